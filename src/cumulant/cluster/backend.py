"""Which cases of cluster attention the Triton kernels take, and the call that hands them over.

Shape legend: B batch, H heads, Lq queries, Lk keys, D, E widths, K clusters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import transformed
from ..kernels import launch
from .layout import Blocks, Grid, divide, on_grid

TILES = (32, 64, 128)  # queries that can share their near clusters in a kernel
WIDEST, WIDEST_FLOAT32 = 128, 64  # head size: what fits the shared memory of a multiprocessor
MOST = 1024  # clusters
LONG = 1024  # keys from which "auto" takes the kernels; shorter sequences have not been measured


class Form(NamedTuple):
    """The options that say how clusters and near field are put together, checked."""

    near: int | str
    closure: str
    rank: str
    full: bool
    response: int | None
    near_rows: int


def kernels_take(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Any,
    grid: Grid | None,
    prefix: int,
    key_mask: Tensor | None,
    is_causal: bool,
    form: Form,
    least: int,
    scale: float,
) -> bool:
    """Whether the kernels compute this case; raises for backend="triton" where they cannot."""
    if backend == "reference" or (backend == "auto" and not (query.is_cuda and key.shape[-2] >= LONG)):
        return False
    reason = obstacle(query, key, value, clusters, grid, prefix, key_mask, is_causal, form, least, scale)
    if reason is not None and backend == "triton":
        raise ValueError(f'backend="triton" cannot be used: {reason}; use backend="auto"')
    return reason is None


def obstacle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Any,
    grid: Grid | None,
    prefix: int,
    key_mask: Tensor | None,
    is_causal: bool,
    form: Form,
    least: int,
    scale: float,
) -> str | None:
    """Why the kernels cannot take this case, or None if they can."""
    reason = launch.obstacle(query, value, 2, False)
    if reason is not None:
        return reason
    widest = WIDEST_FLOAT32 if query.dtype == torch.float32 else WIDEST
    if max(query.shape[-1], value.shape[-1]) > widest:
        return f"heads of {query.dtype} are at most {widest} wide, got {query.shape[-1]} and {value.shape[-1]}"
    if is_causal or key_mask is not None or prefix:
        what = "is_causal=True" if is_causal else "a key_mask" if key_mask is not None else f"prefix={prefix}"
        return f"kernels take neither masks nor prefix tokens, got {what}"
    if query.shape[-3] != key.shape[-3]:
        return f"kernels take as many key heads as query heads, got {query.shape[-3]} and {key.shape[-3]}"
    if not scale > 0:
        return f"kernels take a scale above 0, got {scale}"
    if transformed():
        return "torch.func transforms and forward-mode gradients need plain torch"
    if isinstance(clusters, bool) or not isinstance(clusters, int | tuple | Blocks):
        return f"kernels take blocks of a sequence or a grid, got clusters of type {type(clusters).__name__}"
    if isinstance(clusters, Blocks) and (clusters.keep is not None or clusters.recent):
        return f"keep and recent of {clusters} belong to is_causal=True"
    if isinstance(clusters, tuple) and (grid is None or not _cuts(clusters, grid)):
        return f"clusters={clusters} do not cut grid={grid}"
    if isinstance(clusters, int) and clusters < 1:
        return f"clusters must be at least 1, got {clusters}"
    if form.full:
        return 'kernels take variance="diagonal"'
    if not isinstance(form.near, int):
        return f"kernels take near as a number, got {form.near!r}"
    K = len(_blocks(clusters, key.shape[-2], grid, least)[0]) - 1
    if K > MOST:
        return f"kernels take at most {MOST} clusters, got {K}"
    choosing = form.near or (form.response is not None and 0 < form.response < K)
    if choosing and form.near_rows not in TILES:
        sizes = ", ".join(map(str, TILES))
        return f"near clusters must be shared by near_rows={sizes} queries in a row, got near_rows={form.near_rows}"
    if form.near >= K:
        return f"near={form.near} of {K} clusters leaves nothing far away"
    return None


def _cuts(clusters: tuple[Any, ...], grid: Grid) -> bool:
    return len(clusters) == len(grid) and all(
        isinstance(b, int) and not isinstance(b, bool) and 1 <= b <= max(1, side)
        for b, side in zip(clusters, grid, strict=True)
    )


def run_kernels(
    query: Tensor, key: Tensor, value: Tensor, clusters: Any, grid: Grid | None, least: int, scale: float, form: Form
) -> Tensor:
    """(B, H, Lq, E). Keys and values of a grid are put in the order of its blocks first, queries are not."""
    from ..kernels import triton_cluster

    starts, order = _blocks(clusters, key.shape[-2], grid, least)
    if order is not None:
        compiling = torch.compiler.is_compiling()
        index = torch.tensor(order, device=key.device) if compiling else _order_on(order, key.device)
        key, value = key[:, :, index], value[:, :, index]
    assert isinstance(form.near, int)
    K, choosing = len(starts) - 1, form.near > 0 or form.response is not None
    return triton_cluster.attention(
        query,
        key,
        value,
        starts,
        scale=scale,
        tile=form.near_rows if choosing and form.near_rows in TILES else _tile(query.shape[-2]),
        near=form.near,
        response=-1 if form.response is None or form.response >= K else form.response,
        closure=form.closure,
        by_error=form.rank == "error",
    )


def _tile(Lq: int) -> int:
    return 128 if Lq > 64 else 64


def _blocks(
    clusters: int | tuple[int, ...] | Blocks, L: int, grid: Grid | None, least: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """First token of each block and the end, after putting the tokens in an order (None: as they are)."""
    if isinstance(clusters, Blocks):
        count = max(1, -(-L // clusters.size))
        return tuple(min(c * clusters.size, L) for c in range(count + 1)), None
    if grid is not None:
        return _grid_blocks(grid, clusters if isinstance(clusters, tuple) else divide(grid, clusters, least))
    assert isinstance(clusters, int)
    K = min(clusters, max(1, -(-L // least)))
    return tuple(-(-c * L // K) for c in range(K + 1)), None


@torch.compiler.assume_constant_result
def _grid_blocks(grid: Grid, blocks: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _cached_grid_blocks(grid, blocks)


@lru_cache(64)
def _cached_grid_blocks(grid: Grid, blocks: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    layout = on_grid(grid, blocks, torch.device("cpu"))
    assert layout.places is not None
    places = layout.places[0, 0]
    there = torch.ones_like(places, dtype=torch.bool) if layout.present is None else layout.present[0, 0]
    return (0, *there.sum(-1).cumsum(0).tolist()), tuple(places[there].tolist())


@lru_cache(64)
def _order_on(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)
