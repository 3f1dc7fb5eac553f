"""Sizes and tuning of the kernels of local linear attention, and what they cannot take. Without Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...tracing import transformed
from .. import launch
from ..launch import Config, dot_precision, padded

WIDEST, WIDEST_FLOAT32 = 128, 64  # head size: what fits the registers of a program
# Tuned on an H200 for D = E = 64 in bfloat16; for what is wider, the one that keeps all rows in registers.
CONFIGS = {"forward": Config(64, 4, 2), "query_gradients": Config(64, 4, 2), "key_gradients": Config(64, 4, 2)}
WIDE = Config(32, 8, 1)


class Call(NamedTuple):
    """One call -> (B, H, L, E). B batch, H heads, L queries, S keys, D, E widths."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, E)
    added: Tensor | None  # (B, S) float32, added to the logits of each key
    ridge: Tensor  # (B, H, L) float32
    scale: float
    is_causal: bool = False
    iterations: int = 32
    tolerance: float = 1e-12


def obstacle(query: Tensor, value: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None if they can."""
    reason = launch.obstacle(query, value) or launch.too_wide(query, value, WIDEST, WIDEST_FLOAT32)
    if reason is not None:
        return reason
    if transformed():
        return "torch.func transforms and forward-mode gradients need plain torch"
    return None


def blocks(call: Call) -> dict[str, Any]:
    """Constants of every kernel: padded widths and sizes of blocks."""
    D, E = call.query.shape[-1], call.value.shape[-1]
    largest = WIDE.block if _is_wide(call) else 64
    M, N = (min(largest, padded(x.shape[-2])) for x in (call.query, call.key))
    return {
        "D": D, "E": E, "BD": padded(D), "BE": padded(E), "M": M, "N": N, "CAUSAL": call.is_causal,
        "ADDED": call.added is not None, "PRECISION": dot_precision(call.query.dtype),
    }  # fmt: skip


def resources(kernel: str, call: Call) -> dict[str, int]:
    """Warps and stages of a kernel."""
    config = WIDE if _is_wide(call) else CONFIGS[kernel]
    return {"STAGES": config.stages, "num_warps": config.warps, "num_stages": config.stages}


def _is_wide(call: Call) -> bool:
    return call.query.dtype == torch.float32 or max(call.query.shape[-1], call.value.shape[-1]) > 64
