"""Some items of a training part set apart, to choose weights on; the same ones in every run on the same data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .clips import Choice, ClipPart, Videos
from .digits import ScenePart
from .images import Images, TensorImages
from .order import mix
from .part import GROUP_IN_NAME, Part
from .text import TextPart

Picks = NDArray[np.int64]
STREAM = -4  # of random numbers, beside those of training


def split_off(part: Part, fraction: float) -> tuple[Part, Part]:
    """The part without, and of, a share of every class: `fraction` of its items, at least one of all classes together.

    The choice depends on the labels alone. Clips whose names share a group (UCF-101: one video) stay together. A class
    of one item, or of one group, keeps it for training. Of a text the end is set apart.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"holdout must be above 0 and below 1, got {fraction}")
    if isinstance(part, TextPart):
        return cut_text(part, fraction)
    if part.views != 1:
        raise ValueError(f"a hold-out is taken of a training part, which shows items once, got views={part.views}")
    units = unit_of_item(part)
    first = np.unique(units, return_index=True)[1]
    labels = part.labels.cpu().numpy()[first]
    apart = []
    for label in np.unique(labels):
        its = np.flatnonzero(labels == label)
        count = min(int(len(its) * fraction + 0.5), len(its) - 1)
        apart.append(its[np.argsort(mix(STREAM, int(label), its))[:count]])
    chosen = np.concatenate(apart)
    if not len(chosen):
        sizes = np.bincount(labels)
        if sizes.max() < 2:
            raise ValueError(f"holdout={fraction} leaves nothing to train on: no class has two items; set holdout=0")
        chosen = np.flatnonzero(labels == sizes.argmax())[:1]
    held = np.isin(units, chosen)
    trained, other = choose(part, np.flatnonzero(~held)), choose(part, np.flatnonzero(held))
    if isinstance(other, ClipPart):  # from the middle of their video, as in evaluation
        other = ClipPart(other.videos, other.sampling, jitter=False)
    return trained, other


def cut_text(part: TextPart, fraction: float) -> tuple[TextPart, TextPart]:
    """A text without, and of, its end: neighbouring windows would know of each other."""
    cut = len(part.tokens) - int(len(part.tokens) * fraction)
    pieces = [
        TextPart(tokens, part.context, round(part.bytes_per_token * len(tokens)), part.title)
        for tokens in (part.tokens[:cut], part.tokens[cut:])
    ]
    return pieces[0], pieces[1]


def unit_of_item(part: Part) -> Picks:
    """What may not be split, numbered from 0: the group of a clip where all names tell it, else every item."""
    if isinstance(part, ClipPart):
        found = [GROUP_IN_NAME.search(part.name(i)) for i in range(len(part))]
        if all(found):
            keys = [f"{label} {match[1]}" for match, label in zip(found, part.labels.tolist(), strict=True) if match]
            return np.unique(keys, return_inverse=True)[1]
    return np.arange(len(part))


def choose(part: Part, picks: Picks) -> Part:
    """The items `picks` of a part as a part of their own."""
    there = torch.from_numpy(picks)
    if isinstance(part, ScenePart):
        return ScenePart(part.images[there, :-1], part.images[there, -1], part.title)
    if isinstance(part, TensorImages):
        ratios = None if part.ratios is None else part.ratios[there]
        return TensorImages(part.images[there], part.labels[there], part.title, ratios)
    if isinstance(part, Images):
        return Images(SomeItems(part.items, picks), part.labels[there])
    if isinstance(part, ClipPart):
        return ClipPart(SomeVideos(part.videos, picks), part.sampling, jitter=part.jitter)
    return SomeOf(part, picks)


class Some:
    """Some of what is read by its number."""

    def __init__(self, whole: Any, picks: Picks) -> None:
        self.whole, self.picks = whole, picks
        if hasattr(whole, "labels"):
            self.labels: Tensor = whole.labels[torch.from_numpy(picks)]

    def __len__(self) -> int:
        return len(self.picks)

    def at(self, index: int) -> int:
        """Its number in the whole."""
        return int(self.picks[index])

    def name(self, index: int) -> str:
        return self.whole.name(self.at(index))

    def contents(self) -> Iterable[bytes]:
        return (self.picks.tobytes(), *getattr(self.whole, "contents", tuple)())


class SomeOf(Some):
    """Some items of a part of one's own."""

    views = 1

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        return self.whole.decode(self.at(index), size, seed)


class SomeItems(Some):
    """Some encoded items."""

    def encoded(self, index: int) -> bytes | Path:
        return self.whole.encoded(self.at(index))

    @property
    def shard_of(self) -> Picks | None:
        every = getattr(self.whole, "shard_of", None)
        return None if every is None else every[self.picks]


class SomeVideos(Some):
    """Some videos."""

    def __init__(self, whole: Videos, picks: Picks) -> None:
        super().__init__(whole, picks)
        self.separate = whole.separate

    def length(self, index: int) -> int:
        return self.whole.length(self.at(index))

    def ratio(self, index: int) -> float:
        return self.whole.ratio(self.at(index))

    def read(self, index: int, choose: Choice, size: int, crop: int, crops: int) -> Tensor:
        return self.whole.read(self.at(index), choose, size, crop, crops)
