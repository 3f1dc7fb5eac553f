"""A low-rank guess of an attention map for blocks of queries, the keys of its largest entries, and softmax over those
keys, read where they lie. No gradients.

Shape legend: G = B H heads of all batches, L tokens, r queries of a block, J blocks, c reduced channels, K basis maps,
b keys kept of each block, D width.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, dot_precision, on_device, padded, rows
from ..products import dot
from ..tokens import kernel

LOG2E = math.log2(math.e)
CHUNK = 32  # rows whose coefficients a program holds
OF_ALL = tl.constexpr(-(2**31))


@kernel
def mixed_kernel(
    query, pooled, out, scale, rows_, r, J, C, K,
    TOP: tl.constexpr, N: tl.constexpr, WC: tl.constexpr, WK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (G J): the sum over the rows of a block of the TOP largest of softmax(query pooled scale)."""
    g, j = (tl.program_id(0) // J).to(tl.int64), tl.program_id(0) % J
    c, k = tl.arange(0, WC), tl.arange(0, WK)
    there = (c < C)[:, None] & (k < K)[None, :]
    P = tl.load(pooled + g * C * K + c[:, None] * K + k[None, :], mask=there, other=0.0)
    total = tl.zeros((WK,), tl.float32)
    for start in range(0, r, N):
        n = j * r + start + tl.arange(0, N)
        inside = (n < rows_) & (n < (j + 1) * r)
        at = query + (g * rows_ + n)[:, None] * C + c[None, :]
        q = tl.load(at, mask=inside[:, None] & (c < C)[None, :], other=0.0)
        s = dot(q, P, tl.zeros((N, WK), tl.float32), PRECISION) * scale
        s = tl.where((k < K)[None, :], s, float("-inf"))
        p = tl.exp(s - tl.max(s, 1)[:, None])
        p = tl.where(inside[:, None], p / tl.sum(p, 1)[:, None], 0.0)
        left = p
        for _ in tl.static_range(TOP):  # the first of equals, as many as TOP
            best = tl.argmax(left, 1)
            left = tl.where(k[None, :] == best[:, None], -1.0, left)
        total += tl.sum(tl.where((left < 0) | (TOP == 0), p, 0.0), 0)
    tl.store(out + tl.program_id(0).to(tl.int64) * K + k, total, mask=k < K)


@kernel
def largest_kernel(guess, chosen, L, b, W: tl.constexpr, BITS: tl.constexpr):
    """Grid (lists): the places of the b largest of L numbers, the first of equals, in their order.

    The b-th largest is found bit by bit: of all numbers that at least b reach, it is the largest.
    """
    slot, n = tl.program_id(0).to(tl.int64), tl.arange(0, W)
    x = tl.load(guess + slot * L + n, mask=n < L, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(x.dtype)  # there are two of 0
    bits = bits.to(tl.int16 if BITS == 16 else tl.int32, bitcast=True).to(tl.int32)
    order = bits ^ ((bits >> 31) & ((1 << (BITS - 1)) - 1))  # whole numbers in the order of x
    order = tl.where(n < L, order, OF_ALL)
    least = tl.where(tl.sum((order >= 0).to(tl.int32), 0) >= b, 0, OF_ALL if BITS == 32 else -(1 << 15))
    for shift in range(BITS - 1):
        higher = least + (1 << (BITS - 2 - shift))
        least = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= b, higher, least)
    # Those above and those equal in one sum: both are at most 2^15.
    above, equal = order > least, (order == least) & (n < L)
    up_to = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    left = b - tl.sum(above.to(tl.int32), 0)
    equals = (up_to >> 16) & 0xFFFF
    place = (up_to & 0xFFFF) + tl.minimum(equals, left) - 1
    tl.store(chosen + slot * b + place, n, mask=above | (equal & (equals <= left)))


@kernel
def listed_kernel(
    query, key, value, chosen, out, scale, H, rows_, r, J, b, D,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    M: tl.constexpr, N: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H J parts): M queries of a block over the keys of its list; softmax by its running maximum."""
    parts = (r + M - 1) // M
    slot, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    batch, head, j = (slot // J // H).to(tl.int64), slot // J % H, slot % J
    inner = part * M + tl.arange(0, M)
    m, c = j * r + inner, tl.arange(0, W)
    inside = ((inner < r) & (m < rows_))[:, None] & (c < D)[None, :]
    q = tl.load(query + batch * qb + head * qh + m.to(tl.int64)[:, None] * qt + c[None, :], mask=inside, other=0.0)
    keys, values = key + batch * kb + head * kh + c[None, :], value + batch * vb + head * vh + c[None, :]
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, W), tl.float32)
    for start in range(0, b, N):
        n = start + tl.arange(0, N)
        at = tl.load(chosen + slot.to(tl.int64) * b + n, mask=n < b, other=0).to(tl.int64)[:, None]
        there = (n < b)[:, None] & (c < D)[None, :]
        k = tl.load(keys + at * kt, mask=there, other=0.0)
        v = tl.load(values + at * vt, mask=there, other=0.0)
        s = dot(q, tl.trans(k), tl.zeros((M, N), tl.float32), PRECISION) * scale
        s = tl.where((n < b)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = dot(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        top = higher
    to = out + batch * ob + head * oh + m.to(tl.int64)[:, None] * ot + c[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def mixed(query: Tensor, pooled: Tensor, r: int, top: int, scale: float) -> Tensor:
    """query (B, H, N, c), pooled (B, H, c, K) -> the `top` largest coefficients of a row, summed over blocks of r rows,
    or all of them with top=0, (B, H, J, K) in float32."""
    query, pooled, (B, H, n, C), K = query.contiguous(), pooled.contiguous(), query.shape, pooled.shape[-1]
    J = cdiv(n, r)
    out = torch.empty(B, H, J, K, dtype=torch.float32, device=query.device)
    with on_device(query.device):
        mixed_kernel[(B * H * J,)](
            query, pooled, out, scale, n, r, J, C, K, TOP=top, N=min(CHUNK, padded(r)), WC=padded(C), WK=padded(K),
            PRECISION=dot_precision(query.dtype), num_warps=4,
        )  # fmt: skip
    return out


def largest_places(guess: Tensor, b: int) -> Tensor:
    """guess (..., L), without NaN -> the places of its b largest along the last axis, rising, (..., b) in int32."""
    guess, L = guess.contiguous(), guess.shape[-1]
    chosen = torch.empty(*guess.shape[:-1], b, dtype=torch.int32, device=guess.device)
    with on_device(guess.device):
        largest_kernel[(guess.numel() // L,)](
            guess, chosen, L, b, W=padded(L), BITS=8 * guess.element_size(), num_warps=16 if L > 4096 else 4
        )
    return chosen


def attend_listed(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, r: int, scale: float) -> Tensor:
    """query (B, H, N, D), key and value (B, H, L, D), chosen (B, H, J, b) for blocks of r queries -> (B, H, N, D) whose
    heads lie side by side in memory. Cost: 2 N b D a head."""
    query, key, value, chosen = rows(query), rows(key), rows(value), chosen.contiguous()
    (B, H, n, D), (J, b) = query.shape, chosen.shape[-2:]
    M, N = (16, 16) if query.device.type == "cpu" else (min(128, padded(r)), 64)
    out = query.new_empty(B, n, H, D).transpose(1, 2)
    with on_device(query.device):
        listed_kernel[(B * H * J * cdiv(r, M),)](
            query, key, value, chosen, out, scale * LOG2E, H, n, r, J, b, D,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
            M=M, N=N, W=padded(D), PRECISION=dot_precision(query.dtype), num_warps=8 if M == 128 else 4, num_stages=3,
        )  # fmt: skip
    return out
