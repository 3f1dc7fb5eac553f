"""How a case of cluster attention is handed over to its kernels: the call, and tables that tell where they find the
tokens of each cluster (`kernels.cluster.parts`), and the blocks of the past that causal rows see (`kernels.past`).

Shape legend: B batch, H, Hk heads of queries and keys, Lq queries, Lk keys, L of them after the prefix, D, E widths, K
clusters (KP padded), S sets of tables: 1 for blocks, B with a key mask, B Hk where heads have clusters of their own; of
the past N blocks, T clusters of all n levels (KP padded), A clusters in the list of a tile, at most.

The rule of `causal.py` lets a cluster be seen from some block of rows on until another one: by a run of rows. The
clusters that a tile sees are a run of each level, so that cluster i of a level can have the place i mod (the longest
run) in every list that holds it.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Call, Grid
from ..kernels import replay
from ..kernels.cluster.bounds import SORTABLE, padding
from ..kernels.cluster.bounds import tables as tables_of
from ..moments import statistics_dtype
from ..tracing import is_plain, may_keep
from .alike import SEARCH, runs_of, shares_by_content
from .backend import (
    TILES,
    Assignment,
    Case,
    block_sizes,
    blocks_of,
    blocks_of_past,
    borders,
    past_tile,
    sizes_of,
    slots_of,
)
from .basis import sampled
from .kmeans import KMeans, first_centres, kmeans
from .layout import Blocks, tiled
from .statistics import origin
from .tree import Tree

NEVER = 2**31 - 1
CHUNK = 32  # clusters that a kernel takes at once: lists are padded to that


def run_kernels(kernels: str, case: Case) -> Tensor:
    """(B, H, Lq, E) of query (B, H, Lq, D), key (B, Hk, Lk, D) and value (B, Hk, Lk, E), by `kernels`."""
    return {"short": _run_short, "clusters": _run_clusters, "past": _run_past}[kernels](case)


def _run_short(case: Case) -> Tensor:
    from ..kernels.short import host as triton_short

    call, form = case.call, case.form
    places, slots = slots_of(*blocks_of(case), call.prefix)
    shared: dict[str, Any] = {"scale": call.softmax_scale, "prefix": call.prefix}
    return triton_short.attention(*call[:3], places, slots, closure=form.closure, full=form.full, **shared)


def _run_clusters(case: Case) -> Tensor:
    from ..kernels.cluster import host as triton_cluster

    call, K, how = case.call, sizes_of(case)[0], _how(case)
    if finds_at_once(case):
        return _found_at_once(case, K, how)
    if isinstance(case.clusters, KMeans | Assignment):
        replay.refuse()  # tables hold what tokens do
        if isinstance(case.clusters, KMeans):
            case = case._replace(clusters=_found(case, flat_mask(call)))
    return triton_cluster.attention(
        *call[:3], None, *tables(case), **how, prefix=call.prefix, masked=call.key_mask is not None
    )


def _how(case: Case) -> dict[str, Any]:
    """The options of the kernels of clusters."""
    call, form, near = case.call, case.form, case.form.near
    assert isinstance(near, int)
    choosing = near > 0 or form.response is not None
    listed = form.response is not None and form.response < sizes_of(case)[0]
    return {
        "scale": call.softmax_scale,
        "tile": form.near_rows if choosing and form.near_rows in TILES else 128 if call.query.shape[-2] > 64 else 64,
        "near": near,
        "response": -2 if form.pooled else form.response if listed else -1,
        "closure": form.closure,
        "rank": form.rank,
    }


def can_search(tokens: int, columns: int) -> bool:
    """Whether the kernels of a tree take so many tokens of so many columns."""
    from ..kernels.tree import host

    return host.in_range(tokens, columns)


def run_tree(case: Case, tree: Tree, runs: int, tiles: tuple[Grid, Grid] | None) -> Tensor:
    """(B, H, Lq, E) in clusters of a tree, found by the same operator; `case` has blocks of their size.

    Queries are halved into `runs` of alike ones, 0: not, or are in `tiles` of a grid (the grid, a tile).
    """
    from ..kernels.tree import attend

    (query, key), device = case.call[:2], case.call.query.device
    K, found = sizes_of(case)[0], tables(case)
    order = (_kept_order if may_keep(query) else _order)(tiles, device)
    return attend.attention(
        *case.call[:3], sampled(tree.sample, query), sampled(SEARCH.sample, key), order, found.bounds, found.logs,
        tree.count, runs, tree.iterations, K, found.longest, found.equal, **_how(case),
    )  # fmt: skip


def _order(tiles: tuple[Grid, Grid] | None, device: torch.device) -> Tensor:
    """The tokens of a grid tile by tile, (1, L); (1, 0) without one."""
    if tiles is None:
        return torch.empty(1, 0, dtype=torch.int64, device=device)
    places = torch.arange(prod(tiles[0]), device=device).view(1, 1, -1, 1)
    return tiled(*tiles).pack(places).view(1, -1)


@lru_cache(64)
@torch.inference_mode(False)  # what is kept from a call under inference_mode serves training too
def _kept_order(tiles: tuple[Grid, Grid] | None, device: torch.device) -> Tensor:
    return _order(tiles, device)


def finds_at_once(case: Case) -> bool:
    """Whether one operator finds the clusters by k-means, puts alike queries together and attends, in kernels alone."""
    from ..kernels.kmeans import host as triton_kmeans

    call, options = case.call, case.clusters
    if not isinstance(options, KMeans) or options.metric == "diagonal" or options.start != "even":
        return False
    K, plain = sizes_of(case)[0], call.key_mask is None and not call.prefix
    return plain and call.query.shape[-2] > 0 and K <= SORTABLE and triton_kmeans.fits(K, call.key)


def _found_at_once(case: Case, K: int, how: dict[str, Any]) -> Tensor:
    from ..kernels.cluster.plan import no_numbers
    from ..kernels.kmeans import attend

    (query, key), options = case.call[:2], case.clusters
    runs, places = 0, no_numbers(key.device)
    if shares_by_content(case):
        runs, places = runs_of(query.shape[-2], case.form.near_rows), sampled(SEARCH.sample, key)
    return attend.attention(
        *case.call[:3], places, K, options.iterations, options.step(key.shape[-2]), options.metric == "full",
        runs if runs > 1 else 0, SEARCH.iterations, **how,
    )  # fmt: skip


def _run_past(case: Case) -> Tensor:
    from ..kernels.past import host as triton_past

    call, form, Lq = case.call, case.form, case.call.query.shape[-2]
    blocks, tile = blocks_of_past(case.clusters, call.offset + Lq), past_tile(call)
    tables = past_tables(call, blocks, tile)
    return triton_past.attention(
        *call[:3],
        *tables,
        clusters=widest_list(Lq, call.offset, blocks, tile)[0],
        blocks=-(-(call.offset + Lq) // blocks.size),
        size=blocks.size,
        recent=blocks.recent,
        offset=call.offset,
        scale=call.softmax_scale,
        tile=tile,
        response=-2 if form.pooled else 0 if form.response == 0 else -1,
        closure=form.closure,
        prefix=call.prefix,
        near=form.near,
        rank="error" if form.rank == "error" else "mass",
        masked=call.key_mask is not None,
    )


def _found(case: Case, mask: Tensor | None) -> Assignment:
    """The clusters that k-means finds: by kernels where a program can hold the centres, else as plain torch does."""
    from ..kernels.kmeans import host as triton_kmeans

    call, options, (B, Hk) = case.call, case.clusters, case.call.key.shape[:2]
    K = sizes_of(case)[0]
    key = call.key[:, :, call.prefix :]
    present = None if mask is None else mask[:, call.prefix :]
    if options.metric != "diagonal" and triton_kmeans.fits(K, call.key):
        query = call.query if options.metric == "full" and call.query.shape[-2] else None
        with torch.no_grad():
            step = options.step(key.shape[-2])
            centres = None  # evenly out of the keys: the kernels find these themselves
            if present is not None or options.start != "even":
                some = None if present is None else present[:, None, ::step]
                centres = first_centres(key[:, :, ::step], some, options)
            return Assignment(triton_kmeans.nearest(query, key, present, centres, K, options.iterations, step), K)
    dtype = statistics_dtype(call.key.dtype)
    q = (call.query.to(dtype) * call.softmax_scale).reshape(B, Hk, -1, call.key.shape[-1])
    k, weights = call.key.to(dtype), None if mask is None else mask.unsqueeze(1).to(dtype)
    if weights is not None:
        k = k.masked_fill((weights == 0).unsqueeze(-1), 0)
    k = (k - origin(k, weights, False))[:, :, call.prefix :]
    return Assignment(kmeans(q, k, None if weights is None else weights[..., call.prefix :], options), K)


class Tables(NamedTuple):
    """As `kernels.cluster.plan.Call` takes them."""

    bounds: Tensor  # (S, 2, KP + 1)
    logs: Tensor  # (S, KP)
    order: Tensor | None  # (S, Lk)
    clusters: int
    longest: int
    equal: bool


def flat_mask(call: Call) -> Tensor | None:
    """The key mask as (B, Lk)."""
    return None if call.key_mask is None else call.key_mask.expand(*call.lead, call.key.shape[-2]).flatten(0, -2)


def tables(case: Case) -> Tables:
    """Of blocks, or of an `Assignment`; with a key mask those of the tokens that take part.

    Layers of a model share a mask: the tables of the last few are kept, as long as they are not written to.
    """
    mask = case.call.key_mask
    if mask is None or isinstance(case.clusters, Assignment) or not _may_keep_for(mask):
        return _tables(case, flat_mask(case.call))
    kind = mask._version, case.clusters, case.call.grid, case.call.prefix, case.least, case.call.key.shape[:-1]
    for seen, same, found in _masked:
        if seen() is mask and same == kind:
            return found
    found = _tables(case, flat_mask(case.call))
    _masked.appendleft((ref(mask), kind, found))
    return found


_masked: deque[tuple[ref[Tensor], Any, Tables]] = deque(maxlen=8)


def _may_keep_for(mask: Tensor) -> bool:
    """Whether writing to it would show, and nothing records operations to run them again."""
    return may_keep(mask) and not mask.is_inference() and not torch.is_inference_mode_enabled()


def _tables(case: Case, mask: Tensor | None) -> Tables:
    call, clusters = case.call, case.clusters
    Lk, prefix, device = call.key.shape[-2], call.prefix, call.key.device
    if isinstance(clusters, Assignment):
        return _sorted(clusters.ids.flatten(0, 1), mask, prefix, clusters.clusters, 0)
    blocks = clusters, Lk - prefix, call.grid, case.least
    if mask is None:
        return _made(*blocks, prefix, device) if torch.compiler.is_compiling() else _kept(*blocks, prefix, device)
    K, longest = block_sizes(*blocks)
    if isinstance(clusters, int) and call.grid is None:  # blocks of the tokens that take part
        taking = mask[:, prefix:]
        number = taking.sum(-1, keepdim=True)
        count = (-(-number // case.least)).clamp(min=1, max=K)
        ids = (taking.cumsum(-1) - 1).clamp(min=0) * count // number.clamp(min=1)
        return _sorted(ids, mask, prefix, K, max(case.least, longest))
    ids = _ids(*blocks, device) if torch.compiler.is_compiling() else _kept_ids(*blocks, device)
    return _sorted(ids.expand(len(mask), -1), mask, prefix, K, longest)


def _ids(clusters: Any, L: int, grid: Grid | None, least: int, device: torch.device) -> Tensor:
    """Block of each of L tokens."""
    starts, order = borders(clusters, L, grid, least)
    ids = torch.bucketize(torch.arange(L, device=device), torch.tensor(starts[1:], device=device), right=True)
    return ids if order is None else torch.empty_like(ids).scatter(0, torch.tensor(order, device=device), ids)


@lru_cache(64)
def _kept_ids(*blocks: Any) -> Tensor:
    with torch.inference_mode(False):
        return _ids(*blocks)


def _made(clusters: Any, L: int, grid: Grid | None, least: int, prefix: int, device: torch.device) -> Tables:
    """Of blocks, the same in every sequence."""
    starts, order = borders(clusters, L, grid, least)
    K, longest = block_sizes(clusters, L, grid, least)
    bounds, logs = tables_of([prefix + start for start in starts], prefix, device)
    places = None
    if order is not None:
        every = [*range(prefix), *(prefix + place for place in order)]
        places = torch.tensor([every], dtype=torch.int32, device=device)
    return Tables(bounds, logs, places, K, longest, longest * K == L)


@lru_cache(64)
def _kept(*blocks: Any) -> Tables:
    with torch.inference_mode(False):  # what is kept from a call under inference_mode serves training too
        return _made(*blocks)


def _sorted(ids: Tensor, present: Tensor | None, prefix: int, K: int, longest: int) -> Tables:
    """Of clusters ids (S, L), tokens that are not `present` (S or B, Lk) in none: sorted by cluster, prefix first."""
    if not prefix and is_plain(ids):
        from ..kernels.cluster import order as by_kernels

        if by_kernels.sortable(ids, K):
            return Tables(*by_kernels.sorted_tables(ids, present, K), K, longest, False)
    if present is not None:
        present = present.repeat_interleave(len(ids) // len(present), 0)
    kind = torch.int16 if K < 1 << 15 else torch.int32
    keys = F.pad(ids.to(kind), (prefix, 0), value=-1)
    if present is not None:
        keys = torch.where(present, keys, K)
    found, order = keys.sort(stable=True)
    numbers = torch.arange(K + 1, device=ids.device, dtype=torch.int32).expand(len(ids), -1)
    edges = torch.searchsorted(found.int(), numbers.contiguous())
    first, end = edges[:, :-1], edges[:, 1:]
    none, start = edges.new_zeros(len(ids), padding(K) - K), edges.new_zeros(len(ids), 1)
    bounds = torch.stack((torch.cat((first, none, start), -1), torch.cat((end, none, edges[:, :1]), -1)), 1)
    logs = torch.cat((end - first, none), -1).float().log2()
    return Tables(bounds.int(), logs, order.int(), K, longest, False)


class Past(NamedTuple):
    """As `kernels.past.plan.Call` takes them."""

    bounds: Tensor  # (S, 2, KP + 1) int32, first token and end of each cluster, the N blocks first, sinks last
    logs: Tensor  # (S, KP) float32, log2 of their sizes
    order: Tensor | None  # (S, Lk) int32, where the tokens lie; None: as they are
    spans: Tensor  # (3, KP) int32: first row that sees a cluster, the first that does not any more, place in lists
    lists: Tensor  # (tiles, 1 + A) int32: how many places are used, and the clusters, -1 for none
    levels: Tensor  # (2, n) int32: first cluster of each level, and how many


def past_tables(call: Call, blocks: Blocks, tile: int) -> Past:
    """Of rows `call.offset` on, in tiles of so many; with a key mask clusters hold the tokens that take part."""
    Lq, Lk, device = call.query.shape[-2], call.key.shape[-2], call.key.device
    starts, ends, found = _made_past(Lq, Lk, call.offset, blocks, tile, device, call.prefix)
    mask = flat_mask(call)
    if mask is None:
        return found
    taking = mask & (torch.arange(Lk, device=device) < call.offset + Lq)
    ranks = F.pad(taking.cumsum(-1), (1, 0))
    bounds = torch.stack((ranks[:, starts], ranks[:, ends]), 1).clamp(min=call.prefix)
    bounds[:, :, -1] = F.pad(ranks[:, -1:].clamp(max=call.prefix), (1, 0))
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
def _made_past(
    Lq: int, Lk: int, offset: int, blocks: Blocks, tile: int, device: torch.device, sinks: int = 0
) -> tuple[Tensor, Tensor, Past]:
    """First tokens and ends of the clusters with sinks, and of nothing after them, (KP + 1); and the tables without a
    mask, where clusters begin after the sinks."""
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
    bounds = torch.stack((first, end)).clamp(min=min(sinks, seen))
    bounds[0, -1] = 0
    logs = (bounds[1] - bounds[0])[:-1].float().log2()
    listed, ladder = torch.cat((used, listed), -1), torch.tensor(levels).T.contiguous()
    bounds, logs = bounds[None].int().to(device), logs[None].to(device)
    return (
        first.to(device),
        end.to(device),
        Past(bounds, logs, None, *(x.int().to(device) for x in (span, listed, ladder))),
    )
