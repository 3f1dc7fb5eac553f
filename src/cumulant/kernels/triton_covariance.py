"""Second moments of tokens on the GPU: x^T x without forming the half that symmetry gives.

Shape legend: B batch, L tokens, C width; BM x BM the tile of one program, N tokens of a block.

The folded layer needs <x~ x~^T> of 16-bit tokens. Their products are exact in float32, so the sums run on the tokens
as they are, straight from memory to the tensor cores, and the mean is taken out at the end in float32: for means up to
100 spreads, beyond which 16-bit tokens have no digits left, that costs less than rounding a key projection does.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, multiprocessors, on_device
from .products import cast, dot

BLOCK, TOKENS, WARPS, STAGES = 128, 64, 8, 4


@triton.jit
def tile_of(t):
    """Row and column of tile t in the lower triangle, counted row by row."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i -= (i * (i + 1) // 2 > t).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= t).to(tl.int32)
    return i, t - i * (i + 1) // 2


@triton.jit
def products_kernel(
    x, partial, L, C, stride_b, stride_t, share, BM: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """partial[b, split] (C x C, lower tiles) = x^T x over the tokens of one split."""
    i, j = tile_of(tl.program_id(0))
    split, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = split * share
    end = tl.minimum(L, start + share)
    rows, columns = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    n = tl.arange(0, N)
    base = x + b * stride_b + start.to(tl.int64) * stride_t
    left, right = base + n[:, None] * stride_t + rows[None, :], base + n[:, None] * stride_t + columns[None, :]
    acc = tl.zeros((BM, BM), tl.float32)
    for at in range(start, end, N):
        valid = (at + n < end)[:, None]
        if EVEN:
            p, q = tl.load(left, mask=valid, other=0.0), tl.load(right, mask=valid, other=0.0)
        else:
            p = tl.load(left, mask=valid & (rows < C)[None, :], other=0.0)
            q = tl.load(right, mask=valid & (columns < C)[None, :], other=0.0)
        acc = dot(tl.trans(p), q, acc, "ieee")
        left += N * stride_t
        right += N * stride_t
    out = partial + (b * tl.num_programs(1) + split) * C * C + rows[:, None] * C + columns[None, :]
    tl.store(out, acc, mask=(rows < C)[:, None] & (columns < C)[None, :])


@triton.jit
def finish_kernel(partial, mean, G, L, C, splits, BM: tl.constexpr):
    """G = sum of splits / L - mean mean^T, written below and above the diagonal, in G's dtype."""
    i, j = tile_of(tl.program_id(0))
    b = tl.program_id(1).to(tl.int64)
    rows, columns = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    mask = (rows < C)[:, None] & (columns < C)[None, :]
    acc = tl.zeros((BM, BM), tl.float32)
    for split in range(splits):
        at = partial + (b * splits + split) * C * C + rows[:, None] * C + columns[None, :]
        acc += tl.load(at, mask=mask, other=0.0)
    m = tl.load(mean + b * C + rows, mask=rows < C, other=0.0)
    r = tl.load(mean + b * C + columns, mask=columns < C, other=0.0)
    acc = acc / L - m[:, None] * r[None, :]
    base = G + b * C * C
    tl.store(base + rows[:, None] * C + columns[None, :], cast(acc, G.dtype.element_ty), mask=mask)
    tl.store(base + columns[:, None] * C + rows[None, :], cast(tl.trans(acc), G.dtype.element_ty), mask=tl.trans(mask))


@torch.library.custom_op("cumulant::covariance", mutates_args=())
def covariance(x: Tensor, mean: Tensor) -> Tensor:
    """<x~ x~^T> (B, C, C) in the dtype of x (B, L, C), which has contiguous rows; mean (B, C) in float32.

    Cost: L C^2 / 2 multiply-adds (only tiles on and below the diagonal), x is read about C / BLOCK times from cache.
    """
    B, L, C = x.shape
    side = cdiv(C, BLOCK)
    tiles = side * (side + 1) // 2
    # Enough programs for two rounds of the multiprocessors, each with 2,048 tokens or more: partial sums cost memory.
    splits = max(1, min(cdiv(2 * multiprocessors(x.device), tiles * B), cdiv(L, 2048)))
    share = cdiv(cdiv(L, splits), TOKENS) * TOKENS
    splits = cdiv(L, share)
    partial = torch.empty(B, splits, C, C, dtype=torch.float32, device=x.device)
    G = torch.empty(B, C, C, dtype=x.dtype, device=x.device)
    with on_device(x.device):
        products_kernel[(tiles, splits, B)](
            x, partial, L, C, x.stride(0), x.stride(1), share, BM=BLOCK, N=TOKENS, EVEN=C % BLOCK == 0,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        finish_kernel[(tiles, B)](partial, mean, G, L, C, splits, BM=BLOCK, num_warps=WARPS)
    return G


@covariance.register_fake
def _(x: Tensor, mean: Tensor) -> Tensor:
    B, _, C = x.shape
    return x.new_empty(B, C, C)
