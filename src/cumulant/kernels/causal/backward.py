"""Triton kernels of causal cumulant attention, backward: `query_gradients` -> `suffixes` -> `key_gradients`.

The first walks each part forwards, as `outputs` does, writes dq and sums what the rows of a part mean to the keys
before it; the second sums those over all later parts; the third walks each part backwards and writes dk, dv. The
sums are, with f = scale q at order 2 and a hat for "times G": R = sum f do^T hat, r = sum (1 - ubar) do hat,
s = sum y / W - sum zbar f1 hat, and at order 3 s2 = - sum zbar f2 hat. Formulas and shape legend: host.py.

The walks of order 3, where all these sums would spill registers, are in third.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import ahead, head, kernel, sequence
from .parts import (
    add_tile,
    after_first_tile,
    centred,
    each_row,
    everywhere,
    four,
    halves,
    inverse,
    keep,
    load,
    load_sums,
    lost,
    outer,
    quad,
    read_keys,
    row_sum,
    settled,
    store,
    times,
    triangle,
    two,
    unquad,
)  # fmt: skip


@triton.jit
def store_rows(sums, R, R2, r, s, s2, i, j, ORDER: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    matrix, vectors = i[:, None] * BE + j[None, :], sums + (ORDER - 1) * BD * BE
    tl.store(sums + matrix, R)
    tl.store(vectors + j, r)
    tl.store(vectors + BE + i, s)
    if ORDER == 3:
        tl.store(sums + BD * BE + matrix, R2)
        tl.store(vectors + BE + BD + i, s2)


@triton.jit
def load_rows(sums, i, j, there, ORDER: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """What `store_rows` left, or 0 unless `there` (1 or 0). R2 = R and s2 = s at order 2."""
    matrix, vectors = i[:, None] * BE + j[None, :], sums + (ORDER - 1) * BD * BE
    rows = i < there * BD
    R = tl.load(sums + matrix, mask=rows[:, None], other=0.0)
    r = tl.load(vectors + j, mask=j < there * BE, other=0.0)
    s = tl.load(vectors + BE + i, mask=rows, other=0.0)
    R2, s2 = R, s
    if ORDER == 3:
        R2 = tl.load(sums + BD * BE + matrix, mask=rows[:, None], other=0.0)
        s2 = tl.load(vectors + BE + BD + i, mask=rows, other=0.0)
    return R, R2, r, s, s2


@triton.jit
def store_gradient(x, x_t, at, length, length_k, weights, unit, columns, tile, SCALED: tl.constexpr,
                   WEIGHTED: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                   N: tl.constexpr):  # fmt: skip
    """Gradient of the tokens at, at + 1, ... in units of `unit` if SCALED: times their weights, 0 from length_k on."""
    where = at + tl.arange(0, N)
    if WEIGHTED:
        tile *= weights[:, None]
    if SCALED:
        tile *= 1.0 / unit
    if MASKED:
        tile = tl.where((where < length_k)[:, None], tile, 0.0)
    store(x, x_t, at, where < length, columns, tile, WIDTH, BLOCK, N)


@triton.jit
def row_over(rows, plane, at, live, length_k, WEIGHTED: tl.constexpr, N: tl.constexpr):
    """1 / W of the rows at, at + 1, ...; 0 where nothing counts, of those that are not live too with weights."""
    n = at + tl.arange(0, N)
    if WEIGHTED:
        return tl.load(rows + 2 * plane + n, mask=live, other=0.0)
    else:
        return inverse(tl.minimum(n + 1, length_k).to(tl.float32))


@triton.jit
def first_unit(rows, plane, start, length_q, length_k, DOT: tl.constexpr, SUM: tl.constexpr, WEIGHTED: tl.constexpr,
               N: tl.constexpr):  # fmt: skip
    """Sums of float16 are in units of 1 / W of a part's first tile, so that operands stay in range; others in 1."""
    unit = tl.full((), 1.0, tl.float32)
    if DOT == tl.float16 and not SUM:
        unit = tl.minimum(start + N, length_k).to(tl.float32)
        if WEIGHTED:
            mark = rows + 2 * plane + tl.minimum(start + N, length_q) - 1
            unit = inverse(tl.load(mark, mask=start < length_q, other=0.0))
        unit = tl.where(unit > 0, unit, 1.0)
    return unit


