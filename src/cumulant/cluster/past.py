"""Where kernels find the blocks of the past that causal rows see: tables for `kernels.past`.

Shape legend: B batch, Lq queries, Lk keys, N blocks, T clusters of all levels (KP padded), n levels, S sets of tables:
1, or B with a key mask; A clusters in the list of a tile, at most.

The rule of `causal.py` lets a cluster be seen from some block of rows on until another one: by a run of rows. The
clusters that a tile sees are a run of each level, so that cluster i of a level can have the place i mod (the longest
run) in every list that holds it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Call
from ..kernels.cluster.bounds import padding
from .layout import Blocks
from .tables import flat_mask

NEVER = 2**31 - 1
CHUNK = 32  # clusters that a kernel takes at once: lists are padded to that


class Past(NamedTuple):
    """As `kernels.past.plan.Call` takes them."""

    bounds: Tensor  # (S, 2, KP + 1) int32, first token and end of each cluster, the N blocks first
    logs: Tensor  # (S, KP) float32, log2 of their sizes
    order: Tensor | None  # (S, Lk) int32, where the tokens lie; None: as they are
    spans: Tensor  # (3, KP) int32: first row that sees a cluster, the first that does not any more, place in lists
    lists: Tensor  # (tiles, 1 + A) int32: how many places are used, and the clusters, -1 for none
    levels: Tensor  # (2, n) int32: first cluster of each level, and how many


def past_tables(call: Call, blocks: Blocks, tile: int) -> Past:
    """Of rows `call.offset` on, in tiles of so many; with a key mask clusters hold the tokens that take part."""
    Lq, Lk, device = call.query.shape[-2], call.key.shape[-2], call.key.device
    starts, ends, found = _made(Lq, Lk, call.offset, blocks, tile, device)
    mask = flat_mask(call)
    if mask is None:
        return found
    taking = mask & (torch.arange(Lk, device=device) < call.offset + Lq)
    ranks = F.pad(taking.cumsum(-1), (1, 0))
    bounds = torch.stack((ranks[:, starts], ranks[:, ends]), 1)
    logs = (bounds[:, 1] - bounds[:, 0])[:, :-1].float().log2()
    order = (~taking).to(torch.int8).argsort(dim=-1, stable=True)
    return found._replace(bounds=bounds.int(), logs=logs, order=order.int())


def widest_list(Lq: int, offset: int, blocks: Blocks, tile: int) -> tuple[int, int]:
    """Clusters of all levels, and the longest list of a tile."""
    levels = _levels(offset + Lq, blocks)
    return sum(len(since) for since, _, _, _ in levels), sum(_runs(x, Lq, offset, blocks, tile)[2] for x in levels)


@lru_cache(64)
def _levels(L: int, blocks: Blocks) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each level: the first block of rows that sees a cluster, the first that does not any more; of each block of
    rows: the first cluster that it sees, and the end."""
    N, keep = -(-L // blocks.size), blocks.keep
    end = (torch.arange(N) - blocks.recent).clamp(min=0)
    count, levels = N, []
    while True:
        whole = keep is None or count <= keep + 1
        later = torch.zeros_like(end) if keep is None else ((end - keep) // 2).clamp(min=0)
        which = torch.arange(count)
        since, until = (torch.searchsorted(x, which, right=True) for x in (end, 2 * later))
        levels.append((since, until, 2 * later, end))
        if whole:
            return levels
        count, end = count // 2, later


def _runs(
    level: tuple[Tensor, Tensor, Tensor, Tensor], Lq: int, offset: int, blocks: Blocks, tile: int
) -> tuple[Tensor, Tensor, int]:
    """Of each tile: its first cluster of a level, and the end; and the longest such run."""
    first = torch.arange(0, Lq, tile) + offset
    last = (first + tile).clamp(max=offset + Lq) - 1
    low, high = level[2][first // blocks.size], level[3][last // blocks.size]
    return low, high, int((high - low).max())


@lru_cache(64)
@torch.inference_mode(False)  # what is kept from a call under inference_mode serves training too
def _made(
    Lq: int, Lk: int, offset: int, blocks: Blocks, tile: int, device: torch.device
) -> tuple[Tensor, Tensor, Past]:
    """First tokens and ends of the clusters and of nothing after them, (KP + 1); and the tables without a mask."""
    L, C = offset + Lq, blocks.size
    never, seen = -(-L // C), min(L, Lk)
    starts, ends, spans, lists, levels, total, width = [], [], [], [], [], 0, 0
    for number, level in enumerate(_levels(L, blocks)):
        which, tokens = torch.arange(len(level[0])), C << number
        starts.append((which * tokens).clamp(max=seen))
        ends.append((which * tokens + tokens).clamp(max=seen))
        low, high, longest = _runs(level, Lq, offset, blocks, tile)
        since, until = (torch.where(x < never, x * C, NEVER) for x in level[:2])
        spans.append(torch.stack((since, until, width + which % max(1, longest))))
        place = torch.arange(longest)
        cluster = low[:, None] + (place - low[:, None]) % max(1, longest)
        lists.append(torch.where(cluster < high[:, None], cluster + total, -1))
        levels.append((total, len(which)))
        total, width = total + len(which), width + longest
    lists.append(torch.full((len(lists[0]), -width % CHUNK or (0 if width else CHUNK)), -1))
    listed = torch.cat(lists, -1)
    used = ((listed >= 0) * torch.arange(1, listed.shape[-1] + 1)).amax(-1, keepdim=True)
    more = padding(total) - total
    first, end = (F.pad(torch.cat(x), (0, more + 1)) for x in (starts, ends))
    span = F.pad(torch.cat(spans, -1), (0, more), value=NEVER)
    logs = (end - first)[:-1].float().log2()
    listed, ladder = torch.cat((used, listed), -1), torch.tensor(levels).T.contiguous()
    bounds, logs = torch.stack((first, end))[None].int().to(device), logs[None].to(device)
    return (
        first.to(device),
        end.to(device),
        Past(bounds, logs, None, *(x.int().to(device) for x in (span, listed, ladder))),
    )
