"""Cluster attention of short clusters on the GPU: its operator and launches. Formulas: parts.py; sizes: plan.py.

Shape legend: B sequences, H heads, Lq, Lk lengths, D, E widths, K clusters of at most m tokens, in MP slots each (a
power of two), p prefix tokens.

Bytes: forward reads q, v and twice k, and writes the output; backward, where all slots of a head fit one tile, reads q,
k, v and do and writes dq, dk and dv, else it reads those four twice, the output, and what its rounding lost. Beside
these only a number for each query and means and variances of the clusters, 2 K D a head, are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, empty_like_rows, like_rows, stride_unit, strides
from ..operator import Operator
from . import backward, forward
from .plan import Call, plan_for, tables


def empty(call: Call, keep: bool) -> tuple[Tensor, ...]:
    """out, lse (B H, Lq), spread and means (B H, clusters, BD) unless full, origin (B H, BD) and, for a backward pass
    that needs delta before it has it, what the rounding of the output lost, (B, H, Lq, E)."""
    query, plan = call.query, plan_for(call)
    lost = keep and not plan.whole and query.dtype != torch.float32
    clusters = (0 if plan.full else plan.heads, plan.clusters, plan.widths[0])
    return (
        empty_like_rows(query, plan.E),
        query.new_empty(plan.heads, plan.length_q, dtype=torch.float32),
        query.new_empty(clusters, dtype=plan.square),
        query.new_empty(clusters, dtype=torch.float32),
        query.new_empty(plan.heads, plan.widths[0]),
        empty_like_rows(query, plan.E) if lost else query.new_empty(0),
    )


def run_forward(call: Call, keep: bool) -> tuple[Tensor, ...]:
    plan, outputs = plan_for(call), empty(call, keep)
    (q, k, v), heads = call[:3], call.key.shape[1]
    out, lse, spread, means, origin, lost = outputs
    slots = tables(tuple(call.places), call.slots, plan.tiles, q.device)
    unit, count = stride_unit(k), 1 if call.full else max(1, 16 // call.slots)
    tiles = 1 if call.full else plan.clusters // count
    forward.statistics[(tiles * plan.heads,)](
        k, spread, means, origin, *slots, *strides(unit, k), heads, plan.clusters, tiles,
        FULL=call.full, D=plan.D, BD=plan.widths[0], MP=call.slots, COUNT=count, UNIT=unit,
        num_warps=max(1, call.slots * plan.widths[0] // 2048),  # sums of up to 32 rows stay within a warp
    )  # fmt: skip
    unit, tiles = stride_unit(q, k, v, out), cdiv(plan.length_q, plan.queries("attend"))
    forward.attend[(tiles * plan.heads,)](
        q, k, v, out, lost, lse, spread, *slots, *strides(unit, q, k, v, out),
        plan.length_q, call.prefix, heads, plan.clusters, tiles, call.scale,
        KEEP=lost.numel() > 0, UNIT=unit, **plan.launch("attend"),
    )  # fmt: skip
    return outputs


def run_backward(
    call: Call, g: Tensor, out: Tensor, lse: Tensor, spread: Tensor, means: Tensor, origin: Tensor, lost: Tensor
) -> tuple[Tensor, ...]:
    plan, (q, k, v), heads = plan_for(call), call[:3], call.key.shape[1]
    dq, dk, dv = (like_rows(x) for x in (q, k, v))
    slots = tables(tuple(call.places), call.slots, plan.tiles, q.device)
    name = "whole_gradients" if plan.whole else "query_gradients"
    tiles = cdiv(plan.length_q, plan.queries(name))
    partial = lse.new_empty(plan.heads, tiles, call.prefix, sum(plan.widths))
    deltas = lse if plan.whole else torch.empty_like(lse)
    last = plan.queries("whole_gradients" if plan.whole else "key_gradients")
    dxs = spread.new_empty(0 if call.full else plan.heads, plan.clusters, cdiv(plan.length_q, last) * last)
    numbers = (plan.length_q, call.prefix, heads, plan.clusters)
    if not plan.whole:
        unit = stride_unit(q, k, v, out, g, dq)
        backward.query_gradients[(tiles * plan.heads,)](
            q, k, v, out, lost, g, dq, lse, deltas, spread, origin, partial, *slots,
            *strides(unit, q, k, v, out, g, dq), *numbers, tiles, call.scale, UNIT=unit, **plan.launch(name),
        )  # fmt: skip
        name = "key_gradients"
    unit = stride_unit(q, k, v, g, dq, dk, dv)
    backward.key_gradients[(plan.tiles * plan.heads,)](
        q, k, v, g, dq, dk, dv, lse, deltas, spread, means, origin, dxs, partial, *slots,
        *strides(unit, q, k, v, g, dq, dk, dv), *numbers, plan.tiles, call.scale,
        WHOLE=plan.whole, UNIT=unit, **plan.launch(name, plan.whole),
    )  # fmt: skip
    if call.prefix:
        unit, (BD, BE) = stride_unit(dk, dv), plan.widths
        backward.add_prefix[(call.prefix * plan.heads,)](
            partial, dk, dv, *strides(unit, dk, dv), call.prefix, heads, tiles,
            D=plan.D, E=plan.E, BD=BD, BE=BE, UNIT=unit, num_warps=1,
        )  # fmt: skip
    return dq, dk, dv


attention = Operator("short", Call, run_forward, run_backward, empty, states=5, reads_out=True)
