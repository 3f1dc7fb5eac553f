"""Cluster attention on the GPU: launches and the custom ops. Formulas: cluster_parts.py; sizes: cluster_plan.py.

Shape legend: B sequences, H heads, Lq, Lk lengths, D, E widths, K clusters (KP padded), T near and R responding
clusters of a tile of M queries.

Memory beside inputs and outputs: statistics K D E a head, and Lq K numbers of 16 bits (gains) forward, five times that
backward; with one response for all none forward, three times backward. Linear in the length for a fixed K: no Lq x Lk
and no Lq x K x D tensor exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...tracing import is_plain
from ..direct import direct
from ..launch import empty_like_rows, on_device, rows, stride_unit, strides
from . import backward as backward_kernels
from . import forward as kernels
from . import statistics as cluster_statistics
from . import sums as cluster_sums
from .plan import Plan, Shape, logs_on, no_numbers, plan_for, starts_on

_ROWS = ("CLOSURE", "NEAR", "D", "BD", "BE", "M", "CK", "KP", "SQUARE", "PRECISION")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Sequence[int],
    *,
    scale: float,
    tile: int = 128,
    near: int = 0,
    response: int = -1,
    closure: str = "tanh",
    rank: str = "mass",
    which: Tensor | None = None,
) -> Tensor:
    """Cluster attention, differentiable in query, key and value.

    query (B, H, Lq, D), key (B, H, Lk, D), value (B, H, Lk, E) -> (B, H, Lq, E). Cluster c holds the keys from
    starts[c] to starts[c + 1] (K + 1 numbers, the first 0, the last Lk). `tile` queries in a row share their `near`
    clusters, the heaviest, or those of `which` (tiles, near), -1 for none; `response` clusters answer with their
    covariance, -1: all, -2: all with one, the mean of theirs by size. `rank`: as of `cluster_attention`.
    """
    keep = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    arguments = (query, key, value, which, list(starts), scale, tile, near, response, closure, rank)
    if not is_plain(query):
        return forward(*arguments, keep)[0]
    return _Attention.apply(*arguments) if keep else run_forward(*arguments, False)[0]


def plan_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    which: Tensor | None,
    starts: Sequence[int],
    tile: int,
    near: int,
    response: int,
    closure: str,
    rank: str,
) -> Plan:
    B, H, Lq, D = query.shape
    K = len(starts) - 1
    sizes = [b - a for a, b in pairwise(starts)]
    far = K - near
    shape = Shape(
        B, H, Lq, key.shape[2], D, value.shape[-1], K, max(sizes), max(sizes) == min(sizes), tile, near,
        -1 if response >= far else response, closure, rank, which is not None,
    )  # fmt: skip
    return plan_for(shape, query.dtype)


def _state(query: Tensor, plan: Plan, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """lse (B H, Lq), vectors (B H, KP, 2 BD + BE), factors (B H, KP, 4 BD + 2 BE), matrices (B H, KP, BD, BE),
    near (B H, tiles, T), responding (B H, tiles, R), and rounding (B, H, Lq, E).

    One matrix for all clusters is kept as two of its type, (B H, 2, BD, BE). `rounding` is what the output lost in its
    own to 16 bits, for a backward pass only.
    """
    shape = plan.shape
    heads = shape.batch * shape.heads
    listed = shape.response if plan.response == 2 else 0
    return (
        query.new_empty(heads, shape.length_q, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 2 * plan.BD + plan.BE, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 4 * plan.BD + 2 * plan.BE),
        query.new_empty(heads, 2 if plan.response == 3 else plan.KP, plan.BD, plan.BE),
        query.new_empty(heads, plan.tiles, shape.near, dtype=torch.int32),
        query.new_empty(heads, plan.tiles, listed, dtype=torch.int32),
        empty_like_rows(rows(query), shape.E) if keep and query.dtype != torch.float32 else query.new_empty(0),
    )


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    which: Tensor | None,
    starts: Sequence[int],
    scale: float,
    tile: int,
    near: int,
    response: int,
    closure: str,
    rank: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, and the state of a backward pass (`_state`)."""
    q, k, v = rows(query), rows(key), rows(value)
    plan = plan_of(query, key, value, which, starts, tile, near, response, closure, rank)
    state = _state(query, plan, keep)
    out = empty_like_rows(q, value.shape[-1])
    first, logs = starts_on(starts, plan, query.device), logs_on(starts, plan, query.device)
    with on_device(query.device):
        _statistics(plan, k, v, first, state, scale)
        _choose(plan, q, which, logs, state, scale)
        _attend(plan, q, k, v, out, (first, logs), state, scale)
    return out, *state


