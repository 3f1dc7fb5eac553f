"""A damaged frame spoils the clips that hold it and no others, in memory and streamed alike."""

import pyarrow as pa
import pytest
import torch
from samples import encode, frame_numbers, image_cells, numbered_frames, write_table

from cumulant.data import Loader, open_source
from cumulant.data.memory import hold

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be decoded")

LENGTHS = (6, 10, 8, 7)
BROKEN = {(1, 3), (1, 4), (2, 0)}


def cells():
    pictures = [encode(frame) for frame in numbered_frames(max(LENGTHS))]
    return [
        image_cells([b"broken" if (clip, frame) in BROKEN else pictures[frame] for frame in range(length)])
        for clip, length in enumerate(LENGTHS)
    ]


def as_lists(folder):
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    for part in ("train", "test"):
        write_table(folder / f"{part}.parquet", {"frames": pa.array(cells(), kind), "label": [0, 1, 0, 1]})
    return open_source(folder, frames=3, stride=1)


def as_rows(folder):
    for part in ("train", "test"):
        rows = [(f"{part}{clip}", n, clip % 2, cell) for clip, its in enumerate(cells()) for n, cell in enumerate(its)]
        ids, numbers, labels, images = (list(column) for column in zip(*rows, strict=True))
        write_table(folder / f"{part}.parquet", {"image": images, "clip_id": ids, "frame": numbers, "label": labels})
    return open_source(folder, frames=3, stride=1)


def loader(part, in_memory=False, workers=0, **options):
    return Loader(part, 4, size=8, seed=1, in_memory=in_memory, workers=workers, max_bad=3, **options)


def same(a, b):
    return all(torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("write", [as_lists, as_rows], ids=["lists", "rows"])
@pytest.mark.parametrize("drop_last", [True, False], ids=["replaced", "left out"])
def test_memory_and_streaming_give_the_same_clips(tmp_path, write, drop_last):
    part = write(tmp_path).train
    memory, streamed = (loader(part, in_memory, drop_last=drop_last) for in_memory in (True, False))
    shown = set()
    for epoch in range(12):
        batches = list(memory.epoch(epoch))
        assert same(batches, list(streamed.epoch(epoch)))
        for pixels, _, positions in batches:
            for clip, position in zip(pixels, positions.tolist(), strict=True):
                shown |= {(position, frame) for frame in frame_numbers(clip)}
    assert not shown & BROKEN
    assert {position for position, _ in shown} == {0, 1, 2, 3}
    assert sorted(item.position for item in memory.bad) == sorted({item.position for item in streamed.bad}) == [1, 2]


def test_a_clip_does_not_depend_on_what_was_read_before(tmp_path):
    part = as_lists(tmp_path).train
    long_running = loader(part)
    for epoch in range(8):
        assert same(list(long_running.epoch(epoch)), list(loader(part).epoch(epoch)))


def test_a_video_without_one_good_frame_is_bad_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.BROKEN", {(0, frame) for frame in range(6)})
    memory = loader(as_lists(tmp_path).train, in_memory=True)
    assert [item.position for item in memory.bad] == [0]
    assert all(0 not in positions for epoch in range(4) for _, _, positions in memory.epoch(epoch))


def test_a_source_with_a_damaged_frame_is_not_held(tmp_path):
    assert hold(as_lists(tmp_path), 8) is None
