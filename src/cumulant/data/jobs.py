"""Decoding in chunks, in this process or in worker processes: what streaming and filling the memory share."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .clips import ClipPart
from .part import DataError, DecodeError, Part

CHUNK_BYTES = 4 << 20


class Job(NamedTuple):
    """Items to decode together; `seeds` as many, or None."""

    positions: NDArray[Any]
    seeds: NDArray[Any] | None


class Decoded(NamedTuple):
    """`pixels` of the items `positions`, one after the other; `lengths` frames each when whole videos were asked for.

    `ratios`: width / height of each picture, 1 where it is the centre square. `bad`: (position, why) of items met on
    the way that could not be decoded; `damaged`: (position, frame, why) of frames that are black in a whole video
    because they could not.
    """

    pixels: Tensor
    positions: Tensor
    ratios: Tensor
    lengths: list[int]
    bad: list[tuple[int, str]]
    damaged: list[tuple[int, int, str]]


class Decoder(Dataset[Decoded]):
    """Decodes jobs. A bad item gives way to the next good one after it (`replace`), or is left out.

    `whole` reads all frames of each video instead of a clip; `stretch` all of a picture instead of its centre square.
    """

    def __init__(
        self, part: Part, size: int, *, replace: bool, attempts: int, whole: bool = False, stretch: bool = False
    ) -> None:
        self.part, self.size, self.replace, self.attempts, self.whole = part, size, replace, attempts, whole
        self.stretch = stretch and hasattr(part, "decode_whole")
        self.known_bad: dict[int, str] = {}
        # Where one damaged frame spoils some clips of a video and not others, a clip must not depend on those before.
        self.remembers = not (isinstance(part, ClipPart) and part.jitter and part.videos.separate)

    def __getitem__(self, job: Job) -> Decoded:
        pixels: list[Tensor] = []
        positions: list[int] = []
        ratios: list[float] = []
        bad: list[tuple[int, str]] = []
        damaged: list[tuple[int, int, str]] = []
        for slot, wanted in enumerate(job.positions.tolist()):
            seed = None if job.seeds is None else int(job.seeds[slot])
            for step in range(self.attempts if self.replace else 1):
                position = (wanted + step) % len(self.part)
                item, ratio, broken = self._decode(position, seed)
                if isinstance(item, Tensor):
                    pixels.append(item)
                    positions.append(position)
                    ratios.append(ratio)
                    damaged += [(position, frame, why) for frame, why in broken.items()]
                    break
                bad.append((position, item))
        stacked = torch.cat(pixels) if pixels else torch.empty(0, dtype=torch.uint8)
        lengths = [len(item) for item in pixels]
        there = torch.tensor(positions, dtype=torch.int64)
        return Decoded(stacked, there, torch.tensor(ratios, dtype=torch.float32), lengths, bad, damaged)

    def _decode(self, position: int, seed: int | None) -> tuple[Tensor | str, float, dict[int, str]]:
        """Pixels, or why there are none; width / height; and the damaged frames of a whole video."""
        if position in self.known_bad:
            return self.known_bad[position], 1.0, {}
        try:
            if self.whole:
                assert isinstance(self.part, ClipPart)
                ratio = self.part.videos.ratio(position) if self.stretch else 1.0
                pixels, damaged = self.part.readable(position, self.size, 0 if self.stretch else 1)
                return pixels, ratio, damaged
            if self.stretch:
                pixels, ratio = self.part.decode_whole(position, self.size, seed)  # type: ignore[attr-defined]
                return pixels[None], ratio, {}
            return self.part.decode(position, self.size, seed)[None], 1.0, {}
        except DecodeError as error:
            if self.remembers:
                self.known_bad[position] = error.why
            return error.why, 1.0, {}


def keep(decoded: Any) -> Any:
    """Collation has nothing to do: a job is a chunk already."""
    return decoded


def worker_loader(
    decoder: Decoder, plan: Sequence[Job], workers: int, *, pin: bool, ahead: int = 2
) -> DataLoader[Decoded]:
    """Jobs of the plan in order; each worker works `ahead` jobs ahead. Workers live on between passes, for which the
    plan may be changed in place."""
    options: dict[str, Any] = {}
    if workers:
        options = dict(prefetch_factor=ahead, persistent_workers=True, worker_init_fn=outlast)
    # A generator of its own: the default would draw from torch's global one at every pass.
    options["generator"] = torch.Generator()
    return DataLoader(
        decoder, batch_size=None, sampler=plan, num_workers=workers, collate_fn=keep, pin_memory=pin, **options
    )


def apart(_: int) -> None:
    """Puts a worker into a process group of its own. A signal to the group of the trainer (Ctrl-C, `timeout`, a batch
    system) is meant for the trainer, which saves its state and then ends its workers: they must not be gone before."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def outlast(_: int) -> None:
    """Lets a decoding process live until its trainer ends it. A batch system tells every process of a job to end, each
    by itself: the trainer must not miss one before it has saved its state."""
    apart(_)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # which tells who has sent it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_trainer, daemon=True).start()


def _end_with_trainer() -> None:
    parent = parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


def run_once(decoder: Decoder, jobs: Sequence[Job], workers: int) -> Iterator[Decoded]:
    """All jobs in order: in worker processes, or in threads (Pillow and PyAV let go of the interpreter while most
    codecs work; WebP's does not, and small pictures spend their time in Python)."""
    if workers:
        yield from worker_loader(decoder, jobs, workers, pin=False)
        return
    with ThreadPoolExecutor(cores()) as pool:
        yield from pool.map(decoder.__getitem__, jobs)


@contextmanager
def telling_of_killed_workers() -> Iterator[None]:
    """A decoding process that was killed is a DataError that says what to do, in place of what torch says.

    torch notices it by a signal, so the error may come out of any line of the main thread: besides taking batches, what
    is done with them belongs in here too.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if not said.startswith("DataLoader worker (pid"):
            raise
        if "shared memory" in said:
            why = "there was no room in the shared memory, /dev/shm (in a container: make it larger)"
        elif "signal: Killed" in said or "exited unexpectedly" in said:
            why = "probably because the machine ran out of memory"
        else:
            raise  # the crash of a codec, say: torch names the signal
        raise DataError(
            f"a process that decodes the data was killed: {why}; take fewer of them with workers (0: decode in this "
            'process), or a smaller batch_size, and do not keep decoded data in main memory (in_memory="no", '
            "of a Loader False)"
        ) from error


def chunk_length(item_bytes: int) -> int:
    """Items a job: a few MiB, at most 64 items, so that one batch is shared by many workers."""
    return max(1, min(64, CHUNK_BYTES // max(1, item_bytes)))


def cores() -> int:
    """Cores of this process, shared with the other processes of the same torchrun on this machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
