"""Clips hold the right frames, the same in every reader; UCF-101's lists decide who is in which part."""

import itertools
import pickle
import re
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import encode, frame_numbers, numbered_frames, write_clip, write_frame_table, write_table

from cumulant.data import ClipPart, ClipSampling, DataError, DecodeError, Source, TensorVideos, memory, open_source
from cumulant.optional import install

sizes = st.integers(1, 40)


def one_table(folder, clip, **options):
    """A source whose parts both hold this clip."""
    for part in ("train", "test"):
        write_frame_table(folder / f"{part}.parquet", [clip], [0])
    return open_source(folder, **options)


def clip_tree(folder, frames, suffix=".avi"):
    for part in ("train", "test"):
        write_clip(folder / part / "Run" / f"a{suffix}", frames)
    return folder


@given(frames=st.integers(1, 8), stride=st.integers(1, 4), total=sizes, seed=st.integers(0, 2**63 - 1))
def test_a_training_clip_is_evenly_spaced_and_inside_the_video(frames, stride, total, seed):
    numbers = ClipSampling(frames, stride).training(np.asarray(total), np.asarray(seed)).tolist()
    assert len(numbers) == frames
    assert all(0 <= number < total for number in numbers)
    assert all((b - a - stride) % total == 0 for a, b in itertools.pairwise(numbers))
    if total > (frames - 1) * stride:
        assert numbers == list(range(numbers[0], numbers[0] + frames * stride, stride))  # no running over the end


def test_training_starts_wherever_the_clip_fits_and_equally_often():
    seeds = np.arange(3000)
    starts = ClipSampling(4, 2).training(np.full(3000, 9), seeds)[:, 0]
    assert np.bincount(starts).tolist() == [1000, 1000, 1000]


def test_a_short_video_is_run_through_again():
    assert ClipSampling(6, 1).evaluation(np.asarray(4)).tolist() == [0, 1, 2, 3, 0, 1]


def test_one_view_is_the_middle_and_several_reach_from_end_to_end():
    total = np.asarray(10)
    assert ClipSampling(4, 1).evaluation(total).tolist() == [3, 4, 5, 6]
    views = [ClipSampling(4, 1, views=3).evaluation(total, view)[0] for view in range(3)]
    assert views == [0, 3, 6]


def test_frames_in_a_table_are_read_in_order_without_loss(tmp_path):
    clip = [np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8) for i in range(6)]
    pixels = one_table(tmp_path, clip, frames=3, stride=2).test.decode(0, 8)
    expected = np.stack([clip[1], clip[3], clip[5]])  # starts 0 and 1 fit; the middle rounds up
    assert torch.equal(pixels, torch.from_numpy(expected.transpose(3, 0, 1, 2).copy()))


def test_the_seed_alone_decides_where_a_training_clip_starts(tmp_path):
    train = one_table(tmp_path, numbered_frames(12), frames=4, stride=2).train
    starts = {seed: frame_numbers(train.decode(0, 8, seed))[0] for seed in range(12)}
    assert starts == {seed: seed % 6 for seed in range(12)}
    assert frame_numbers(train.decode(0, 8)) == [3, 5, 7, 9]


def test_test_clips_do_not_depend_on_a_seed(tmp_path):
    test = one_table(tmp_path, numbered_frames(12), frames=4, stride=2).test
    assert torch.equal(test.decode(0, 8, 1), test.decode(0, 8, 2))


def test_views_and_crops_of_a_video_follow_each_other_in_the_test_part_alone(tmp_path):
    wide = numbered_frames(8, width=24, height=8)
    for frame in wide:
        frame[:, :8], frame[:, 16:] = 0, 255  # left, middle and right differ
    for part in ("train", "test"):
        write_frame_table(tmp_path / f"{part}.parquet", [wide, wide], [0, 1])
    source = open_source(tmp_path, frames=2, stride=1, views=2, crops=3)
    assert " test in 6 views each)" in repr(source)
    assert (len(source.train), source.train.views) == (2, 1)
    assert (len(source.test), source.test.views) == (12, 6)
    assert source.test.labels.tolist() == [0] * 6 + [1] * 6
    assert source.test.name(5) == source.test.name(0) != source.test.name(6)
    left, middle, right = (source.test.decode(i, 8) for i in range(3))
    assert (left.max(), right.min()) == (0, 255)
    assert frame_numbers(middle) == [0, 1]
    assert frame_numbers(source.test.decode(4, 8)) == [6, 7]


