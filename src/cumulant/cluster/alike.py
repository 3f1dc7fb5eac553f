"""Queries in an order in which those that are alike stand together, for tiles that share near clusters by content.

Shape legend: B batch, H query heads, Hk key heads, Lq queries, Lk keys, D width, S sampled keys.

Clusters of k-means, or given ones, are no runs of tokens: queries that stand in a row have little to do with each other
there. So queries are halved again and again as keys are by a `Tree`: two are as far apart as the logits that S keys
give them, less the mean of these keys, which moves all logits of a query alike.

On three layers of a sentence encoder, 4,096 tokens, 64 k-means clusters of which 4 are near: tiles of 64 queries in a
row have 3.4 times the error of queries that choose each for itself, in this order 2.2 times (1.8 by `rank="mass"`);
sorted by their heaviest cluster 2.6, by the nearest centre 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import launch
from ..moments import statistics_dtype
from .backend import WIDEST, Assignment, Case, sizes_of
from .basis import sampled, spread_out
from .kmeans import KMeans
from .tree import Tree, order_of, permuted

SEARCH = Tree(1)  # how many keys are sampled, and steps to find a direction


def shares_by_content(case: Case) -> bool:
    """Whether tiles of queries choose clusters together that are no runs of tokens."""
    form, K = case.form, sizes_of(case)[0] if isinstance(case.clusters, KMeans | Assignment) else 0
    if form.near_rows == 1 or not isinstance(form.near, int) or form.near >= K or case.call.is_causal:
        return False
    return form.near > 0 or 0 < (form.response or 0) < K


def runs_of(Lq: int, rows: int) -> int:
    """Into how many runs Lq queries are halved for tiles of so many."""
    return 1 << max(0, (Lq // rows).bit_length() - 1)


def multiply_adds(Lq: int, D: int, rows: int) -> float:
    """Of the search, for Lq queries of width D."""
    return Tree(runs_of(Lq, rows)).multiply_adds(Lq, D)


@torch.no_grad()
def order_by_content(query: Tensor, key: Tensor, mask: Tensor | None, rows: int, prefix: int = 0) -> Tensor:
    """The order (B H, Lq) of query (B, H, Lq, D) for tiles of so many rows, key (B, Hk, Lk, D), mask (B, Lk).

    Keys of the prefix, and those that take no part, are not looked at.
    """
    runs = runs_of(query.shape[2], rows)
    narrow = launch.too_wide(query, key, WIDEST, WIDEST) is None
    if mask is None and not prefix and runs > 1 and narrow and launch.direct(query) and launch.direct(key):
        from ..kernels.tree import host

        with launch.on_device(query.device):
            given = launch.rows(query), launch.rows(key), sampled(SEARCH.sample, key)
            return host.order_of_queries(*given, runs, SEARCH.iterations)[:, : query.shape[2]]
    dtype = statistics_dtype(key.dtype)
    some = spread_out(key[:, :, prefix:], SEARCH.sample).to(dtype)
    if mask is None:
        some = some - some.mean(-2, keepdim=True)
    else:
        there = spread_out(mask[:, None, prefix:, None], SEARCH.sample) > 0
        some = some.masked_fill(~there, 0)
        mean = some.sum(-2, keepdim=True) / there.sum(-2, keepdim=True).clamp(min=1)
        some = (some - mean).masked_fill(~there, 0)
    some = some.nan_to_num(0.0, 0.0, 0.0).to(query.dtype).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return order_of((query @ some.mT).flatten(0, 1), runs, SEARCH)


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """x (B, H, Lq, width) with its rows in the order (B H, Lq)."""
    return permuted(x.flatten(0, 1), order).view_as(x)


def as_before(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of `in_order`, of x (B, any heads, any groups, Lq, width) too."""
    return permuted(x.reshape(len(order), *x.shape[-2:]), order, back=True).view(x.shape)
