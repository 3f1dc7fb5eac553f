"""Mean and covariance of tokens on the GPU: x^T x without the half that symmetry gives.

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

from ..launch import cdiv, multiprocessors, on_device
from ..products import cast, dot

BLOCK, TOKENS, WARPS, STAGES = 128, 32, 8, 3  # within 1 % of the best of 18 on an H200, C 768
LEAST = 1024  # tokens, at least, of a program: partial sums cost memory


@triton.jit
def tile_of(t):
    """Row and column of tile t in the lower triangle, counted row by row."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i -= (i * (i + 1) // 2 > t).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= t).to(tl.int32)
    return i, t - i * (i + 1) // 2


@triton.jit
def sums_kernel(
    x, products, sums, L, C, stride_b, stride_t, share, tiles, splits,
    BM: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid (B splits tiles), the tiles of a split side by side: in one dimension, since the second and third hold
    65,535 programs at most. Over the tokens of one split: a tile of x^T x; those on the diagonal also add up x."""
    slot = (tl.program_id(0) // tiles).to(tl.int64)
    split, b = (slot % splits).to(tl.int32), slot // splits
    i, j = tile_of(tl.program_id(0) % tiles)
    start = split * share
    end = tl.minimum(L, start + share)
    n = tl.arange(0, N)
    rows, columns = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    base = x + b * stride_b + start.to(tl.int64) * stride_t + n[:, None] * stride_t
    left, right = base + rows[None, :], base + columns[None, :]
    acc = tl.zeros((BM, BM), tl.float32)
    total = tl.zeros((N, BM), tl.float32)
    for at in range(start, end, N):
        valid = (at + n < end)[:, None]
        if EVEN:
            p, q = tl.load(left, mask=valid, other=0.0), tl.load(right, mask=valid, other=0.0)
        else:
            p = tl.load(left, mask=valid & (rows < C)[None, :], other=0.0)
            q = tl.load(right, mask=valid & (columns < C)[None, :], other=0.0)
        acc = dot(tl.trans(p), q, acc, "ieee")
        if i == j:
            total += p.to(tl.float32)
        left += N * stride_t
        right += N * stride_t
    out = products + slot * C * C + rows[:, None] * C + columns[None, :]
    tl.store(out, acc, mask=(rows < C)[:, None] & (columns < C)[None, :])
    if i == j:
        tl.store(sums + slot * C + columns, tl.sum(total, 0), mask=columns < C)


@triton.jit
def total_of(sums, slot, splits, columns, C):
    total = tl.zeros(columns.shape, tl.float32)
    for split in range(splits):
        total += tl.load(sums + (slot + split) * C + columns, mask=columns < C, other=0.0)
    return total


@triton.jit
def finish_kernel(products, sums, G, mean, L, C, tiles, splits, BM: tl.constexpr):
    """Grid (B tiles). The mean, and G = sum of splits / L - mean mean^T below and above the diagonal, in G's dtype."""
    i, j = tile_of(tl.program_id(0) % tiles)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    rows, columns = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    mask = (rows < C)[:, None] & (columns < C)[None, :]
    acc = tl.zeros((BM, BM), tl.float32)
    for split in range(splits):
        at = products + (b * splits + split) * C * C + rows[:, None] * C + columns[None, :]
        acc += tl.load(at, mask=mask, other=0.0)
    m = total_of(sums, b * splits, splits, rows, C) / L
    r = total_of(sums, b * splits, splits, columns, C) / L
    acc = acc / L - m[:, None] * r[None, :]
    if i == j:
        tl.store(mean + b * C + rows, m, mask=rows < C)
    base = G + b * C * C
    tl.store(base + rows[:, None] * C + columns[None, :], cast(acc, G.dtype.element_ty), mask=mask)
    upper = cast(tl.trans(acc), G.dtype.element_ty)
    tl.store(base + columns[:, None] * C + rows[None, :], upper, mask=tl.trans(mask))


def _splits(work: int, L: int, processors: int) -> int:
    """How often to cut the tokens so that the last round of programs leaves few multiprocessors idle."""
    most = max(1, min(L // LEAST, cdiv(4 * processors, work)))
    return min(range(1, most + 1), key=lambda s: (cdiv(work * s, processors) / s, s))


@torch.library.custom_op("cumulant::covariance", mutates_args=())
def covariance(x: Tensor) -> tuple[Tensor, Tensor]:
    """<x~ x~^T> (B, C, C) in the dtype of x (B, L, C), which has contiguous rows, and the mean (B, C) in float32.

    Cost: L C^2 / 2 multiply-adds (only tiles on and below the diagonal); tiles of x are read again from the cache.
    """
    B, L, C = x.shape
    side = cdiv(C, BLOCK)
    tiles = side * (side + 1) // 2
    splits = _splits(tiles * B, L, multiprocessors(x.device))
    share = cdiv(cdiv(L, splits), TOKENS) * TOKENS
    splits = cdiv(L, share)
    products = torch.empty(B, splits, C, C, dtype=torch.float32, device=x.device)
    sums = torch.empty(B, splits, C, dtype=torch.float32, device=x.device)
    G = torch.empty(B, C, C, dtype=x.dtype, device=x.device)
    mean = torch.empty(B, C, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        sums_kernel[(B * splits * tiles,)](
            x, products, sums, L, C, x.stride(0), x.stride(1), share, tiles, splits,
            BM=BLOCK, N=TOKENS, EVEN=C % BLOCK == 0, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        finish_kernel[(B * tiles,)](products, sums, G, mean, L, C, tiles, splits, BM=BLOCK, num_warps=WARPS)
    return G, mean


@covariance.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    B, _, C = x.shape
    return x.new_empty(B, C, C), x.new_empty(B, C, dtype=torch.float32)
