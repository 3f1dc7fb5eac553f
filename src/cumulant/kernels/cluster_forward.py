"""Forward kernels of cluster attention: statistics, choice of clusters, attention. Formulas: cluster_parts.py.

Shape legend: that of cluster_parts.py; a tile is M queries of one head that share their near clusters.

Cost a head, in multiply-adds: statistics L D E; choice 3 L K D (twice that where K is more than a chunk); attention
L (3 K D + K E + R D E + T m (D + E)), with R = K unless responses are limited. Bytes: k and v twice (the second time
from the L2 cache), q twice, the output, n K gains written and read back, and the matrices, K D E, once for each tile
out of the L2 cache: n = 128 rows make 128 operations a byte of it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from .cluster_parts import (
    LOG2E,
    NOTHING,
    counted,
    finite,
    masses,
    near_tile,
    origin_of,
    packed,
    parts,
    ranks,
    squared,
    store_tile,
    tile,
    value_means,
    without_near,
)
from .products import cast, dot
from .tokens import head, reference

COUNTS = {"length_q", "length_k", "heads", "clusters", "tiles", "blocks", "splits", "span", "T", "R"}
STRIDES = {f"{x}_{s}" for x in ("q", "k", "v", "o", "g", "dq", "dk", "dv") for s in "bht"}


def kernel(function):
    """triton.jit, without recompiling for a length, a batch or a stride."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[x for x in names if x in COUNTS | STRIDES])


