"""Kernels of k-means: second moment of the queries, nearest centre of each key, new centres.

Shape legend: B sequences, H key heads, L keys, D width (BD padded), K centres (KP padded), S splits of the tokens.

With M the metric and o the first centre, a key k belongs to the centre c of largest (k - o)^T M (c - o) - half of
(c - o)^T M (c - o), that is of largest k.w_c - b_c with w_c = M (c - o) and b_c = o.w_c + half. w is kept as two
numbers of the keys' type, w_c rounded and what that left over, b in float32. Cost of a step: 2 L K D, with L K D more
for the sums.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from ..cluster.parts import parts, picked_tile
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
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
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
    total, number = tl.zeros((KP, BD), tl.float32), tl.zeros((KP,), tl.float32)
    last = tl.cdiv(length_k, step)
    end = tl.minimum(split * span + span, last)
    for at in range(split * span, end, N):
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
        nearest = tl.minimum(tl.argmax(score - bias[None, :], 1), clusters - 1)  # also of what is not a number
        if SUMS:
            chosen = ((nearest[:, None] == c[None, :]) & taking[:, None]).to(tl.float32)
            number += tl.sum(chosen, 0)
            total = dot(tl.trans(chosen.to(dtype)), keys, total, PRECISION)
        else:
            tl.store(ids + own * length_k + token, nearest, mask=there)
    if SUMS:
        slot = split.to(tl.int64) * tl.num_programs(1) + pid
        tl.store(sums + slot * (KP * BD) + c[:, None] * BD + d[None, :], total)
        tl.store(counts + slot * KP + c, number)


@kernel
def update(
    centres, metric, sums, counts, weights, biases, splits, plane,
    FIRST: tl.constexpr, BD: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H,). Centres (B H, KP, BD) float32, those without a key left where they are, and w and b of them; FIRST:
    the centres are given. `plane` = B H."""
    pid = tl.program_id(0).to(tl.int64)
    d, c = tl.arange(0, BD), tl.arange(0, KP)
    cell = c[:, None] * BD + d[None, :]
    centres += pid * (KP * BD)
    centre = tl.load(centres + cell)
    if not FIRST:
        total, number = tl.zeros((KP, BD), tl.float32), tl.zeros((KP,), tl.float32)
        sums += pid * (KP * BD)
        counts += pid * KP
        for _ in range(splits):
            total += tl.load(sums + cell)
            number += tl.load(counts + c)
            sums += plane.to(tl.int64) * (KP * BD)
            counts += plane.to(tl.int64) * KP
        over = 1.0 / tl.maximum(number, 1.0)
        centre = tl.where((number > 0.0)[:, None], total * over[:, None], centre)
        tl.store(centres + cell, centre)
        tl.debug_barrier()
    origin = tl.load(centres + d)
    away = centre - origin[None, :]
    M = tl.load(metric + pid * (BD * BD) + d[:, None] * BD + d[None, :])
    seen = dot(away, M, None, PRECISION)
    half = 0.5 * tl.sum(away * seen, 1)
    high, low = parts(seen, weights.dtype.element_ty)
    weights += pid * (2 * KP * BD)
    tl.store(weights + cell, high)
    tl.store(weights + KP * BD + cell, low)
    full = high.to(tl.float32)
    if weights.dtype.element_ty != tl.float32:
        full += low.to(tl.float32)
    tl.store(biases + pid * KP + c, half + tl.sum(full * origin[None, :], 1))
