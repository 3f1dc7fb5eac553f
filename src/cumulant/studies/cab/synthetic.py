"""Generated data for every task, so that `cumulant bench cab` runs without a file: the uses of attention are the real
ones, the figures are not those of real data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cumulant.data.text import story
from cumulant.studies.cab import data
from cumulant.studies.cab.tasks import PictureTask, RestoreTask, ReviewTask, RoleTask, SeriesTask, Task

STORIES = 1200
KIND, UNKIND = ("good", "fine", "warm", "bright", "lovely"), ("bad", "poor", "cold", "dull", "dreadful")
SPOKEN = ("filed", "argued", "section", "cited", "therefore", "below", "allowed")  # a word of each role


def made(task: Task) -> data.Tensors:
    """The generated tensors of a task."""
    return MAKERS[task.name](task)


def _stories() -> tuple[str, str]:
    texts = [story(number) for number in range(STORIES)]
    cut = STORIES * 9 // 10
    return "".join(texts[:cut]), "".join(texts[cut:])


def language(task: Task) -> data.Tensors:
    return {part: data.as_bytes(text.encode()) for part, text in zip(("train", "test"), _stories(), strict=True)}


def restore(task: RestoreTask) -> data.Tensors:
    return data.restore_tensors(task, *_stories())


def pictures(task: PictureTask) -> data.Tensors:
    """Two discs of random colours on a ground."""
    dice, found = np.random.default_rng(0), {}
    line = np.arange(task.side) / task.side
    for part, count in (("train", 256), ("test", 32)):
        images = np.empty((count, 3, task.side, task.side), np.uint8)
        for image in images:
            image[:] = dice.integers(0, 256, (3, 1, 1))
            for _ in range(2):
                x, y, radius = dice.uniform(0.2, 0.8), dice.uniform(0.2, 0.8), dice.uniform(0.1, 0.4)
                inside = (line[:, None] - y) ** 2 + (line[None] - x) ** 2 < radius**2
                image[:, inside] = dice.integers(0, 256, (3, 1))
        found[part] = torch.from_numpy(images)
    return found


def reviews(task: ReviewTask) -> data.Tensors:
    """Stories with more kind words than unkind ones, or the other way round."""
    dice, found = np.random.default_rng(0), {}
    for part, count in (("train", 512), ("test", 128)):
        labels = dice.integers(0, 2, count)
        cut = []
        for number, label in enumerate(labels):
            lists = (KIND, UNKIND) if label else (UNKIND, KIND)
            words = [dice.choice(lists[0]) for _ in range(3)] + [dice.choice(lists[1])]
            told = story(number).strip().split(". ")
            cut.append(data.cut_sentences([f"{one} {word}" for one, word in zip(told, words, strict=False)], task))
        found[part] = torch.tensor(cut, dtype=torch.int16)
        found[f"{part}_labels"] = torch.from_numpy(labels.astype(np.int16))
    return found


def roles(task: RoleTask) -> data.Tensors:
    """Judgments whose roles follow each other; a word tells a role in two sentences of three."""
    dice = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"train": [], "test": [], "train_labels": [], "test_labels": []}
    for number in range(100):
        labels = np.sort(dice.integers(0, task.classes, 2 * task.shape[0])).tolist()
        told = [f"{story(n)[:20]} {SPOKEN[role] if dice.random() < 0.67 else ''}" for n, role in enumerate(labels)]
        data.add_windows(task, rows, "test" if number % 5 == 4 else "train", told, labels)
    return {name: torch.tensor(values, dtype=torch.int16) for name, values in rows.items()}


def series(task: SeriesTask) -> data.Tensors:
    """Days and weeks of seven channels, with noise."""
    dice, hours = np.random.default_rng(0), np.arange(3600)
    day, week = 2 * np.pi * hours / 24, 2 * np.pi * hours / 168
    stamps = np.stack((np.sin(day), np.cos(day), np.sin(week), np.cos(week)), 1).astype(np.float32)
    values = stamps @ dice.normal(size=(2, 4, 7)) + 0.3 * dice.normal(size=(2, len(hours), 7))
    return data.series_tensors(values, stamps, 2400, 600, task.past)


MAKERS: dict[str, Callable[[Any], data.Tensors]] = {
    "lm": language, "mlm": language, "sr": pictures, "reviews": reviews, "roles": roles, "lstf": series,
    "restore": restore,
}  # fmt: skip
