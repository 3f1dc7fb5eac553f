"""Rows of tokens in the order of a tree. torch's own takes four times as long for rows of 128 to 256 bytes.

Shape legend: N heads of all sequences, L tokens, M of them taken, W width.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...tensors import inverse
from ..cluster.parts import picked_tile, store_picked
from ..launch import FARTHEST, cdiv, direct, layout, on_device, padded
from ..tokens import head, kernel

BLOCK = 64  # rows of a program


@kernel
def take(
    x, order, out, x_b, x_h, x_t, size, splits, W: tl.constexpr, BW: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Grid (heads x splits,). N rows `order` (heads, M) of x (1, heads, L, W) to out (heads, M, W)."""
    own, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    row, columns = split * N + tl.arange(0, N), tl.arange(0, BW)
    there = row < size
    skipped = own.to(tl.int64) * size
    place = tl.load(order + skipped + row, mask=there, other=0)
    x = head(x, own * 0, own, 0, x_b, x_h, x_t, UNIT)
    rows = picked_tile(x, place, there, x_t * UNIT, columns, W, BW, False)
    store_picked(out + skipped * W, rows, row, there, W, columns, W, BW)


def fits(x: Tensor) -> bool:
    """Whether the kernel may take x (N, L, W): nothing watches, and rows lie in one piece."""
    return direct(x) and x.stride(-1) == 1 and x.stride(1) < FARTHEST and x.numel() > 0


def rows_of(x: Tensor, order: Tensor) -> Tensor:
    """Rows `order` (N, M) of x (N, L, W): (N, M, W), without gradient."""
    (N, M), W = order.shape, x.shape[-1]
    out, order = x.new_empty(N, M, W), order.contiguous()
    unit, (steps,) = layout(x.unsqueeze(0))
    splits = cdiv(M, BLOCK)
    constants: dict[str, Any] = {"W": W, "BW": padded(W), "N": BLOCK, "UNIT": unit, "num_warps": 4}
    with on_device(x.device):
        take[(N * splits,)](x, order, out, *steps, M, splits, **constants)
    return out


class Permuted(torch.autograd.Function):
    """Rows of x (N, L, W) in an order (N, L) of all of them, with the gradient: its rows in the order back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows_of(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        back: Tensor = Permuted.apply(grad if grad.stride(-1) == 1 else grad.contiguous(), inverse(*ctx.saved_tensors))
        return back, None
