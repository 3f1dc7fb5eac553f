"""Cluster attention on the GPU: its operator and launches. Formulas: parts.py; sizes: plan.py.

Shape legend: B sequences, H heads, Lq, Lk lengths, D, E widths, K clusters (KP padded), T near and R responding
clusters of a tile of M queries.

Memory beside inputs and outputs: statistics K D E a head, and Lq K numbers of 16 bits (gains) forward, five times that
backward; with one response for all none forward, three times backward. Linear in the length for a fixed K: no Lq x Lk
and no Lq x K x D tensor exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..launch import cdiv, empty_like_rows, like_rows, stride_unit, strides
from ..operator import Operator
from . import backward, forward, statistics, sums
from .plan import Call, Plan, no_numbers, plan_for, tables

_ROWS = ("CLOSURE", "NEAR", "D", "BD", "BE", "M", "CK", "KP", "SQUARE", "PRECISION")


def empty(call: Call, keep: bool) -> tuple[Tensor, ...]:
    """out, and lse (B H, Lq), vectors (B H, KP, 2 BD + BE), factors (B H, KP, 4 BD + 2 BE), matrices (B H, KP, BD, BE),
    near (B H, tiles, T), responding (B H, tiles, R), and rounding (B, H, Lq, E).

    One matrix for all clusters is kept as two of its type, (B H, 2, BD, BE). `rounding` is what the output lost in its
    own to 16 bits, for a backward pass only.
    """
    query, plan = call.query, plan_for(call)
    shape, heads = plan.shape, plan.pairs
    listed = shape.response if plan.response == 2 else 0
    return (
        empty_like_rows(query, shape.E),
        query.new_empty(heads, shape.length_q, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 2 * plan.BD + plan.BE, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 4 * plan.BD + 2 * plan.BE),
        query.new_empty(heads, 2 if plan.response == 3 else plan.KP, plan.BD, plan.BE),
        query.new_empty(heads, plan.tiles, shape.near, dtype=torch.int32),
        query.new_empty(heads, plan.tiles, listed, dtype=torch.int32),
        empty_like_rows(query, shape.E) if keep and query.dtype != torch.float32 else query.new_empty(0),
    )


def run_forward(call: Call, keep: bool) -> tuple[Tensor, ...]:
    plan, outputs = plan_for(call), empty(call, keep)
    _statistics(plan, call, outputs)
    _choose(plan, call, outputs)
    _attend(plan, call, outputs)
    return outputs


def _tables(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    return tables(tuple(call.starts), plan.KP, call.query.device)


def _statistics(plan: Plan, call: Call, outputs: Sequence[Tensor]) -> None:
    config, unit, starts = plan.config("statistics"), stride_unit(call.key, call.value), _tables(plan, call)[0]
    vectors, factors, matrices = outputs[2:5]
    pooled = plan.response == 3
    each = matrices.new_empty(plan.pairs, plan.KP, plan.BD, plan.BE) if pooled else matrices
    statistics.statistics[(plan.KP, plan.pairs)](
        call.key, call.value, starts, vectors, factors, each, *strides(unit, call.key, call.value),
        plan.shape.length_k, plan.shape.heads, call.scale, N=config.block, FOLD=16, STAGES=config.stages, UNIT=unit,
        **plan.constants("D", "E", "BD", "BE", "PRECISION"), **plan.resources("statistics", 128),
    )  # fmt: skip
    if pooled:
        size, N = plan.BD * plan.BE, plan.config("pool").block
        statistics.pool[(size // N, plan.pairs)](
            each, starts, matrices, plan.shape.length_k, SIZE=size, N=N, **plan.constants("KP", "CK"),
            **plan.resources("pool", 128),
        )  # fmt: skip


def _choose(plan: Plan, call: Call, outputs: Sequence[Tensor]) -> None:
    q, shape, (_, _, vectors, factors, _, near, responding, _) = call.query, plan.shape, outputs
    logs, unit = _tables(plan, call)[1], stride_unit(q)
    if call.which is not None:
        near.copy_(call.which.expand_as(near))
    choosing, listed = shape.near > 0 and call.which is None, plan.response == 2
    if choosing and shape.rank == "mean":
        _choose_by_mean(plan, call, logs, vectors, near)
        choosing = False
    if not (choosing or listed) or plan.fused:
        return
    scores = vectors.new_empty(plan.pairs, plan.tiles, 2, plan.KP)
    forward.choose[(plan.tiles, plan.pairs)](
        q, logs, vectors, factors, scores, near, responding, *strides(unit, q),
        shape.length_q, shape.heads, shape.clusters, shape.near, responding.shape[-1], call.scale,
        BY_ERROR=shape.rank == "error", LISTED=listed, GIVEN=not choosing, UNIT=unit,
        **plan.constants(*_ROWS), **plan.resources("choose"),
    )  # fmt: skip


def _choose_by_mean(plan: Plan, call: Call, logs: Tensor, vectors: Tensor, near: Tensor) -> None:
    q, shape, unit, config = call.query, plan.shape, stride_unit(call.query), plan.config("choose_by_mean")
    moments = vectors.new_empty(plan.pairs, plan.tiles, 2, plan.BD)
    forward.query_moments[(plan.tiles, plan.pairs)](
        q, moments, *strides(unit, q), shape.length_q, shape.heads, call.scale, UNIT=unit,
        **plan.constants("D", "BD", "M"), **plan.resources("query_moments", 128),
    )  # fmt: skip
    forward.choose_by_mean[(cdiv(plan.tiles, config.block), plan.pairs)](
        moments, logs, vectors, near, plan.tiles, shape.clusters, shape.near, N=config.block,
        **plan.constants("CLOSURE", "BD", "BE", "CK", "KP"), **plan.resources("choose_by_mean", 128),
    )  # fmt: skip


def _attend(plan: Plan, call: Call, outputs: Sequence[Tensor]) -> None:
    shape, (out, lse, vectors, factors, matrices, near, responding, rounding) = plan.shape, outputs
    (q, k, v), heads, config = call[:3], plan.pairs, plan.config("attend")
    unit, apart = stride_unit(q, k, v, out), plan.response in (1, 2)
    gains = q.new_empty(heads, plan.tiles, plan.KP, shape.tile) if apart else q.new_empty(1)
    chunk = plan.CK if plan.fused or apart else min(config.keys or plan.CK, plan.KP)
    chunks = plan.KP // chunk
    tops = vectors.new_empty(heads, plan.tiles, chunks, shape.tile) if apart and chunks > 1 else vectors
    forward.attend[(plan.tiles, heads)](
        q, k, v, out, rounding, lse, *_tables(plan, call), vectors, factors, matrices, _list(near), _list(responding),
        gains, tops, *strides(unit, q, k, v, out), shape.length_q, shape.heads, shape.clusters,
        cdiv(shape.longest, config.block), shape.near, responding.shape[-1], call.scale,
        CHOOSE=plan.fused, BY_ERROR=shape.rank == "error", KEEP=rounding.numel() > 0, EVEN=plan.even(config.block),
        E=shape.E, RESPONSE=plan.response, N=config.block, CHUNK_STAGES=1 if plan.fused or apart else config.stages,
        STAGES=config.stages, NEAR_STAGES=config.key_stages or config.stages, UNIT=unit,
        **plan.constants(*_ROWS) | {"CK": chunk}, **plan.resources("attend"),
    )  # fmt: skip


def _list(numbers: Tensor) -> Tensor:
    return numbers if numbers.numel() else no_numbers(numbers.device)


def run_backward(call: Call, grad: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    plan, vectors, responding = plan_for(call), outputs[2], outputs[6]
    dq, dk, dv = (like_rows(x) for x in call[:3])
    per_query, rest = _backward_queries(plan, call, grad, dq, outputs)
    grad_vectors = _backward_vectors(plan, call, grad, rest, vectors)
    grad_matrices = _backward_matrices(plan, call, grad, rest[1], responding, vectors)
    _backward_keys(plan, call, grad, dk, dv, outputs, per_query, grad_vectors, grad_matrices)
    return dq, dk, dv


def _backward_queries(
    plan: Plan, call: Call, g: Tensor, dq: Tensor, outputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Writes dq; returns shifts and deltas (B H, tiles, M), and weights, gains, dz and dx (B H, tiles, KP, M)."""
    shape, (out, lse, vectors, factors, matrices, near, responding, rounding) = plan.shape, outputs
    (q, k, v), heads, config = call[:3], plan.pairs, plan.config("query_gradients")
    unit = stride_unit(q, k, v, out, g, dq)
    per_query = tuple(lse.new_empty(heads, plan.tiles, shape.tile) for _ in range(2))
    # Gains multiply the largest part of dq: in 16 bits they would add a third rounding to those of S and of dq itself.
    kinds = (q.dtype, torch.float32, q.dtype, q.dtype)
    counts = (plan.KP, 1 if plan.response == 3 else plan.KP, plan.KP, plan.KP)
    rest = tuple(
        q.new_empty(heads, plan.tiles, n, shape.tile, dtype=kind) for n, kind in zip(counts, kinds, strict=True)
    )
    backward.query_gradients[(plan.tiles, heads)](
        q, k, v, out, rounding, g, dq, lse, *per_query, *_tables(plan, call), vectors, factors, matrices, _list(near),
        _list(responding), *rest, *strides(unit, q, k, v, out, g, dq), shape.length_q, shape.heads, shape.clusters,
        cdiv(shape.longest, config.block), shape.near, responding.shape[-1], call.scale, EVEN=plan.even(config.block),
        E=shape.E, N=config.block, RESPONSE=plan.response,
        CHUNK_STAGES=1 if plan.response in (1, 2) else config.stages, STAGES=config.stages,
        NEAR_STAGES=config.key_stages or config.stages, UNIT=unit,
        **plan.constants(*_ROWS) | {"CK": min(config.keys or plan.CK, plan.KP)}, **plan.resources("query_gradients"),
    )  # fmt: skip
    return per_query, rest


