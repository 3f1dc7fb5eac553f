"""Some items of a training part set apart, to choose weights on; the same ones in every run on the same data."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .clips import Choice, ClipPart, Videos
from .images import Images, TensorImages
from .order import mix
from .part import GROUP_IN_NAME, Part
from .rows import Items
from .scenes import ScenePart
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
    return choose(part, np.flatnonzero(~held)), unjittered(choose(part, np.flatnonzero(held)))


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


def unjittered(part: Part) -> Part:
    """Clips from the middle of their video, as in evaluation."""
    return ClipPart(part.videos, part.sampling, jitter=False) if isinstance(part, ClipPart) else part


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


class SomeOf:
    """Some items of a part of one's own."""

    views = 1

    def __init__(self, part: Part, picks: Picks) -> None:
        self.part, self.picks, self.labels = part, picks, part.labels[torch.from_numpy(picks)]

    def __len__(self) -> int:
        return len(self.picks)

    def name(self, index: int) -> str:
        return self.part.name(int(self.picks[index]))

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        return self.part.decode(int(self.picks[index]), size, seed)


class SomeItems:
    """Some encoded items."""

    def __init__(self, items: Items, picks: Picks) -> None:
        self.items, self.picks = items, picks

    def __len__(self) -> int:
        return len(self.picks)

    def name(self, index: int) -> str:
        return self.items.name(int(self.picks[index]))

    def encoded(self, index: int):  # type: ignore[no-untyped-def]
        return self.items.encoded(int(self.picks[index]))

    def contents(self) -> Iterable[bytes]:
        return (self.picks.tobytes(), *self.items.contents())

    @property
    def shard_of(self) -> Picks | None:
        every = getattr(self.items, "shard_of", None)
        return None if every is None else every[self.picks]


class SomeVideos:
    """Some videos."""

    def __init__(self, videos: Videos, picks: Picks) -> None:
        self.videos, self.picks, self.separate = videos, picks, videos.separate
        self.labels = videos.labels[torch.from_numpy(picks)]

    def name(self, index: int) -> str:
        return self.videos.name(int(self.picks[index]))

    def contents(self) -> Iterable[bytes]:
        return (self.picks.tobytes(), *self.videos.contents())

    def length(self, index: int) -> int:
        return self.videos.length(int(self.picks[index]))

    def ratio(self, index: int) -> float:
        return self.videos.ratio(int(self.picks[index]))

    def read(self, index: int, choose: Choice, size: int, crop: int, crops: int) -> Tensor:
        return self.videos.read(int(self.picks[index]), choose, size, crop, crops)
