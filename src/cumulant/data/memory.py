"""A part decoded once and kept as uint8 on the device: a step is one gather there, without work on the host.

N: items, T: frames of a clip, F: frames of all videos together.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .clips import ClipPart, TensorVideos
from .images import TensorImages
from .jobs import Decoder, Job, chunk_length, cores, run_once
from .part import DataError, Part, Source, spread

SHARE = 0.25
"""What may be taken of the free memory without being asked."""

MANY_ITEMS = 500  # from here on decoding is worth starting processes for


class Memory:
    """`pixels` (N, 3, [T,] size, size); of videos whose clips start anywhere all frames (F, 3, size, size), the
    frames of video i being starts[i] to starts[i + 1].

    `ratios` (N,): width / height of the pictures where they were stretched to the square, else None.
    `bad`: position -> why of items without pixels; `damaged`: (position, frame) -> why of single frames, black here.
    """

    def __init__(
        self,
        part: Part,
        pixels: Tensor,
        starts: NDArray[np.int64] | None,
        bad: dict[int, str],
        damaged: dict[tuple[int, int], str] | None = None,
        ratios: Tensor | None = None,
    ) -> None:
        self.part, self.pixels, self.starts, self.bad, self.damaged = part, pixels, starts, bad, damaged or {}
        self.labels, self.ratios = part.labels.to(pixels.device), ratios

    def flaws(self) -> dict[int, str]:
        """Position -> why of all items that cannot be used, or not all of whose clips can."""
        return {**{position: why for (position, _), why in reversed(self.damaged.items())}, **self.bad}

    @classmethod
    def fill(
        cls,
        part: Part,
        size: int,
        device: torch.device,
        *,
        workers: int,
        progress: bool | None,
        attempts: int,
        stretch: bool = False,
    ) -> Memory:
        """Decode everything, with a progress bar once it takes longer than two seconds; `stretch` as of `Decoder`."""
        from tqdm import tqdm

        ratios = torch.ones(len(part), device=device) if stretch else None
        there = isinstance(part, TensorImages) and part.images.shape[-2:] == (size, size)
        if there and (part.ratios is None or stretch):  # type: ignore[attr-defined]
            assert isinstance(part, TensorImages)
            known = ratios if part.ratios is None else part.ratios.to(device)
            return cls(part, part.images.to(device), None, {}, ratios=known)
        whole = keeps_whole_videos(part)
        decoder = Decoder(part, size, replace=False, attempts=attempts, whole=whole, stretch=stretch)
        chunk = 1 if whole else chunk_length(item_bytes(part, size))
        jobs = [Job(np.arange(first, min(first + chunk, len(part))), None) for first in range(0, len(part), chunk)]
        bad: dict[int, str] = {}
        damaged: dict[tuple[int, int], str] = {}
        lengths = np.zeros(len(part), dtype=np.int64)
        pieces: list[Tensor] = []
        pixels: Tensor | None = None
        with tqdm(
            total=len(part), desc="decoding", unit=" items", delay=2, disable=None if progress is None else not progress
        ) as bar:
            for job, decoded in zip(jobs, run_once(decoder, jobs, workers), strict=True):
                bad.update(decoded.bad)
                damaged.update(((position, frame), why) for position, frame, why in decoded.damaged)
                lengths[decoded.positions.numpy()] = decoded.lengths
                if ratios is not None:
                    ratios[decoded.positions.to(device)] = decoded.ratios.to(device)
                bar.update(len(job.positions))
                if not len(decoded.pixels):
                    continue
                if whole:
                    pieces.append(decoded.pixels.to(device))
                    continue
                if pixels is None:
                    pixels = torch.zeros(len(part), *decoded.pixels.shape[1:], dtype=torch.uint8, device=device)
                if decoded.bad:
                    pixels[decoded.positions.to(device)] = decoded.pixels.to(device)
                else:  # a plain copy is several times faster than an indexed one
                    pixels[job.positions[0] : job.positions[-1] + 1].copy_(decoded.pixels)
        if whole:
            pixels = torch.cat(pieces) if pieces else None
        if pixels is None:
            pixels = torch.empty(0, dtype=torch.uint8, device=device)
        return cls(part, pixels, np.cumsum([0, *lengths]) if whole else None, bad, damaged, ratios)

    def usable(self, positions: NDArray[np.int64], seeds: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        """Which items, or clips of videos, can be shown: (n,)."""
        good = ~np.isin(positions, list(self.bad))
        if self.damaged and self.starts is not None:
            broken = np.asarray([self.starts[position] + frame for position, frame in self.damaged])
            rows = self.frames(positions[good], None if seeds is None else seeds[good])
            assert rows is not None
            good[good] = ~np.isin(rows.numpy(), broken).any(1)
        return good

    def replaced(self, positions: NDArray[np.int64], seeds: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """The positions used: themselves, or for a bad item or clip the next one after it that is good."""
        used, waiting = positions.copy(), np.arange(len(positions))
        for _ in range(len(self.part)):
            waiting = waiting[~self.usable(used[waiting], None if seeds is None else seeds[waiting])]
            if not len(waiting):
                return used
            used[waiting] = (used[waiting] + 1) % len(self.part)
        raise DataError("no item is left that could take the place of those that cannot be decoded")

    def frames(self, positions: NDArray[np.int64], seeds: NDArray[np.int64] | None) -> Tensor | None:
        """Rows (n, T) of `pixels` that make the clips of an epoch; None where an item is one row."""
        if self.starts is None:
            return None
        assert isinstance(self.part, ClipPart)
        total = np.diff(self.starts)[positions]
        sampling = self.part.sampling
        chosen = sampling.evaluation(total) if seeds is None else sampling.training(total, seeds)
        return torch.from_numpy(self.starts[positions][:, None] + chosen)

    def take(self, positions: Tensor, frames: Tensor | None) -> Tensor:
        """Pixels (n, 3, [T,] size, size) of `positions` (n,), all on the device."""
        if frames is None:
            return self.pixels[positions]
        return self.pixels[frames].transpose(1, 2).contiguous()


def keeps_whole_videos(part: Part) -> bool:
    return isinstance(part, ClipPart) and part.jitter


def item_bytes(part: Part, size: int) -> int:
    frames = part.sampling.frames if isinstance(part, ClipPart) else 1
    return 3 * frames * size * size


def needed_bytes(part: Part, size: int) -> int:
    """Bytes of the decoded part; for whole videos from the lengths of up to 16 of them."""
    if not keeps_whole_videos(part):
        return len(part) * item_bytes(part, size)
    assert isinstance(part, ClipPart)
    lengths = []
    for index in spread(len(part), 16):
        try:
            lengths.append(part.videos.length(index))
        except ValueError:  # a bad item: reported when it is decoded
            continue
    return int(len(part) * 3 * size * size * np.mean(lengths)) if lengths else 0


def allowed_bytes(device: torch.device) -> int:
    """A quarter of the free memory of the device."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    return int(SHARE * free_memory() / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def free_memory() -> int:
    """Bytes the machine, or the container this runs in, can still give."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 4 << 30
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


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
