"""Non-causal cumulant attention on the GPU: plans, launches and the custom ops. Formulas: dense_parts.py.

Shape legend: B sequences, H key heads, Hq = G H query heads, Lq, Lk lengths, D, E widths; ragged batches are packed
as (tokens, heads, width) with offsets cu_q, cu_k (B + 1).

Bytes, per key head: the forward pass reads q, k, v and writes the output, and keeps the moments (D E numbers at order
2, twice that at order 3, in bfloat16 or float32) only for a backward pass, which reads q, k, v, do once and writes
dq, dk, dv. Cost: 2 L D E products a head forward at order 2, twice that at order 3; backward twice the forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...tracing import is_plain
from ..direct import direct
from ..launch import cdiv, empty_like_rows, on_device, rows, stride_unit, strides, token_weights
from . import kernels
from .plan import CELLS, FUSED, MERGED, Batch, Plan, plan_for


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    order: int,
    scale: float,
    normalization: str = "mean",
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
) -> Tensor:
    """Cumulant attention of order 2 or 3 (diagonal), differentiable in query, key and value.

    Dense: query (B, Hq, Lq, D), key (B, H, Lk, D), value (B, H, Lk, E), weights (B, Lk) bool or floating point, or None
    -> (B, Hq, Lq, E). Ragged, with cu_q and cu_k (B + 1,): query (Tq, Hq, D), key (Tk, H, D), value (Tk, H, E), weights
    (Tk,) or None -> (Tq, Hq, E); max_q and max_k, the longest sequences, are read from the device when not given.
    """
    keep = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if cu_q is None or cu_k is None:
        max_q, max_k = query.shape[2], key.shape[2]
    else:
        max_q, max_k = _longest(cu_q) if max_q is None else max_q, _longest(cu_k) if max_k is None else max_k
    arguments = (query, key, value, weights, cu_q, cu_k, max_q, max_k, order, scale, normalization == "sum")
    if not is_plain(query):
        return forward(*arguments, keep)[0]
    return _Attention.apply(*arguments) if keep else run_forward(*arguments, False)[0]


def _longest(offsets: Tensor) -> int:
    return int((offsets[1:] - offsets[:-1]).max()) if offsets.numel() > 1 else 0


def _state(key: Tensor, value: Tensor, cu_k: Tensor | None, order: int, keep: bool) -> tuple[Tensor, Tensor]:
    """Memory for the matrices and vectors of every key head (see dense_parts.py); empty when nothing is kept."""
    sequences = key.shape[0] if cu_k is None else cu_k.numel() - 1
    D, E = key.shape[-1], value.shape[-1]
    heads = sequences * key.shape[1] if keep else 0
    dtype = torch.bfloat16 if key.dtype == torch.bfloat16 else torch.float32
    return (
        key.new_empty(heads, order - 1, D, E, dtype=dtype),
        key.new_empty(heads, 2 * D + E + 1, dtype=torch.float32),
    )


def _weights(weights: Tensor | None) -> tuple[Tensor | None, tuple[int, int]]:
    """Token weights as kernels read them, with their batch and token strides."""
    if weights is None:
        return None, (0, 0)
    return token_weights(weights), (weights.stride(0) if weights.ndim == 2 else 0, weights.stride(-1))


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    order: int,
    scale: float,
    total: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, matrices, vectors: the last two are the state of a backward pass, empty unless `keep`."""
    batch = Batch(rows(query), rows(key), rows(value), weights, cu_q, cu_k)
    out = empty_like_rows(batch.query, value.shape[-1])
    matrices, vectors = _state(key, value, cu_k, order, keep)
    plan = plan_for(batch, max_q, max_k, order, total)
    if out.numel():
        with on_device(query.device):
            if plan.fused:
                _fused_forward(plan, batch, out, matrices, vectors, scale, keep)
            else:
                state = (matrices, vectors) if keep else _state(key, value, cu_k, order, True)
                _split_moments(plan, batch, *state, scale)
                _read_out(plan, batch, out, *state)
    elif keep:
        matrices.zero_(), vectors.zero_()
    return out, matrices, vectors