@kernel
def query_gradients(
    q, k, v, w, g, dq, means, rows, sums, state, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, rows_b, rows_h,
    plane, length_q, length_k, heads, span, splits, scale,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SUM: tl.constexpr, CARRY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, STATE: tl.constexpr, SUMS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B Hq splits). dq of one part of one query head; what its rows mean to keys and, with CARRY, their sums."""
    DOT: tl.constexpr = k.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    part, hq = (pid % splits).to(tl.int32), pid // splits
    b, hq = hq // (heads * GROUP), hq % (heads * GROUP)
    h = hq // GROUP
    first_q, length_q = sequence(offsets_q, b, length_q, RAGGED)
    first_k, length_k = sequence(offsets_k, b, length_k, RAGGED)
    length_k = tl.minimum(length_k, length_q)
    q = head(q, b, hq, first_q, q_b, q_h, q_t, UNIT)
    g = head(g, b, hq, first_q, g_b, g_h, g_t, UNIT)
    dq = head(dq, b, hq, first_q, dq_b, dq_h, dq_t, UNIT)
    k = head(k, b, h, first_k, k_b, k_h, k_t, UNIT)
    v = head(v, b, h, first_k, v_b, v_h, v_t, UNIT)
    q_t, k_t, v_t, g_t, dq_t = q_t * UNIT, k_t * UNIT, v_t * UNIT, g_t * UNIT, dq_t * UNIT
    rows += b * rows_b + hq * rows_h + first_q
    means += b * rows_b + hq * rows_h + first_q
    if WEIGHTED:
        w += b * w_b + first_k * w_t
    start = part * span
    end = tl.minimum(start + span, length_q)
    i, j, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    slot = (b * heads + h) * splits + part
    W, c, d, a, e, S, _P, _T = load_sums(state + slot * STATE, i, j, tl.where(start > 0, 1, 0), ORDER, BD, BE)
    a, e, c, d = quad(a), quad(e), settled(cast(c, DOT)), settled(cast(d, DOT))
    row_unit = tl.full((), 1.0, tl.float32)
    R = tl.zeros((BD, BE), tl.float32)
    r = tl.zeros((BE, 16), tl.float32)
    s = tl.zeros((BD, 16), tl.float32)
    past = triangle(N, False, DOT)
    begin = after_first_tile(w, w_t, start, end, length_k, DOT, WEIGHTED, N)
    EARLY: tl.constexpr = 2 if BD <= 64 else 1
    for FIRST in tl.static_range(1 if DOT != tl.float32 else 0, -1, -1):  # the first tile, then all others
        first, last = start if FIRST else begin, begin if FIRST else end
        # The LLVM of Triton 3.9 breaks on one stage for narrow heads; wide ones have no shared memory for two.
        for at in tl.range(first, last, N, disable_licm=True, num_stages=EARLY if FIRST else None):
            ahead(k, k_t, at + N, length_k, N)
            ahead(v, v_t, at + N, length_k, N)
            ahead(q, q_t, at + N, end, N)
            ahead(g, g_t, at + N, end, N)
            _x, xw, y, _yw, weights, total = read_keys(
                k, v, w, k_t, v_t, w_t, at, length_k, c, d, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
            )
            # Operands of float16 are kept in its range: averages over the past instead of sums.
            unit, W_past = (inverse(W), W) if DOT == tl.float16 else (1.0, 1.0)
            a16, e16, S16 = halves(a * unit, DOT), halves(e * unit, DOT), cast(S * unit, DOT)
            a, e, S, _a, _S = add_tile(a, e, S, a, S, xw, xw, y, weights, ORDER, WEIGHTED, N, PRECISION)
            Wi = tl.minimum(at + n + 1, length_k).to(tl.float32)
            if WEIGHTED:
                Wi = W + tl.cumsum(weights, 0)
            W += total
            live = at + n < end
            over = tl.where(live, inverse(Wi), 0.0)
            gain = tl.where(over > 0, 1.0, 0.0) if SUM else over
            f = load(q, q_t, at, live, i, D, BD, N)
            do = load(g, g_t, at, live, j, E, BE, N)
            counted = two(weights, DOT) if WEIGHTED else two(tl.zeros((N,), tl.float32) + 1.0, DOT)

            mean = tl.load(means + at + n, mask=live, other=0.0)
            du = dot(do, tl.trans(y), None, PRECISION)
            du_mean = row_sum(do, e16, keep(du, past, DOT), counted, W_past, PRECISION)
            if FIRST:
                du_mean += 0.5 * tl.sum(dot(lost(du, past, DOT), counted, None, PRECISION), 1)
            du_mean *= over
            du -= du_mean[:, None]
            df = outer(-du_mean, a16, dot(do, tl.trans(S16), None, PRECISION), N, PRECISION) * W_past
            if FIRST:
                df = dot(lost(du, past, DOT), xw, df, PRECISION)
            df = dot(keep(du, past, DOT), xw, df, PRECISION) * (gain * scale)[:, None]
            store(dq, dq_t, at, live, i, df, D, BD, N)

            alpha = (1.0 - mean) * gain
            tl.store(rows + at + n, alpha, mask=live)
            tl.store(rows + plane + at + n, -du_mean, mask=live)
            if WEIGHTED:
                tl.store(rows + 2 * plane + at + n, over, mask=live)
            if CARRY:
                if DOT == tl.float16 and not SUM:  # sums in units of 1 / W of the first tile, again for the range
                    row_unit = tl.where(at == start, tl.where(W > 0, W, 1.0), row_unit)
                    gain, alpha = gain * row_unit, alpha * row_unit
                f = times(f, gain * scale)
                R = dot(tl.trans(f), do, R, PRECISION)
                s = dot(tl.trans(f), four(-du_mean, DOT), s, PRECISION)
                r = dot(tl.trans(do), four(alpha, DOT), r, PRECISION)

    if CARRY:
        sums += (slot * GROUP + hq % GROUP) * SUMS
        unit = 1.0 / row_unit
        if start < end:
            store_rows(sums, R * unit, R, unquad(r) * unit, unquad(s) * unit, unquad(s), i, j, ORDER, BD, BE)


@kernel
def suffixes(
    sums, later, state, offsets_q, length_q, heads, span, splits,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    STATE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Grid (B H). The sums of all parts after each one, about its reference point, over the heads of the group."""
    pid = tl.program_id(0).to(tl.int64)
    _, length_q = sequence(offsets_q, pid // heads, length_q, RAGGED)
    i, j = tl.arange(0, BD), tl.arange(0, BE)
    last = tl.cdiv(length_q, span) - 1
    R = tl.zeros((BD, BE), tl.float32)
    R2 = tl.zeros((BD, BE), tl.float32)
    r, s = tl.zeros((BE,), tl.float32), tl.zeros((BD,), tl.float32)
    s2 = tl.zeros((BD,), tl.float32)
    for step in tl.range(0, last, num_stages=2):
        at = pid * splits + last - step
        for member in range(GROUP):
            of = sums + (at * GROUP + member) * SUMS
            R1, A2, r1, s1, t2 = load_rows(of, i, j, tl.full((), 1, tl.int32), ORDER, BD, BE)
            R, r, s = R + R1, r + r1, s + s1
            if ORDER == 3:
                R2, s2 = R2 + A2, s2 + t2
        point = state + at * STATE + (ORDER - 1) * BD * BE
        p = tl.load(point + i) - tl.load(point - STATE + i)
        t = tl.load(point + BD + j) - tl.load(point - STATE + BD + j)
        r -= tl.sum(p[:, None] * R, 0)
        if ORDER == 3:
            r += tl.sum((p * p)[:, None] * R2, 0)
            R -= 2.0 * p[:, None] * R2
            s -= 2.0 * p * s2
            s2 -= tl.sum(R2 * t[None, :], 1)
        s -= tl.sum(R * t[None, :], 1)
        store_rows(later + (at - 1) * SUMS, R, R2, r, s, s2, i, j, ORDER, BD, BE)


@kernel
def key_gradients(
    q, k, v, w, g, dk, dv, rows, later, state, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    rows_b, rows_h, plane, length_q, length_k, heads, span, splits, scale,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, SUMS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H splits). dk and dv of one part of one key head, from the last tile to the first."""
    DOT: tl.constexpr = k.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    part, h = (pid % splits).to(tl.int32), pid // splits
    b, h = h // heads, h % heads
    first_q, length_q = sequence(offsets_q, b, length_q, RAGGED)
    first_k, length = sequence(offsets_k, b, length_k, RAGGED)
    length_k = tl.minimum(length, length_q)  # later keys are seen by no row: their gradient is 0
    k = head(k, b, h, first_k, k_b, k_h, k_t, UNIT)
    v = head(v, b, h, first_k, v_b, v_h, v_t, UNIT)
    dk = head(dk, b, h, first_k, dk_b, dk_h, dk_t, UNIT)
    dv = head(dv, b, h, first_k, dv_b, dv_h, dv_t, UNIT)
    k_t, v_t, dk_t, dv_t = k_t * UNIT, v_t * UNIT, dk_t * UNIT, dv_t * UNIT
    rows += b * rows_b + h * GROUP * rows_h + first_q
    if WEIGHTED:
        w += b * w_b + first_k * w_t
    start = part * span
    end = tl.where(start < length, tl.minimum(start + span, tl.maximum(length, length_q)), start)
    i, j, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    slot = (b * heads + h) * splits + part
    point = state + slot * STATE + (ORDER - 1) * BD * BE
    there = tl.where(start < length_q, 1, 0)
    c = cast(tl.load(point + i, mask=i < there * BD, other=0.0), DOT)
    d = cast(tl.load(point + BD + j, mask=j < there * BE, other=0.0), DOT)
    SCALED: tl.constexpr = DOT == tl.float16 and not SUM
    unit = first_unit(rows, plane, start, length_q, length_k, DOT, SUM, WEIGHTED, N)
    R, _R2, r, s, _s2 = load_rows(later + slot * SUMS, i, j, tl.where(start + span < length_q, 1, 0), ORDER, BD, BE)
    R, r, s = R * unit, quad(r * unit), quad(s * unit)
    steps = tl.cdiv(end - start, N)
    seen = triangle(N, True, DOT)  # (key, row)
    begin = after_first_tile(w, w_t, start, end, length_k, DOT, WEIGHTED, N)
    others = steps - (begin - start + N - 1) // N
    for FIRST in tl.static_range(2 if DOT != tl.float32 else 1):  # all tiles but the first, then that one
        first, last = others if FIRST else 0, steps if FIRST else others
        for step in tl.range(first, last, disable_licm=True, num_stages=1 if FIRST else None):
            at = start + (steps - 1 - step) * N
            x, _xw, y, _yw, weights, _total = read_keys(
                k, v, w, k_t, v_t, w_t, at, length_k, c, d, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
            )
            R16 = cast(R, DOT)
            dy = everywhere(halves(r, DOT), dot(x, R16, None, PRECISION), N, PRECISION)
            dx = tl.zeros((N, BD), tl.float32)
            if GROUP > 1:  # otherwise dv is written before dk is begun, which saves registers
                dx = everywhere(halves(s, DOT), dot(y, tl.trans(R16), None, PRECISION), N, PRECISION)
            for member in range(GROUP):
                hq = h * GROUP + member
                live = at + n < length_q
                f = load(head(q, b, hq, first_q, q_b, q_h, q_t, UNIT), q_t * UNIT, at, live, i, D, BD, N)
                do = load(head(g, b, hq, first_q, g_b, g_h, g_t, UNIT), g_t * UNIT, at, live, j, E, BE, N)
                row = rows + member * rows_h
                alpha = tl.load(row + at + n, mask=live, other=0.0) * unit
                zeta = tl.load(row + plane + at + n, mask=live, other=0.0)
                over = row_over(row, plane, at, live, length_k, WEIGHTED, N)
                gain = tl.where(over > 0, 1.0, 0.0) if SUM else over * unit
                f, wide = times(f, gain * scale), four(alpha, DOT)
                if FIRST:
                    u = dot(x, tl.trans(f), None, PRECISION)
                    u += centred(u, seen, weights, over, gain)[None, :]
                    dy = dot(lost(u, seen, DOT), do, dy, PRECISION)
                else:
                    u = dot(x, tl.trans(f), each_row(alpha, N, DOT, PRECISION), PRECISION)
                dy = dot(keep(u, seen, DOT), do, dy, PRECISION)
                r = dot(tl.trans(do), wide, r, PRECISION)
                if GROUP == 1:
                    store_gradient(
                        dv, dv_t, at, length, length_k, weights, unit, j, dy, SCALED, WEIGHTED, MASKED, E, BE, N
                    )
                    dx = everywhere(halves(s, DOT), dot(y, tl.trans(R16), None, PRECISION), N, PRECISION)
                wide = four(zeta, DOT)
                du = dot(y, tl.trans(do), each_row(zeta, N, DOT, PRECISION), PRECISION)
                if FIRST:
                    dx = dot(lost(du, seen, DOT), f, dx, PRECISION)
                dx = dot(keep(du, seen, DOT), f, dx, PRECISION)
                s = dot(tl.trans(f), wide, s, PRECISION)
                R = dot(tl.trans(f), do, R, PRECISION)
            store_gradient(dk, dk_t, at, length, length_k, weights, unit, i, dx, SCALED, WEIGHTED, MASKED, D, BD, N)
            if GROUP > 1:
                store_gradient(dv, dv_t, at, length, length_k, weights, unit, j, dy, SCALED, WEIGHTED, MASKED, E, BE, N)
