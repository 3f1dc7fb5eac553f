"""A Source from files in folders: train/<class>/..., and UCF-101 with its official lists."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from ..call import check_choice
from .clips import ClipPart, ClipSampling
from .decode import IMAGE_SUFFIXES
from .images import Images
from .part import GROUP_IN_NAME, DataError, Source, check_groups, shorten
from .rows import Files
from .tables import TEST_PARTS, TRAIN_PARTS, pick_parts
from .video import VIDEO_SUFFIXES, EncodedVideos

LIST_FOLDERS = ("", "ucfTrainTestlist", "splits")
CLIP_FOLDERS = ("UCF-101", "UCF101", "videos", "")


def tree_source(folder: Path, sampling: ClipSampling, *, test_part: str | None = None) -> Source:
    """train/<class>/**/file and val, validation or test likewise; images or videos, by suffix."""
    available = {part: folder / part for part in (*TRAIN_PARTS, *TEST_PARTS) if (folder / part).is_dir()}
    train_name, test_name = pick_parts(folder.name, available, test_part)
    classes = class_folders(available[train_name])
    train, test = (labelled_files(available[part], classes) for part in (train_name, test_name))
    suffixes = {Path(file).suffix.lower() for file, _ in (*train, *test)}
    if suffixes & IMAGE_SUFFIXES and suffixes & VIDEO_SUFFIXES:
        raise DataError(f"{folder}: images and videos in one tree ({shorten(sorted(suffixes))}); expected one kind")
    if suffixes & VIDEO_SUFFIXES:
        check_groups(folder.name, name_groups(train), name_groups(test))
        clips = [clip_part(folder, part, sampling, jitter) for part, jitter in ((train, True), (test, False))]
        return Source(folder.name, "video", clips[0], clips[1], classes)
    images = [Images(*labelled(folder, part)) for part in (train, test)]
    return Source(folder.name, "image", images[0], images[1], classes)


def class_folders(part: Path) -> tuple[str, ...]:
    classes = tuple(sorted(entry.name for entry in part.iterdir() if entry.is_dir() and not entry.name.startswith(".")))
    if not classes:
        raise DataError(f"{part}: no class folders; expected {part.name}/<class>/<file>")
    empty = [name for name in classes if next(media_files(part / name), None) is None]
    if empty:
        raise DataError(f"{part}: empty class, no images or videos in {shorten(empty)}")
    return classes


def labelled_files(part: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """(file relative to the folder above `part`, label), sorted by class and name."""
    number = {name: label for label, name in enumerate(classes)}
    annotations = part / f"{part.name}_annotations.txt"
    # Tiny-ImageNet as it is downloaded: val/images/*.JPEG and one list, which stays when they are sorted by class.
    if annotations.exists() and (part / "images").is_dir():
        lines = [line.split("\t") for line in annotations.read_text(encoding="utf-8").splitlines() if line.strip()]
        short = next((fields for fields in lines if len(fields) < 2), None)
        if short is not None:
            raise DataError(f"{annotations}: expected file and class with a tab between them, got {short[0]!r}")
        pairs = [(f"{part.name}/images/{fields[0]}", fields[1]) for fields in lines]
    else:
        pairs = [
            (os.path.relpath(file, part.parent), name.name)
            for name in sorted(entry for entry in part.iterdir() if entry.is_dir() and not entry.name.startswith("."))
            for file in media_files(name)
        ]
    unknown = sorted({name for _, name in pairs} - set(classes))
    if unknown:
        raise DataError(f"{part}: unknown class in the test part, without training items: {shorten(unknown)}")
    return [(file, number[name]) for file, name in pairs]


def media_files(folder: str | Path, above: frozenset[str] | None = None) -> Iterator[str]:
    """Images and videos below a folder in sorted order, hidden files and folders left out.

    A link to one of the folders `above` is not followed: it would show the same files again and again.
    """
    here = os.path.realpath(folder)
    above = frozenset(map(str, Path(here).parents)) if above is None else above
    if here in above:
        return
    entries = sorted((entry for entry in os.scandir(folder) if not entry.name.startswith(".")), key=attrgetter("name"))
    for entry in entries:
        if not entry.is_dir() and Path(entry.name).suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
            yield entry.path
    for entry in entries:
        if entry.is_dir():
            yield from media_files(entry.path, above | {here})


def ucf_lists(folder: Path) -> Path | None:
    """Where UCF-101's split lists are, if there are any."""
    places = (folder / name for name in LIST_FOLDERS)
    return next((place for place in places if any(place.glob("trainlist0[123].txt"))), None)