def _statistics(plan: Plan, k: Tensor, v: Tensor, starts: Tensor, state: Sequence[Tensor], scale: float) -> None:
    config, unit, heads = plan.config("statistics"), stride_unit(k, v), plan.shape.batch * plan.shape.heads
    vectors, factors, matrices = state[1:4]
    pooled = plan.response == 3
    each = matrices.new_empty(heads, plan.KP, plan.BD, plan.BE) if pooled else matrices
    cluster_statistics.statistics[(plan.KP, heads)](
        k, v, starts, vectors, factors, each, *strides(k, unit), *strides(v, unit), plan.shape.length_k,
        plan.shape.heads, scale, N=config.block, FOLD=16, STAGES=config.stages, UNIT=unit,
        **plan.constants("D", "E", "BD", "BE", "PRECISION"), **plan.resources("statistics", 128),
    )  # fmt: skip
    if pooled:
        size, N = plan.BD * plan.BE, plan.config("pool").block
        cluster_statistics.pool[(size // N, heads)](
            each, starts, matrices, plan.shape.length_k, SIZE=size, N=N, **plan.constants("KP", "CK"),
            **plan.resources("pool", 128),
        )  # fmt: skip


def _choose(plan: Plan, q: Tensor, which: Tensor | None, logs: Tensor, state: Sequence[Tensor], scale: float) -> None:
    shape, (_, vectors, factors, _, near, responding, _) = plan.shape, state
    heads = shape.batch * shape.heads
    if which is not None:
        near.copy_(which.expand_as(near))
    choosing, listed = shape.near > 0 and which is None, plan.response == 2
    if choosing and shape.rank == "mean":
        _choose_by_mean(plan, q, logs, vectors, near, scale)
        choosing = False
    if not (choosing or listed) or plan.fused:
        return
    scores = vectors.new_empty(heads, plan.tiles, 2, plan.KP)
    unit = stride_unit(q)
    kernels.choose[(plan.tiles, heads)](
        q, logs, vectors, factors, scores, near, responding, *strides(q, unit),
        shape.length_q, shape.heads, shape.clusters, shape.near, responding.shape[-1], scale,
        BY_ERROR=shape.rank == "error", LISTED=listed, GIVEN=not choosing, UNIT=unit,
        **plan.constants(*_ROWS), **plan.resources("choose"),
    )  # fmt: skip


def _choose_by_mean(plan: Plan, q: Tensor, logs: Tensor, vectors: Tensor, near: Tensor, scale: float) -> None:
    shape, unit, config = plan.shape, stride_unit(q), plan.config("choose_by_mean")
    heads = shape.batch * shape.heads
    moments = vectors.new_empty(heads, plan.tiles, 2, plan.BD)
    kernels.query_moments[(plan.tiles, heads)](
        q, moments, *strides(q, unit), shape.length_q, shape.heads, scale, UNIT=unit,
        **plan.constants("D", "BD", "M"), **plan.resources("query_moments", 128),
    )  # fmt: skip
    kernels.choose_by_mean[(-(-plan.tiles // config.block), heads)](
        moments, logs, vectors, near, plan.tiles, shape.clusters, shape.near, N=config.block,
        **plan.constants("CLOSURE", "BD", "BE", "CK", "KP"), **plan.resources("choose_by_mean", 128),
    )  # fmt: skip


def _attend(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sizes: tuple[Tensor, Tensor],
    state: Sequence[Tensor],
    scale: float,
) -> None:
    shape, (lse, vectors, factors, matrices, near, responding, rounding) = plan.shape, state
    heads, config, unit = shape.batch * shape.heads, plan.config("attend"), stride_unit(q, k, v, out)
    apart = plan.response in (1, 2)
    gains = q.new_empty(heads, plan.tiles, plan.KP, shape.tile) if apart else q.new_empty(1)
    chunk = plan.CK if plan.fused or apart else min(config.keys or plan.CK, plan.KP)
    chunks = plan.KP // chunk
    tops = vectors.new_empty(heads, plan.tiles, chunks, shape.tile) if apart and chunks > 1 else vectors
    kernels.attend[(plan.tiles, heads)](
        q, k, v, out, rounding, lse, *sizes, vectors, factors, matrices, _list(near), _list(responding), gains, tops,
        *strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(out, unit),
        shape.length_q, shape.heads, shape.clusters, -(-shape.longest // config.block), shape.near,
        responding.shape[-1], scale, CHOOSE=plan.fused, BY_ERROR=shape.rank == "error",
        KEEP=rounding.numel() > 0, EVEN=plan.even(config.block), E=shape.E, RESPONSE=plan.response, N=config.block,
        CHUNK_STAGES=1 if plan.fused or apart else config.stages, STAGES=config.stages,
        NEAR_STAGES=config.key_stages or config.stages, UNIT=unit,
        **plan.constants(*_ROWS) | {"CK": chunk}, **plan.resources("attend"),
    )  # fmt: skip


def _list(numbers: Tensor) -> Tensor:
    return numbers if numbers.numel() else no_numbers(numbers.device)


def run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    vectors: Tensor,
    factors: Tensor,
    matrices: Tensor,
    near_list: Tensor,
    responding: Tensor,
    rounding: Tensor,
    starts: Sequence[int],
    scale: float,
    tile: int,
    near: int,
    response: int,
    closure: str,
    rank: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the gradient of the output and what the forward pass kept."""
    q, k, v, g = rows(query), rows(key), rows(value), rows(grad)
    plan = plan_of(query, key, value, None, starts, tile, near, response, closure, rank)
    dq, dk, dv = (empty_like_rows(x, x.shape[-1]) for x in (q, k, v))
    first, logs = starts_on(starts, plan, query.device), logs_on(starts, plan, query.device)
    state = (lse, vectors, factors, matrices, near_list, responding, rounding)
    with on_device(query.device):
        per_query, rest = _backward_queries(plan, q, k, v, out, g, dq, (first, logs), state, scale)
        grad_vectors = _backward_vectors(plan, q, g, rest, vectors, scale)
        grad_matrices = _backward_matrices(plan, q, g, rest[1], responding, vectors)
        _backward_keys(
            plan, q, k, v, g, dk, dv, first, vectors, near_list, per_query, grad_vectors, grad_matrices, scale
        )
    return dq, dk, dv


def _backward_queries(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    g: Tensor,
    dq: Tensor,
    sizes: tuple[Tensor, Tensor],
    state: Sequence[Tensor],
    scale: float,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Writes dq; returns shifts and deltas (B H, tiles, M), and weights, gains, dz and dx (B H, tiles, KP, M)."""
    shape, (lse, vectors, factors, matrices, near, responding, rounding) = plan.shape, state
    heads, config = shape.batch * shape.heads, plan.config("query_gradients")
    unit = stride_unit(q, k, v, out, g, dq)
    per_query = tuple(lse.new_empty(heads, plan.tiles, shape.tile) for _ in range(2))
    # Gains multiply the largest part of dq: in 16 bits they would add a third rounding to those of S and of dq itself.
    kinds = (q.dtype, torch.float32, q.dtype, q.dtype)
    counts = (plan.KP, 1 if plan.response == 3 else plan.KP, plan.KP, plan.KP)
    rest = tuple(
        q.new_empty(heads, plan.tiles, n, shape.tile, dtype=kind) for n, kind in zip(counts, kinds, strict=True)
    )
    backward_kernels.query_gradients[(plan.tiles, heads)](
        q, k, v, out, rounding, g, dq, lse, *per_query, *sizes, vectors, factors, matrices, _list(near),
        _list(responding), *rest,
        *strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(out, unit), *strides(g, unit),
        *strides(dq, unit), shape.length_q, shape.heads, shape.clusters,
        -(-shape.longest // config.block), shape.near, responding.shape[-1], scale, EVEN=plan.even(config.block),
        E=shape.E, N=config.block, RESPONSE=plan.response,
        CHUNK_STAGES=1 if plan.response in (1, 2) else config.stages, STAGES=config.stages,
        NEAR_STAGES=config.key_stages or config.stages, UNIT=unit,
        **plan.constants(*_ROWS) | {"CK": min(config.keys or plan.CK, plan.KP)}, **plan.resources("query_gradients"),
    )  # fmt: skip
    return per_query, rest


def _backward_vectors(
    plan: Plan, q: Tensor, g: Tensor, rest: Sequence[Tensor], vectors: Tensor, scale: float
) -> Tensor:
    shape, config, unit = plan.shape, plan.config("vector_gradients"), stride_unit(q, g)
    heads, chunks = shape.batch * shape.heads, plan.KP // plan.CK
    span, splits = plan.split(heads * chunks, q.device, 2, 0.001)
    partial = vectors.new_empty(splits, *vectors.shape)
    weights, _, dz, dx = rest
    cluster_sums.vector_gradients[(chunks, heads, splits)](
        q, g, weights, dz, dx, partial, *strides(q, unit), *strides(g, unit), shape.length_q, shape.heads, plan.tiles,
        span, scale, E=shape.E, N=min(config.block, shape.tile), STAGES=config.stages, UNIT=unit,
        **plan.constants("WHOLE", "D", "BD", "BE", "M", "CK", "KP", "SQUARE", "PRECISION"),
        **plan.resources("vector_gradients", 128),
    )  # fmt: skip
    return partial[0] if splits == 1 else partial.sum(0)


def _backward_matrices(plan: Plan, q: Tensor, g: Tensor, gains: Tensor, responding: Tensor, vectors: Tensor) -> Tensor:
    """dS (B H, KP, BD, BE) float32, (B H, 1, BD, BE) of one matrix; anything where clusters answer with their means."""
    if plan.response == 0:
        return vectors
    shape, unit, heads = plan.shape, stride_unit(q, g), plan.shape.batch * plan.shape.heads
    name = "listed_gradients" if plan.response == 2 else "matrix_gradients"
    config, tokens = plan.config(name), (*strides(q, unit), *strides(g, unit), shape.length_q, shape.heads, plan.tiles)
    constants = {"E": shape.E, "STAGES": config.stages, "UNIT": unit, **plan.resources(name, 128)}
    constants |= plan.constants("D", "BD", "BE", "M", "KP", "PRECISION")
    if plan.response == 2:
        total = vectors.new_empty(heads, plan.KP, plan.BD, plan.BE)
        lists = _tiles_of_clusters(responding, plan.KP)
        cluster_sums.listed_gradients[(plan.KP, heads)](q, g, gains, total, *lists, *tokens, **constants)
        return total
    N = min(shape.tile, config.block)
    C, KP = (1, 1) if plan.response == 3 else (config.keys, plan.KP)
    groups = 1 if plan.response == 3 else -(-shape.clusters // C)
    # One matrix a head: writing a part of it costs next to nothing, and programs are small.
    resident, cost = (4, 0.0005) if plan.response == 3 else (config.key_stages, 0.03)
    span, splits = plan.split(heads * groups, q.device, resident, cost)
    partial = vectors.new_empty(splits, heads, KP, plan.BD, plan.BE)
    cluster_sums.matrix_gradients[(groups, heads, splits)](
        q, g, gains, partial, *tokens, span, N=N, C=C, **constants | {"KP": KP}
    )
    return partial[0] if splits == 1 else partial.sum(0)


def _tiles_of_clusters(named: Tensor, KP: int) -> tuple[Tensor, Tensor]:
    """Of lists of clusters (B H, tiles, T): how many tiles name each cluster, (B H, KP), and which (B H, KP, tiles)."""
    heads, tiles, T = named.shape
    counts, lists = named.new_empty(heads, KP), named.new_empty(heads, KP, tiles)
    backward_kernels.tiles_of_clusters[(KP, heads)](named, counts, lists, tiles, T, N=256, num_warps=4)
    return counts, lists


def _backward_keys(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dk: Tensor,
    dv: Tensor,
    starts: Tensor,
    vectors: Tensor,
    near: Tensor,
    per_query: Sequence[Tensor],
    grad_vectors: Tensor,
    grad_matrices: Tensor,
    scale: float,
) -> None:
    shape, config, unit = plan.shape, plan.config("key_gradients"), stride_unit(q, k, v, g, dk, dv)
    lists = _tiles_of_clusters(near, plan.KP) if shape.near else (starts, starts)
    blocks = -(-shape.longest // config.block)
    backward_kernels.key_gradients[(blocks, shape.clusters, shape.batch * shape.heads)](
        q, k, v, g, dk, dv, *per_query, starts, vectors, grad_vectors, grad_matrices, *lists,
        *strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(g, unit), *strides(dk, unit),
        *strides(dv, unit), shape.length_q, shape.length_k, shape.heads, plan.tiles, scale,
        RESPONSE=plan.response > 0, POOLED=plan.response == 3, E=shape.E, N=config.block, ROWS=min(shape.tile, 64),
        STAGES=config.stages, UNIT=unit,
        **plan.constants("NEAR", "WHOLE", "D", "BD", "BE", "M", "KP", "PRECISION"),
        **plan.resources("key_gradients", 128 if shape.tile >= 64 else 32),
    )  # fmt: skip


forward = torch.library.custom_op("cumulant::cluster_forward", run_forward, mutates_args=())
backward = torch.library.custom_op("cumulant::cluster_backward", run_backward, mutates_args=())


@forward.register_fake
def _(query, key, value, which, starts, scale, tile, near, response, closure, rank, keep):  # type: ignore[no-untyped-def]
    plan = plan_of(query, key, value, which, starts, tile, near, response, closure, rank)
    return empty_like_rows(rows(query), value.shape[-1]), *_state(query, plan, keep)


@backward.register_fake
def _(grad, query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(empty_like_rows(rows(x), x.shape[-1]) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, *ctx.numbers, _ = inputs
    ctx.save_for_backward(query, key, value, *output)


def _gradients(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*backward(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 9)


forward.register_autograd(partial(_gradients, backward), setup_context=_setup_context)
_Attention = direct(run_forward, _setup_context, partial(_gradients, run_backward), True)