def test_the_shape_is_channels_frames_height_width(tmp_path):
    source = one_table(tmp_path, numbered_frames(4), frames=3, stride=1)
    assert source.kind == "video"
    assert source.train.decode(0, 8).shape == (3, 3, 8, 8)
    assert source.train.whole(0, 8).shape == (4, 3, 8, 8)


@pytest.mark.parametrize("suffix", [".avi", ".mp4", ".mkv"])  # mkv does not tell the number of frames
def test_pyav_finds_the_same_frames_as_a_table(tmp_path, suffix):
    frames = numbered_frames(20)
    table = one_table(tmp_path / "table", frames, frames=4, stride=3, views=2)
    clips = open_source(clip_tree(tmp_path / "tree", frames, suffix), frames=4, stride=3, views=2)
    for view in range(2):
        assert frame_numbers(clips.test.decode(view, 16)) == frame_numbers(table.test.decode(view, 16))
    for seed in range(4):
        assert frame_numbers(clips.train.decode(0, 16, seed)) == frame_numbers(table.train.decode(0, 16, seed))
    assert frame_numbers(clips.train.whole(0, 16).transpose(0, 1)) == list(range(20))


def test_video_files_inside_a_table_decode_too(tmp_path):
    clip_tree(tmp_path, numbered_frames(6))
    content = (tmp_path / "train/Run/a.avi").read_bytes()
    for part in ("train", "test"):
        cells = [{"bytes": content, "path": None}]
        write_table(tmp_path / f"{part}.parquet", {"video": cells, "label": [0]}, types={"video": "Video"})
    source = open_source(tmp_path, frames=6, stride=1)
    assert frame_numbers(source.test.decode(0, 16)) == [0, 1, 2, 3, 4, 5]


def test_a_clip_part_decodes_in_another_process(tmp_path):
    train = open_source(clip_tree(tmp_path, numbered_frames(6)), frames=2, stride=1).train
    assert torch.equal(pickle.loads(pickle.dumps(train)).decode(0, 16, 3), train.decode(0, 16, 3))


def test_a_video_without_frames_is_named(tmp_path):
    frames = pa.array([[]], pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    for part in ("train", "test"):
        write_table(tmp_path / f"{part}.parquet", {"frames": frames, "label": [0], "clip": ["v_Run_g01_c01"]})
        break
    write_frame_table(tmp_path / "test.parquet", [numbered_frames(1)], [0], clip=["v_Run_g08_c01"])
    with pytest.raises(DecodeError, match=r"v_Run_g01_c01 .*row 0.*without frames"):
        open_source(tmp_path).train.decode(0, 8)


def test_a_broken_frame_is_named_with_its_number(tmp_path):
    cells = [[{"bytes": encode(frame), "path": None} for frame in numbered_frames(3)]]
    cells[0][1]["bytes"] = b"\x89PNG broken"
    for part in ("train", "test"):
        write_table(tmp_path / f"{part}.parquet", {"frames": cells, "label": [0]})
    with pytest.raises(DecodeError, match=r"train.parquet row 0 frame 1"):
        open_source(tmp_path, frames=3, stride=1).train.decode(0, 8)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda content: b"", "Error"),
        (lambda content: b"not a video at all", "Error"),
        (lambda content: content[: len(content) // 4], "only .* of 60 frames|Error"),
    ],
    ids=["empty", "text", "truncated"],
)
def test_a_broken_video_file_is_named(tmp_path, spoil, why):
    clip_tree(tmp_path, [np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8) for i in range(60)])
    file = tmp_path / "train/Run/a.avi"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DecodeError, match=rf"train/Run/a\.avi: .*({why})") as raised:
        open_source(tmp_path).train.decode(0, 16)
    assert "Errno" not in str(raised.value)
    assert str(raised.value).count("a.avi") == 1


def test_without_pyav_the_error_names_the_extra(tmp_path, monkeypatch):
    source = open_source(clip_tree(tmp_path, numbered_frames(2)))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match="PyAV: " + re.escape(install("video"))):
        source.train.decode(0, 16)


# UCF-101


