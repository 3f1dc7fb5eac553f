"""Who holds which tokens: parts in the order of workers or in zigzag, and cutting tensors into them.

Shape legend: W workers, p pieces of a worker (1, or 2 in zigzag), L tokens of this worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..call import check_choice, check_dense, whole
from ..moments import Moments, added
from .exchange import Gather, Shift, Workers, exchange

ORDERS = ("rank", "zigzag")


class Parts:
    """How a sequence is laid out over workers."""

    def __init__(self, workers: Workers, zigzag: bool = False, lengths: Sequence[int] | None = None) -> None:
        self.workers, self.zigzag = workers, zigzag
        self._lengths = None if lengths is None else list(lengths)

    @property
    def pieces(self) -> int:
        return 2 if self.zigzag else 1

    def places(self, rank: int) -> list[int]:
        """Where the pieces of a worker stand among all pieces."""
        return [rank, 2 * self.workers.size - 1 - rank] if self.zigzag else [rank]

    def slices(self, tokens: int) -> list[slice]:
        """The pieces of a worker that holds so many tokens."""
        if not self.zigzag:
            return [slice(0, tokens)]
        return [slice(0, first_piece(tokens)), slice(first_piece(tokens), tokens)]

    def lengths(self, tokens: int) -> list[int]:
        """Tokens of every worker, of which this one holds `tokens`."""
        if self._lengths is not None:
            own = self._lengths[self.workers.rank]
            if own != tokens:
                raise ValueError(f"lengths say that worker {self.workers.rank} holds {own} tokens, got {tokens}")
            return self._lengths
        if self.workers.size == 1:
            return [tokens]
        return self.workers.numbers(tokens)

    def start(self, tokens: int) -> int:
        """Place of this worker's first token, for parts in the order of workers."""
        return list(accumulate(self.lengths(tokens), initial=0))[self.workers.rank]

    def before(self, moments: Moments) -> Callable[[], Moments]:
        """Starts an exclusive scan: of moments (p, ...) of the pieces, those of all that stands before each.

        log2(W) shifts, or one gather where that is as few bytes (two workers) or pieces go to and fro (zigzag). What is
        returned waits for it.
        """
        workers = self.workers
        scanned = workers.size > 2 and not self.zigzag
        kind = Shift(workers, 1) if scanned else Gather(workers)
        pending = kind.start([x.detach() for x in moments.kept()])
        return lambda: (self._scanned if scanned else self._picked)(
            moments, exchange(kind, *moments.kept(), pending=pending)
        )

    def sums_before(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Of sums of every worker, those of the workers before this one: log2(W) shifts."""
        earlier = exchange(Shift(self.workers, 1), *sums)
        seen, by = [a + b for a, b in zip(earlier, sums, strict=True)], 1
        while (by := 2 * by) < self.workers.size:
            found = exchange(Shift(self.workers, by), *seen)
            earlier = tuple(a + b for a, b in zip(earlier, found, strict=True))
            seen = [a + b for a, b in zip(seen, found, strict=True)]
        return earlier

    def _picked(self, moments: Moments, rows: tuple[Tensor, ...]) -> Moments:
        """Of moments (W, p, ...) of all pieces, those before each of ours."""
        workers = self.workers
        everyone = moments.filled(x.flatten(0, 1) for x in rows)
        order = [place for r in range(workers.size) for place in self.places(r)]
        found = [only(everyone, [o < place for o in order]).union(added) for place in self.places(workers.rank)]
        return moments.filled(torch.stack(x) for x in zip(*(one.kept() for one in found), strict=True))

    def _scanned(self, moments: Moments, rows: tuple[Tensor, ...]) -> Moments:
        """Moments of the workers before this one, from those of the one before it on, in steps of 1, 2, 4, ..."""
        earlier, by = moments.filled(rows), 1
        seen = earlier.merge(moments)
        while (by := 2 * by) < self.workers.size:
            found = moments.filled(exchange(Shift(self.workers, by), *seen.kept()))
            earlier, seen = found.merge(earlier), found.merge(seen)
        return earlier


def only(sets: Moments, these: Sequence[bool]) -> Moments:
    """Moments (n, ...) in which only some of the n sets hold anything."""
    there = torch.zeros(len(these), dtype=torch.bool, device=sets.weight.device)
    for i, one in enumerate(these):  # a copy from the host could not be captured in a CUDA graph
        if one:
            there[i] = True

    def kept(x: Tensor) -> Tensor:
        return torch.where(there.view(-1, *(1,) * (x.ndim - 1)), x, 0)

    return sets.filled(map(kept, sets.kept()))


def check_lengths(lengths: Sequence[int], workers: int) -> None:
    if not isinstance(lengths, Sequence) or len(lengths) != workers or not all(map(whole, lengths)):
        raise ValueError(f"lengths must be {workers} numbers of tokens, one for each worker, got {lengths!r}")


def first_piece(tokens: int) -> int:
    """In zigzag, how many of a worker's tokens belong to its first piece."""
    return -(-tokens // 2)


def held(tokens: int, parts: Parts, rank: int) -> list[slice]:
    """The slices of a whole sequence that a worker holds when parts are even."""
    W = parts.workers.size
    ends = [tokens * r // W for r in range(W + 1)]
    lengths = [b - a for a, b in pairwise(ends)]
    if not parts.zigzag:
        return [slice(ends[rank], ends[rank + 1])]
    sizes = [*map(first_piece, lengths), *(n - first_piece(n) for n in reversed(lengths))]
    at = list(accumulate(sizes, initial=0))
    return [slice(at[place], at[place + 1]) for place in parts.places(rank)]


def _parts(x: Tensor, mesh: DeviceMesh, dim: str, axis: int, order: str) -> Parts:
    check_dense("x", x)
    check_choice("order", order, ORDERS)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be one of the {x.ndim} dimensions of x, got {axis!r}")
    return Parts(Workers.of(mesh, dim), order == "zigzag")


def shard(x: Tensor, mesh: DeviceMesh, dim: str = "cp", *, axis: int = -2, order: str = "rank") -> Tensor:
    """This worker's part of x, which all of them have whole, cut along `axis` (that of the tokens)."""
    parts = _parts(x, mesh, dim, axis, order)
    pieces = [x.narrow(axis, s.start, s.stop - s.start) for s in held(x.shape[axis], parts, parts.workers.rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def unshard(x: Tensor, mesh: DeviceMesh, dim: str = "cp", *, axis: int = -2, order: str = "rank") -> Tensor:
    """The whole of x on every worker, put together from parts of any lengths. Its gradient is that of all workers."""
    parts = _parts(x, mesh, dim, axis, order)
    x = x.movedim(axis, 0)
    lengths = parts.lengths(x.shape[0])
    padded = torch.cat((x, x.new_zeros(max(lengths) - x.shape[0], *x.shape[1:])))
    (rows,) = exchange(Gather(parts.workers), padded)
    pieces: dict[int, Tensor] = {}
    for rank, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        cuts = [first_piece(n), n - first_piece(n)] if parts.zigzag else [n]
        pieces.update(zip(parts.places(rank), row[:n].split(cuts), strict=True))
    return torch.cat([pieces[place] for place in sorted(pieces)]).movedim(0, axis)
