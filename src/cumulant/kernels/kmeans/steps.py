"""Kernels of k-means: second moment of the queries, nearest centre of each key, new centres.

Shape legend: B sequences, H key heads, L keys, D width (BD padded), K centres (KP padded), S splits of the tokens.

With M the metric and o the first centre, a key k belongs to the centre c of largest (k - o)^T M (c - o) - half of
(c - o)^T M (c - o), that is of largest k.w_c - b_c with w_c = M (c - o) and b_c = o.w_c + half. w is kept as two
numbers of the keys' type, w_c rounded and what that left over, b in float32. Cost of a step: 2 L K D, with L K D more
for the sums.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..cluster.parts import finished, parts, picked_tile
from ..products import dot
from ..tokens import head, kernel


@kernel
def second_moments(
    q, moments, q_b, q_h, q_t, length_q, heads, span, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    N: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (S, B H). Sums of q q^T over `span` queries of each of GROUP heads, (S, B H, BD, BD)."""
    split, pid = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    total = tl.zeros((BD, BD), tl.float32)
    end = tl.minimum(split * span + span, length_q)
    for member in range(GROUP):
        own = head(q, pid // heads, pid % heads * GROUP + member, 0, q_b, q_h, q_t, UNIT)
        for at in range(split * span, end, N):
            row = at + tl.arange(0, N)
            rows = picked_tile(own, row, row < end, q_t * UNIT, d, D, BD, False)
            total = dot(tl.trans(rows), rows, total, PRECISION)
    cell = d[:, None] * BD + d[None, :]
    tl.store(moments + (split.to(tl.int64) * tl.num_programs(1) + pid) * (BD * BD) + cell, total)


@kernel
def assign(
    k, present, weights, biases, ids, sums, counts, k_b, k_h, k_t, length_k, heads, clusters, span, step,
    MASKED: tl.constexpr, SUMS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, KP: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (S, B H). The nearest centre of `span` keys, every `step`-th one; SUMS: instead the sums of the keys of each
    centre and how many there are, (S, B H, KP, BD) and (S, B H, KP). `present` (B, L): which take part."""
    split, pid = tl.program_id(0), tl.program_id(1)
    d, c = tl.arange(0, BD), tl.arange(0, KP)
    dtype: tl.constexpr = k.dtype.element_ty
    own = pid.to(tl.int64)
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    present += (pid // heads).to(tl.int64) * length_k
    cells = weights + own * (2 * KP * BD) + c[:, None] * BD + d[None, :]
    high, low = tl.load(cells), tl.load(cells + KP * BD)
    bias = tl.where(c < clusters, tl.load(biases + own * KP + c), float("inf"))
    total, hits = tl.zeros((KP, BD), tl.float32), tl.zeros((N, KP), tl.float32)
    last = tl.cdiv(length_k, step)
    end = tl.minimum(split * span + span, last)
    for at in tl.range(split * span, end, N, num_stages=STAGES):
        index = at + tl.arange(0, N)
        token, there = index * step, index < end
        keys = picked_tile(k, token, there, k_t * UNIT, d, D, BD, False)
        taking = there
        if MASKED:
            taking = there & (tl.load(present + token, mask=there, other=0) != 0)
            keys = tl.where(taking[:, None], keys, tl.zeros_like(keys))  # the others may hold anything
        score = dot(keys, tl.trans(high), None, PRECISION)
        if dtype != tl.float32:
            score = dot(keys, tl.trans(low), score, PRECISION)
        score = finished(score)
        nearest = tl.minimum(tl.argmax(score - bias[None, :], 1), clusters - 1)  # also of what is not a number
        if SUMS:
            chosen = ((nearest[:, None] == c[None, :]) & taking[:, None]).to(tl.float32)
            hits += chosen
            total = finished(dot(tl.trans(chosen.to(dtype)), keys, total, PRECISION))
        else:
            tl.store(ids + own * length_k + token, nearest, mask=there)
    if SUMS:
        slot = split.to(tl.int64) * tl.num_programs(1) + pid
        tl.store(sums + slot * (KP * BD) + c[:, None] * BD + d[None, :], total)
        tl.store(counts + slot * KP + c, tl.sum(hits, 0))


@triton.jit
def write_seen(centre, origin, M, weights, biases, c, pid, BD: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr):
    """w and b of centres c, (n, BD), as `assign` reads them."""
    d = tl.arange(0, BD)
    away = centre - origin[None, :]
    seen = dot(away, M, None, PRECISION)
    half = 0.5 * tl.sum(away * seen, 1)
    high, low = parts(seen, weights.dtype.element_ty)
    cell = weights + pid * (2 * KP * BD) + c[:, None] * BD + d[None, :]
    tl.store(cell, high)
    tl.store(cell + KP * BD, low)
    full = high.to(tl.float32)
    if weights.dtype.element_ty != tl.float32:
        full += low.to(tl.float32)
    tl.store(biases + pid * KP + c, half + tl.sum(full * origin[None, :], 1))


@kernel
def begin(
    x, moments, centres, metric, weights, biases, x_b, x_h, x_t, size, step, heads, clusters, splits, plane, over,
    METRIC: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, KP: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H,). The first centres, evenly out of `size` tokens of x, `step` apart; the metric, `over` times the sum
    of what `second_moments` found, plain distances without METRIC and where that is not a number; w and b."""
    pid = tl.program_id(0).to(tl.int64)
    d, c = tl.arange(0, BD), tl.arange(0, KP)
    x = head(x, pid // heads, pid % heads, 0, x_b, x_h, x_t, UNIT)
    token = (c.to(tl.int64) * size // clusters) * step
    centre = picked_tile(x, token, c < clusters, x_t * UNIT, d, D, BD, False).to(tl.float32)
    origin = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(centres + pid * (KP * BD) + c[:, None] * BD + d[None, :], centre)
    cell = d[:, None] * BD + d[None, :]
    M = (d[:, None] == d[None, :]).to(tl.float32)
    if METRIC:
        total = tl.zeros((BD, BD), tl.float32)
        moments += pid * (BD * BD) + cell
        for first in range(0, splits, 4):
            for i in tl.static_range(4):  # four reads under way
                total += tl.load(moments, mask=cell < tl.where(first + i < splits, BD * BD, 0), other=0.0)
                moments += plane.to(tl.int64) * (BD * BD)
        wrong = tl.max(tl.max((total * 0.0 != 0.0).to(tl.int32), 1), 0)
        M = tl.where(wrong > 0, M, total * over)
    tl.store(metric + pid * (BD * BD) + cell, M)
    write_seen(centre, origin, M, weights, biases, c, pid, BD, KP, PRECISION)


@triton.jit
def moved(centres, sums, counts, c, plane, splits, BD: tl.constexpr, KP: tl.constexpr):
    """Centres c, (n, BD): means of their keys out of sums over `splits`, those without a key where they are."""
    d = tl.arange(0, BD)
    cell = c[:, None] * BD + d[None, :]
    total, number = tl.zeros(cell.shape, tl.float32), tl.zeros(c.shape, tl.float32)
    for first in range(0, splits, 4):
        for i in tl.static_range(4):  # four reads under way
            end = tl.where(first + i < splits, KP * BD, 0)
            total += tl.load(sums + cell, mask=cell < end, other=0.0)
            number += tl.load(counts + c, mask=c < end, other=0.0)
            sums += plane.to(tl.int64) * (KP * BD)
            counts += plane.to(tl.int64) * KP
    over = 1.0 / tl.maximum(number, 1.0)
    return tl.where((number > 0.0)[:, None], total * over[:, None], tl.load(centres + cell))


@kernel
def update(
    centres, found, metric, sums, counts, weights, biases, splits, plane,
    BD: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H, KP / N). N of the centres (B H, KP, BD) float32 of each head as `found`, and w and b of them, measured
    from the first of all. `plane` = B H."""
    pid, d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    c = tl.program_id(1) * N + tl.arange(0, N)
    centres += pid * (KP * BD)
    sums += pid * (KP * BD)
    counts += pid * KP
    centre = moved(centres, sums, counts, c, plane, splits, BD, KP)
    tl.store(found + pid * (KP * BD) + c[:, None] * BD + d[None, :], centre)
    origin = tl.sum(moved(centres, sums, counts, tl.arange(0, 1), plane, splits, BD, KP), 0)
    M = tl.load(metric + pid * (BD * BD) + d[:, None] * BD + d[None, :])
    write_seen(centre, origin, M, weights, biases, c, pid, BD, KP, PRECISION)
