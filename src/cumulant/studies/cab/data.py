"""The tensors of each task, from files people have; `synthetic` makes the same without any.

Folders are those of the data sets' own names: tiny-shakespeare/input.txt, imdb/*.parquet, tiny-imagenet-100/*.parquet,
legal-rhetorical-roles/*.jsonl.gz, ett-small/*.csv.gz. Splits are the official ones where there are any; judgments are
split by document.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.data.decode import decode_image
from cumulant.data.rows import parquet_rows
from cumulant.data.tables import find_shards
from cumulant.studies.cab.tasks import ABSENT, PictureTask, RestoreTask, ReviewTask, RoleTask, SeriesTask, Task

TRAIN_PICTURES, TEST_PICTURES = 6000, 256
TRAIN_REVIEWS, TEST_REVIEWS = 20000, 4000
TRAIN_BYTES, TEST_BYTES = 8_000_000, 200_000
SENTENCE = re.compile(r"(?<=[.!?])\s+|<br />")
WORD = re.compile(r"[a-z0-9']+")
HOURS, TEST_HOURS = 8640, 2880  # of training; validation follows, and as many hours of test
ROLES = {
    "facts": 0, "fac": 0, "argument": 1, "arg": 1, "statute": 2, "sta": 2, "precedent": 3, "pre": 3,
    "ratio of the decision": 4, "ratio": 4, "ruling by lower court": 5, "rlc": 5, "ruling by present court": 6,
    "rpc": 6,
}  # fmt: skip
Tensors = dict[str, Tensor]


def digest(tensors: Tensors) -> str:
    """What tells these tensors from others."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        found.update(tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def read(task: Task, folder: Path) -> Tensors:
    """The tensors of a task from the data sets in a folder."""
    place = folder / task.data
    if not place.is_dir():
        raise FileNotFoundError(
            f"{place} is not there: task {task.name!r} is made of the data set {task.data}; choose other --tasks, or "
            "leave --data out for generated data"
        )
    return READERS[task.name](task, place)


