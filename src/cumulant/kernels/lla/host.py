"""Local linear attention on the GPU: its operator and launches. Formulas: zoo/lla.py.

Shape legend: that of `Call`.

Memory beside inputs and outputs, for a backward pass: the mean of the keys, the slope and, while it runs, the response
of every query, each as wide as a key in float32, and four numbers a query. No L x S tensor exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, empty_like_rows, like_rows, stride_unit, strides
from ..operator import Operator
from . import backward, forward
from .plan import Call, blocks, resources


def empty(call: Call, keep: bool) -> tuple[Tensor, ...]:
    """out, and for a backward pass log2 of the sums (B, H, L), means of keys and slopes (B, H, L, D)."""
    query = call.query
    return (
        empty_like_rows(query, call.value.shape[-1]),
        query.new_empty(query.shape[:-1], dtype=torch.float32),
        query.new_empty(query.shape, dtype=torch.float32),
        query.new_empty(query.shape, dtype=torch.float32),
    )


def run_forward(call: Call, keep: bool) -> tuple[Tensor, ...]:
    q, k, v, added, ridge, scale, *_ = call
    out, lse, mean, slope = outputs = empty(call, keep)
    (B, H, L, _), S, unit, constants = q.shape, k.shape[2], stride_unit(q, k, v, out), blocks(call)
    forward.forward[(cdiv(L, constants["M"]) * B * H,)](
        q, k, v, lse if added is None else added, ridge, out, lse, mean, slope, *strides(unit, q, k, v, out),
        *ridge.stride(), L, S, H, scale, call.iterations, call.tolerance,
        UNIT=unit, **constants, **resources("forward", call),
    )  # fmt: skip
    return outputs


def run_backward(call: Call, do: Tensor, lse: Tensor, mean: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    q, k, v, added, ridge, scale, *_ = call
    dq, dk, dv = (like_rows(x) for x in (q, k, v))
    (B, H, L, _), S, unit = q.shape, k.shape[2], stride_unit(q, k, v, do, dq, dk, dv)
    response, numbers = torch.empty_like(slope), lse.new_empty(B, H, 3, L)
    shared, constants = strides(unit, q, k, v, do), {"UNIT": unit, **blocks(call)}
    inputs = (q, k, v, lse if added is None else added, ridge, do, lse)
    backward.query_gradients[(cdiv(L, constants["M"]) * B * H,)](
        *inputs, mean, slope, dq, response, numbers, *shared, *strides(unit, dq), *ridge.stride(),
        L, S, H, scale, call.iterations, call.tolerance, **constants, **resources("query_gradients", call),
    )  # fmt: skip
    backward.key_gradients[(cdiv(S, constants["N"]) * B * H,)](
        *inputs, slope, response, numbers, dk, dv, *shared, *strides(unit, dk, dv), *ridge.stride(),
        L, S, H, scale, **constants, **resources("key_gradients", call),
    )  # fmt: skip
    return dq, dk, dv, -numbers[:, :, 2]


attention = Operator("lla", Call, run_forward, run_backward, empty, states=3, differentiable=(0, 1, 2, 4))
