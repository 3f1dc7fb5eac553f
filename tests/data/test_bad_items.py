"""An image or clip that cannot be decoded is named, and skipped or replaced the same way everywhere, up to a limit."""

import os

import pytest
import torch
from samples import encode, image_cells, numbered_frames, picture, write_clip, write_images, write_table

from cumulant.data import DataError, DecodeError, Loader, TensorImages, open_source
from cumulant.data.video import declared_frames

MODES = pytest.mark.parametrize(
    ("in_memory", "workers"),
    [(True, 0), (True, 1), (False, 0), (False, 2)],
    ids=["memory", "filled", "here", "workers"],
)


def loader(folder, **options):
    return Loader(open_source(folder).train, 4, **{"size": 8, "seed": 1, **options})


def seen(loader, epoch=0):
    batches = list(loader.epoch(epoch))
    pixels, labels, positions = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return pixels, labels, positions


def opened_and_seen(folder, **options):
    opened = loader(folder, **options)
    return opened, seen(opened)


@MODES
def test_a_bad_item_is_named_once_and_its_successor_takes_its_place(tmp_path, in_memory, workers):
    write_images(tmp_path, train=24, spoil=(5, 6))
    with pytest.warns(UserWarning, match=r"of 24 items cannot be decoded.*train-00000-of-00001.parquet row [56]"):
        spoilt, (pixels, labels, positions) = opened_and_seen(tmp_path, in_memory=in_memory, workers=workers)
    assert sorted(item.position for item in spoilt.bad) == [5, 6]
    assert {item.why for item in spoilt.bad} == {"UnidentifiedImageError: no kind of image that Pillow knows"}
    assert positions.tolist().count(7) == 3
    assert sorted(set(range(24)) - set(positions.tolist())) == [5, 6]
    assert torch.equal(labels, positions % 3)
    expected = open_source(tmp_path).train
    assert all(
        torch.equal(image, expected.decode(where, 8)) for image, where in zip(pixels, positions.tolist(), strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
def test_every_mode_gives_the_same_batches(tmp_path):
    write_images(tmp_path, train=24, spoil=(0, 5, 6, 23))
    reference = seen(loader(tmp_path, in_memory=True, workers=0), 3)
    for in_memory, workers in ((True, 1), (False, 0), (False, 2)):
        found = seen(loader(tmp_path, in_memory=in_memory, workers=workers), 3)
        assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
@MODES
def test_in_evaluation_bad_items_are_left_out_and_no_step_is_lost(tmp_path, in_memory, workers):
    write_images(tmp_path, train=10, spoil=(0, 4, 5, 6, 7))
    spoilt = loader(tmp_path, in_memory=in_memory, workers=workers, shuffle=False, drop_last=False)
    batches = [batch[2].tolist() for batch in spoilt.epoch(0)]
    assert batches == [[1, 2, 3], [], [8, 9]]
    empty = list(spoilt.epoch(0))[1]
    assert empty[0].shape == (0, 3, 8, 8)


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
@MODES
def test_too_many_bad_items_are_an_error_with_their_names(tmp_path, in_memory, workers):
    write_images(tmp_path, train=24, spoil=range(4, 8))
    with pytest.raises(DataError, match=r"4 of 24 items cannot be decoded, more than max_bad=3: .*row.*remove them"):
        seen(loader(tmp_path, in_memory=in_memory, workers=workers, max_bad=3))


@pytest.mark.parametrize(("count", "allowed"), [(8, 4), (100, 10), (3000, 30)])
def test_the_limit_is_one_percent_at_least_ten_and_at_most_half(count, allowed):
    part = TensorImages(torch.zeros(count, 3, 2, 2, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64))
    assert Loader(part, 4, size=2, workers=0).max_bad == allowed


def test_a_missing_and_a_truncated_file_are_bad_items_too(tmp_path):
    for part in ("train", "val"):
        for i in range(6):
            file = tmp_path / part / "cat" / f"{i}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode(picture(i, 32, 32), "JPEG"))
    source = open_source(tmp_path)
    (tmp_path / "train/cat/1.jpg").unlink()
    whole = (tmp_path / "train/cat/3.jpg").read_bytes()
    (tmp_path / "train/cat/3.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=r"train/cat/1.jpg \(FileNotFoundError.*train/cat/3.jpg \(OSError"):
        Loader(source.train, 2, size=8, workers=0)


def test_a_row_without_bytes_is_a_bad_item(tmp_path):
    cells = [*image_cells([encode(picture(i)) for i in range(3)]), None]
    for part in ("train", "test"):
        write_table(tmp_path / f"{part}.parquet", {"image": cells, "label": [0] * 4})
    with pytest.warns(UserWarning, match=r"train.parquet row 3 \(neither bytes nor a path"):
        assert [item.position for item in loader(tmp_path, workers=0).bad] == [3]


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_bad_clip_counts_once_however_many_views_it_has(tmp_path, in_memory):
    for part in ("train", "test"):
        for i in range(4):
            write_clip(tmp_path / part / "Run" / f"{i}.avi", numbered_frames(6))
    (tmp_path / "test/Run/2.avi").write_bytes(b"broken")
    test = open_source(tmp_path, frames=2, stride=1, views=3).test
    spoilt = Loader(test, 4, size=16, shuffle=False, drop_last=False, max_bad=1, in_memory=in_memory, workers=0)
    positions = torch.cat([batch[2] for batch in spoilt.epoch(0)]).tolist()
    assert positions == [*range(6), 9, 10, 11]
    assert [item.position for item in spoilt.bad] == [6, 7, 8]


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_part_without_a_single_good_item_is_an_error(tmp_path, in_memory):
    write_images(tmp_path, train=8, spoil=range(8))
    with pytest.raises(DataError, match="cannot be decoded"):
        seen(loader(tmp_path, in_memory=in_memory, workers=0, max_bad=100))


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
def test_too_many_bad_items_stay_an_error_when_it_was_ignored_once(tmp_path):
    write_images(tmp_path, train=8, spoil=range(3, 8))
    spoilt = loader(tmp_path, in_memory=False, workers=0, max_bad=4)
    for epoch in range(3):
        with pytest.raises(DataError, match="5 of 8 items cannot be decoded, more than max_bad=4"):
            list(spoilt.epoch(epoch))


def test_a_pipe_among_the_images_is_named_and_nobody_waits_for_it(tmp_path):
    for name in ("train/a/1.png", "train/a/2.png", "train/b/1.png", "train/b/3.png", "val/a/1.png", "val/b/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode(picture()))
    os.mkfifo(tmp_path / "train" / "b" / "2.png")
    source = open_source(tmp_path)
    assert source.identity()["train"] == [2, 3]
    with pytest.warns(UserWarning, match=r"1 of 5 .*b/2.png \(a pipe, socket or device, not a file\)"):
        Loader(source.train, 4, size=8)


def test_a_pipe_in_place_of_a_clip_is_a_bad_item(tmp_path):
    os.mkfifo(tmp_path / "clip.avi")
    with pytest.raises(DecodeError, match="a pipe, socket or device, not a file"):
        declared_frames(tmp_path / "clip.avi", "clip.avi")