def ucf_source(folder: Path, lists: Path, sampling: ClipSampling, *, split: int = 1) -> Source:
    """UCF-101: clips in UCF-101/<class>/ or <class>/; trainlist0k.txt, testlist0k.txt and classInd.txt beside them."""
    check_choice("split", split, (1, 2, 3))
    listed = [read_ucf_list(lists / f"{part}list0{split}.txt") for part in ("train", "test")]
    names = sorted({file.split("/")[0] for part in listed for file in part})
    places = [folder / place for place in CLIP_FOLDERS]
    clips = next((place for place in places if any((place / name).is_dir() for name in names)), None)
    if clips is None:
        raise DataError(f"{folder}: no class folder like {names[0]}/ in {', '.join(map(str, places))}")
    present = [name for name in ucf_class_order(lists, names) if (clips / name).is_dir()]
    if len(present) < len(names):
        warnings.warn(f"{clips}: {len(names) - len(present)} of {len(names)} classes have no folder and are left out",
                      stacklevel=3)  # fmt: skip
    number = {name: label for label, name in enumerate(present)}
    train, test = ([(f, number[f.split("/")[0]]) for f in part if f.split("/")[0] in number] for part in listed)
    check_groups(folder.name, name_groups(train), name_groups(test))
    twice = sorted({file for file, _ in train} & {file for file, _ in test})
    if twice:
        raise DataError(f"{lists}: the same clips in the train and the test list: {shorten(twice)}")
    parts = [clip_part(clips, part, sampling, jitter) for part, jitter in ((train, True), (test, False))]
    return Source(folder.name, "video", parts[0], parts[1], tuple(present))


def read_ucf_list(file: Path) -> list[str]:
    """Class/v_Class_gNN_cNN.avi, one a line, with or without a class number behind it."""
    if not file.exists():
        raise DataError(f"{file}: missing; UCF-101's official split files are trainlist0k.txt and testlist0k.txt")
    clips = [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    wrong = [clip for clip in clips if not re.fullmatch(r"[^/]+/[^/]+", clip)]
    if wrong or not clips:
        raise DataError(f"{file}: expected lines like Archery/v_Archery_g01_c01.avi, got {shorten(wrong) or 'none'}")
    return clips


def ucf_class_order(lists: Path, names: list[str]) -> list[str]:
    """Classes by the numbers of classInd.txt where it is there, else by name."""
    file = lists / "classInd.txt"
    if not file.exists():
        return names
    fields = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        number = {name: int(value) for value, name in fields}
    except ValueError as error:
        raise DataError(f"{file}: expected lines like 1 ApplyEyeMakeup: {error}") from error
    unknown = sorted(set(names) - set(number))
    if unknown:
        raise DataError(f"{file}: unknown class in the split files: {shorten(unknown)}")
    return sorted(names, key=number.__getitem__)


def clip_part(folder: Path, files: Sequence[tuple[str, int]], sampling: ClipSampling, jitter: bool) -> ClipPart:
    return ClipPart(EncodedVideos(*labelled(folder, files)), sampling, jitter=jitter)


def labelled(folder: Path, files: Sequence[tuple[str, int]]) -> tuple[Files, Tensor]:
    return Files(folder, [file for file, _ in files]), torch.tensor([label for _, label in files], dtype=torch.int64)


def name_groups(files: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """(label, group) of those clips whose name tells the group."""
    matches = ((GROUP_IN_NAME.search(file), label) for file, label in files)
    return [(label, int(match[1])) for match, label in matches if match]
