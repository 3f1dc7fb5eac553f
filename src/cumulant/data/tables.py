"""A Source from tables: which column is what, what the classes are called, and who belongs to which part."""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..call import check_choice
from .clips import ClipPart, ClipSampling
from .images import Images
from .part import GROUP_IN_NAME, DataError, Part, Source, check_groups, shorten
from .rows import Cells, JoinedRows, Rows
from .video import EncodedVideos, FrameVideos

TRAIN_PARTS = ("train", "training")
TEST_PARTS = ("validation", "valid", "val", "test", "testing")
"""Validation comes first: the test parts of ImageNet and its relatives carry no labels."""

LABEL_COLUMNS = ("label", "labels", "fine_label")
GROUPS_PER_SPLIT = 7
"""UCF-101's official split k tests on the groups 7 (k - 1) + 1 to 7 k of every class and trains on the rest."""


def find_shards(folder: Path) -> dict[str, list[Path]]:
    """Part name -> parquet files: train-*.parquet and so on in the folder or its data/, or train/*.parquet."""
    shards = named_shards(folder, "*.parquet", lambda part, file: re.match(rf"{part}([-_.]|$)", file.stem))
    for found in shards.values():
        count = re.search(r"-of-0*(\d+)$", found[0].stem)
        if count and int(count[1]) != len(found):
            warnings.warn(f"{found[0].parent}: {len(found)} of {count[1]} shards like {found[0].name}", stacklevel=4)
    return shards


def named_shards(folder: Path, pattern: str, is_of: Callable[[str, Path], Any]) -> dict[str, list[Path]]:
    """Part name -> files of the folder or its data/ that are of it, or those in a folder of its name."""
    shards: dict[str, list[Path]] = {}
    for part in (*TRAIN_PARTS, *TEST_PARTS):
        for place in (folder, folder / "data"):
            files = [file for file in place.glob(pattern) if not file.name.startswith(".")]
            below = (file for file in (place / part).glob(pattern) if not file.name.startswith("."))
            found = sorted(file for file in files if is_of(part, file)) or sorted(below)
            if found:
                shards.setdefault(part, found)
    return shards


