"""Triton kernels of causal cumulant attention, backward: `query_gradients` -> `suffixes` -> `key_gradients`.

The first walks each part forwards, as `outputs` does, writes dq and sums what the rows of a part mean to the keys
before it; the second sums those over all later parts; the third walks each part backwards and writes dk, dv. The
sums are, with f = scale q at order 2 and a hat for "times G": R = sum f do^T hat, r = sum (1 - ubar) do hat,
s = sum y / W - sum zbar f1 hat, and at order 3 s2 = - sum zbar f2 hat. Formulas and shape legend: host.py.

At order 3 the sums of a part are a kernel of their own, `row_sums`, and what both it and the third read of a row, f1
and f2 hat, is written by the first: with four sums of 64 x 64 in one walk registers spill, which costs more than the
bytes do.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import head, kernel, sequence
from .parts import (
    everywhere,
    four,
    halves,
    inverse,
    keep,
    load,
    load_sums,
    quad,
    read_keys,
    settled,
    square,
    store,
    times,
    triangle,
    unquad,
)


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
def weighed(x, factor, acc, PRECISION: tl.constexpr):
    """acc (n, 16) + x^T factor in its first four columns, x (N, n); the factor (N,) with twice the digits of x."""
    high = cast(factor, x.dtype)
    acc = dot(tl.trans(x), four(factor, x.dtype), acc, PRECISION)
    if x.dtype == tl.float32:
        return acc
    return dot(tl.trans(x), four(factor - high.to(tl.float32), x.dtype), acc, PRECISION)


@triton.jit
def shown(x, weights, mask, WEIGHTED: tl.constexpr):
    """Scores x (N, N) times the weights of their columns, 0 where the mask is."""
    x *= mask.to(tl.float32)
    if WEIGHTED:
        x *= weights[None, :]
    return x


@triton.jit
def in_unit(x, unit, dtype: tl.constexpr):
    """x times the unit of `first_unit`, as an operand."""
    if x.dtype == tl.bfloat16:
        return x
    else:
        return cast(x * unit, dtype)


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
    q, k, v, w, g, dq, y_out, f_out, half_out, means, rows, sums, state, kept, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, rows_b, rows_h,
    plane, length_q, length_k, heads, span, splits, all_tiles, scale,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SUM: tl.constexpr, CARRY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, STATE: tl.constexpr, SUMS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B Hq splits). dq of one part of one query head and what its rows mean to keys: 1 - ubar and -zbar, at
    order 3 also y and both f hat. With CARRY, at order 2, their sums.
    """
    DOT: tl.constexpr = k.dtype.element_ty
    SQUARE: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else tl.float32
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
    y_out = head(y_out, b, hq, first_q, dq_b, dq_h, dq_t, UNIT)
    f_out = head(f_out, b, hq, first_q, dq_b, dq_h, dq_t, UNIT)
    half_out = head(half_out, b, hq, first_q, dq_b, dq_h, dq_t, UNIT)
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
    kept += slot * all_tiles * (2 * BD + BE)
    W, c, d, _a, _e, S, _P, T = load_sums(state + slot * STATE, i, j, tl.where(start > 0, 1, 0), ORDER, BD, BE)
    c, d = settled(cast(c, DOT)), settled(cast(d, DOT))
    row_unit = tl.full((), 1.0, tl.float32)
    R = tl.zeros((BD, BE), tl.float32)
    r = tl.zeros((BE, 16), tl.float32)
    s = tl.zeros((BD, 16), tl.float32)
    past = triangle(N, False, DOT)
    for at in tl.range(start, end, N, disable_licm=True):
        x, xw, y, _yw, weights, total = read_keys(
            k, v, w, k_t, v_t, w_t, at, length_k, c, d, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
        )
        # Operands of float16 are kept in its range: averages over the past instead of sums.
        unit, W_past = (inverse(W), W) if DOT == tl.float16 else (1.0, 1.0)
        S16, T16 = cast(S * unit, DOT), cast(T * unit, SQUARE)
        S = dot(tl.trans(xw), y, S, PRECISION)
        if ORDER == 3:
            xxw = square(x, xw, SQUARE)
            T = dot(tl.trans(xxw), cast(y, SQUARE), T, PRECISION)
        Wi = tl.minimum(at + n + 1, length_k).to(tl.float32)
        if WEIGHTED:
            Wi = W + tl.cumsum(weights, 0)
        W += total
        live = at + n < end
        over = tl.where(live, inverse(Wi), 0.0)
        gain = tl.where(over > 0, 1.0, 0.0) if SUM else over
        f = load(q, q_t, at, live, i, D, BD, N)
        do = load(g, g_t, at, live, j, E, BE, N)
        tile = kept + ((at - start) // N) * (2 * BD + BE)
        a, e = tl.load(tile + i), tl.load(tile + BD + j)

        du = dot(do, tl.trans(y), None, PRECISION)
        du_mean = tl.sum(shown(du, weights, past, WEIGHTED), 1) + tl.sum(do.to(tl.float32) * e[None, :], 1)
        du_mean *= over
        du = keep(du - du_mean[:, None], past, DOT)
        df = dot(do, tl.trans(S16), None, PRECISION) * W_past - du_mean[:, None] * a[None, :]
        df = dot(du, xw, df, PRECISION) * (gain * scale if ORDER == 2 else gain)[:, None]
        if ORDER == 3:
            z = f.to(tl.float32) * scale
            zg = z * gain[:, None]
            zo = z * over[:, None] if SUM else zg
            zm = zo * (dot(past, xw, None, PRECISION) + a[None, :])
            # Divided by W before it is rounded, but for float16, whose range the quotient would leave.
            store(y_out, dq_t, at, live, i, -z * (z if DOT == tl.float16 else zo) * df, D, BD, N)
            store(f_out, dq_t, at, live, i, zg - zg * zm, D, BD, N)
            store(half_out, dq_t, at, live, i, 0.5 * z * zg, D, BD, N)
            P = tl.load(tile + BD + BE + i)
            df2 = dot(cast(do, SQUARE), tl.trans(T16), None, PRECISION) * W_past - du_mean[:, None] * P[None, :]
            df2 = dot(cast(du, SQUARE), xxw, df2, PRECISION)
            df = scale * (df - 2.0 * zm * df + df2 * zg)
        store(dq, dq_t, at, live, i, df, D, BD, N)

        alpha = (1.0 - tl.load(means + at + n, mask=live, other=0.0)) * gain
        tl.store(rows + at + n, alpha, mask=live)
        tl.store(rows + plane + at + n, -du_mean, mask=live)
        if WEIGHTED:
            tl.store(rows + 2 * plane + at + n, over, mask=live)
        if CARRY and ORDER == 2:
            if DOT == tl.float16 and not SUM:  # sums in units of 1 / W of the first tile, again for the range
                row_unit = tl.where(at == start, tl.where(W > 0, W, 1.0), row_unit)
                gain, alpha = gain * row_unit, alpha * row_unit
            f = times(f, gain * scale)
            R = dot(tl.trans(f), do, R, PRECISION)
            s = dot(tl.trans(f), four(-du_mean, DOT), s, PRECISION)
            r = weighed(do, alpha, r, PRECISION)

    if CARRY and ORDER == 2:
        sums += (slot * GROUP + hq % GROUP) * SUMS
        unit = 1.0 / row_unit
        if start < end:
            store_rows(sums, R * unit, R, unquad(r) * unit, unquad(s) * unit, unquad(s), i, j, ORDER, BD, BE)


@kernel
def row_sums(
    f_in, half_in, g, y_in, rows, sums, after, offsets_q, offsets_k, g_b, g_h, g_t, y_b, y_h, y_t, rows_b, rows_h,
    plane, length_q, length_k, heads, span, splits, all_tiles,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, SUM: tl.constexpr,
    CARRY: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    SUMS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B Hq splits). At order 3: sums of what the rows of a part mean to keys before it, with CARRY; and in
    `after`, of those sums that are vectors, r, s and s2, the part after each tile."""
    DOT: tl.constexpr = y_in.dtype.element_ty
    SQUARE: tl.constexpr = half_in.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    part, hq = (pid % splits).to(tl.int32), pid // splits
    b, hq = hq // (heads * GROUP), hq % (heads * GROUP)
    first_q, length_q = sequence(offsets_q, b, length_q, RAGGED)
    _, length_k = sequence(offsets_k, b, length_k, RAGGED)
    length_k = tl.minimum(length_k, length_q)
    f_in = head(f_in, b, hq, first_q, y_b, y_h, y_t, UNIT)
    half_in = head(half_in, b, hq, first_q, y_b, y_h, y_t, UNIT)
    y_in = head(y_in, b, hq, first_q, y_b, y_h, y_t, UNIT)
    g = head(g, b, hq, first_q, g_b, g_h, g_t, UNIT)
    y_t, g_t = y_t * UNIT, g_t * UNIT
    rows += b * rows_b + hq * rows_h + first_q
    start = part * span
    end = tl.minimum(start + span, length_q)
    i, j, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    slot = ((b * heads + hq // GROUP) * splits + part) * GROUP + hq % GROUP
    after += slot * all_tiles * (2 * BD + BE)
    unit = first_unit(rows, plane, start, length_q, length_k, DOT, SUM, WEIGHTED, N)
    back = 1.0 / unit
    R = tl.zeros((BD, BE), tl.float32)
    R2 = tl.zeros((BD, BE), tl.float32)
    r = tl.zeros((BE, 16), tl.float32)
    s = tl.zeros((BD, 16), tl.float32)
    s2 = tl.zeros((BD, 16), tl.float32)
    steps = tl.cdiv(end - start, N)
    for step in tl.range(0, steps, disable_licm=True):
        tile = steps - 1 - step
        at = start + tile * N
        live = at + n < end
        f = in_unit(load(f_in, y_t, at, live, i, D, BD, N), unit, DOT)
        half = in_unit(load(half_in, y_t, at, live, i, D, BD, N), unit, SQUARE)
        do = load(g, g_t, at, live, j, E, BE, N)
        y_row = load(y_in, y_t, at, live, i, D, BD, N)
        alpha = tl.load(rows + at + n, mask=live, other=0.0) * unit
        zeta = tl.load(rows + plane + at + n, mask=live, other=0.0)
        vectors = after + tile * (2 * BD + BE)
        tl.store(vectors + j, unquad(r) * back)
        tl.store(vectors + BE + i, unquad(s) * back)
        tl.store(vectors + BE + BD + i, unquad(s2) * back)
        if CARRY:
            R = dot(tl.trans(f), do, R, PRECISION)
            R2 = dot(tl.trans(half), cast(do, SQUARE), R2, PRECISION)
        r = weighed(do.to(SQUARE), alpha, r, PRECISION)
        s = dot(tl.trans(f), four(zeta, DOT), s, PRECISION)
        s2 = dot(tl.trans(half), four(zeta, SQUARE), s2, PRECISION)
        each = tl.zeros((N,), tl.float32) + 1.0
        if DOT == tl.float16:
            each = row_over(rows, plane, at, live, length_k, WEIGHTED, N) * unit
        s = dot(tl.trans(y_row), four(each, DOT), s, PRECISION)
    if CARRY and start < end:
        store_rows(
            sums + slot * SUMS, R * back, R2 * back, unquad(r) * back, unquad(s) * back, unquad(s2) * back,
            i, j, ORDER, BD, BE,
        )  # fmt: skip


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


@triton.jit
def rows_after(later, after, tile, at, all_tiles, more, length_q, columns, unit, GROUP: tl.constexpr,
               FIRST: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):  # fmt: skip
    """One of the vectors r, s, s2, which begins at number FIRST: of the parts after this one, if there are any more,
    and of the rows of this part after a tile."""
    vector = tl.load(later + FIRST + columns, mask=columns < more * BD * BE, other=0.0)
    inside = tl.where(at < length_q, BD * BE, 0)
    for member in tl.static_range(GROUP):
        place = (member * all_tiles + tile) * (2 * BD + BE) + FIRST
        vector += tl.load(after + place + columns, mask=columns < inside, other=0.0)
    return vector * unit


@kernel
def key_gradients(
    q, k, v, w, g, dk, dv, y_in, f_in, half_in, rows, after, later, state, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    y_b, y_h, y_t, rows_b, rows_h, plane, length_q, length_k, heads, span, splits, all_tiles, scale,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, SUMS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H splits). dk and dv of one part of one key head, from the last tile to the first."""
    DOT: tl.constexpr = k.dtype.element_ty
    SQUARE: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else tl.float32
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
    c = settled(cast(tl.load(point + i, mask=i < there * BD, other=0.0), DOT))
    d = settled(cast(tl.load(point + BD + j, mask=j < there * BE, other=0.0), DOT))
    SCALED: tl.constexpr = DOT == tl.float16 and not SUM
    unit = first_unit(rows, plane, start, length_q, length_k, DOT, SUM, WEIGHTED, N)
    later += slot * SUMS
    more = tl.where(start + span < length_q, 1, 0)
    R, R2, r, s, _s2 = load_rows(later, i, j, more, ORDER, BD, BE)
    R, R2, r, s = R * unit, R2 * unit, quad(r * unit), quad(s * unit)
    later += (ORDER - 1) * BD * BE
    after += slot * GROUP * all_tiles * (2 * BD + BE)
    steps = tl.cdiv(end - start, N)
    seen = triangle(N, True, DOT)  # (key, row)
    for step in tl.range(0, steps, disable_licm=True):
        tile = steps - 1 - step
        at = start + tile * N
        x, _xw, y, _yw, weights, _total = read_keys(
            k, v, w, k_t, v_t, w_t, at, length_k, c, d, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
        )
        R16 = cast(R, DOT)
        dy = dot(x, R16, None, PRECISION)
        if ORDER == 3:
            xx, R16_2 = square(x, x, SQUARE), cast(R2, SQUARE)
            dy = dot(xx, R16_2, dy, PRECISION)
            dy += rows_after(later, after, tile, at, all_tiles, more, length_q, j, unit, GROUP, 0, BD, BE)[None, :]
        else:
            dy = everywhere(halves(r, DOT), dy, N, PRECISION)
        dx, dxx = tl.zeros((N, BD), tl.float32), tl.zeros((N, BD), tl.float32)
        if GROUP > 1:  # otherwise dv is written before dk is begun, which saves registers
            dx = dot(y, tl.trans(R16), None, PRECISION)
            if ORDER == 3:
                dxx = dot(cast(y, SQUARE), tl.trans(R16_2), None, PRECISION)
            else:
                dx = everywhere(halves(s, DOT), dx, N, PRECISION)
        for member in range(GROUP):
            hq = h * GROUP + member
            live = at + n < length_q
            do = load(head(g, b, hq, first_q, g_b, g_h, g_t, UNIT), g_t * UNIT, at, live, j, E, BE, N)
            row = rows + member * rows_h
            alpha = tl.load(row + at + n, mask=live, other=0.0) * unit
            zeta = tl.load(row + plane + at + n, mask=live, other=0.0)
            over = row_over(row, plane, at, live, length_k, WEIGHTED, N)
            if ORDER == 3:
                f = load(head(f_in, b, hq, first_q, y_b, y_h, y_t, UNIT), y_t * UNIT, at, live, i, D, BD, N)
                half = load(head(half_in, b, hq, first_q, y_b, y_h, y_t, UNIT), y_t * UNIT, at, live, i, D, BD, N)
                f, half = in_unit(f, unit, DOT), in_unit(half, unit, SQUARE)
                # sum_i (u_i - ubar + 1) do_i; scores of order 3 may exceed the range of float16
                u = dot(x, tl.trans(f), dot(xx, tl.trans(half), None, PRECISION), PRECISION) + alpha[None, :]
                dy = dot(keep(u, seen, SQUARE), do.to(SQUARE), dy, PRECISION)
            else:
                gain = tl.where(over > 0, 1.0, 0.0) if SUM else over * unit
                f = load(head(q, b, hq, first_q, q_b, q_h, q_t, UNIT), q_t * UNIT, at, live, i, D, BD, N)
                f = times(f, gain * scale)
                u = dot(x, tl.trans(f), None, PRECISION) + alpha[None, :]
                dy = dot(keep(u, seen, DOT), do, dy, PRECISION)
                r = weighed(do, alpha, r, PRECISION)
            if GROUP == 1:
                store_gradient(dv, dv_t, at, length, length_k, weights, unit, j, dy, SCALED, WEIGHTED, MASKED, E, BE, N)
                dx = dot(y, tl.trans(R16), None, PRECISION)
                if ORDER == 2:
                    dx = everywhere(halves(s, DOT), dx, N, PRECISION)
            du = keep(dot(y, tl.trans(do), None, PRECISION) + zeta[None, :], seen, DOT)
            dx = dot(du, f, dx, PRECISION)
            R = dot(tl.trans(f), do, R, PRECISION)
            if ORDER == 2:
                s = dot(tl.trans(f), four(zeta, DOT), s, PRECISION)
            else:
                y_row = load(head(y_in, b, hq, first_q, y_b, y_h, y_t, UNIT), y_t * UNIT, at, live, i, D, BD, N)
                if DOT == tl.float16:
                    y_row = times(y_row, over * unit)
                dx = dot(seen, y_row, dx, PRECISION)
                if GROUP == 1:
                    dxx = dot(cast(y, SQUARE), tl.trans(R16_2), None, PRECISION)
                dxx = dot(cast(du, SQUARE), half, dxx, PRECISION)
                R2 = dot(tl.trans(half), cast(do, SQUARE), R2, PRECISION)
        if ORDER == 3:
            dx += rows_after(later, after, tile, at, all_tiles, more, length_q, i, unit, GROUP, BE, BD, BE)[None, :]
            dxx += rows_after(later, after, tile, at, all_tiles, more, length_q, i, unit, GROUP, BE + BD, BD, BE)[
                None, :
            ]
            dx += 2.0 * x.to(tl.float32) * dxx
        store_gradient(dk, dk_t, at, length, length_k, weights, unit, i, dx, SCALED, WEIGHTED, MASKED, D, BD, N)
        if GROUP > 1:
            store_gradient(dv, dv_t, at, length, length_k, weights, unit, j, dy, SCALED, WEIGHTED, MASKED, E, BE, N)
