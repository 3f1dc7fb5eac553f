"""Batches of uint8 pixels on the device, in an order that depends on the seed and the epoch alone.

B: global batch, b: the share of this rank, N: items of the part, T: frames of a clip.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..call import check_count
from ..kinds import check_kinds
from .jobs import Decoded, Decoder, Job, chunk_length, cores, telling_of_killed_workers, worker_loader
from .memory import Memory, allowed_bytes, item_bytes, needed_bytes
from .order import epoch_order, rank_slice
from .part import DataError, DecodeError, Part, shorten

Batch = tuple[Tensor, Tensor, Tensor]

MANY_FRAMES = 2000
"""Fewer pictures than this are decoded before worker processes would have started."""


@dataclass(frozen=True)
class BadItem:
    """An image or clip that could not be decoded."""

    position: int
    name: str
    why: str


class Steps(NamedTuple):
    """What this rank decodes: step s takes the positions bounds[s] to bounds[s + 1]."""

    positions: NDArray[np.int64]
    seeds: NDArray[np.int64] | None
    bounds: list[int]


class Loader:
    """Steps through a part of a data set.

    Args:
        part: `source.train` or `source.test`.
        batch_size: the global batch B; rank r gets items r B / world to (r + 1) B / world of each, so that all ranks
            together see what a single process would see.
        size: side of the pictures; the short side is resized to it and the centre square taken.
        whole: decode whole pictures instead, stretched to the square; `ratios_of` says how wide they were, so that
            a random crop (`Augment`) sees all of a picture and undoes the stretching.
        seed: of the order and of where training clips start, with the epoch and the place in it.
        shuffle: False goes through the items in order, clips from the middle of their video: for evaluation.
        repeats: repeated augmentation: so many copies of each item in a batch, which then holds B / repeats items.
        device: where the batches are wanted.
        workers: decoding processes; None takes one a core where that pays, 0 stays in this process.
        in_memory: decode once and keep everything on the device; "auto" does so if it takes at most a quarter of the
            free memory. The batches are the same, bit for bit.
        drop_last: True gives full batches only; False also gives the rest.
        max_bad: more items than this that cannot be decoded are an error (default: 1 %, at least 10, at most half).
            Fewer are reported in `bad` and by a warning; the next good item takes the place of a bad one where
            batches are full (`drop_last`), and otherwise, as in evaluation, it is left out.
        shard_window: of a part that lies in shards, shuffle so many of them at a time, in an order that is shuffled
            itself, so that only these are read; 0: shuffle over all. Either is a function of seed and epoch alone.
        shard_lanes: with a window, so many readers each go through shards of their own, `shard_window` at a time, so
            that a rank reads about 1 / world of all shards wherever world divides this number. The order is the same
            for all of them, so that an epoch goes on in any other.
        progress: show a bar while decoding into memory; None: in a terminal.
    """

    def __init__(
        self,
        part: Part,
        batch_size: int,
        *,
        size: int,
        seed: int = 0,
        shuffle: bool = True,
        repeats: int = 1,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        in_memory: bool | Literal["auto"] = "auto",
        drop_last: bool = True,
        max_bad: int | None = None,
        progress: bool | None = None,
        whole: bool = False,
        shard_window: int = 0,
        shard_lanes: int = 1,
    ) -> None:
        self.shard_window, self.shard_lanes = shard_window, shard_lanes
        self.part, self.batch_size, self.size, self.seed = part, batch_size, size, seed
        self.shuffle, self.repeats, self.drop_last = shuffle, repeats, drop_last
        self.rank, self.world, self.device = rank, world, torch.device(device)
        check_arguments(self, workers, in_memory, max_bad)
        check_kinds(Loader.__init__, {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "whole": whole})
        items = len(part) // part.views
        self.max_bad = min(max(10, items // 100), items // 2) if max_bad is None else max_bad
        self.bad: list[BadItem] = []
        attempts = self.max_bad * part.views + 1
        open_files(part, size)
        needed = needed_bytes(part, size)
        self.in_memory = needed <= allowed_bytes(self.device) if in_memory == "auto" else bool(in_memory)
        if workers is None:
            busy = not self.in_memory or needed >= MANY_FRAMES * 3 * size * size
            workers = cores() if busy and cores() > 1 else 0
        self._running = 0
        if self.in_memory:
            with telling_of_killed_workers():
                self._memory = Memory.fill(
                    part, size, self.device, workers=workers, progress=progress, attempts=attempts, stretch=whole
                )
            self._ratios = self._memory.ratios
            self._report(self._memory.flaws().items())
        else:
            self._plan: list[Job] = []
            self._chunk = chunk_length(item_bytes(part, size))
            self._ratios = torch.ones(len(part), device=self.device) if whole else None
            decoder = Decoder(part, size, replace=drop_last, attempts=attempts, stretch=whole)
            per_batch = -(-batch_size // world // self._chunk)
            ahead = max(2, -(-2 * per_batch // max(1, workers)))  # two batches in the making
            self._jobs = worker_loader(decoder, self._plan, workers, pin=self.device.type == "cuda", ahead=ahead)

    def __len__(self) -> int:
        """Steps per epoch."""
        return len(self.part) // self.batch_size if self.drop_last else -(-len(self.part) // self.batch_size)

    def ratios_of(self, positions: Tensor) -> Tensor | None:
        """Width / height (b,) of pictures that were handed out, before they were stretched; None for centre squares."""
        return None if self._ratios is None else self._ratios[positions]

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Batches of an epoch from step `first_step` on: pixels uint8 (b, 3, [T,] size, size), labels (b,) and
        positions in the part (b,), all on the device. A new epoch ends the one before."""
        if not 0 <= first_step <= len(self):
            raise ValueError(f"first_step must be between 0 and {len(self)} (steps per epoch), got {first_step}")
        self._running += 1
        steps = self._steps(epoch, first_step)
        return self._from_memory(steps) if self.in_memory else self._streamed(steps, self._running)

    def _steps(self, epoch: int, first_step: int) -> Steps:
        order, seeds = epoch_order(
            len(self.part),
            self.batch_size,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            repeats=self.repeats,
            drop_last=self.drop_last,
            shards=getattr(self.part, "shard_of", None),
            window=self.shard_window,
            lanes=self.shard_lanes,
        )
        slots, bounds = [np.arange(0)], [0]
        for first in range(first_step * self.batch_size, len(order), self.batch_size):
            share = rank_slice(min(self.batch_size, len(order) - first), self.rank, self.world)
            slots.append(np.arange(first + share.start, first + share.stop))
            bounds.append(bounds[-1] + len(slots[-1]))
        mine = np.concatenate(slots)
        return Steps(order[mine], None if seeds is None else seeds[mine], bounds)

    def _from_memory(self, steps: Steps) -> Iterator[Batch]:
        positions, seeds, bounds = steps
        if self._memory.flaws() and self.drop_last:
            positions = self._memory.replaced(positions, seeds)
        elif self._memory.flaws():
            good = self._memory.usable(positions, seeds)
            bounds = np.concatenate([[0], np.cumsum(good)])[bounds].tolist()
            positions, seeds = positions[good], None if seeds is None else seeds[good]
        frames = self._memory.frames(positions, seeds)
        there = torch.from_numpy(positions).to(self.device)
        frames = None if frames is None else frames.to(self.device)
        for first, last in pairwise(bounds):
            chosen = there[first:last]
            pixels = self._memory.take(chosen, None if frames is None else frames[first:last])
            yield pixels, self._memory.labels[chosen], chosen

    def _streamed(self, steps: Steps, run: int) -> Iterator[Batch]:
        positions, seeds, bounds = steps
        self._still(run)  # before the plan of a later epoch would be overwritten
        jobs, jobs_of_step = [], []
        for first, last in pairwise(bounds):
            cuts = [*range(first, last, self._chunk), last]
            for a, b in pairwise(cuts):
                jobs.append(Job(positions[a:b], None if seeds is None else seeds[a:b]))
            jobs_of_step.append(len(cuts) - 1)
        self._plan[:] = jobs
        with telling_of_killed_workers():
            decoded = iter(self._jobs)
        for count in jobs_of_step:
            self._still(run)
            with telling_of_killed_workers():
                batch = self._assemble([next(decoded) for _ in range(count)])
            yield batch

    def _still(self, run: int) -> None:
        if run != self._running:
            raise RuntimeError("this epoch has ended: a later one of the same loader was begun")

    def _assemble(self, chunks: list[Decoded]) -> Batch:
        self._report(item for chunk in chunks for item in chunk.bad)
        positions = torch.cat([torch.empty(0, dtype=torch.int64), *(chunk.positions for chunk in chunks)])
        full = [chunk.pixels for chunk in chunks if len(chunk.pixels)]
        frames = () if (sampling := getattr(self.part, "sampling", None)) is None else (sampling.frames,)
        shape = full[0].shape[1:] if full else (3, *frames, self.size, self.size)
        pixels = torch.empty(len(positions), *shape, dtype=torch.uint8, device=self.device)
        first = 0
        for piece in full:
            pixels[first : first + len(piece)].copy_(piece, non_blocking=True)
            first += len(piece)
        if self._ratios is not None and full:
            self._ratios[positions.to(self.device)] = torch.cat([chunk.ratios for chunk in chunks]).to(self.device)
        return pixels, self.part.labels[positions].to(self.device), positions.to(self.device)

    def _report(self, found: Iterable[tuple[int, str]]) -> None:
        """Remember bad items, warn of new ones, and give up when there are too many."""
        known = {item.position for item in self.bad}
        new = {position: BadItem(position, self.part.name(position), why) for position, why in found}
        fresh = [item for position, item in sorted(new.items()) if position not in known]
        if not new:
            return
        self.bad += fresh
        shown = shorten(dict.fromkeys(f"{item.name} ({item.why})" for item in fresh or self.bad))
        names = len({item.position // self.part.views for item in self.bad})
        total = len(self.part) // self.part.views
        if names > self.max_bad:
            raise DataError(
                f"{names} of {total} items cannot be decoded, more than max_bad={self.max_bad}: {shown}; repair or "
                "remove them, or allow more with max_bad"
            )
        if names == total:
            raise DataError(f"all {total} items cannot be decoded: {shown}")
        if not fresh:
            return
        what = "the next good item is used instead" if self.drop_last else "left out"
        warnings.warn(f"{names} of {total} items cannot be decoded, {what}: {shown}", stacklevel=3)


def open_files(part: Part, size: int) -> None:
    """Decode one item here, so that tables are read once, before workers are forked or threads started, and a missing
    package is told at once."""
    with suppress(DecodeError):
        part.decode(0, size)


def check_arguments(loader: Loader, workers: int | None, in_memory: bool | str, max_bad: int | None) -> None:
    """Refuse what makes no sense, by name."""
    for name in ("batch_size", "size", "repeats", "world", "shard_lanes"):
        check_count(name, getattr(loader, name))
    if not isinstance(loader.rank, int) or not 0 <= loader.rank < loader.world:
        raise ValueError(f"rank must be between 0 and world - 1 = {loader.world - 1}, got {loader.rank}")
    if loader.batch_size % loader.world and loader.drop_last:
        raise ValueError(f"batch_size must be a multiple of world={loader.world}, got {loader.batch_size}")
    items = len(loader.part)
    if loader.drop_last and loader.batch_size > items:
        raise ValueError(f"batch_size {loader.batch_size} is larger than the part ({items} items); use drop_last=False")
    if not -(2**63) <= loader.seed < 2**63:
        raise ValueError(f"seed must fit into 64 bits, got {loader.seed}")
    if loader.repeats > 1 and not loader.shuffle:
        raise ValueError(f"repeats must be 1 without shuffle, got {loader.repeats}: in order every item comes once")
    if not isinstance(in_memory, bool) and in_memory != "auto":  # "no" would count as true
        raise ValueError(f'in_memory must be True, False or "auto", got {in_memory!r}')
    if loader.shard_window and getattr(loader.part, "shard_of", None) is None:
        raise ValueError(f"shard_window must be 0 for data that is not in shards, got {loader.shard_window}")
    lanes = loader.shard_lanes
    if lanes > 1 and not (loader.shard_window and loader.shuffle and loader.repeats == 1):
        raise ValueError(
            f"shard_lanes must be 1 unless shards are shuffled by shard_window, without repeats, got {lanes}"
        )
    if loader.batch_size % lanes or (lanes > 1 and lanes % loader.world):
        raise ValueError(
            f"shard_lanes must divide batch_size={loader.batch_size} and be a multiple of world={loader.world}, "
            f"got {lanes}"
        )
    for name, given in (("workers", workers), ("max_bad", max_bad), ("shard_window", loader.shard_window)):
        if given is not None and (not isinstance(given, int) or given < 0):
            raise ValueError(f"{name} must be None or a whole number of at least 0, got {given!r}")
