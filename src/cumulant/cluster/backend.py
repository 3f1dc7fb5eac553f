"""Which cases of cluster attention the Triton kernels take, and which of them.

Shape legend: B batch, H heads, Lq queries, Lk keys, D, E widths, K clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call, Grid
from ..kernels import launch, notice
from ..tracing import constant, transformed
from .kmeans import KMeans
from .layout import Blocks, cuts, divide, on_grid

TILES = (32, 64, 128)  # queries that can share their near clusters in a kernel
WIDEST, WIDEST_FLOAT32 = 128, 64  # head size: what fits the shared memory of a multiprocessor
# Bytes of shared memory that a row of a tile takes in the causal kernels where that is most, in wide heads or float32.
PAST_ROW = {torch.bfloat16: 928, torch.float16: 1_280, torch.float32: 1_664}
MOST = 1024  # clusters
MOST_OPEN, MOST_NEAR = 256, 16  # clusters of which causal rows choose near ones, and how many each
MOST_HEADS = 65_535  # of all sequences of a batch: as far as the second dimension of a grid of programs goes
LONG = 1024  # keys up to which short clusters go through their tokens, where that is cheaper
LARGEST, MOST_PREFIX, MOST_SLOTS = 64, 32, 4096  # of the kernels that go through the tokens of short clusters


class Form(NamedTuple):
    """The options that say how clusters and near field are put together, checked."""

    near: int | str
    closure: str
    rank: str
    full: bool
    response: int | None
    near_rows: int
    pooled: bool = False  # one response for all clusters
    together: bool = False  # the queries of a block ask with their mean


@dataclass(frozen=True, eq=False)
class Assignment:
    """Clusters of any kind: ids (B, Hk, L) of the tokens after the prefix, from 0 to `clusters` - 1."""

    ids: Tensor
    clusters: int


class Case(NamedTuple):
    """A call of cluster attention: what is asked, which clusters, how they are put together."""

    call: Call
    clusters: Any
    form: Form
    least: int


def sizes_of(case: Case) -> tuple[int, int]:
    """Number of clusters, and tokens of the largest; 0 where that is not known before they are found.

    No property: torch.compile of torch 2.11 cannot unpack one of a named tuple.
    """
    if isinstance(case.clusters, KMeans):
        return min(case.clusters.count, max(1, case.call.key.shape[-2] - case.call.prefix)), 0
    if isinstance(case.clusters, Assignment):
        return case.clusters.clusters, 0
    return block_sizes(case.clusters, case.call.key.shape[-2] - case.call.prefix, case.call.grid, case.least)


def blocks_of(case: Case) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """First token of each cluster and the end, counted after the prefix, and an order of the tokens (`borders`)."""
    return borders(case.clusters, case.call.key.shape[-2] - case.call.prefix, case.call.grid, case.least)


def cheaper_by_token(m: int, D: int, E: int) -> bool:
    """Whether a query meets m tokens with fewer multiplications than their covariance, D x E."""
    return m * (D + E) <= D * E


def kernels_for(backend: str, case: Case) -> str | None:
    """The kernels that compute this case, "short", "clusters" or "past" (causal); None: plain torch.

    Short clusters of short sequences go through their tokens, everything else through clusters if it can. Raises for
    backend="triton" where neither can.
    """
    call, clusters = case.call, case.clusters
    if backend == "reference" or (backend == "auto" and not notice.expected(call.query)):
        return None
    if torch.compiler.is_compiling() or transformed():
        name, reason = _kernels(case)
    else:
        same = ("assignment", clusters.clusters) if isinstance(clusters, Assignment) else clusters
        shapes = *(x.shape for x in call[:3]), call.query.dtype, call.query.device
        mask = None if call.key_mask is None else call.key_mask.dtype
        key = shapes, same, case.form, case.least, mask, call[4:]
        found = _found.get(key)
        if found is None:
            if len(_found) > 1000:
                _found.clear()
            found = _found[key] = _kernels(case)
        name, reason = found
    if reason is None:
        return name
    if backend == "triton":
        raise ValueError(f'backend="triton" cannot be used: {reason}; use backend="auto"')
    notice.plain_torch("cluster_attention", call.query, reason)
    return None


_found: dict[Any, tuple[str | None, str | None]] = {}  # what `_kernels` said of calls that are alike


def _kernels(case: Case) -> tuple[str | None, str | None]:
    """The kernels that compute this case, or why none can."""
    call, Lk = case.call, case.call.key.shape[-2]
    reason = _general_obstacle(case)
    if reason is None and call.is_causal:
        reason = _past_obstacle(case)
        return "past" if reason is None else None, reason
    if reason is None:
        K, size = sizes_of(case)
        why_not = {"short": _short_obstacle(case, K, size), "clusters": _clusters_obstacle(case, K)}
        by_token = Lk < LONG and size > 0 and cheaper_by_token(size, call.key.shape[-1], call.value.shape[-1])
        for name in ("short", "clusters") if by_token else ("clusters", "short"):
            if why_not[name] is None:
                return name, None
        reason = f"{why_not['clusters']} (kernels of short clusters: {why_not['short']})"
    return None, reason


def _general_obstacle(case: Case) -> str | None:
    """Why no kernel can take this case, or None."""
    call, clusters = case.call, case.clusters
    query, key, value = call[:3]
    reason = launch.obstacle(query, value) or launch.too_wide(query, value, WIDEST, WIDEST_FLOAT32)
    if reason is not None:
        return reason
    if call.key_mask is not None and call.key_mask.dtype != torch.bool:
        got = f"weights of {call.key_mask.dtype}; pass key_mask > 0 if they are 0 and 1"
        return f"kernels take a key_mask of bool, got {got}"
    if not call.softmax_scale > 0:
        return f"kernels take a scale above 0, got {call.softmax_scale}"
    if _unknown(*key.shape[-2:], value.shape[-1]):
        return "kernels take a number of keys and widths that torch.compile knows, got a dynamic one"
    if transformed():
        return "torch.func transforms and forward-mode gradients need plain torch"
    if isinstance(clusters, Blocks) and (clusters.keep is not None or clusters.recent) and not call.is_causal:
        return f"keep and recent of {clusters} belong to is_causal=True"
    if isinstance(clusters, tuple) and (call.grid is None or not cuts(clusters, call.grid)):
        return f"clusters={clusters} do not cut grid={call.grid}"
    if case.form.together:
        return 'kernels take queries="each"'
    if call.prefix >= key.shape[-2] and not call.is_causal:
        return f"prefix={call.prefix} leaves none of {key.shape[-2]} keys for clusters"
    return None


def blocks_of_past(clusters: int | Blocks, rows: int) -> Blocks:
    """The blocks of causal attention whose last row has the place `rows` - 1, none longer than all rows."""
    if isinstance(clusters, int):
        # Traced, each length has a graph of its own: inductor cannot bound what is divided by a quotient of it.
        rows = index(rows) if torch.compiler.is_compiling() else rows
        return Blocks(max(1, -(-rows // clusters)))
    if torch.compiler.is_compiling():  # one graph for all lengths, of which a minimum could not be bounded either
        return clusters
    return replace(clusters, size=max(1, min(clusters.size, rows)))


def past_tile(call: Call) -> int:
    """Rows of a tile of the causal kernels: up to 128, fewer on GPUs whose shared memory would not hold these."""
    query, rows = call.query, 128
    wide = max(query.shape[-1], call.value.shape[-1]) > 64
    taken = PAST_ROW[query.dtype] if wide or query.dtype == torch.float32 else 0
    while rows > 32 and rows * taken > launch.shared_memory(query.device):
        rows //= 2
    return min(rows, launch.padded(query.shape[-2], 32))


def _past_obstacle(case: Case) -> str | None:
    """Why the kernels of causal clusters cannot take this case, or None if they can."""
    from .run import widest_list

    form, call, clusters = case.form, case.call, case.clusters
    Lq = call.query.shape[-2]
    if call.grid is not None or form.together or form.near_rows != 1:
        return "causal clusters are blocks of a sequence"  # an error, and plain torch says which
    if not isinstance(clusters, int | Blocks):
        return "causal clusters are blocks of a sequence"
    if _unknown(*call.query.shape, call.offset) or torch.compiler.is_compiling():
        return "kernels of causal clusters are not compiled into a graph"
    if not isinstance(form.near, int):
        return "causal clusters have no neighbours"
    if form.near > MOST_NEAR:
        return f"kernels of causal clusters take near up to {MOST_NEAR}, got {form.near}"
    if form.full:
        return 'kernels take variance="diagonal"'
    blocks = blocks_of_past(clusters, call.offset + Lq)
    total, listed = widest_list(Lq, call.offset, blocks, past_tile(call))
    if form.response is not None and 0 < form.response < listed:
        return f"causal kernels take response=None or 0, got {form.response}"
    if form.pooled and blocks.keep is not None:
        return f'causal kernels take response="pooled" of blocks that are not merged, got {blocks}'
    if form.near and total > MOST_OPEN:
        return (
            f"kernels take near clusters of at most {MOST_OPEN} causal blocks, got {total}; pass near=0 or larger ones"
        )
    if listed > MOST or total > 4 * MOST:
        return (
            f"kernels take at most {MOST} clusters, got {listed} that a row sees; Blocks(size, keep=) merges old ones"
        )
    heads = math.prod(call.lead) * call.query.shape[-3]
    if heads > MOST_HEADS:
        return f"kernels take at most {MOST_HEADS:,} heads in a batch, got {heads:,}"
    return None


def _clusters_obstacle(case: Case, K: int) -> str | None:
    """Why the kernels of clusters cannot take this case, K of them, or None if they can."""
    form = case.form
    if _unknown(*case.call.query.shape):
        return "kernels take shapes that torch.compile knows, got a dynamic one"
    if form.full:
        return 'kernels take variance="diagonal"'
    if not isinstance(form.near, int):
        return f"kernels take near as a number, got {form.near!r}"
    if K > MOST:
        return f"kernels take at most {MOST} clusters, got {K}"
    heads = math.prod(case.call.lead) * case.call.query.shape[-3]
    if heads > MOST_HEADS:
        return f"kernels take at most {MOST_HEADS:,} heads in a batch, got {heads:,}"
    choosing = form.near or (form.response is not None and 0 < form.response < K)
    if choosing and form.near_rows not in TILES:
        sizes = ", ".join(map(str, TILES))
        return f"near clusters must be shared by near_rows={sizes} queries, got near_rows={form.near_rows}"
    if form.near >= K:
        return f"near={form.near} of {K} clusters leaves nothing far away"
    return None


def _short_obstacle(case: Case, K: int, size: int) -> str | None:
    """Why the kernels that go through the tokens of K clusters of at most `size` cannot, or None if they can."""
    form, call = case.form, case.call
    if isinstance(case.clusters, KMeans | Assignment) or call.key_mask is not None:
        return "blocks without a key_mask"
    if call.query.shape[-3] != call.key.shape[-3]:
        return f"as many key heads as query heads, got {call.query.shape[-3]} and {call.key.shape[-3]}"
    if form.near != 0:
        return f"near=0, got {form.near!r}"
    if form.pooled:
        return 'all clusters respond, got response="pooled"'
    if form.response is not None and form.response < K:
        return f"all clusters respond, got response={form.response}"
    if size > LARGEST:
        return f"at most {LARGEST} tokens in a cluster, got {size}"
    if case.call.prefix > MOST_PREFIX:
        return f"at most {MOST_PREFIX} prefix tokens, got {case.call.prefix}"
    slots = K * launch.padded(size, 1)
    if slots > MOST_SLOTS:
        return f"at most {MOST_SLOTS} tokens in all clusters, these up to powers of two, got {slots}"
    return None


def _unknown(*sizes: int) -> bool:
    """Whether torch.compile is at work and leaves one of the sizes open."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not all(has_static_value(n) for n in sizes)