def _backward_vectors(plan: Plan, call: Call, g: Tensor, rest: Sequence[Tensor], vectors: Tensor) -> Tensor:
    q, shape, config, unit = call.query, plan.shape, plan.config("vector_gradients"), stride_unit(call.query, g)
    chunks = plan.KP // plan.CK
    span, splits = plan.split(plan.pairs * chunks, q.device, 2, 0.001)
    partial = vectors.new_empty(splits, *vectors.shape)
    weights, _, dz, dx = rest
    sums.vector_gradients[(chunks, plan.pairs, splits)](
        q, g, weights, dz, dx, partial, *strides(unit, q, g), shape.length_q, shape.heads, plan.tiles, span, call.scale,
        E=shape.E, N=min(config.block, shape.tile), STAGES=config.stages, UNIT=unit,
        **plan.constants("WHOLE", "D", "BD", "BE", "M", "CK", "KP", "SQUARE", "PRECISION"),
        **plan.resources("vector_gradients", 128),
    )  # fmt: skip
    return partial[0] if splits == 1 else partial.sum(0)


def _backward_matrices(plan: Plan, call: Call, g: Tensor, gains: Tensor, responding: Tensor, vectors: Tensor) -> Tensor:
    """dS (B H, KP, BD, BE) float32, (B H, 1, BD, BE) of one matrix; anything where clusters answer with their means."""
    if plan.response == 0:
        return vectors
    q, shape, unit, heads = call.query, plan.shape, stride_unit(call.query, g), plan.pairs
    name = "listed_gradients" if plan.response == 2 else "matrix_gradients"
    config, tokens = plan.config(name), (*strides(unit, q, g), shape.length_q, shape.heads, plan.tiles)
    constants = {"E": shape.E, "STAGES": config.stages, "UNIT": unit, **plan.resources(name, 128)}
    constants |= plan.constants("D", "BD", "BE", "M", "KP", "PRECISION")
    if plan.response == 2:
        total = vectors.new_empty(heads, plan.KP, plan.BD, plan.BE)
        lists = _tiles_of_clusters(responding, plan.KP)
        sums.listed_gradients[(plan.KP, heads)](q, g, gains, total, *lists, *tokens, **constants)
        return total
    N = min(shape.tile, config.block)
    C, KP = (1, 1) if plan.response == 3 else (config.keys, plan.KP)
    groups = 1 if plan.response == 3 else cdiv(shape.clusters, C)
    # One matrix a head: writing a part of it costs next to nothing, and programs are small.
    resident, cost = (4, 0.0005) if plan.response == 3 else (config.key_stages, 0.03)
    span, splits = plan.split(heads * groups, q.device, resident, cost)
    partial = vectors.new_empty(splits, heads, KP, plan.BD, plan.BE)
    sums.matrix_gradients[(groups, heads, splits)](
        q, g, gains, partial, *tokens, span, N=N, C=C, **constants | {"KP": KP}
    )
    return partial[0] if splits == 1 else partial.sum(0)


