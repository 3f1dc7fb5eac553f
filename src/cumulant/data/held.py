"""A source decoded once for several loaders that follow each other: the same items, their pixels in memory."""

from __future__ import annotations

from itertools import pairwise

import torch

from .clips import ClipPart, TensorVideos
from .images import TensorImages
from .jobs import cores
from .memory import Memory, allowed_bytes, needed_bytes
from .part import Part, Source

MANY_ITEMS = 500  # from here on decoding is worth starting processes for


def hold(source: Source, size: int, whole: bool = False) -> Source | None:
    """The same source with all frames decoded to `size`; loaders of it have nothing to decode. `whole`: of training
    pictures not the centre square but all, as `Loader(whole=True)` has them.

    None where that takes more than a quarter of the free memory, where videos are cropped in several places, or where
    an item is damaged: a loader of the source itself reports those.
    """
    parts = (source.train, source.test)
    if sum(needed_bytes(_entire(part), size) for part in parts) > allowed_bytes(torch.device("cpu")):
        return None
    train, test = (_held(part, size, source.name, stretch) for part, stretch in zip(parts, (whole, False), strict=True))
    if train is None or test is None:
        return None
    return Source(source.name, source.kind, train, test, source.classes, known=source.identity())


def _entire(part: Part) -> Part:
    """What is decoded: whole videos, not clips."""
    return ClipPart(part.videos, part.sampling, jitter=True) if isinstance(part, ClipPart) else part


def _held(part: Part, size: int, name: str, stretch: bool) -> Part | None:
    if isinstance(part, ClipPart) and part.sampling.crops > 1:
        return None
    workers = cores() if len(part) > MANY_ITEMS else 0
    cpu = torch.device("cpu")
    memory = Memory.fill(_entire(part), size, cpu, workers=workers, progress=None, attempts=1, stretch=stretch)
    if memory.flaws():
        return None
    if not isinstance(part, ClipPart):
        return TensorImages(memory.pixels, part.labels, name, memory.ratios)
    assert memory.starts is not None
    videos = [memory.pixels[first:last] for first, last in pairwise(memory.starts.tolist())]
    held = TensorVideos(videos, part.videos.labels, name, memory.ratios)
    return ClipPart(held, part.sampling, jitter=part.jitter)
