"""Tokens of a call and blocks of its sequence that several workers hold: who has which, and where.

Shape legend: W workers, B batch, K blocks of all tokens, c of which this worker touches, m slots of a block.

Blocks are those of the whole sequence, whoever holds it: a block may lie on several workers, each of which fills the
slots of its own tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Call, Grid
from ..cluster.backend import block_sizes, borders
from ..cluster.layout import Blocks, Layout, beside, divide
from ..moments import statistics_dtype
from .exchange import Workers
from .parts import Parts


class Spread(NamedTuple):
    """How the tokens of a call lie on the workers: queries and keys of each, and whether any has a mask."""

    queries: list[int]
    keys: list[int]
    masked: bool

    @classmethod
    def of(cls, parts: Parts, call: Call) -> Spread:
        own = [call.query.shape[-2], call.key.shape[-2], int(call.key_mask is not None)]
        (rows,) = parts.workers.rows(torch.tensor(own, device=parts.workers.device))
        queries, keys, masked = rows.T.tolist()
        return cls(queries, keys, any(masked))


class Tokenwise(NamedTuple):
    """This worker's scaled queries, keys, values and weights, of one batch dimension, in the statistics' dtype."""

    q: Tensor  # (B, H, G, Lq, D)
    k: Tensor  # (B, H, L, D), 0 where absent
    v: Tensor  # (B, H, L, E)
    weights: Tensor | None  # (B, 1, L)

    @classmethod
    def of(cls, call: Call, masked: bool) -> Tokenwise:
        dtype = statistics_dtype(call.query.dtype)
        *parts, mask = call.in_one_batch()
        q, k, v = (x.to(dtype) for x in parts)
        q = (q * call.softmax_scale).unflatten(1, (k.shape[1], -1))
        if mask is None:
            return cls(q, k, v, k.new_ones(len(k), 1, k.shape[2]) if masked else None)
        weights = mask.unsqueeze(1).to(dtype)
        absent = (weights == 0).unsqueeze(-1)
        return cls(q, k.masked_fill(absent, 0), v.masked_fill(absent, 0), weights)


class Held(NamedTuple):
    """What this worker holds of K blocks."""

    clusters: int  # K
    ranges: list[tuple[int, int]]  # the blocks that each worker touches, from and to
    layout: Layout  # of its own tokens: those of its range, all slots
    adjacent: Tensor  # (K, t) blocks beside each block and itself, -1 for none
    place: Tensor | None  # (B, L) block of each of its tokens, where masks move the borders of each sequence

    @property
    def most(self) -> int:
        """Blocks that a worker touches, at most."""
        return max(b - a for a, b in self.ranges)


def held(
    workers: Workers, lengths: list[int], clusters: int | tuple[int, ...] | Blocks, grid: Grid | None, least: int,
    weights: Tensor | None, device: torch.device,
) -> Held:  # fmt: skip
    """Of `clusters` of tokens whose lengths on the workers are given; weights (B, 1, L) move K blocks of a sequence."""
    L, rank = sum(lengths), workers.rank
    if isinstance(clusters, int) and grid is None and weights is not None:
        return _of_those_there(workers, lengths, clusters, least, weights.squeeze(1))
    at = list(accumulate(lengths, initial=0))
    starts, order = borders(clusters, L, grid, least)
    K, m = block_sizes(clusters, L, grid, least)
    sides = (K,) if grid is None else clusters if isinstance(clusters, tuple) else divide(grid, _count(clusters), least)
    if order is None:
        ranges = [(bisect_right(starts, a) - 1, bisect_left(starts, b)) if a < b else (0, 0) for a, b in pairwise(at)]
        everywhere = None
    else:
        everywhere = torch.tensor(order, device=device)
        sizes = torch.tensor([b - a for a, b in pairwise(starts)])
        owner = torch.empty(L, dtype=torch.long)
        owner[torch.tensor(order)] = torch.arange(K).repeat_interleave(sizes)
        cut = owner.split(lengths)
        ranges = [(int(x.min()), int(x.max()) + 1) if len(x) else (0, 0) for x in cut]
    first, last = ranges[rank]
    slot = torch.tensor(starts[first : last + 1], device=device)
    index = slot[:-1, None] + torch.arange(m, device=device)
    token = index if everywhere is None else everywhere[index.clamp(max=max(0, L - 1))]
    own = token - at[rank]
    present = (index < slot[1:, None]) & (own >= 0) & (own < lengths[rank])
    own = own.clamp(min=0, max=max(0, lengths[rank] - 1))
    layout = Layout(last - first, m, last - first, own[None, None], present[None, None])
    return Held(K, ranges, layout, beside(sides, device), None)


def _count(clusters: int | tuple[int, ...] | Blocks) -> int:
    assert isinstance(clusters, int)
    return clusters


def _of_those_there(workers: Workers, lengths: list[int], count: int, least: int, weights: Tensor) -> Held:
    """`count` blocks of the tokens that take part, in each sequence for itself, as `layout.consecutive` makes them."""
    device, L, rank = weights.device, sum(lengths), workers.rank
    taking = weights > 0
    (numbers,) = workers.rows(taking.sum(-1))  # (W, B)
    ends = F.pad(numbers.cumsum(0), (0, 0, 1, 0))  # (W + 1, B) ranks of the first token of each worker
    number = ends[-1].unsqueeze(-1)  # (B, 1)
    K = min(count, max(1, -(-L // least)))
    blocks = (-(-number // least)).clamp(min=1, max=K)
    starts = torch.minimum(-(-torch.arange(K + 1, device=device) * number // blocks), number)  # (B, K + 1)
    size = max(least, -(-L // K))

    def block_of(ranks: Tensor) -> Tensor:
        return torch.minimum(ranks, (number - 1).clamp(min=0)) * blocks // number.clamp(min=1)

    low, high = (block_of(x.mT.contiguous()).mT for x in (ends[:-1], (ends[1:] - 1).clamp(min=0)))
    there = numbers > 0
    low, high = torch.where(there, low, K).amin(1), torch.where(there, high + 1, 0).amax(1)
    ranges = [(min(a, b), b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    first, last = ranges[rank]
    ranks = starts[:, first:last, None] + torch.arange(size, device=device)  # (B, c, m)
    before = ends[rank][:, None, None]
    present = (
        (ranks < starts[:, first + 1 : last + 1, None]) & (ranks >= before) & (ranks < ends[rank + 1][:, None, None])
    )
    order = torch.argsort((~taking).to(torch.int8), dim=-1, stable=True)
    own = (ranks - before).clamp(min=0, max=max(0, weights.shape[-1] - 1)).flatten(1)
    index = order.gather(-1, own).view_as(ranks) if weights.shape[-1] else ranks
    layout = Layout(last - first, size, last - first, index[:, None], present[:, None])
    # A query at an absent token stands where the last token that takes part before it does, on whichever worker.
    standing = (ends[rank].unsqueeze(-1) + taking.cumsum(-1) - 1).clamp(min=0)
    return Held(K, ranges, layout, beside((K,), device), block_of(standing))
