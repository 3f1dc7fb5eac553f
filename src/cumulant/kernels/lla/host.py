"""Local linear attention on the GPU: launches and the custom ops. Kernels: lla_kernels.py; formulas: zoo/lla.py.

Shape legend: B batch, H heads, L queries, S keys, D, E widths.

Memory beside inputs and outputs, for a backward pass: the mean of the keys, the slope and, while it runs, the response
of every query, each as wide as a key in float32, and four numbers a query. No L x S tensor exists.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...tracing import is_plain, transformed
from .. import launch
from ..direct import direct
from ..launch import Config, cdiv, dot_precision, empty_like_rows, on_device, padded, rows, stride_unit, strides

WIDEST, WIDEST_FLOAT32 = 128, 64  # head size: what fits the registers of a program


def obstacle(query: Tensor, value: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None if they can."""
    reason = launch.obstacle(query, value, 2, False) or launch.too_wide(query, value, WIDEST, WIDEST_FLOAT32)
    if reason is not None:
        return reason
    if transformed():
        return "torch.func transforms and forward-mode gradients need plain torch"
    return None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    ridge: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    iterations: int = 32,
    tolerance: float = 1e-12,
) -> Tensor:
    """out (B, H, L, E), differentiable in query (B, H, L, D), key (B, H, S, D), value (B, H, S, E) and ridge (B, H, L).

    `added` (B, S), float32, is added to the logits of each key. `ridge` is float32.
    """
    arguments = (query, key, value, added, ridge, scale, is_causal, iterations, tolerance)
    if not is_plain(query):
        return forward(*arguments)[0]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, ridge))
    return _Attention.apply(*arguments) if wanted else run_forward(*arguments)[0]


def _is_wide(query: Tensor, value: Tensor) -> bool:
    return query.dtype == torch.float32 or max(query.shape[-1], value.shape[-1]) > 64


def _blocks(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Constants of every kernel: padded widths and sizes of blocks."""
    D, E = query.shape[-1], value.shape[-1]
    BD, BE = padded(D), padded(E)
    largest = WIDE.block if _is_wide(query, value) else 64
    M, N = (min(largest, padded(x.shape[-2])) for x in (query, key))
    return {"D": D, "E": E, "BD": BD, "BE": BE, "M": M, "N": N, "PRECISION": dot_precision(query.dtype)}


def _config(kernel: str, query: Tensor, value: Tensor) -> dict[str, int]:
    """Warps and stages of a kernel."""
    config = WIDE if _is_wide(query, value) else CONFIGS[kernel]
    return {"STAGES": config.stages, "num_warps": config.warps, "num_stages": config.stages}


# Tuned on an H200 for D = E = 64 in bfloat16; for what is wider, the one that keeps all rows in registers.
CONFIGS = {"forward": Config(64, 4, 2), "query_gradients": Config(64, 4, 2), "key_gradients": Config(64, 4, 2)}
WIDE = Config(32, 8, 1)


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    ridge: Tensor,
    scale: float,
    is_causal: bool,
    iterations: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, and for a backward pass log2 of the sums (B, H, L), means of keys and slopes (B, H, L, D)."""
    from . import kernels as lla_kernels

    q, k, v = rows(query), rows(key), rows(value)
    out, (lse, mean, slope) = empty_like_rows(q, v.shape[-1]), _state(query)
    (B, H, L, _), S, unit = q.shape, k.shape[2], stride_unit(q, k, v, out)
    constants = _blocks(query, key, value)
    with on_device(query.device):
        lla_kernels.forward[(cdiv(L, constants["M"]) * B * H,)](
            q, k, v, lse if added is None else added, ridge, out, lse, mean, slope,
            *strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(out, unit), *ridge.stride(),
            L, S, H, scale, iterations, tolerance,
            CAUSAL=is_causal, ADDED=added is not None, UNIT=unit, **constants, **_config("forward", query, value),
        )  # fmt: skip
    return out, lse, mean, slope


def _state(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape[:-1], dtype=torch.float32),
        query.new_empty(query.shape, dtype=torch.float32),
        query.new_empty(query.shape, dtype=torch.float32),
    )


def run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    ridge: Tensor,
    lse: Tensor,
    mean: Tensor,
    slope: Tensor,
    scale: float,
    is_causal: bool,
    iterations: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient of the ridge (B, H, L)."""
    from . import kernels as lla_kernels

    q, k, v, do = rows(query), rows(key), rows(value), rows(grad)
    dq, dk, dv = (empty_like_rows(x, x.shape[-1]) for x in (q, k, v))
    (B, H, L, _), S, unit = q.shape, k.shape[2], stride_unit(q, k, v, do, dq, dk, dv)
    response, numbers = torch.empty_like(slope), lse.new_empty(B, H, 3, L)
    shared = (*strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(do, unit))
    constants = {"CAUSAL": is_causal, "ADDED": added is not None, "UNIT": unit, **_blocks(query, key, value)}
    inputs = (q, k, v, lse if added is None else added, ridge, do, lse)
    with on_device(query.device):
        lla_kernels.query_gradients[(cdiv(L, constants["M"]) * B * H,)](
            *inputs, mean, slope, dq, response, numbers, *shared, *strides(dq, unit), *ridge.stride(),
            L, S, H, scale, iterations, tolerance, **constants, **_config("query_gradients", query, value),
        )  # fmt: skip
        lla_kernels.key_gradients[(cdiv(S, constants["N"]) * B * H,)](
            *inputs, slope, response, numbers, dk, dv, *shared, *strides(dk, unit), *strides(dv, unit), *ridge.stride(),
            L, S, H, scale, **constants, **_config("key_gradients", query, value),
        )  # fmt: skip
    return dq, dk, dv, -numbers[:, :, 2]


forward = torch.library.custom_op("cumulant::lla_forward", run_forward, mutates_args=())
backward = torch.library.custom_op("cumulant::lla_backward", run_backward, mutates_args=())


@forward.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return empty_like_rows(rows(query), value.shape[-1]), *_state(query)


@backward.register_fake
def _(grad, query, key, value, *rest):  # type: ignore[no-untyped-def]
    found = (empty_like_rows(rows(x), x.shape[-1]) for x in (query, key, value))
    return *found, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.is_causal, ctx.iterations, ctx.tolerance = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    numbers = (ctx.scale, ctx.is_causal, ctx.iterations, ctx.tolerance)
    dq, dk, dv, d_ridge = backward(grad, *ctx.saved_tensors, *numbers)
    return dq, dk, dv, None, d_ridge, *(None,) * 4


forward.register_autograd(partial(_gradients, backward), setup_context=_setup_context)
_Attention = direct(run_forward, _setup_context, partial(_gradients, run_backward))
