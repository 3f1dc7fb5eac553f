"""Rows of tokens in the order of a tree. torch's own takes four times as long for rows of 128 to 256 bytes.

Shape legend: N heads of all sequences, L tokens, M of them taken, W width.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..cluster.statistics import moved
from ..launch import FARTHEST, cdiv, direct, layout, on_device, padded
from ..tokens import Fixed, head, kernel

BLOCK = 64  # rows of a program


@kernel
def move(
    x, y, order, x_b, x_h, x_t, y_b, y_h, y_t, order_b, size, splits, heads, BACK: tl.constexpr, W: tl.constexpr,
    BW: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (B heads x splits,). N rows `order` (B heads, M) of x (B, heads, L, W) to rows of y (B, heads, M, W); BACK:
    the other way."""
    own, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    b, h = own // heads, own % heads
    row = split * N + tl.arange(0, N)
    there = row < size
    place = tl.load(order + own.to(tl.int64) * order_b + row, mask=there, other=0)
    x, y = head(x, b, h, 0, x_b, x_h, x_t, UNIT), head(y, b, h, 0, y_b, y_h, y_t, UNIT)
    moved(x, y, row, place, there, x_t * UNIT, y_t * UNIT, BACK, W, BW)


def fits(x: Tensor) -> bool:
    """Whether the kernel may take x (N, L, W): nothing watches, and rows lie in one piece."""
    return direct(x) and x.stride(-1) == 1 and x.stride(1) < FARTHEST and x.numel() > 0


def rows_of(x: Tensor, order: Tensor) -> Tensor:
    """Rows `order` (N, M) of x (N, L, W): (N, M, W), without gradient."""
    (N, M), W = order.shape, x.shape[-1]
    out = x.new_empty(N, M, W)
    start(x.unsqueeze(0), out.unsqueeze(0), order.contiguous(), False)
    return out


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x (N, L, W) to the places `order` (N, L) of all of them, without gradient: `rows_of` undone."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    start(out.unsqueeze(0), x.unsqueeze(0), order.contiguous(), True)
    return out


def start(x: Tensor, y: Tensor, order: Tensor, back: bool) -> None:
    """Rows `order` (B H, M or more) of x (B, H, L, W) to the rows of y (B, H, M, W), or back."""
    (B, H, M, W), (unit, (own, other)) = y.shape, layout(x, y)
    splits, known = cdiv(M, BLOCK), unit == 8 and not order.data_ptr() & 15
    with on_device(x.device):
        move.start(
            (B * H * splits, 1, 1), _fixed(W, unit, back, known, x.dtype, order.dtype),
            x, y, order, *own, *other, order.stride(0), M, splits, H,
        )  # fmt: skip


@lru_cache(64)
def _fixed(W: int, unit: int, back: bool, known: bool, *_: torch.dtype) -> Fixed:
    """Constants of a launch for tensors of these types."""
    return Fixed({"BACK": back, "W": W, "BW": padded(W), "N": BLOCK, "UNIT": unit, "num_warps": 4}, known)


def moved_to(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x (B, H, L, W) in the order (B H, L or more) of all of them."""
    found = x.new_empty(x.shape)
    start(x, found, order, False)
    return found


def moved_back(x: Tensor, order: Tensor, found: Tensor) -> Tensor:
    """The same undone: x to `found`, which is returned."""
    start(found, x, order, True)
    return found


class Permuted(torch.autograd.Function):
    """Rows of x (N, L, W) in an order (N, L) of all of them, or back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: bool = False) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back = back
        return (put_back if back else rows_of)(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = grad if grad.stride(-1) == 1 else grad.contiguous()
        found: Tensor = Permuted.apply(whole, *ctx.saved_tensors, not ctx.back)
        return found, None, None