def _fused_forward(
    plan: Plan, batch: Batch, out: Tensor, matrices: Tensor, vectors: Tensor, scale: float, keep: bool
) -> None:
    q, k, v, weights, cu_q, cu_k = batch
    config = plan.config("fused_forward", max(plan.longest_q, plan.longest_k))
    unit = stride_unit(q, k, v, out)
    w, w_strides = _weights(weights)
    kernels.fused_forward[(plan.sequences * plan.heads,)](
        q, k, v, w, out, matrices, vectors, cu_q, cu_k, *strides(q, unit), *strides(k, unit), *strides(v, unit),
        *w_strides, *strides(out, unit), plan.longest_q, plan.longest_k, plan.heads, scale,
        WEIGHTED=w is not None, KEEP=keep, UNIT=unit, **plan.constants(config, *FUSED),
    )  # fmt: skip


def _split_moments(plan: Plan, batch: Batch, matrices: Tensor, vectors: Tensor, scale: float) -> None:
    """Partial moments of each span of keys, then their merge into the state."""
    k, v = batch.key, batch.value
    heads, BE = plan.sequences * plan.heads, plan.part(plan.BE)
    config = plan.config("partial_moments", plan.longest_k)
    span, splits = plan.span("partial_moments", plan.longest_k, heads, config.block)
    partial_matrices = vectors.new_empty(splits, *matrices.shape)
    partial_vectors = vectors.new_empty(splits, *vectors.shape)
    unit = stride_unit(k, v)
    w, w_strides = _weights(batch.weights)
    kernels.partial_moments[(heads, splits, cdiv(plan.E, BE))](
        k, v, w, partial_matrices, partial_vectors, batch.cu_k, *strides(k, unit), *strides(v, unit), *w_strides,
        plan.longest_k, plan.heads, span, WEIGHTED=w is not None, UNIT=unit, **plan.constants(config, "ROWS", BE=BE),
    )  # fmt: skip
    kernels.merge[(heads, cdiv(plan.D * plan.E, CELLS))](
        partial_matrices, partial_vectors, matrices, vectors, splits, scale, ORDER=plan.order, SUM=plan.total,
        D=plan.D, E=plan.E, CELLS=CELLS, C=MERGED, num_warps=CELLS // 32,
    )  # fmt: skip


def _read_out(plan: Plan, batch: Batch, out: Tensor, matrices: Tensor, vectors: Tensor) -> None:
    q, query_heads, BE = batch.query, plan.heads * plan.group, plan.part(plan.BE)
    config = plan.config("read_out", plan.longest_q)
    span, splits = plan.span("read_out", plan.longest_q, plan.sequences * query_heads, config.block)
    unit = stride_unit(q, out)
    kernels.read_out[(plan.sequences * query_heads, splits, cdiv(plan.E, BE))](
        q, out, matrices, vectors, batch.cu_q, *strides(q, unit), *strides(out, unit),
        plan.longest_q, query_heads, plan.group, span, UNIT=unit, **plan.constants(config, "SUM", BE=BE),
    )  # fmt: skip


