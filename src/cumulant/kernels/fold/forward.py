"""Kernels of the covariance of tokens: sums over splits, then the sum of these. Shape legend: host.py."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot


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
