"""How a call on the CPU is cut: tiles of heads, spans and chunks of tokens, and the memory that a tile is computed in.

Shape legend: B batch, H key heads, L length, D, E widths. A tile is g (batch, head) pairs times n tokens,
(g, n, width).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...moments import Moments, statistics_dtype

TILE = 1 << 19  # numbers in a workspace tile of one thread, 2 MiB in float32
TOGETHER = 1 << 21  # and in one of all threads
SHARE = 1 << 17  # numbers of a task, at least: half a millisecond, less is not worth a thread
GRAIN = 1 << 15  # numbers from which on torch cuts an operation into shares of its threads
TOKENS = 2048  # tokens of a task, at least, where few heads are cut along the sequence
CHUNK = 4096  # tokens that a tile is computed of at a time, at most: enough for matrix products at full speed
TASKS = 8  # tasks, at least, into which long sequences of few heads are cut
_KEPT = threading.local()


class Tile:
    """A range of batches and key heads; calling it cuts that part out of any (B, heads, L, width) tensor."""

    def __init__(self, batches: slice, heads: slice, key_heads: int) -> None:
        self.batches, self.heads, self.key_heads = batches, heads, key_heads

    @property
    def pairs(self) -> int:
        """(batch, key head) pairs in it."""
        return (self.batches.stop - self.batches.start) * (self.heads.stop - self.heads.start)

    def __call__(self, x: Tensor, n: slice) -> Tensor:
        groups = x.shape[1] // self.key_heads
        return x[self.batches, self.heads.start * groups : self.heads.stop * groups, n]

    def weights(self, x: Tensor | None, n: slice) -> Tensor | None:
        """(B, L) weights as (g, L, 1)."""
        if x is None:
            return None
        x = x[self.batches, n]
        return x[:, None].expand(-1, self.heads.stop - self.heads.start, -1).flatten(0, 1).unsqueeze(-1)

    def total(self, x: Tensor | bool | None, state: Moments) -> Tensor | None:
        """(B or 1, 1, 1, 1) numbers as (g or 1, 1, 1); True: the weights of the state."""
        if isinstance(x, bool):
            return state.weight[:, None, None] if x else None
        if x is None or x.shape[0] == 1:
            return None if x is None else x[0]
        return x[self.batches, 0].repeat_interleave(self.heads.stop - self.heads.start, 0)


def cut(query: Tensor, key: Tensor, halves: bool, threads: int, together: bool = False) -> list[list[Tile]]:
    """The tiles, in one group, or in two where messages go in halves: of the heads, or of the batch.

    Tiles have at most `TILE` numbers, and are as many as threads where each has its `SHARE`. Tiles of all threads
    `together` hold at least two heads, `TOGETHER` numbers or as many at a time. Which heads lie in a tile changes no
    digit of them, so threads change none.
    """
    B, H = key.shape[:2]
    numbers = max(1, key.shape[2] * key.shape[3], query.numel() // max(1, B * H))  # of a key head
    if together:
        held = (
            numbers
            if 2 * numbers <= TOGETHER
            else min(numbers, CHUNK * numbers // max(1, key.shape[2], query.shape[2]))
        )
        pairs = max(2, -(-B * H // -(-B * H * held // TOGETHER)))
    else:
        tasks = max(1, -(-B * H * numbers // TILE), min(threads, B * H * numbers // SHARE))
        pairs = max(1, -(-B * H // tasks))
    if not halves or B * H < 2:
        return [list(_tiles(slice(0, B), slice(0, H), H, pairs))]
    cuts = [(slice(0, B), slice(0, H // 2)), (slice(0, B), slice(H // 2, H))]
    if H == 1:
        cuts = [(slice(0, B // 2), slice(0, H)), (slice(B // 2, B), slice(0, H))]
    return [list(_tiles(*cut, H, pairs)) for cut in cuts]


def may_join(query: Tensor, key: Tensor) -> bool:
    """Whether tiles of all threads hold two or more whole heads each.

    One matrix alone may be multiplied in parts, as many as threads, and its digits then depend on those.
    """
    return key.shape[1] > 1 and min(x.pairs for x in cut(query, key, False, 1, True)[0]) > 1


def _tiles(of_batches: slice, of_heads: slice, key_heads: int, pairs: int) -> Iterator[Tile]:
    """Tiles of at most so many (batch, head) pairs."""
    many = of_heads.stop - of_heads.start
    batches, heads = max(1, pairs // max(1, many)), max(1, min(many, pairs))
    heads = max(1, -(-many // -(-many // heads)))  # even shares
    for b in range(of_batches.start, of_batches.stop, batches):
        for h in range(of_heads.start, of_heads.stop, heads):
            last = min(of_heads.stop, h + heads)
            yield Tile(slice(b, min(of_batches.stop, b + batches)), slice(h, last), key_heads)


def spans(x: Tensor, key: Tensor) -> list[slice]:
    """The tokens of x (B, heads, L, width) cut so that few (batch, head) pairs make `TASKS` tasks."""
    L, pairs = x.shape[-2], max(1, key.shape[0] * key.shape[1])
    n = max(TOKENS, L) if pairs >= TASKS else -(-L // -(-TASKS // pairs))
    n = max(1, -(-n // TOKENS)) * TOKENS
    return [slice(start, min(L, start + n)) for start in range(0, max(1, L), n)]


def chunks(x: Tensor) -> Iterator[slice]:
    """Token ranges of which a tile is computed at a time; the same whatever else is in it."""
    L, n = x.shape[-2], max(1, min(CHUNK, TILE // max(1, x.shape[-1])))
    return (slice(start, min(L, start + n)) for start in range(0, L, n))


class Workspace:
    """Named buffers that are reused from tile to tile: fresh memory costs more than the arithmetic on it.

    A thread keeps its own for the next call, five of `TILE` numbers: whether freed memory goes back to the system, and
    comes as new pages every time, depends on what else the process has freed, and doubles the time of a small call.
    """

    def __init__(self, like: Tensor, kept: bool, together: bool = False) -> None:
        self.together = together  # operations are of all threads
        self.dtype, self.device = statistics_dtype(like.dtype), like.device
        self.buffers: dict[Any, tuple[Tensor, Tensor]] = vars(_KEPT).setdefault("buffers", {}) if kept else {}

    def take(self, name: str, *shape: int) -> Tensor:
        flat, last = self.buffers.get((name, self.dtype), (None, None))
        if last is not None and last.shape == shape:
            return last
        size = prod(shape)
        with torch.inference_mode(False):  # what is kept serves calls outside of it too
            if flat is None or flat.numel() < size:
                flat = torch.empty(size, dtype=self.dtype, device=self.device)
            last = flat[:size].view(shape)
        self.buffers[name, self.dtype] = flat, last
        return last

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def whole(self, x: Tensor) -> bool:
        """Whether whole sequences of x (b, h, L, width) are computed at once where no sum over tokens is taken.

        Into a part of the tokens of several heads torch multiplies one head after the other.
        """
        return self.together and x.numel() <= TOGETHER

    def rows(self, x: Tensor) -> Iterable[slice]:
        """Token ranges where no sum over tokens is taken: no digit depends on them."""
        return (slice(0, x.shape[-2]),) if self.whole(x) else chunks(x)

    def flat(self, x: Tensor) -> Tensor | None:
        """x (b, h, n, width) itself as (g, n, width), or None where its dtype or strides do not allow it."""
        return _merged(x) if x.dtype == self.dtype else None

    def load(self, name: str, x: Tensor) -> Tensor:
        """x (b, h, n, width) as (g, n, width) in the statistics' precision: itself where possible, else a copy."""
        flat = self.flat(x)
        if flat is None:
            self.take(name, *x.shape).copy_(x)
            flat = self.take(name, prod(x.shape[:2]), *x.shape[2:])
        return flat

    def centred(self, name: str, x: Tensor, mean: Tensor, absent: Tensor | None) -> Tensor:
        """x (b, h, n, width) minus its mean (g, width) as (g, n, width); 0 where a token is absent."""
        out = self.take(name, *x.shape)
        torch.sub(x, mean.view(*x.shape[:2], 1, -1), out=out)
        out = out.view(-1, *x.shape[2:])
        return out if absent is None else out.masked_fill_(absent, 0)

    def target(self, name: str, x: Tensor) -> Tensor:
        """A place to compute x in: x itself as (g, n, width) where possible, else a buffer for `store`."""
        flat = self._own(x)
        return self.take(name, prod(x.shape[:2]), *x.shape[2:]) if flat is None else flat

    def store(self, x: Tensor, computed: Tensor) -> None:
        if self._own(x) is None:
            x.copy_(computed.view(x.shape))

    def _own(self, x: Tensor) -> Tensor | None:
        flat = self.flat(x)
        return None if flat is None or (self.together and not flat.is_contiguous()) else flat


def _merged(x: Tensor) -> Tensor | None:
    """(b, h, n, width) as a (b h, n, width) view, or None where the strides do not allow it."""
    b, h = x.shape[:2]
    if x.stride(-1) != 1 or (b > 1 and h > 1 and x.stride(0) != h * x.stride(1)):
        return None
    return x.view(b * h, *x.shape[2:])