def as_bytes(text: bytes) -> Tensor:
    """A text as uint8 (N,)."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _shakespeare(place: Path) -> tuple[str, str]:
    text = (place / "input.txt").read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def language(task: Task, place: Path) -> Tensors:
    train, test = _shakespeare(place)
    return {"train": as_bytes(train.encode()), "test": as_bytes(test.encode())}


def _column(place: Path, part: str, *columns: str) -> list[list[Any]]:
    shards = find_shards(place)
    if part not in shards:
        raise FileNotFoundError(f"{place} has no {part}-*.parquet")
    rows = parquet_rows(shards[part])
    return [rows.column(column) for column in columns]


def masked(task: Task, place: Path) -> Tensors:
    """Reviews one after the other, kind and unkind in turns."""
    found = {}
    for part, count in (("train", TRAIN_BYTES), ("test", TEST_BYTES)):
        texts, labels = _column(place, part, "text", "label")
        order = _mixed(labels)
        text, size = [], 0
        for at in order:
            text.append(texts[at].encode())
            size += len(text[-1]) + 1
            if size > count:
                break
        found[part] = as_bytes(b"\n".join(text)[:count])
    return found


def _mixed(labels: Sequence[int]) -> list[int]:
    """Places with labels in turns; the same each time."""
    dice = np.random.default_rng(0)
    groups = [dice.permutation(np.flatnonzero(np.asarray(labels) == label)) for label in sorted(set(labels))]
    return [int(at) for turn in zip(*groups, strict=False) for at in turn]


def pictures(task: PictureTask, place: Path) -> Tensors:
    return {part: decoded(encoded, task.side) for part, encoded in encoded_pictures(place).items()}


def encoded_pictures(place: Path) -> dict[str, list[bytes]]:
    """The first pictures of both parts, as they lie in the files."""
    found = {}
    for part, name, count in (("train", "train", TRAIN_PICTURES), ("test", "validation", TEST_PICTURES)):
        rows = parquet_rows(find_shards(place)[name])
        found[part] = [rows.cell(at, "image")["bytes"] for at in range(min(count, len(rows)))]
    return found


def decoded(encoded: Sequence[bytes], side: int) -> Tensor:
    """uint8 (N, 3, side, side)."""
    return torch.stack([decode_image(one, side, f"picture {at}") for at, one in enumerate(encoded)])


def hashed(sentence: str, count: int, words: int) -> list[int]:
    """The first words of a sentence as numbers from 1 on, filled with 0; different words may share one."""
    found = [zlib.crc32(word.encode()) % (words - 1) + 1 for word in WORD.findall(sentence.lower())[:count]]
    return found + [0] * (count - len(found))


def cut_sentences(sentences: Sequence[str], task: ReviewTask) -> list[list[int]]:
    """Numbers (S, W) of the first sentences of a document; long ones go on in the next row."""
    rows, width = [], task.shape[1]
    for sentence in sentences:
        parts = WORD.findall(sentence.lower())
        rows += [" ".join(parts[at : at + width]) for at in range(0, len(parts), width)]
    rows = [*rows, *[""] * task.shape[0]][: task.shape[0]]
    return [hashed(row, width, task.words) for row in rows]


def reviews(task: ReviewTask, place: Path) -> Tensors:
    found = {}
    for part, count in (("train", TRAIN_REVIEWS), ("test", TEST_REVIEWS)):
        texts, labels = _column(place, part, "text", "label")
        order = _mixed(labels)[:count]
        cut = [cut_sentences(SENTENCE.split(texts[at]), task) for at in order]
        found[part] = torch.tensor(cut, dtype=torch.int16)
        found[f"{part}_labels"] = torch.tensor([labels[at] for at in order], dtype=torch.int16)
    return found


def roles(task: RoleTask, place: Path) -> Tensors:
    """Windows of sentences; every fifth document of each file is for the test."""
    rows: dict[str, list[Any]] = {"train": [], "test": [], "train_labels": [], "test_labels": []}
    for file in sorted(place.glob("*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            documents = [json.loads(line) for line in lines]
        for number, document in enumerate(documents):
            part = "test" if number % 5 == 4 else "train"
            labels = [ROLES[label.strip().lower()] for label in document["labels"]]
            add_windows(task, rows, part, document["sentences"], labels)
    if not rows["train"] or not rows["test"]:
        raise FileNotFoundError(f"{place} has no *.jsonl.gz with five documents or more")
    return {name: torch.tensor(values, dtype=torch.int16) for name, values in rows.items()}


def add_windows(
    task: RoleTask, rows: dict[str, list[Any]], part: str, sentences: Sequence[str], labels: Sequence[int]
) -> None:
    """A document in windows of S sentences, those of training half over each other."""
    count, width = task.shape
    numbers = [hashed(sentence, width, task.words) for sentence in sentences]
    for at in range(0, len(numbers), count if part == "test" else count // 2):
        own, said = numbers[at : at + count], list(labels[at : at + count])
        rows[part].append(own + [[0] * width] * (count - len(own)))
        rows[f"{part}_labels"].append(said + [ABSENT] * (count - len(said)))


def series(task: SeriesTask, place: Path) -> Tensors:
    """Two stations (2, hours, 7), each column by mean and deviation of its training part, and the time (hours, 4)."""
    stations, stamps = [], np.zeros(0)
    for name in ("ETTh1", "ETTh2"):
        with gzip.open(place / f"{name}.csv.gz", "rt", encoding="utf-8") as lines:
            rows = list(csv.reader(lines))[1:]
        stations.append(np.array([[float(cell) for cell in row[1:8]] for row in rows], np.float32))
        stamps = np.array([_stamp(datetime.fromisoformat(row[0])) for row in rows], np.float32)
    return series_tensors(np.stack(stations), stamps, HOURS, TEST_HOURS, task.past)


def series_tensors(values: np.ndarray, stamps: np.ndarray, train: int, test: int, past: int) -> Tensors:
    """Parts of (2, hours, 7): training, then as many hours of validation as of test, left out, then the test, with the
    past of its first hour."""
    mean, deviation = values[:, :train].mean(1, keepdims=True), values[:, :train].std(1, keepdims=True)
    values = (values - mean) / deviation
    parts = {"train": slice(0, train), "test": slice(train + test - past, train + 2 * test)}
    found: Tensors = {}
    for part, cut in parts.items():
        found[part] = torch.from_numpy(values[:, cut].astype(np.float32).copy())
        found[f"{part}_stamps"] = torch.from_numpy(stamps[cut].copy())
    return found


def _stamp(time: datetime) -> list[float]:
    day, week = 2 * np.pi * time.hour / 24, 2 * np.pi * (time.weekday() * 24 + time.hour) / 168
    return [np.sin(day), np.cos(day), np.sin(week), np.cos(week)]


def plain(text: str) -> str:
    """A text without case, line breaks and punctuation."""
    return " ".join(re.sub(r"[^a-z\s]", "", text.lower()).split())


def restore_tensors(task: RestoreTask, train: str, test: str) -> Tensors:
    """Pairs of pieces that begin with a word: as it stands (target) and without punctuation and case (source)."""
    found: Tensors = {}
    for part, text in (("train", train), ("test", test)):
        words = [match.start() for match in re.finditer(r"\S+", text)]
        step = max(1, len(words) // 20000) if part == "train" else 25  # words from one piece to the next
        pieces = [
            text[at : at + task.target].rsplit(None, 1)[0] for at in words[::step] if at + task.target < len(text)
        ]
        found[part] = _padded([piece.encode() for piece in pieces], task.target)
        found[f"{part}_source"] = _padded([plain(piece).encode() for piece in pieces], task.source)
    return found


def _padded(pieces: Sequence[bytes], length: int) -> Tensor:
    rows = [np.frombuffer(piece[:length].ljust(length, b"\0"), np.uint8) for piece in pieces]
    return torch.from_numpy(np.stack(rows))


def restore(task: RestoreTask, place: Path) -> Tensors:
    return restore_tensors(task, *_shakespeare(place))


READERS: dict[str, Callable[[Any, Path], Tensors]] = {
    "lm": language, "mlm": masked, "sr": pictures, "reviews": reviews, "roles": roles, "lstf": series,
    "restore": restore,
}  # fmt: skip