def run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    matrices: Tensor,
    vectors: Tensor,
    max_q: int,
    max_k: int,
    order: int,
    scale: float,
    total: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the gradient of the output and the state of the forward pass."""
    grad, batch = rows(grad), Batch(rows(query), rows(key), rows(value), weights, cu_q, cu_k)
    dq, dk, dv = (empty_like_rows(x, x.shape[-1]) for x in batch[:3])
    if not grad.numel() or not value.numel():
        dq.zero_(), dk.zero_(), dv.zero_()
        return dq, dk, dv
    plan = plan_for(batch, max_q, max_k, order, total)
    with on_device(query.device):
        if plan.fused and not plan.wide:
            _fused_backward(plan, batch, grad, dq, dk, dv, matrices, vectors, scale)
        else:
            gradients = _backward_queries(plan, batch, grad, dq, matrices, vectors, scale)
            _backward_keys(plan, batch, dk, dv, vectors, *gradients)
    return dq, dk, dv


def _fused_backward(
    plan: Plan,
    batch: Batch,
    grad: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    matrices: Tensor,
    vectors: Tensor,
    scale: float,
) -> None:
    q, k, v, weights, cu_q, cu_k = batch
    config = plan.config("fused_backward", max(plan.longest_q, plan.longest_k))
    unit = stride_unit(q, k, v, grad, dq, dk, dv)
    w, w_strides = _weights(weights)
    kernels.fused_backward[(plan.sequences * plan.heads,)](
        q, k, v, w, grad, dq, dk, dv, matrices, vectors, cu_q, cu_k, *strides(q, unit), *strides(k, unit),
        *strides(v, unit), *w_strides, *strides(grad, unit), *strides(dq, unit), *strides(dk, unit),
        *strides(dv, unit), plan.longest_q, plan.longest_k, plan.heads, scale,
        WEIGHTED=w is not None, UNIT=unit, **plan.constants(config, *FUSED),
    )  # fmt: skip


def _backward_queries(
    plan: Plan, batch: Batch, grad: Tensor, dq: Tensor, matrices: Tensor, vectors: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Writes dq; returns the gradients of the matrices, and the constants of dk and dv, of every key head."""
    q, heads, query_heads, BD = batch.query, plan.sequences * plan.heads, plan.heads * plan.group, plan.part(plan.BD)
    config = plan.config("backward_queries", plan.longest_q)
    span, splits = plan.span("backward_queries", plan.longest_q, heads * plan.group, config.block)
    partial_matrices = vectors.new_empty(splits, heads * plan.group, *matrices.shape[1:])
    partial_sums = vectors.new_empty(splits, heads * plan.group, plan.E)
    unit = stride_unit(q, grad, dq)
    kernels.backward_queries[(heads * plan.group, splits, cdiv(plan.D, BD))](
        q, grad, dq, matrices, partial_matrices, partial_sums, batch.cu_q, *strides(q, unit), *strides(grad, unit),
        *strides(dq, unit), plan.longest_q, query_heads, plan.group, span, UNIT=unit,
        **plan.constants(config, "ROWS", BD=BD),
    )  # fmt: skip
    grad_matrices, grad_vectors = torch.empty_like(matrices), vectors.new_empty(heads, plan.D + plan.E)
    R = max(1, 256 // plan.BE)
    kernels.reduce[(heads, cdiv(plan.D, R))](
        partial_matrices, partial_sums, matrices, vectors, grad_matrices, grad_vectors, splits, plan.group, scale,
        ORDER=plan.order, SUM=plan.total, D=plan.D, E=plan.E, R=R, BE=plan.BE, C=MERGED,
    )  # fmt: skip
    return grad_matrices, grad_vectors


def _backward_keys(
    plan: Plan, batch: Batch, dk: Tensor, dv: Tensor, vectors: Tensor, grad_matrices: Tensor, grad_vectors: Tensor
) -> None:
    k, v, heads = batch.key, batch.value, plan.sequences * plan.heads
    config = plan.config("backward_keys", plan.longest_k)
    span, splits = plan.span("backward_keys", plan.longest_k, heads, config.block)
    unit = stride_unit(k, v, dk, dv)
    w, w_strides = _weights(batch.weights)
    kernels.backward_keys[(heads, splits)](
        k, v, w, dk, dv, vectors, grad_matrices, grad_vectors, batch.cu_k, *strides(k, unit), *strides(v, unit),
        *w_strides, *strides(dk, unit), *strides(dv, unit), plan.longest_k, plan.heads, span,
        WEIGHTED=w is not None, UNIT=unit, **plan.constants(config, BD=plan.part(plan.BD)),
    )  # fmt: skip


forward = torch.library.custom_op("cumulant::dense_forward", run_forward, mutates_args=())
backward = torch.library.custom_op("cumulant::dense_backward", run_backward, mutates_args=())


@forward.register_fake
def _(query, key, value, weights, cu_q, cu_k, max_q, max_k, order, scale, total, keep):  # type: ignore[no-untyped-def]
    return empty_like_rows(rows(query), value.shape[-1]), *_state(key, value, cu_k, order, keep)


@backward.register_fake
def _(grad, query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(empty_like_rows(rows(x), x.shape[-1]) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, weights, cu_q, cu_k, *ctx.numbers, _ = inputs
    ctx.save_for_backward(query, key, value, weights, cu_q, cu_k, *output[1:])


def _gradients(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*backward(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 9)


forward.register_autograd(partial(_gradients, backward), setup_context=_setup_context)
_Attention = direct(run_forward, _setup_context, partial(_gradients, run_backward), True)
