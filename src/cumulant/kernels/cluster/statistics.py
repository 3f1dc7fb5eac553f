"""Kernels for the statistics of clusters, of each and pooled. Formulas and shape legend: parts.py.

Cost a head: L D E multiply-adds; k and v are read once.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import fold, head, kernel, minus
from .parts import LOG2E, origin_of, parts, picked_tile, placed, store_picked, widened


@triton.jit
def sample(x, stride, order, first, count, part, columns, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """One of the `count` tokens from `first` on, `part` quarters of the way: (width,), 0 where there is none."""
    at = first + (count // 4).to(tl.int64) * part
    at = placed(order, at, count > 0, ORDERED, False)
    return tl.load(x + at.to(tl.int64) * stride + columns, mask=columns < tl.where(count > 0, WIDTH, 0), other=0.0)


@triton.jit
def samples(x, stride, order, first, count, columns, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """Four tokens, evenly spaced."""
    x0 = sample(x, stride, order, first, count, 0, columns, WIDTH, ORDERED)
    x1 = sample(x, stride, order, first, count, 1, columns, WIDTH, ORDERED)
    x2 = sample(x, stride, order, first, count, 2, columns, WIDTH, ORDERED)
    return x0, x1, x2, sample(x, stride, order, first, count, 3, columns, WIDTH, ORDERED)


@triton.jit
def common_point(x0, x1, x2, x3):
    """A point (width,) that all tokens are measured from, by four of them: one of these, or 0.

    0 where these four differ in sign or by more than a third. Differences of 16-bit numbers then need no rounding,
    because none is taken or because all tokens lie within a factor of 2 where four are that much alike: products of
    them are exact. Tokens that do not are so near to 0 that float32 holds what cancels. Of tokens one deviation from 0
    four are alike by chance in a column of 200, of those three away in one of 13.
    """
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    low, high = tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3)), tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    alike = (low * high > 0.0) & ((3.0 * high <= 4.0 * low) | (3.0 * low >= 4.0 * high))
    return tl.where(alike, x1, 0.0)


@triton.jit
def sample_mean(x, first, end, stride, order, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ORDERED: tl.constexpr):
    """The mean of 32 tokens, evenly spaced from `first` to `end`, but for the extremes, often outliers: (BLOCK,)."""
    some = first + (tl.arange(0, 32).to(tl.int64) * (end - first)) // 32
    at = placed(order, some, some < end, ORDERED, False)
    found = picked_tile(x, at, some < end, stride, columns, WIDTH, BLOCK, False).to(tl.float32)
    return (tl.sum(found, 0) - tl.max(found, 0) - tl.min(found, 0)) * (1.0 / 30)


@triton.jit
def points_of(
    k, v, k_t, v_t, order, start, count, d, e, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """`common_point` of the keys and of the values of `count` tokens from `start` on."""
    k0, k1, k2, k3 = samples(k, k_t, order, start, count, d, D, ORDERED)
    v0, v1, v2, v3 = samples(v, v_t, order, start, count, e, E, ORDERED)
    return common_point(k0, k1, k2, k3), common_point(v0, v1, v2, v3)


@kernel
def points(
    k, v, bounds, order, found, k_b, k_h, k_t, v_b, v_h, v_t, length_k, heads, clusters, per,
    ORDERED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, KP: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (B H). What `statistics` measures all tokens of a head from, (B H, 2 BD + BE): the origin of its keys, and
    the `common_point` of keys and of values."""
    pid, d, e = tl.program_id(0), tl.arange(0, BD), tl.arange(0, BE)
    order += (pid // per).to(tl.int64) * length_k
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    count = length_k
    if ORDERED:
        count = tl.load(bounds + (pid // per) * (2 * KP + 2) + KP + clusters)
    k_point, v_point = points_of(k, v, k_t, v_t, order, 0 * count, count, d, e, D, E, BD, BE, ORDERED)
    found += pid.to(tl.int64) * (2 * BD + BE)
    tl.store(found + d, cast(sample_mean(k, 0 * count, count, k_t, order, d, D, BD, ORDERED), k.dtype.element_ty))
    tl.store(found + BD + d, k_point)
    tl.store(found + 2 * BD + e, v_point)


@triton.jit
def moved(x, y, token, place, there, x_t, y_t, BACK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows `place` of x to rows `token` of y; BACK: the other way."""
    d = tl.arange(0, BD)
    if BACK:
        store_picked(x, picked_tile(y, token, there, y_t, d, D, BD, False), place, there, x_t, d, D, BD)
    else:
        store_picked(y, picked_tile(x, place, there, x_t, d, D, BD, False), token, there, y_t, d, D, BD)


@kernel
def reorder(
    k, v, to_k, to_v, order, k_b, k_h, k_t, v_b, v_h, v_t, to_k_b, to_k_h, to_k_t, to_v_b, to_v_h, to_v_t,
    length_k, heads, per, BACK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of N tokens, B H). Tokens of k and v in the order of the clusters, to_k and to_v; BACK: those of the
    latter as they were, k and v."""
    pid = tl.program_id(1)
    b, h = pid // heads, pid % heads
    token = tl.program_id(0) * N + tl.arange(0, N)
    there = token < length_k
    place = tl.load(order + (pid // per).to(tl.int64) * length_k + token, mask=there, other=0)
    k, to_k = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(to_k, b, h, 0, to_k_b, to_k_h, to_k_t, UNIT)
    v, to_v = head(v, b, h, 0, v_b, v_h, v_t, UNIT), head(to_v, b, h, 0, to_v_b, to_v_h, to_v_t, UNIT)
    moved(k, to_k, token, place, there, k_t * UNIT, to_k_t * UNIT, BACK, D, BD)
    moved(v, to_v, token, place, there, v_t * UNIT, to_v_t * UNIT, BACK, E, BE)


@kernel
def statistics(
    k, v, bounds, order, points, vectors, factors, matrices, k_b, k_h, k_t, v_b, v_h, v_t,
    length_k, heads, clusters, per, scale,
    ORDERED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, KP: tl.constexpr,
    N: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, GIVEN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid (KP, B H). Means and centred second moments of the tokens of one cluster, and their factors.

    Tokens are read once: they are measured from a `common_point` (float32: from the mean of a sample), and what that is
    off their mean is taken away from the moments at the end. GIVEN: these points are in `points`. EVEN: all clusters
    are whole blocks of N, but for those without tokens. CAUSAL: no other token is looked at but the first of all,
    the origin, and of a token that is not a number only the mean of the keys knows.
    """
    c, pid = tl.program_id(0), tl.program_id(1)
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    first, end = tl.load(bounds + c), tl.load(bounds + (KP + 1) + c)
    d, e, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    dtype: tl.constexpr = k.dtype.element_ty
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    over = 1.0 / tl.maximum(end - first, 1).to(tl.float32)
    row = pid.to(tl.int64) * tl.num_programs(0) + c
    factors += row * (4 * BD + 2 * BE)
    if GIVEN:
        points += pid.to(tl.int64) * (2 * BD + BE)
        k_point, v_point = tl.load(points + BD + d).to(tl.float32), tl.load(points + 2 * BD + e).to(tl.float32)
    else:
        count = length_k
        if ORDERED:  # tokens that take no part may hold anything
            count = tl.load(bounds + KP + clusters)
        start = first * 0
        if CAUSAL:
            start, count = first, end - first
            origin = sample(k, k_t, order, 0, tl.minimum(length_k, 1), 0, d, D, ORDERED)
        else:
            origin = cast(sample_mean(k, start, start + count, k_t, order, d, D, BD, ORDERED), dtype)
        tl.store(factors + 3 * BD + d, origin)  # read again at the end: in the loop there are no registers left for it
        if dtype == tl.float32:
            k_point = sample_mean(k, first, end, k_t, order, d, D, BD, ORDERED)
            v_point = sample_mean(v, first, end, v_t, order, e, E, BE, ORDERED)
        else:
            k_point, v_point = points_of(k, v, k_t, v_t, order, start, count, d, e, D, E, BD, BE, ORDERED)
    S, P = tl.zeros((BD, BE), tl.float32), tl.zeros((FOLD, BD), tl.float32)
    k_sum, v_sum = tl.zeros((FOLD, BD), tl.float32), tl.zeros((FOLD, BE), tl.float32)
    FIRST: tl.constexpr = ORDERED or dtype == tl.float32  # the product before the sums: whichever order spills less
    if ORDERED:  # where tokens lie is read a turn before them: what waits for it cannot be asked for ahead
        coming = placed(order, first + n, first + n < end, True, False)
    for at in tl.range(first, end, N, num_stages=STAGES):
        there = at + n < tl.where(EVEN, at + N, end)
        place = at + n
        if ORDERED:
            place = coming
            coming = placed(order, at + N + n, at + N + n < end, True, False)
        x = picked_tile(k, place, there, k_t, d, D, BD, EVEN)
        y = picked_tile(v, place, there, v_t, e, E, BE, EVEN)
        # Where four tokens are alike by chance differences are rounded all the same. Sums and products are then of the
        # same numbers, so that S stays centred.
        dk, dv = minus(x, k_point, there), minus(y, v_point, there)
        if FIRST:
            S = dot(tl.trans(dk), dv, S, PRECISION)
        wide = widened(dk)
        k_sum += fold(wide, FOLD)
        v_sum += fold(widened(dv), FOLD)
        P += fold(wide * wide, FOLD)
        if not FIRST:
            S = dot(tl.trans(dk), dv, S, PRECISION)
    k_off, v_off = tl.sum(k_sum, 0) * over, tl.sum(v_sum, 0) * over
    k_mean, v_mean = k_point + k_off, v_point + v_off
    spread = tl.maximum(tl.sum(P, 0) * over - k_off * k_off, 0.0)
    S = S * over - k_off[:, None] * v_off[None, :]
    if CAUSAL:
        flaw = tl.sum(k_mean * 0.0) + tl.sum(v_mean * 0.0)  # 0, or not a number
        k_mean += flaw
        v_mean, spread = tl.where(flaw == 0.0, v_mean, 0.0), tl.where(flaw == 0.0, spread, 0.0)
        S = tl.where(flaw == 0.0, S, 0.0)
    vectors += row * (2 * BD + BE)
    tl.store(vectors + d, k_mean)
    tl.store(vectors + BD + d, spread)
    tl.store(vectors + 2 * BD + e, v_mean)
    if GIVEN:
        origin = tl.load(points + d)
        tl.store(factors + 3 * BD + d, origin)
        away = k_mean - origin.to(tl.float32)
    else:
        tl.debug_barrier()
        away = k_mean - origin_of(factors, d, BD)
    high, low = parts(away * (scale * LOG2E), dtype)
    tl.store(factors + d, high)
    tl.store(factors + BD + d, low)
    tl.store(factors + 2 * BD + d, cast(spread * (scale * scale), dtype))
    high, low = parts(v_mean, dtype)
    tl.store(factors + 4 * BD + e, high)
    tl.store(factors + 4 * BD + BE + e, low)
    cell = d[:, None] * BE + e[None, :]
    tl.store(matrices + row * (BD * BE) + cell, cast(S * scale, dtype))


@kernel
def pool(matrices, bounds, pooled, per, KP: tl.constexpr, CK: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Grid (SIZE / N, B H). The mean of S by the sizes of the clusters, (B H, 2, SIZE): rounded, and what that lost."""
    cell, pid = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    bounds += (pid // per) * (2 * KP + 2)
    matrices += pid * (KP * SIZE)
    total, tokens = tl.zeros((N,), tl.float32), 0.0
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        size = (tl.load(bounds + (KP + 1) + c) - tl.load(bounds + c)).to(tl.float32)
        total += tl.sum(size[:, None] * tl.load(matrices + c[:, None] * SIZE + cell[None, :]).to(tl.float32), 0)
        tokens += tl.sum(size)
    high, low = parts(total * (1.0 / tl.maximum(tokens, 1.0)), pooled.dtype.element_ty)
    tl.store(pooled + pid * (2 * SIZE) + cell, high)
    tl.store(pooled + pid * (2 * SIZE) + SIZE + cell, low)
