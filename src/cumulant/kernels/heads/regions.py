"""Softmax of each region of a grid over the tokens of its chosen regions, read where they lie; and a depth-wise
convolution of tokens on that grid, added to what is there. No gradients.

Shape legend: B batch, H heads, D width, C = H D; a grid of rows x cols tokens in regions of down x across, w tokens
each; k regions chosen for each of R.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, dot_precision, on_device, padded, rows
from ..products import dot

LOG2E = math.log2(math.e)


@triton.jit
def token(region, j, wide, down, across, cols):
    """Numbers of the tokens j of a region, of which `wide` lie side by side."""
    return (region // wide * down + j // across) * cols + region % wide * across + j % across


@triton.jit
def regions_kernel(
    query, key, value, chosen, out, scale, H, D, R, K, w, wide, down, across, cols,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B R H blocks): M queries of one region and head; softmax by its running maximum."""
    blocks = (w + M - 1) // M
    slot, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, slot = slot % H, slot // H
    b, region = (slot // R).to(tl.int64), slot % R
    c, m = tl.arange(0, W), block * M + tl.arange(0, M)
    mine = token(region, m, wide, down, across, cols)
    inside = (m < w)[:, None] & (c < D)[None, :]
    q = tl.load(query + b * qb + head * qh + mine.to(tl.int64)[:, None] * qt + c[None, :], mask=inside, other=0.0)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, W), tl.float32)
    for one in range(K):
        other = tl.load(chosen + (b * R + region) * K + one).to(tl.int32)
        for start in range(0, w, N):
            n = start + tl.arange(0, N)
            at = token(other, n, wide, down, across, cols).to(tl.int64)
            there = (n < w)[:, None] & (c < D)[None, :]
            k = tl.load(key + b * kb + head * kh + at[:, None] * kt + c[None, :], mask=there, other=0.0)
            v = tl.load(value + b * vb + head * vh + at[:, None] * vt + c[None, :], mask=there, other=0.0)
            s = dot(q, tl.trans(k), tl.zeros((M, N), tl.float32), PRECISION) * scale
            s = tl.where((n < w)[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            acc = dot(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
            top = higher
    acc = acc / total[:, None]
    to = out + b * ob + head * oh + mine.to(tl.int64)[:, None] * ot + c[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolve_kernel(
    tokens, weight, out, C, height, cols, tb, tt, ob, ot, SIDE: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Grid (B blocks): N tokens, all channels, SIDE x SIDE taps; out += the convolution."""
    L = height * cols
    blocks = (L + N - 1) // N
    b, n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * N + tl.arange(0, N)
    c, row, col = tl.arange(0, W), n // cols, n % cols
    wide = (c < C)[None, :]
    acc = tl.zeros((N, W), tl.float32)
    for tap in tl.static_range(SIDE * SIDE):
        y, x = row + tap // SIDE - SIDE // 2, col + tap % SIDE - SIDE // 2
        there = (n < L) & (y >= 0) & (y < height) & (x >= 0) & (x < cols)
        at = tokens + b * tb + (y * cols + x).to(tl.int64)[:, None] * tt + c[None, :]
        t = tl.load(at, mask=there[:, None] & wide, other=0.0).to(tl.float32)
        acc += t * tl.load(weight + c * (SIDE * SIDE) + tap, mask=c < C, other=0.0).to(tl.float32)[None, :]
    to = out + b * ob + n.to(tl.int64)[:, None] * ot + c[None, :]
    inside = (n < L)[:, None] & wide
    acc += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


def attend_regions(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, layout: tuple[int, int, int, int], scale: float
) -> Tensor:
    """query, key, value (B, H, L, D) of a grid without padding, chosen (B, R, k) regions, layout (regions down, down,
    regions across, across) -> (B, H, L, D) whose heads lie side by side in memory. Cost: 2 L k w D a head."""
    query, key, value = rows(query), rows(key), rows(value)
    (B, H, L, D), (_, R, K) = query.shape, chosen.shape
    _, down, wide, across = layout
    w = down * across
    M, N = (16, 16) if query.device.type == "cpu" else (min(128, padded(w)), min(64, padded(w)))
    out = query.new_empty(B, L, H, D).transpose(1, 2)
    with on_device(query.device):
        regions_kernel[(B * R * H * cdiv(w, M),)](
            query, key, value, chosen.contiguous(), out, scale * LOG2E, H, D, R, K, w, wide, down, across,
            wide * across, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            M=M, N=N, W=padded(D), PRECISION=dot_precision(query.dtype), num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def add_convolved(out: Tensor, tokens: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """out (B, L, C) += depth-wise convolution, zeros at the border, of tokens (B, L, C) by weight (C, 1, k, k)."""
    (B, L, C), side = tokens.shape, weight.shape[-1]
    N = 16 if tokens.device.type == "cpu" else max(8, 4096 // padded(C))
    with on_device(tokens.device):
        convolve_kernel[(B * cdiv(L, N),)](
            tokens, weight.contiguous(), out, C, *grid, *tokens.stride()[:2], *out.stride()[:2],
            SIDE=side, N=N, W=padded(C), num_warps=4,
        )  # fmt: skip
    return out