@constant
def slots_of(starts: tuple[int, ...], order: tuple[int, ...] | None, prefix: int) -> tuple[tuple[int, ...], int]:
    """Keys of the clusters, each in as many slots, a power of two, -1 in those that are empty; and that number."""
    slots = launch.padded(max(b - a for a, b in pairwise(starts)), 1)
    tokens = range(starts[-1]) if order is None else order
    rows = ([prefix + x for x in tokens[a:b]] + [-1] * (slots - (b - a)) for a, b in pairwise(starts))
    return tuple(x for row in rows for x in row), slots


def block_sizes(clusters: int | tuple[int, ...] | Blocks, L: int, grid: Grid | None, least: int) -> tuple[int, int]:
    """How many blocks, and tokens of the largest."""
    return _block_sizes(*_told(clusters), L, grid, least)


def borders(
    clusters: int | tuple[int, ...] | Blocks, L: int, grid: Grid | None, least: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """First token of each block and the end, after putting the tokens in an order (None: as they are)."""
    return _borders(*_told(clusters), L, grid, least)


def _told(clusters: int | tuple[int, ...] | Blocks) -> tuple[int | tuple[int, ...], int]:
    """Blocks as numbers, with the size of a block or 0: to torch.compile of torch 2.11 a dataclass is no constant."""
    return (0, clusters.size) if isinstance(clusters, Blocks) else (clusters, 0)


@constant
def _block_sizes(clusters: int | Grid, size: int, L: int, grid: Grid | None, least: int) -> tuple[int, int]:
    starts = _borders(clusters, size, L, grid, least)[0]
    return len(starts) - 1, max(b - a for a, b in pairwise(starts))


@constant
def _borders(
    clusters: int | Grid, size: int, L: int, grid: Grid | None, least: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    if size:
        count = max(1, -(-L // size))
        return tuple(min(c * size, L) for c in range(count + 1)), None
    if grid is not None:
        return _grid_blocks(grid, clusters if isinstance(clusters, tuple) else divide(grid, clusters, least))
    assert isinstance(clusters, int)
    K = min(clusters, max(1, -(-L // least)))
    return tuple(-(-c * L // K) for c in range(K + 1)), None


@constant
def _grid_blocks(grid: Grid, blocks: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    layout = on_grid(grid, blocks, torch.device("cpu"))
    assert layout.places is not None
    places = layout.places[0, 0]
    there = torch.ones_like(places, dtype=torch.bool) if layout.present is None else layout.present[0, 0]
    return (0, *there.sum(-1).cumsum(0).tolist()), tuple(places[there].tolist())
