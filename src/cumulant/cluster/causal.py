"""Causal cluster attention: blocks of the past are clusters, the current block and some before it are exact.

Shape legend: B batch, H key heads, G query heads of each, L tokens, N blocks of C tokens, A clusters of a list, D, E
widths.

With `keep`, old blocks are merged in pairs, and pairs in pairs: cluster i of level j holds blocks i 2^j to
(i + 1) 2^j - 1. Of n past blocks n_j = max(0, (n_(j-1) - keep) // 2) clusters of level j were ever made, and those from
2 n_(j+1) to n_j - 1 are still there. The rule depends on n alone, so that a stream and a batch agree.

Sinks, the first tokens of a text, to which all later ones may look: their block is a cluster without them, and they
stay exact beside it. Blocks stand where they stood.

With response="pooled" the clusters that a block of rows sees answer with one covariance, the mean of theirs by weight:
of the past alone, so that a row's answer does not depend on what comes after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..moments import Moments
from ..tensors import ABSENT, broken, spoiled
from .backend import Form
from .fields import Exact, Far, Seen, Tokens, mix
from .layout import Blocks
from .near import marked
from .statistics import joined, log, merge, moments_of


def causal_clusters(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, blocks: Blocks, form: Form, offset: int = 0, sinks: int = 0
) -> Tensor:
    """q (B, H, G, Lq, D) scaled, k (B, H, Lk, D), v (B, H, Lk, E), weights (B, 1, Lk) -> (B, H, G, Lq, E).

    The first row stands at the place `offset`: only blocks that hold rows are answered. `sinks`: so many tokens, the
    first that take part, are exact for every later row. Cost a row: ((recent + 1) C + sinks) (D + E) + A D E with A = N
    clusters, or (keep + 1) log2(N) when they are merged; pooled: D E, and N A D E once.
    """
    G, L = q.shape[2], offset + q.shape[3]
    # What no row may see must not reach it, NaN included; rows that see a token without numbers have none themselves.
    lost = broken(k, v)
    k, v = (x.masked_fill(lost.unsqueeze(-1), 0) for x in (k, v))
    C = blocks.size
    N = (L + C - 1) // C  # not -(-L // C), of whose sizes inductor makes indices that it cannot bound
    first = offset // C  # block of the first row
    before = offset - first * C
    if weights is None:
        weights = k.new_ones(1, 1, k.shape[-2])
    # Keys that no row may see are cut off; missing ones have weight 0.
    k, v = (_fit(x, N * C, L).unflatten(-2, (N, C)) for x in (k, v))
    weights = _fit(weights.unsqueeze(-1), N * C, L).squeeze(-1).unflatten(-1, (N, C))
    rows = F.pad(q, (0, 0, before, N * C - L)).unflatten(-2, (N - first, C))
    rows = rows.transpose(2, 3).flatten(3, 4)  # (B, H, blocks of rows, G C, D)

    log_weight = log(weights)  # (B, 1, N, C)
    recent = min(blocks.recent, N - 1)
    window = [_delay(log_weight, j, first, ABSENT) for j in range(recent, 0, -1)]
    seen = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    own = torch.where(seen, log_weight[:, :, first:].unsqueeze(-2), ABSENT)  # (B, 1, blocks of rows, C, C)
    exact_weight = torch.cat([*(x.unsqueeze(-2).expand_as(own) for x in window), own], -1)
    exact = Exact(
        torch.cat([_delay(k, j, first) for j in range(recent, -1, -1)], -2),
        torch.cat([_delay(v, j, first) for j in range(recent, -1, -1)], -2),
        exact_weight.repeat(1, 1, 1, G, 1),
    )

    if sinks:
        # Those of a block that is still exact for a row are not seen twice.
        past = torch.arange(first, N, device=q.device) - recent
        exact, weights = _set_apart(exact, k, v, weights, min(sinks, N * C), past)
        log_weight = log(weights)
    moments = moments_of(k, v, weights.expand(k.shape[:-1]), full=form.full, response=form.response != 0)
    block = torch.arange(N, device=q.device)
    hidden = table = tokens = None
    if blocks.keep is None:
        hidden = block >= block[first:, None] - recent
        tokens = Tokens(k, v, log_weight) if form.near else None
    else:
        moments, table = merged_lists(moments, N, blocks.keep, recent)
        table = table[first:]
    assert isinstance(form.near, int)
    far, pool = responses(Far.of(moments), hidden, table, form)
    field = Seen(exact, min(form.near, N), hidden=hidden, table=table, pool=pool)
    out = mix(rows, far, tokens, field, form, by_row=True)
    out = out.unflatten(3, (G, C)).transpose(2, 3).flatten(3, 4)[..., before : before + q.shape[3], :]
    return spoiled(out, lost.unsqueeze(2), torch.arange(offset, L, device=q.device))


def _set_apart(exact: Exact, k: Tensor, v: Tensor, weights: Tensor, count: int, past: Tensor) -> tuple[Exact, Tensor]:
    """The first `count` tokens that take part, beside what is exact for blocks of rows (R) that have `past` (R,) blocks
    as clusters; and the weights (B, 1, N, C) of all others, for clusters. k (B, H, N, C, D), v (B, H, N, C, E)."""
    C, flat = weights.shape[-1], weights.flatten(2)
    place = (flat == 0).int().argsort(dim=-1, stable=True)[..., :count]  # (B, 1, count)

    def taken(x: Tensor) -> Tensor:
        x = x.flatten(2, 3)
        which = place.unsqueeze(-1).expand(*x.shape[:2], count, x.shape[-1])
        return x.gather(2, which).unsqueeze(2).expand(-1, -1, len(past), -1, -1)

    left = place.unsqueeze(2) // C < past[:, None]  # (B, 1, R, count): the block has become a cluster
    log_weight = torch.where(left, log(flat.gather(-1, place)).unsqueeze(2), ABSENT).unsqueeze(-2)
    log_weight = log_weight.expand(*exact.log_weight.shape[:-1], count)
    beside = zip((taken(k), taken(v), log_weight), exact, (-2, -2, -1), strict=True)
    return Exact(*(torch.cat((new, old), dim) for new, old, dim in beside)), flat.scatter(-1, place, 0).view_as(weights)


def merged_lists(blocks: Moments, N: int, keep: int, recent: int) -> tuple[Moments, Tensor]:
    """Moments (B, H, T) of all clusters of all levels, and table (N, A) of those that each block of rows sees.

    Memory: T < 2 N clusters; A <= (keep + 1) (levels).
    """
    levels, level = [blocks], blocks
    while level.weight.shape[2] > keep + 1:
        pairs = level.weight.shape[2] // 2
        even, odd = (
            Moments._make(None if x is None else x[:, :, start : 2 * pairs : 2] for x in level) for start in (0, 1)
        )
        level = merge(even, odd)
        levels.append(level)
    offset, lists = 0, []
    past = (torch.arange(N, device=blocks.weight.device) - recent).clamp(min=0)
    for level in levels:
        later = ((past - keep) >> 1).clamp(min=0)  # // 2, of which inductor would make an index it cannot bound
        which = 2 * later.unsqueeze(-1) + torch.arange(keep + 1, device=past.device)
        lists.append(torch.where(which < past.unsqueeze(-1), which + offset, -1))
        offset, past = offset + level.weight.shape[2], later
    return joined(levels), torch.cat(lists, -1)


def responses(far: Far, hidden: Tensor | None, table: Tensor | None, form: Form) -> tuple[Far, Tensor | None]:
    """Clusters as `form` has them answer; pooled: without responses of theirs, and those of blocks of rows beside them.

    `hidden` (N, K) and `table` (N, A), -1 for none, say which clusters such a block sees, as `Seen` has them.
    """
    if not form.pooled:
        return far, None
    if table is None:
        assert hidden is not None
        return far._replace(response=None), far.pools(~hidden)
    return far._replace(response=None), far.pools(marked(table, far.log_weight.shape[-1]))


def _fit(x: Tensor, length: int, seen: int) -> Tensor:
    """x (..., L, W) without what comes after `seen` tokens, padded with zeros to `length`."""
    x = x[..., :seen, :]
    return F.pad(x, (0, 0, 0, length - x.shape[-2]))


def _delay(x: Tensor, blocks: int, first: int, fill: float = 0.0) -> Tensor:
    """x (B, H, N, C, ...) moved on by so many blocks, from block `first` on; `fill` where nothing came before."""
    start, end = first - blocks, x.shape[2] - blocks
    if start >= 0:
        return x[:, :, start:end]
    return torch.cat((torch.full_like(x[:, :, :-start], fill), x[:, :, :end]), 2)