def table_source(
    name: str,
    parts: Mapping[str, Rows],
    sampling: ClipSampling,
    *,
    split: int = 1,
    test_part: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: Sequence[str] | None = None,
    every: int = 1,
) -> Source:
    """Two parts out of named tables. `every` = 2 keeps the classes 0, 2, 4, ... only, numbered anew."""
    train, test = (parts[part] for part in pick_parts(name, parts, test_part))
    column, kind = payload_column(name, train.schema, image_column)
    label = named_label_column(name, train.schema, label_column)
    missing = {column, label} - set(test.schema.names)
    if missing:
        raise DataError(
            f"{name}: wrong columns, {shorten(sorted(missing))} missing in the test part {test.schema.names}"
        )
    named, named_in_test = (names_from_schema(rows.schema, label) for rows in (train, test))
    if named and named_in_test and named != named_in_test:
        raise DataError(
            f"{name}: the classes of the test part are called {shorten(named_in_test)}, those of the train part "
            f"{shorten(named)}; expected the same names in the same order"
        )
    labels, classes = numbered_labels(name, train.column(label), test.column(label), class_names or named)
    rows: Rows = JoinedRows(train, test)
    in_test = np.arange(len(rows)) >= len(train)

    videos: list[NDArray[np.int64]] | None = None
    names = rows.column("clip") if "clip" in rows.schema.names else None
    if kind == "frame":
        videos, names = clips_of_frames(name, rows, labels, in_test)
        head = np.asarray([its[0] for its in videos])
        labels, in_test, groups = labels[head], in_test[head], groups_in_names(names)
    elif kind == "image":
        groups = None  # of images a column "group" may mean anything
    else:
        groups = row_groups(name, rows)
    in_test = resplit(name, split, labels, groups, in_test)
    keep = (labels % every == 0) | (labels < 0)  # of unlabelled items the source tells
    labels, classes = np.where(labels < 0, labels, labels // every), classes[::every]

    def part(testing: bool) -> Part:
        picks = np.flatnonzero(keep & (in_test == testing))
        chosen = torch.from_numpy(labels[picks])
        if kind == "image":
            return Images(Cells(rows, picks, column), chosen)
        if kind == "video":
            return ClipPart(EncodedVideos(Cells(rows, picks, column), chosen), sampling, jitter=not testing)
        places = [*picks[:, None]] if videos is None else [videos[pick] for pick in picks]
        called = None if names is None else [names[pick] for pick in picks]
        found = FrameVideos(rows, places, column, chosen, called, listed=videos is None)
        return ClipPart(found, sampling, jitter=not testing)

    return Source(name, "image" if kind == "image" else "video", part(False), part(True), classes)


def clips_of_frames(
    name: str, rows: Rows, labels: NDArray[np.int64], in_test: NDArray[np.bool_]
) -> tuple[list[NDArray[np.int64]], list[str]]:
    """One row a frame (columns clip_id and frame): the rows of each clip, sorted by frame, and the clips' names."""
    given = rows.column("clip_id")
    if None in given:
        raise DataError(f"{name}: wrong columns, {rows.name(given.index(None))} has no clip_id")
    ids, clip_of_row = np.unique(np.asarray(given), return_inverse=True)
    order = np.lexsort((whole_numbers(name, rows, "frame"), clip_of_row))
    frames = np.split(order, np.flatnonzero(np.diff(clip_of_row[order], prepend=-1))[1:])
    names = [str(clip) for clip in ids]
    for column_of, what in ((in_test, "rows in train and in test"), (labels, "rows of several classes")):
        mixed = [clip for clip, its in zip(names, frames, strict=True) if (column_of[its] != column_of[its[0]]).any()]
        if mixed:
            raise DataError(f"{name}: a clip has one class and is in one part, but these have {what}: {shorten(mixed)}")
    return frames, names


def pick_parts(name: str, available: Mapping[str, Any], test_part: str | None) -> tuple[str, str]:
    """The names of the training and the test part, or what is missing."""
    train = next((part for part in TRAIN_PARTS if part in available), None)
    if train is None:
        raise DataError(f"{name}: no train part among {sorted(available)}; expected one called {TRAIN_PARTS[0]!r}")
    wanted = TEST_PARTS if test_part is None else (test_part,)
    test = next((part for part in wanted if part in available), None)
    if test is None:
        raise DataError(f"{name}: no test part among {sorted(available)}; expected one of {', '.join(wanted)}")
    others = [part for part in TEST_PARTS if part in available and part != test]
    if test_part is None and others:
        warnings.warn(
            f"{name} has the parts {shorten([test, *others])}: {test} is what is tested on; choose with test_part=",
            stacklevel=5,
        )
    return train, test


def payload_column(name: str, schema: Any, wanted: str | None) -> tuple[str, str]:
    """The column with the pixels, and what a row of it is: image, frames (a list), video, or frame (of a clip)."""
    kinds = {field.name: kind for field in schema if (kind := payload_kind(field, features(schema))) is not None}
    if wanted is not None and wanted not in kinds:
        raise DataError(f"{name}: wrong columns, image_column={wanted!r} holds no images; those that do: {list(kinds)}")
    if not kinds:
        raise DataError(
            f"{name}: wrong columns, no image column in {schema.names}; expected 'image' as struct(bytes, path) or "
            "binary, or a list of such frames"
        )
    if wanted is None and len(kinds) > 1:
        raise DataError(f"{name}: several image columns {list(kinds)}; choose with image_column=")
    column = wanted or next(iter(kinds))
    if kinds[column] == "image" and {"clip_id", "frame"} <= set(schema.names):
        return column, "frame"
    return column, kinds[column]


def payload_kind(field: Any, described: Mapping[str, Any]) -> str | None:
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return any(
                child.name == "bytes" and (types.is_null(child.type) or holds_bytes(child.type)) for child in kind
            )
        return types.is_binary(kind) or types.is_large_binary(kind)

    if types.is_list(field.type) or types.is_large_list(field.type):
        return "frames" if holds_bytes(field.type.value_type) else None
    if not holds_bytes(field.type):
        return None
    feature = described.get(field.name)
    declared = feature.get("_type") if isinstance(feature, dict) else None
    return "video" if declared == "Video" or (declared is None and "video" in field.name) else "image"


def named_label_column(name: str, schema: Any, wanted: str | None) -> str:
    accepted = LABEL_COLUMNS if wanted is None else (wanted,)
    for column in accepted:
        if column in schema.names:
            return column
    raise DataError(f"{name}: wrong columns, no label column in {schema.names}; expected {' or '.join(accepted)}")


def features(schema: Any) -> dict[str, Any]:
    """The Hugging Face description of the columns, empty when there is none."""
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return described if isinstance(described, dict) else {}


def names_from_schema(schema: Any, label: str) -> list[str] | None:
    feature = features(schema).get(label)
    names = feature.get("names") if isinstance(feature, dict) else None
    return [str(each) for each in (names.values() if isinstance(names, dict) else names)] if names else None


def names_from_tsv(file: Path) -> list[str] | None:
    """Class names from a table label, ..., name with a header line, sorted by label."""
    if not file.exists():
        return None
    with file.open(newline="", encoding="utf-8") as lines:
        table = list(csv.DictReader(lines, delimiter="\t"))
    try:
        named = sorted((int(row["label"]), row["name"]) for row in table)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: expected the tab-separated columns label and name, with a header line") from error
    if [label for label, _ in named] != list(range(len(named))):
        raise DataError(f"{file}: labels must run from 0 to {len(named) - 1}, each once")
    return [title for _, title in named]


def numbered_labels(
    name: str, train: Sequence[Any], test: Sequence[Any], names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels of both parts as numbers (-1: none), and the class names; text labels are numbered in sorted order."""
    everything = [*train, *test]
    given = {type(label) for label in everything if label is not None}
    if given == {str}:
        names = sorted({label for label in train if label is not None})
        number: Callable[[Any], int] = {title: i for i, title in enumerate(names)}.__getitem__
        unknown = sorted({label for label in test if label is not None} - set(names))
        if unknown:
            raise DataError(f"{name}: unknown class in the test part, without training items: {shorten(unknown)}")
    elif given == {int}:
        number = int
        largest = max((label for label in train if label is not None), default=-1)
        if not names and largest >= len(train):  # told before so many names are made
            gap = min(set(range(len(train) + 1)) - set(train))
            raise DataError(
                f"{name}: empty class, no training items: {gap} (the largest label is {largest}; expected 0, 1, 2, ... "
                "without gaps)"
            )
        names = names or [str(i) for i in range(1 + largest)]
    else:
        kinds = shorten(sorted(kind.__name__ for kind in given)) or "nothing"
        raise DataError(f"{name}: wrong columns, labels must be integers or text, got {kinds}")
    numbers = [-1 if label is None else number(label) for label in everything]
    return np.asarray(numbers, dtype=np.int64), tuple(names)


def row_groups(name: str, rows: Rows) -> NDArray[np.int64] | None:
    if "group" in rows.schema.names:
        return whole_numbers(name, rows, "group")
    return groups_in_names(rows.column("clip")) if "clip" in rows.schema.names else None


def whole_numbers(name: str, rows: Rows, column: str) -> NDArray[np.int64]:
    """A column of integers, also where they are written as text, which would be sorted as text, 10 before 9."""
    values = rows.column(column)
    try:
        numbers = [int(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: wrong columns, {column!r} must hold whole numbers: {error}") from error
    return np.asarray(numbers, dtype=np.int64)


def groups_in_names(names: Sequence[str | None]) -> NDArray[np.int64] | None:
    """Group numbers from names like v_Archery_g08_c01; None unless every name has one."""
    found = [GROUP_IN_NAME.search(name or "") for name in names]
    return np.asarray([int(match[1]) for match in found if match]) if found and all(found) else None


def resplit(
    name: str, split: int, labels: NDArray[np.int64], groups: NDArray[np.int64] | None, in_test: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Who is in the test part: as given for split 1, by group number for splits 2 and 3. Groups stay together."""
    check_choice("split", split, (1, 2, 3))
    if groups is None:
        if split != 1:
            raise DataError(f"{name}: split {split} needs a column 'group', or clip names like v_Class_g01_c01")
        return in_test
    if split != 1:
        in_test = (groups - 1) // GROUPS_PER_SPLIT == split - 1
    pairs = list(zip(labels.tolist(), groups.tolist(), strict=True))
    check_groups(
        name,
        [p for p, t in zip(pairs, in_test, strict=True) if not t],
        [p for p, t in zip(pairs, in_test, strict=True) if t],
    )
    return in_test
