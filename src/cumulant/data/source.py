"""`open_source`: a folder, a name, the embedded digits; whatever it is, it becomes a Source."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from ..optional import needed
from .clips import ClipSampling
from .digits import digits_source, scenes_source
from .folders import tree_source, ucf_lists, ucf_source
from .part import DataError, Source, shorten
from .rows import HubRows, parquet_rows
from .tables import TEST_PARTS, TRAIN_PARTS, find_shards, names_from_tsv, table_source
from .tars import find_tars, tar_source
from .text import sentences_source, text_files, text_source

ALIASES = {  # data sets on the Hugging Face Hub; 2: every second class of it
    "tiny-imagenet": ("zh-plus/tiny-imagenet", 1),
    "tiny-imagenet-100": ("zh-plus/tiny-imagenet", 2),
    "imagenet-100": ("clane9/imagenet-100", 1),
    "imagenet-1k": ("ILSVRC/imagenet-1k", 1),
    "cifar10": ("uoft-cs/cifar10", 1),
    "cifar100": ("uoft-cs/cifar100", 1),
    "ucf101": ("flwrlabs/ucf101", 1),
}
TEXT = (".txt", ".md")  # files that are data themselves
LOCALLY = "data that is on a disk is given by its folder, or by name where $CUMULANT_DATA is the folder above"


def open_source(
    data: str | Path,
    *,
    frames: int = 16,
    stride: int = 2,
    views: int = 1,
    crops: int = 1,
    split: int = 1,
    test_part: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    tokens: str | None = None,
    context: int | None = None,
    size: int | None = None,
) -> Source:
    """The data set called `data`. Labels are read and checked here; pixels are decoded later.

    `data` is, in this order: "digits", "sentences", "scenes"; a folder or a text file; the name of one in
    $CUMULANT_DATA; one of `ALIASES` (tiny-imagenet, tiny-imagenet-100, imagenet-100, imagenet-1k, cifar10, cifar100,
    ucf101) or another "owner/name" of the Hugging Face Hub, which needs the package `datasets`. A folder holds parquet
    shards (train-*.parquet and validation- or test-*.parquet), tar shards of WebDataset (train-*.tar, ...), or
    train/<class>/ and val|validation|test/<class>/ with images or clips, or UCF-101's clips and split lists, or a text:
    one *.txt, or train.txt and val|validation|test.txt.

    Video: a clip has `frames` frames, every `stride`-th; the test part shows each video in `views` temporal clips
    times `crops` squares; `split` is UCF-101's 1, 2 or 3. `test_part` names the part to test on where there are
    several (validation comes before test); `image_column` and `label_column` where a table has several.
    Text: `tokens` is "chars" or "bytes", `context` the tokens of a window (256). Scenes: `size` is their side (64).
    """
    sampling = ClipSampling(frames, stride, views, crops)
    choices: dict[str, Any] = dict(test_part=test_part, image_column=image_column, label_column=label_column)
    reading: dict[str, Any] = {"tokens": tokens, "context": context}
    none = {"split": None if split == 1 else split, **choices}  # what sets without parts and tables have no use for
    if data == "scenes":
        refuse("scenes", **none, **reading)
        return scenes_source(64 if size is None else size)
    refuse(f"{data} (no scenes)", size=size)
    if data == "sentences":
        refuse("sentences", **none)
        return sentences_source(**reading)
    if data == "digits":
        refuse("digits", **reading, **none)
        return digits_source()
    folder = local_folder(data)
    if folder is not None and is_text(folder):
        refuse(f"{folder} (a text)", **{**none, "test_part": None})
        return text_source(folder, test_part=test_part, **reading)
    refuse(f"{data} (no text)", **reading)
    if folder is not None:
        source = folder_source(folder, sampling, split, choices)
    else:
        source = hub_source(str(data), sampling, split=split, **choices)
    missing = source.untested()
    if missing:
        warnings.warn(
            f"{source.name}: {len(missing)} of {len(source.classes)} classes have no items in the test part, and the "
            f"accuracy says nothing of them: {shorten(missing)}", stacklevel=2,
        )  # fmt: skip
    return source


def refuse(what: str, **choices: Any) -> None:
    """A choice that would have no effect is an error."""
    for name, value in choices.items():
        if value is not None:
            raise DataError(f"{what}: {name} has no effect there, got {value!r}")


def local_folder(data: str | Path) -> Path | None:
    """The folder meant, or None when `data` can only be a name of the Hub."""
    places = [Path(data).expanduser()]
    if os.environ.get("CUMULANT_DATA") and not places[0].is_absolute():
        places.append(Path(os.environ["CUMULANT_DATA"]).expanduser() / data)
    for place in places:
        if place.is_dir():
            return place.resolve()  # so that the name is not "." and workers may change folder
        if place.is_file() and place.suffix.lower() in TEXT:
            return place.resolve()
        if place.exists():
            raise DataError(
                f"{place}: a file; expected the folder that holds the data set, or a text, {' or '.join(TEXT)}"
            )
    if data in ALIASES or (isinstance(data, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data)):
        return None
    looked = " or ".join(str(place) for place in places)
    raise FileNotFoundError(
        f"no data set {str(data)!r}: no folder {looked}, and not one of digits, sentences, scenes, "
        f"{', '.join(ALIASES)} or owner/name of the Hugging Face Hub"
    )


def is_text(place: Path) -> bool:
    """Whether a file or folder is read as a text: one without tables, split lists or folders of classes."""
    if place.is_file():
        return True
    other = (
        find_shards(place)
        or find_tars(place)
        or ucf_lists(place)
        or any((place / part).is_dir() for part in (*TRAIN_PARTS, *TEST_PARTS))
    )
    return not other and bool(text_files(place))


def folder_source(folder: Path, sampling: ClipSampling, split: int, choices: dict[str, Any]) -> Source:
    shards = find_shards(folder)
    if shards:
        parts = {name: parquet_rows(files) for name, files in shards.items()}
        names = names_from_tsv(folder / "classes.tsv")
        return table_source(folder.name, parts, sampling, class_names=names, split=split, **choices)
    trees = [folder / part for part in (*TRAIN_PARTS, *TEST_PARTS) if (folder / part).is_dir()]
    unpacked = any(entry.is_dir() for part in trees for entry in part.iterdir())  # what tars beside it came from
    tars = {} if unpacked or split != 1 else find_tars(folder)
    if tars:
        return tar_source(folder.name, tars, sampling, class_names=names_from_tsv(folder / "classes.tsv"), **choices)
    columns = [name for name in ("image_column", "label_column") if choices[name] is not None]
    if columns:
        raise DataError(
            f"{folder}: {columns[0]}={choices[columns[0]]!r} is for parquet tables and tar shards; there are none here"
        )
    lists = ucf_lists(folder)
    if lists is not None:
        refuse(f"{folder} (UCF-101's lists)", test_part=choices["test_part"])
        return ucf_source(folder, lists, sampling, split=split)
    if split != 1:
        raise DataError(f"{folder}: split {split} needs UCF-101's split lists or a parquet table with groups")
    if trees:
        return tree_source(folder, sampling, test_part=choices["test_part"])
    found = sorted(entry.name for entry in folder.iterdir())[:5]
    raise DataError(
        f"{folder}: no train part; expected train-*.parquet, train-*.tar, train/<class>/, UCF-101's "
        f"trainlist0{split}.txt or one text, found {', '.join(found) or 'nothing'}"
    )


def hub_source(name: str, sampling: ClipSampling, **choices: Any) -> Source:
    """A data set of the Hub through the package `datasets`, which downloads it once and keeps it in its own cache."""
    as_hub = "as a name of the Hugging Face Hub it needs the package datasets"
    with needed(f"{name!r} is not a folder here ({LOCALLY}); {as_hub}", "data"):
        import datasets
    repository, every = ALIASES.get(name, (name, 1))
    try:
        loaded = datasets.load_dataset(repository)
    except (OSError, ValueError) as error:  # no network, no such data set, not for everyone
        raise OSError(
            f"{name!r} is not a folder here, and the Hugging Face Hub does not give {repository} "
            f"({type(error).__name__}: {error}); {LOCALLY}"
        ) from error
    parts = {part: HubRows(table, f"{repository} {part}") for part, table in loaded.items()}
    return table_source(name, parts, sampling, every=every, **choices)