def ucf(folder, groups=(1, 8, 15), classes=("Run", "Sit"), clips="UCF-101", lists="ucfTrainTestlist"):
    """A small UCF-101: one clip a group and class, and the lists of the three official splits."""
    (folder / lists).mkdir(parents=True, exist_ok=True)
    (folder / lists / "classInd.txt").write_text("".join(f"{i + 1} {name}\n" for i, name in enumerate(classes)))
    names = {(name, group): f"{name}/v_{name}_g{group:02d}_c01.avi" for name in classes for group in groups}
    for split in (1, 2, 3):
        testing = [(n, g) for n, g in names if (g - 1) // 7 == split - 1]
        training = [key for key in names if key not in testing]
        lines = "".join(f"{names[key]} {classes.index(key[0]) + 1}\n" for key in training)
        (folder / lists / f"trainlist0{split}.txt").write_text(lines)
        (folder / lists / f"testlist0{split}.txt").write_text("".join(f"{names[key]}\n" for key in testing))
    for file in names.values():
        write_clip(folder / clips / file, numbered_frames(3))
    return folder


def clip_names(part):
    return [part.name(i).rsplit("/", 1)[1] for i in range(len(part))]


@pytest.mark.parametrize(("clips", "lists"), [("UCF-101", "ucfTrainTestlist"), ("", "")])
def test_the_official_lists_decide_who_is_in_which_part(tmp_path, clips, lists):
    folder = ucf(tmp_path, clips=clips, lists=lists)
    for split, group in ((1, "01"), (2, "08"), (3, "15")):
        source = open_source(folder, frames=2, stride=1, split=split)
        assert clip_names(source.test) == [f"v_Run_g{group}_c01.avi", f"v_Sit_g{group}_c01.avi"]
        assert len(source.train) == 4
    assert source.test.labels.tolist() == [0, 1]
    assert source.test.decode(0, 16).shape == (3, 2, 16, 16)


def test_class_numbers_follow_the_index_file(tmp_path):
    source = open_source(ucf(tmp_path, classes=("Sit", "Run")))
    assert source.classes == ("Sit", "Run")
    assert [name.split("_")[1] for name in clip_names(source.test)] == ["Sit", "Run"]


def test_classes_without_a_folder_are_left_out_with_a_warning(tmp_path):
    folder = ucf(tmp_path, classes=("Run", "Sit", "Walk"))
    for file in (folder / "UCF-101/Run").iterdir():
        file.unlink()
    (folder / "UCF-101/Run").rmdir()
    with pytest.warns(UserWarning, match="1 of 3 classes have no folder"):
        source = open_source(folder)
    assert source.classes == ("Sit", "Walk")
    assert source.train.labels.tolist() == [0, 0, 1, 1]


def test_lists_that_mix_groups_are_refused(tmp_path):
    folder = ucf(tmp_path)
    with (folder / "ucfTrainTestlist/testlist01.txt").open("a") as file:
        file.write("Run/v_Run_g08_c02.avi\n")
    with pytest.raises(DataError, match=r"mixed groups.*class 0 g08"):
        open_source(folder)


@pytest.mark.parametrize(
    ("text", "words"), [("", "got none"), ("v_Run_g01_c01.avi\n", "Archery/v_Archery_g01_c01.avi")]
)
def test_lists_of_another_form_are_refused(tmp_path, text, words):
    folder = ucf(tmp_path)
    (folder / "ucfTrainTestlist/testlist01.txt").write_text(text)
    with pytest.raises(DataError, match=words):
        open_source(folder)


def test_a_clip_in_both_lists_is_refused_whatever_its_name(tmp_path):
    for name in ("a", "b"):
        write_clip(tmp_path / "Run" / f"{name}.avi", numbered_frames(2))
    (tmp_path / "trainlist01.txt").write_text("Run/a.avi 1\n")
    (tmp_path / "testlist01.txt").write_text("Run/b.avi\nRun/a.avi\n")
    with pytest.raises(DataError, match=r"same clips in the train and the test list: Run/a.avi"):
        open_source(tmp_path)


def test_an_index_of_classes_of_another_form_is_refused(tmp_path):
    folder = ucf(tmp_path)
    (folder / "ucfTrainTestlist/classInd.txt").write_text("Run\nSit\n")
    with pytest.raises(DataError, match=r"classInd.txt: expected lines like 1 ApplyEyeMakeup"):
        open_source(folder)


def test_a_missing_list_and_missing_clips_are_named(tmp_path):
    folder = ucf(tmp_path)
    (folder / "ucfTrainTestlist/testlist02.txt").unlink()
    with pytest.raises(DataError, match=r"testlist02.txt: missing"):
        open_source(folder, split=2)
    (folder / "UCF-101").rename(folder / "elsewhere")
    with pytest.raises(DataError, match="no class folder like Run/"):
        open_source(folder)


def test_groups_of_a_table_give_the_other_splits(tmp_path):
    for part, groups in (("train", [8, 14, 15, 22]), ("test", [1, 7])):
        write_frame_table(tmp_path / f"{part}.parquet", [numbered_frames(1)] * len(groups), [0] * len(groups),
                          group=groups, clip=[f"v_Run_g{group:02d}_c01" for group in groups])  # fmt: skip

    def groups_of(part):
        return [int(part.name(i)[7:9]) for i in range(len(part))]

    for split, test, train in (
        (1, [1, 7], [8, 14, 15, 22]),
        (2, [8, 14], [15, 22, 1, 7]),
        (3, [15], [8, 14, 22, 1, 7]),
    ):
        source = open_source(tmp_path, frames=1, split=split)
        assert (groups_of(source.test), groups_of(source.train)) == (test, train)


def test_videos_in_memory_give_the_clips_of_those_on_the_disk(tmp_path):
    on_disk = one_table(tmp_path, numbered_frames(9), frames=3, stride=2, views=2)
    for part in (on_disk.train, on_disk.test):
        whole = part.videos.read(0, np.arange, 16, 0, 1)
        held = ClipPart(TensorVideos([whole], part.videos.labels), part.sampling, jitter=part.jitter)
        assert len(held) == len(part)
        assert torch.equal(held.labels, part.labels)
        for index, seed in itertools.product(range(len(part)), (None, 0, 3)):
            assert torch.equal(held.decode(index, 16, seed), part.decode(index, 16, seed))


def test_videos_in_memory_are_not_resized_and_say_so():
    held = ClipPart(
        TensorVideos([torch.zeros(4, 3, 8, 8, dtype=torch.uint8)], torch.tensor([0])), ClipSampling(2), jitter=True
    )
    with pytest.raises(DecodeError, match=r"its frames are \(8, 8\) and kept whole, not 1 crops of size 16"):
        held.decode(0, 16)
    with pytest.raises(ValueError, match="uint8 \\(frames, 3, height, width\\)"):
        TensorVideos([torch.zeros(4, 3, 8, 8)], torch.tensor([0]))
    with pytest.raises(ValueError, match=r"labels must be int64 \(0,\)"):
        TensorVideos([], torch.tensor([0]))


def test_videos_in_memory_have_frames():
    with pytest.raises(ValueError, match=r"at least one frame, got torch.uint8 \(0, 3, 8, 8\) for video 1"):
        TensorVideos([torch.zeros(n, 3, 8, 8, dtype=torch.uint8) for n in (2, 0)], torch.tensor([0, 1]))


@pytest.mark.parametrize("suffix", [".avi", ".mkv"])
def test_the_length_of_a_video_is_known_also_where_its_header_does_not_say(tmp_path, suffix):
    source = open_source(clip_tree(tmp_path, numbered_frames(20), suffix))
    assert source.train.videos.length(0) == 20


def test_holding_a_source_counts_whole_videos(monkeypatch):
    def part(jitter):
        videos = TensorVideos([torch.zeros(50, 3, 4, 4, dtype=torch.uint8)] * 2, torch.tensor([0, 1]))
        return ClipPart(videos, ClipSampling(2, 1), jitter=jitter)

    source = Source("still", "video", part(True), part(False), ("a", "b"))
    whole = 2 * 2 * 50 * 3 * 4 * 4
    for allowed in (whole - 1, whole):
        monkeypatch.setattr(memory, "allowed_bytes", lambda device, allowed=allowed: allowed)
        assert (memory.hold(source, 4) is None) == (allowed < whole)


def test_frame_numbers_written_as_text_are_numbers(tmp_path):
    cells = [{"bytes": encode(frame), "path": None} for frame in numbered_frames(12)]
    for part in ("train", "test"):
        columns = {"image": cells, "label": [0] * 12, "clip_id": [part] * 12, "frame": [str(i) for i in range(12)]}
        write_table(tmp_path / f"{part}.parquet", columns)
    assert frame_numbers(open_source(tmp_path, frames=12, stride=1).train.decode(0, 16)) == list(range(12))
