"""Non-causal cumulant attention on the GPU: its operator and launches. Formulas: parts.py; sizes: plan.py.

Shape legend: that of `Batch`.

Bytes, per key head: the forward pass reads q, k, v and writes the output, and keeps the moments (D E numbers at order
2, twice that at order 3, in bfloat16 or float32) only for a backward pass, which reads q, k, v, do once and writes
dq, dk, dv. Cost: 2 L D E products a head forward at order 2, twice that at order 3; backward twice the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch, batch_of
from ..launch import cdiv, empty_like_rows, layout, like_rows, padded, stride_unit, strides
from ..operator import Operator
from ..tokens import Fixed
from . import backward, forward
from .plan import CELLS, FUSED, MERGED, Plan, plan_for


def _state(batch: Batch, keep: bool) -> tuple[Tensor, Tensor]:
    """Memory for the matrices and vectors of every key head (see parts.py); empty when nothing is kept."""
    key, D, E = batch.key, batch.key.shape[-1], batch.value.shape[-1]
    heads = batch.sequences * key.shape[1] if keep else 0
    dtype = torch.bfloat16 if key.dtype == torch.bfloat16 else torch.float32
    return (
        key.new_empty(heads, batch.order - 1, D, E, dtype=dtype),
        key.new_empty(heads, 3 * D + 2 * E + 1, dtype=torch.float32),
    )


def empty(batch: Batch, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """out, matrices, vectors: the last two are the state of a backward pass."""
    return empty_like_rows(batch.query, batch.value.shape[-1]), *_state(batch, keep)


def run_forward(batch: Batch, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    out, matrices, vectors = empty(batch, keep)
    plan = plan_for(batch)
    if not out.numel():
        return out, matrices.zero_(), vectors.zero_()
    if plan.fused:
        _fused_forward(plan, batch, out, matrices, vectors, keep)
    else:
        state = (matrices, vectors) if keep else _state(batch, True)
        full = batch.cu_k is None and batch.weighing()[0] is None
        merge(plan, *partial_moments(plan, batch), *state, batch.scale, full=full)
        read_out(plan, batch, out, *state)
    return out, matrices, vectors


def _fused_forward(plan: Plan, batch: Batch, out: Tensor, matrices: Tensor, vectors: Tensor, keep: bool) -> None:
    q, k, v, _, cu_q, cu_k, *_ = batch
    (unit, steps), (w, w_strides) = layout(q, k, v, out), batch.weighing()
    fixed = plan.cache.get(("fused_forward", unit, keep, w is None))
    if fixed is None:
        config = plan.config("fused_forward", max(plan.longest_q, plan.longest_k))
        constants = {"WEIGHTED": w is not None, "KEEP": keep, "UNIT": unit, **plan.constants(config, *FUSED)}
        fixed = Fixed(constants, unit == 8 and w is None and not plan.ragged)
        plan.cache["fused_forward", unit, keep, w is None] = fixed
    forward.fused_forward.start(
        (plan.sequences * plan.heads, 1, 1), fixed, q, k, v, w, out, matrices, vectors, cu_q, cu_k,
        *steps[0], *steps[1], *steps[2], *w_strides, *steps[3],
        plan.longest_q, plan.longest_k, plan.heads, batch.scale,
    )  # fmt: skip


def partial_moments(plan: Plan, batch: Batch) -> tuple[Tensor, Tensor]:
    """Moments of each span of keys, unscaled: matrices and vectors with the spans as first dimension, in float32."""
    k, v = batch.key, batch.value
    heads, BE = plan.sequences * plan.heads, plan.part(plan.BE)
    config = plan.config("partial_moments", plan.longest_k)
    span, splits = plan.span("partial_moments", plan.longest_k, heads, config.block)
    matrices, vectors = (
        k.new_empty(splits, heads, *shape, dtype=torch.float32)
        for shape in ((plan.order - 1, plan.D, plan.E), (3 * plan.D + 2 * plan.E + 1,))
    )
    unit, (w, w_strides) = stride_unit(k, v), batch.weighing()
    forward.partial_moments[(heads, splits, cdiv(plan.E, BE))](
        k, v, w, matrices, vectors, batch.cu_k, *strides(unit, k, v), *w_strides,
        plan.longest_k, plan.heads, span, WEIGHTED=w is not None, UNIT=unit, **plan.constants(config, "ROWS", BE=BE),
    )  # fmt: skip
    return matrices, vectors


def merge(
    plan: Plan, partial_matrices: Tensor, partial_vectors: Tensor, matrices: Tensor, vectors: Tensor, scale: float,
    raw: bool = False, full: bool = False,
) -> None:  # fmt: skip
    """The union of partial moments, (splits, heads, ...), as a state; `raw`: as partial moments themselves.

    `full`: the first split of every head has tokens.
    """
    forward.merge[(partial_vectors.shape[1], cdiv(plan.D * plan.E, CELLS))](
        partial_matrices, partial_vectors, matrices, vectors, len(partial_vectors), scale,
        ORDER=plan.order, SUM=plan.total, RAW=raw, FULL=full and plan.longest_k > 0, D=plan.D, E=plan.E, CELLS=CELLS,
        C=min(16 if plan.order == 2 else 8, padded(len(partial_vectors), 4)), num_warps=CELLS // 32,
    )  # fmt: skip


def read_out(plan: Plan, batch: Batch, out: Tensor, matrices: Tensor, vectors: Tensor) -> None:
    q, query_heads, BE = batch.query, plan.heads * plan.group, plan.part(plan.BE)
    config = plan.config("read_out", plan.longest_q)
    span, splits = plan.span("read_out", plan.longest_q, plan.sequences * query_heads, config.block)
    unit = stride_unit(q, out)
    forward.read_out[(plan.sequences * query_heads, splits, cdiv(plan.E, BE))](
        q, out, matrices, vectors, batch.cu_q, *strides(unit, q, out),
        plan.longest_q, query_heads, plan.group, span, UNIT=unit, **plan.constants(config, "SUM", BE=BE),
    )  # fmt: skip


def run_backward(batch: Batch, grad: Tensor, matrices: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
    dq, dk, dv = (like_rows(x) for x in batch[:3])
    if not grad.numel() or not batch.value.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    plan = plan_for(batch)
    if plan.fused_backward:
        _fused_backward(plan, batch, grad, dq, dk, dv, matrices, vectors)
    else:
        gradients = backward_queries(plan, batch, grad, dq, matrices, vectors)
        backward_keys(plan, batch, dk, dv, vectors, *gradients)
    return dq, dk, dv


def _fused_backward(
    plan: Plan, batch: Batch, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, matrices: Tensor, vectors: Tensor
) -> None:
    q, k, v, _, cu_q, cu_k, *_ = batch
    (unit, steps), (w, w_strides) = layout(q, k, v, grad, dq, dk, dv), batch.weighing()
    fixed = plan.cache.get(("fused_backward", unit, w is None))
    if fixed is None:
        config = plan.config("fused_backward", max(plan.longest_q, plan.longest_k))
        constants = {"WEIGHTED": w is not None, "UNIT": unit, **plan.constants(config, *FUSED)}
        fixed = plan.cache["fused_backward", unit, w is None] = Fixed(
            constants, unit == 8 and w is None and not plan.ragged
        )
    backward.fused_backward.start(
        (plan.sequences * plan.heads, 1, 1), fixed, q, k, v, w, grad, dq, dk, dv, matrices, vectors, cu_q, cu_k,
        *steps[0], *steps[1], *steps[2], *w_strides, *steps[3], *steps[4], *steps[5], *steps[6],
        plan.longest_q, plan.longest_k, plan.heads, batch.scale,
    )  # fmt: skip


def backward_queries(
    plan: Plan, batch: Batch, grad: Tensor, dq: Tensor, matrices: Tensor, vectors: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes dq; returns the gradients of the matrices, and the constants of dk and dv, of every key head.

    Both are sums over the queries. The first are kept in `dtype`, that of the matrices unless given.
    """
    q, heads, query_heads, BD = batch.query, plan.sequences * plan.heads, plan.heads * plan.group, plan.part(plan.BD)
    config = plan.config("backward_queries", plan.longest_q)
    span, splits = plan.span("backward_queries", plan.longest_q, heads * plan.group, config.block)
    partial_matrices = vectors.new_empty(splits, heads * plan.group, *matrices.shape[1:])
    partial_sums = vectors.new_empty(splits, heads * plan.group, plan.E)
    unit = stride_unit(q, grad, dq)
    backward.backward_queries[(heads * plan.group, splits, cdiv(plan.D, BD))](
        q, grad, dq, matrices, partial_matrices, partial_sums, batch.cu_q, *strides(unit, q, grad, dq),
        plan.longest_q, query_heads, plan.group, span, UNIT=unit, **plan.constants(config, "ROWS", BD=BD),
    )  # fmt: skip
    grad_matrices = torch.empty_like(matrices, dtype=dtype)
    grad_vectors = vectors.new_empty(heads, plan.D + plan.E)
    R = max(1, 256 // plan.BE)
    backward.reduce[(heads, cdiv(plan.D, R))](
        partial_matrices, partial_sums, matrices, vectors, grad_matrices, grad_vectors, splits, plan.group, batch.scale,
        ORDER=plan.order, SUM=plan.total, D=plan.D, E=plan.E, R=R, BE=plan.BE, C=MERGED,
    )  # fmt: skip
    return grad_matrices, grad_vectors


def backward_keys(
    plan: Plan, batch: Batch, dk: Tensor, dv: Tensor, vectors: Tensor, grad_matrices: Tensor, grad_vectors: Tensor
) -> None:
    k, v, heads = batch.key, batch.value, plan.sequences * plan.heads
    config = plan.config("backward_keys", plan.longest_k)
    span, splits = plan.span("backward_keys", plan.longest_k, heads, config.block)
    unit, (w, w_strides) = stride_unit(k, v, dk, dv), batch.weighing()
    backward.backward_keys[(heads, splits)](
        k, v, w, dk, dv, vectors, grad_matrices, grad_vectors, batch.cu_k, *strides(unit, k, v), *w_strides,
        *strides(unit, dk, dv), plan.longest_k, plan.heads, span,
        WEIGHTED=w is not None, UNIT=unit, **plan.constants(config, BD=plan.part(plan.BD)),
    )  # fmt: skip


# Order 2 or 3 (diagonal): (B, Hq, Lq, E), ragged (Tq, Hq, E).
attention = Operator("dense", Batch, run_forward, run_backward, empty, states=2, make=batch_of)
