"""Two data sets have the same identity when they hold the same, and another as soon as they do not."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import encode, numbered_frames, picture, write_clip, write_frame_table, write_images

from cumulant.data import Source, TensorImages, digits_source, open_source
from cumulant.data.identity import changes
from cumulant.data.memory import hold


def write_tree(folder, count=6):
    for part, classes in (("train", "abc"), ("val", "abc")):
        for label, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (folder / part / name / f"{i}.png").write_bytes(encode(picture(10 * label + i + (part == "val") * 50)))
    return folder


def write_videos(folder):
    for part in ("train", "test"):
        for name in ("run", "walk"):
            write_clip(folder / part / name / "1.avi", numbered_frames(8 if part == "train" else 6))
    return folder


def write_frames(folder):
    for part in ("train", "test"):
        write_frame_table(folder / f"{part}-0.parquet", [numbered_frames(5)] * 2, [0, 1])
    return folder


KINDS = {"images": write_tree, "videos": write_videos, "table": write_images, "table of frames": write_frames}


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_folder_lies_and_how_it_is_spelled_does_not_matter(tmp_path, kind, monkeypatch):
    here = KINDS[kind](tmp_path / "here")
    there = shutil.copytree(here, tmp_path / "other" / "there")
    known = open_source(here).identity()
    monkeypatch.chdir(tmp_path / "other")
    assert open_source("../here").identity() == known
    assert open_source(f"{there}/").identity() == known
    (tmp_path / "link").symlink_to(there)
    assert open_source(tmp_path / "link").identity() == known
    assert json.loads(json.dumps(known)) == known


def remove(folder):
    (folder / "train" / "b" / "3.png").unlink()


def rename(folder):
    (folder / "train" / "b" / "3.png").rename(folder / "train" / "b" / "33.png")


def relabel(folder):
    a, b = folder / "train" / "a" / "5.png", folder / "train" / "b" / "5.png"
    a.rename(folder / "train" / "b" / "6.png")
    b.rename(folder / "train" / "a" / "6.png")


def replace(folder):
    (folder / "val" / "c" / "0.png").write_bytes(encode(picture(99)))


def drop_a_class(folder):
    for part in ("train", "val"):
        shutil.rmtree(folder / part / "c")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (remove, ["train items: 18 -> 17 (b 6 -> 5)"]),
        (rename, ["as many items of every class as before, but other names, sizes or contents"]),
        (relabel, ["as many items of every class as before, but other names, sizes or contents"]),
        (replace, ["as many items of every class as before, but other names, sizes or contents"]),
        (
            drop_a_class,
            ["classes: 3 -> 2, without c", "train items: 18 -> 12 (c 6 -> 0)", "test items: 18 -> 12 (c 6 -> 0)"],
        ),
    ],
)
def test_a_change_of_the_images_is_told_in_words(tmp_path, change, told):
    before = open_source(write_tree(tmp_path)).identity()
    change(tmp_path)
    assert changes(before, open_source(tmp_path).identity()) == told


def test_another_row_or_another_picture_in_a_table_makes_it_another(tmp_path):
    known = [open_source(write_images(tmp_path / str(i), **how)).identity()["digest"] for i, how in
             enumerate(({}, {"train": 13}, {"spoil": (2,)}, {"classes": 2}))]  # fmt: skip
    assert len(set(known)) == 4


def test_other_pixels_or_labels_in_memory_are_another_data_set():
    pixels = torch.from_numpy(np.stack([picture(i).transpose(2, 0, 1) for i in range(6)]))
    labels = torch.tensor([0, 1, 0, 1, 0, 1])

    def source(images, labels):
        parts = (TensorImages(images, labels), TensorImages(pixels, torch.tensor([0, 1, 0, 1, 0, 1])))
        return Source("mine", "image", *parts, ("a", "b"))

    known, other = source(pixels, labels), pixels.clone()
    other[3, 0, 0, 0] += 1
    assert known.identity() == source(pixels.clone(), labels).identity()
    assert known.identity()["digest"] != source(other, labels).identity()["digest"]
    assert known.identity()["digest"] != source(pixels, labels.flip(0)).identity()["digest"]


def test_clips_views_and_crops_are_no_matter_of_the_data(tmp_path):
    write_videos(tmp_path)
    known = open_source(tmp_path, frames=4).identity()
    assert open_source(tmp_path, frames=2, stride=1, views=3, crops=2).identity() == known
    assert known["test"] == [1, 1]


def test_pixels_that_are_held_in_memory_keep_the_identity_of_their_files(tmp_path):
    source = open_source(write_tree(tmp_path))
    held = hold(source, 8)
    assert held is not None
    assert held.identity() == source.identity()


def test_a_large_set_is_told_apart_without_reading_it(tmp_path, monkeypatch):
    write_tree(tmp_path, count=40)
    read = []
    original = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *how: read.append(path.name) or original(path, *how))
    open_source(tmp_path).identity()
    assert 0 < len(read) <= 64 < 240


def test_a_part_of_ones_own_is_known_by_its_labels():
    class Mine:
        views = 1

        def __init__(self, labels):
            self.labels = torch.tensor(labels)

        def __len__(self):
            return len(self.labels)

    def source(labels):
        return Source("mine", "image", Mine(labels), Mine([0, 1]), ("a", "b"))

    assert source([0, 1]).identity() == source([0, 1]).identity() != source([1, 0]).identity()


def test_the_digits_are_always_the_same(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert digits_source().identity() == digits_source().identity() != digits_source(seed=1).identity()
    assert os.listdir(tmp_path) == []