@kernel
def statistics(
    k, v, starts, vectors, factors, matrices, k_b, k_h, k_t, v_b, v_h, v_t, length_k, heads, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP, B H). Means, then centred second moments, of the tokens of one cluster, and their factors."""
    c, pid = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(starts + c), tl.load(starts + c + 1)
    d, e, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    dtype: tl.constexpr = k.dtype.element_ty
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    over = 1.0 / tl.maximum(end - first, 1).to(tl.float32)
    k_sum, v_sum = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
    for at in tl.range(first, end, N, num_stages=STAGES):
        k_sum += tile(k, at + n, k_t, d, end, D, BD).to(tl.float32)
        v_sum += tile(v, at + n, v_t, e, end, E, BE).to(tl.float32)
    k_mean, v_mean = tl.sum(k_sum, 0) * over, tl.sum(v_sum, 0) * over
    S, P = tl.zeros((BD, BE), tl.float32), tl.zeros((N, BD), tl.float32)
    for at in tl.range(first, end, N, num_stages=STAGES):
        inside = (at + n < end)[:, None]
        dk = tl.where(inside, tile(k, at + n, k_t, d, end, D, BD).to(tl.float32) - k_mean[None, :], 0.0)
        dv = tl.where(inside, tile(v, at + n, v_t, e, end, E, BE).to(tl.float32) - v_mean[None, :], 0.0)
        S = dot(tl.trans(cast(dk, dtype)), cast(dv, dtype), S, PRECISION)
        P += dk * dk
    row = pid.to(tl.int64) * tl.num_programs(0) + c
    vectors += row * (2 * BD + BE)
    spread = tl.sum(P, 0) * over
    tl.store(vectors + d, k_mean)
    tl.store(vectors + BD + d, spread)
    tl.store(vectors + 2 * BD + e, v_mean)
    origin = reference(k, k_t, length_k, d, D)
    high, low = parts((k_mean - origin) * (scale * LOG2E), dtype)
    factors += row * (4 * BD + 2 * BE)
    tl.store(factors + d, high)
    tl.store(factors + BD + d, low)
    tl.store(factors + 2 * BD + d, cast(spread * (scale * scale), dtype))
    tl.store(factors + 3 * BD + d, cast(origin, dtype))
    high, low = parts(v_mean, dtype)
    tl.store(factors + 4 * BD + e, high)
    tl.store(factors + 4 * BD + BE + e, low)
    cell = d[:, None] * BE + e[None, :]
    tl.store(matrices + row * (BD * BE) + cell, cast(S * (over * scale), dtype))


@triton.jit
def ranks_in_memory(scores, c, KP: tl.constexpr, CK: tl.constexpr):
    """`ranks` of scores (KP,) that lie in memory, CK of them at a time."""
    mine = tl.load(scores + c)[None, :]
    count = tl.zeros((KP,), tl.int32)
    for chunk in range(0, KP, CK):
        at = chunk + tl.arange(0, CK)
        other = tl.load(scores + at)[:, None]
        before = (other > mine) | ((other == mine) & (at[:, None] < c[None, :]))
        count += tl.sum(before.to(tl.int32), 0)
    return count


@kernel
def choose(
    q, logs, vectors, factors, scores, near, responding, q_b, q_h, q_t, length_q, heads, clusters, T, R, scale,
    CLOSURE: tl.constexpr, BY_ERROR: tl.constexpr, NEAR: tl.constexpr, GIVEN: tl.constexpr, LISTED: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
    SQUARE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). Near clusters of each tile, and those that respond, where clusters make several chunks.

    Near are the T with the largest sum over rows of probability (or of that times x); of the others those R respond
    whose sum of probability times f is largest. Sums pass through `scores` (B H, tiles, 2, KP). GIVEN: the near
    clusters are known.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    row, d = index * M + tl.arange(0, M), tl.arange(0, BD)
    q = head(q, pid // heads, pid % heads, 0, q_b, q_h, q_t, UNIT)
    vectors += pid.to(tl.int64) * (KP * (2 * BD + BE))
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
    squares = squared(rows, SQUARE)
    scores += slot * (2 * KP)
    top, total = tl.full((M,), NOTHING, tl.float32), tl.zeros((M,), tl.float32)
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        z, _, _ = masses(rows, squares, factors, vectors, logs, c, d, scale, CLOSURE, BD, BE, PRECISION)
        higher = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp2(top - finite(higher)) + tl.sum(tl.exp2(z - finite(higher)[:, None]), 1)
        top = higher
    over = tl.where(row < length_q, 1.0 / total, 0.0)  # rows beyond the last query choose nothing
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        z, x, gain = masses(rows, squares, factors, vectors, logs, c, d, scale, CLOSURE, BD, BE, PRECISION)
        share = tl.exp2(z - finite(top)[:, None]) * over[:, None]
        here = c < clusters
        if NEAR and not GIVEN:
            tl.store(scores + c, counted(tl.sum(share * x if BY_ERROR else share, 0), here))
        if LISTED:
            tl.store(scores + KP + c, counted(tl.sum(share * gain, 0), here))
    tl.debug_barrier()
    c = tl.arange(0, KP)
    at_once: tl.constexpr = min(CK, 16384 // KP)  # comparisons that fit the registers
    if NEAR:
        near += slot * T
        if not GIVEN:
            rank = ranks_in_memory(scores, c, KP, at_once)
            tl.store(near + rank, c, mask=rank < T)
            tl.debug_barrier()
    if LISTED:
        if NEAR:
            for i in range(T):
                tl.store(scores + KP + tl.maximum(tl.load(near + i), 0), -1.0, mask=tl.load(near + i) >= 0)
            tl.debug_barrier()
        rank = ranks_in_memory(scores + KP, c, KP, at_once)
        tl.store(responding + slot * R + rank, c, mask=rank < R)


@kernel
def attend(
    q, k, v, o, rounding, lse, starts, logs, vectors, factors, matrices, near, responding, gains, tops,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    length_q, heads, clusters, blocks, T, R, scale,
    CLOSURE: tl.constexpr, CHOOSE: tl.constexpr, BY_ERROR: tl.constexpr, KEEP: tl.constexpr, NEAR: tl.constexpr,
    RESPONSE: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
    SQUARE: tl.constexpr, STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). Output of M queries, and their log2 of the sum of all weights.

    CHOOSE: near and responding clusters are found here, by the rule of `choose`, and written; else they are read.

    RESPONSE: 0 means only, 1 all clusters respond, 2 those listed, 3 all with one matrix, that at `matrices`. Gains p f
    of a tile go through memory, (KP, M), so that a row of them can be loaded beside each matrix; `tops` holds what each
    chunk's are relative to. With one matrix only their sum is needed. KEEP: what the rounding of the output loses is
    written too.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, M)
    row, d, e = index * M + line, tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    q = head(q, pid // heads, pid % heads, 0, q_b, q_h, q_t, UNIT)
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    o = head(o, pid // heads, pid % heads, 0, o_b, o_h, o_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    vectors += pid.to(tl.int64) * (KP * (2 * BD + BE))
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    matrices += pid.to(tl.int64) * ((1 if RESPONSE == 3 else KP) * BD * BE)
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    near += slot * T
    gains += slot * (KP * M)
    tops += slot * ((KP // CK) * M)
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)

    top, total = tl.full((M,), NOTHING, tl.float32), tl.zeros((M,), tl.float32)
    out = tl.zeros((M, BE), tl.float32)
    answering = tl.zeros((M,), tl.float32)
    squares = squared(rows, SQUARE)
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        z, x, gain = masses(rows, squares, factors, vectors, logs, c, d, scale, CLOSURE, BD, BE, PRECISION)
        if CHOOSE:
            share = tl.exp2(z - tl.max(z, 1)[:, None])
            share *= tl.where(row < length_q, 1.0 / tl.sum(share, 1), 0.0)[:, None]
            far = c < clusters
            if RESPONSE == 2:  # before anything else, so that shares and gains need not be kept
                answers = tl.sum(share * gain, 0)
            if NEAR:
                rank = ranks(counted(tl.sum(share * x if BY_ERROR else share, 0), far), c)
                tl.store(near + rank, c, mask=rank < T)
                far = far & (rank >= T)
                z = tl.where(far[None, :], z, NOTHING)
            if RESPONSE == 2:
                rank = ranks(counted(answers, far), c)
                tl.store(responding + slot * R + rank, c, mask=rank < R)
        elif NEAR:
            z = without_near(z, near, c, T)
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.exp2(z - finite(higher)[:, None])
        fading = tl.exp2(top - finite(higher))
        total = total * fading + tl.sum(p, 1)
        top = higher
        if RESPONSE == 3:
            answering = answering * fading + tl.sum(p * gain, 1)
        elif RESPONSE:
            tl.store(gains + c[None, :] * M + line[:, None], packed(p * gain, gains.dtype.element_ty))
            if KP > CK:
                tl.store(tops + (chunk // CK) * M + line, finite(top))
        high, low = value_means(factors, c, e, BD, BE)
        p_high, p_low = parts(p, dtype)
        out = dot(p_high, high, out * fading[:, None], PRECISION)
        if dtype != tl.float32:
            out = dot(p_high, low, out, PRECISION)
            out = dot(p_low, high, out, PRECISION)
    cell = d[:, None] * BE + e[None, :]
    if RESPONSE == 1 or RESPONSE == 2:
        tl.debug_barrier()
        count = clusters
        if RESPONSE == 2:
            responding += slot * R
            count = R
        for i in tl.range(0, count, num_stages=STAGES):
            c = i
            if RESPONSE == 2:
                c = tl.load(responding + i)
            S = tl.load(matrices + c * (BD * BE) + cell)
            g = tl.load(gains + c * M + line).to(tl.float32)
            if KP > CK:
                g *= tl.exp2(tl.load(tops + (c // CK) * M + line) - finite(top))
            out += g[:, None] * dot(rows, S, None, PRECISION)
    if NEAR:
        if CHOOSE:
            tl.debug_barrier()
        a = scale * LOG2E
        away = a * tl.sum(rows.to(tl.float32) * origin_of(factors, d, BD)[None, :], 1)
        for i in tl.range(0, T * blocks, num_stages=NEAR_STAGES):
            c = tl.load(near + i // blocks)
            first = tl.load(starts + tl.maximum(c, 0)) + (i % blocks) * N
            end = tl.where(c >= 0, tl.load(starts + tl.maximum(c, 0) + 1), 0)
            token = first + tl.arange(0, N)
            keys = near_tile(k, token, k_t, d, end, D, BD, EVEN)
            values = near_tile(v, token, v_t, e, end, E, BE, EVEN)
            u = dot(rows, tl.trans(keys), None, PRECISION)
            if not EVEN:
                u = tl.where((token < end)[None, :], u, NOTHING)
            higher = tl.maximum(top, tl.max(u, 1) * a - away)  # a > 0
            p = tl.exp2(u * a - (finite(higher) + away)[:, None])
            fading = tl.exp2(top - finite(higher))
            total = total * fading + tl.sum(p, 1)
            if RESPONSE == 3:
                answering *= fading
            out = dot(cast(p, dtype), values, out * fading[:, None], PRECISION)
            top = higher
    if RESPONSE == 3:
        out += answering[:, None] * dot(rows, tl.load(matrices + cell), None, PRECISION)
    out *= (1.0 / total)[:, None]
    store_tile(o, out, row, o_t * UNIT, e, length_q, E, BE)
    if KEEP:
        rounding = head(rounding, pid // heads, pid % heads, 0, o_b, o_h, o_t, UNIT)
        store_tile(rounding, out - cast(out, dtype).to(tl.float32), row, o_t * UNIT, e, length_q, E, BE)
    tl.store(lse + pid.to(tl.int64) * length_q + row, top + tl.log2(total), mask=row < length_q)