def _tiles_of_clusters(named: Tensor, KP: int) -> tuple[Tensor, Tensor]:
    """Of lists of clusters (B H, tiles, T): how many tiles name each cluster, (B H, KP), and which (B H, KP, tiles)."""
    heads, tiles, T = named.shape
    counts, lists = named.new_empty(heads, KP), named.new_empty(heads, KP, tiles)
    backward.tiles_of_clusters[(KP, heads)](named, counts, lists, tiles, T, N=256, num_warps=4)
    return counts, lists


def _backward_keys(
    plan: Plan, call: Call, g: Tensor, dk: Tensor, dv: Tensor, outputs: Sequence[Tensor], per_query: Sequence[Tensor],
    grad_vectors: Tensor, grad_matrices: Tensor,
) -> None:  # fmt: skip
    (q, k, v), shape, config, starts = call[:3], plan.shape, plan.config("key_gradients"), _tables(plan, call)[0]
    unit, vectors, near = stride_unit(q, k, v, g, dk, dv), outputs[2], outputs[5]
    lists = _tiles_of_clusters(near, plan.KP) if shape.near else (starts, starts)
    backward.key_gradients[(cdiv(shape.longest, config.block), shape.clusters, plan.pairs)](
        q, k, v, g, dk, dv, *per_query, starts, vectors, grad_vectors, grad_matrices, *lists,
        *strides(unit, q, k, v, g, dk, dv), shape.length_q, shape.length_k, shape.heads, plan.tiles, call.scale,
        RESPONSE=plan.response > 0, POOLED=plan.response == 3, E=shape.E, N=config.block, ROWS=min(shape.tile, 64),
        STAGES=config.stages, UNIT=unit,
        **plan.constants("NEAR", "WHOLE", "D", "BD", "BE", "M", "KP", "PRECISION"),
        **plan.resources("key_gradients", 128 if shape.tile >= 64 else 32),
    )  # fmt: skip


attention = Operator("cluster", Call, run_forward, run_backward, empty, states=7, reads_out=True)
