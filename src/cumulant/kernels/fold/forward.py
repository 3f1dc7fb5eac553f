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
    BM: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid (B splits tiles), the tiles of a split side by side: in one dimension, since the second and third hold
    65,535 programs at most. Over the tokens of one split: a tile of x^T x; those on the diagonal also add up x.

    There both factors are the same tile, and the sums have a copy of their own: see `finished` for why.
    """
    slot = (tl.program_id(0) // tiles).to(tl.int64)
    split, b = (slot % splits).to(tl.int32), slot // splits
    i, j = tile_of(tl.program_id(0) % tiles)
    start = split * share
    end = tl.minimum(L, start + share)
    n = tl.arange(0, N)
    rows, columns = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    first = x + b * stride_b + start.to(tl.int64) * stride_t + n[:, None] * stride_t
    left, right = first + rows[None, :], first + columns[None, :]
    acc = tl.zeros((BM, BM), tl.float32)
    if i == j:
        total = tl.zeros((N, BM), tl.float32)
        for at in tl.range(start, end, N, num_stages=STAGES):
            valid = at + n < end
            total += columns_of(left, rows, valid, C, EVEN).to(tl.float32)
            q = columns_of(right, columns, valid, C, EVEN)
            acc = dot(tl.trans(q), q, acc, "ieee")
            left += N * stride_t
            right += N * stride_t
        tl.store(sums + slot * C + columns, tl.sum(total, 0), mask=columns < C)
    else:
        for at in tl.range(start, end, N, num_stages=STAGES):
            valid = at + n < end
            p, q = columns_of(left, rows, valid, C, EVEN), columns_of(right, columns, valid, C, EVEN)
            acc = dot(tl.trans(p), q, acc, "ieee")
            left += N * stride_t
            right += N * stride_t
    out = products + slot * C * C + rows[:, None] * C + columns[None, :]
    tl.store(out, acc, mask=(rows < C)[:, None] & (columns < C)[None, :])


@triton.jit
def columns_of(at, columns, valid, C, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at, mask=valid[:, None], other=0.0)
    else:
        return tl.load(at, mask=valid[:, None] & (columns < C)[None, :], other=0.0)


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
