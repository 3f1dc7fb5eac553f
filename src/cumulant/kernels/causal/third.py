"""Triton kernels of causal cumulant attention of order 3, backward: `query_gradients` -> `row_sums` -> `suffixes` (of
backward.py) -> `key_gradients`. Formulas and shape legend: host.py; names of the sums: backward.py.

Four sums of 64 x 64 in one walk spill registers, which costs more than bytes do. So the sums of a part have a walk of
their own, `row_sums`, and what it and the last walk read of a row, both f hat, is written by the first. Sums that are
vectors are not carried but read for each tile: those before it from what `outputs` left, those after it from what
`row_sums` did.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import head, kernel, sequence
from .backward import first_unit, load_rows, row_over, store_gradient, store_rows
from .parts import (
    after_first_tile,
    centred,
    each_row,
    four,
    inverse,
    keep,
    load,
    load_sums,
    lost,
    lost_square,
    read_keys,
    settled,
    square,
    store,
    times,
    triangle,
    unquad,
)  # fmt: skip


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


@kernel
def query_gradients(
    q, k, v, w, g, dq, y_out, f_out, half_out, means, rows, state, kept, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, rows_b, rows_h,
    plane, length_q, length_k, heads, span, splits, all_tiles, scale,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B Hq splits BD / COLUMNS). COLUMNS of dq of one part of one query head, and what its rows mean to keys:
    1 - ubar, -zbar, y and both f hat.

    Column d needs row d of S and T alone; they are held turned, (E, COLUMNS), so that all products have 64 rows.
    """
    DOT: tl.constexpr = k.dtype.element_ty
    SQUARE: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    block, pid = (pid % (BD // COLUMNS)).to(tl.int32), pid // (BD // COLUMNS)
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
    i, j, n = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BE), tl.arange(0, N)
    slot = (b * heads + h) * splits + part
    kept += slot * all_tiles * (2 * BD + BE)
    W, c, d, _a, _e, S, _P, T = load_sums(state + slot * STATE, i, j, tl.where(start > 0, 1, 0), ORDER, BD, BE)
    c, d, S, T = settled(cast(c, DOT)), settled(cast(d, DOT)), tl.trans(S), tl.trans(T)
    past = triangle(N, False, DOT)
    begin = after_first_tile(w, w_t, start, end, length_k, DOT, WEIGHTED, N)
    for FIRST in tl.static_range(1 if DOT != tl.float32 else 0, -1, -1):  # the first tile, then all others
        first, last = start if FIRST else begin, begin if FIRST else end
        for at in tl.range(first, last, N, disable_licm=True, num_stages=1 if FIRST else None):
            live = at + n < end
            x, xw, y, _yw, weights, total = read_keys(
                k, v, w, k_t, v_t, w_t, at, length_k, c, d, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
            )
            # Operands of float16 are kept in its range: averages over the past instead of sums.
            unit, W_past = (inverse(W), W) if DOT == tl.float16 else (1.0, 1.0)
            S16, T16 = cast(S * unit, DOT), cast(T * unit, SQUARE)
            S = dot(tl.trans(y), xw, S, PRECISION)
            xxw = square(x, xw, SQUARE)
            T = dot(tl.trans(cast(y, SQUARE)), xxw, T, PRECISION)
            # Made here, where y still has its place: in that of y, with longer rows, ptxas 12.8 would lose its address.
            rest = lost_square(x, xw, SQUARE) if FIRST and SQUARE != tl.float32 else None
            Wi = tl.minimum(at + n + 1, length_k).to(tl.float32)
            if WEIGHTED:
                Wi = W + tl.cumsum(weights, 0)
            W += total
            over = tl.where(live, inverse(Wi), 0.0)
            gain = tl.where(over > 0, 1.0, 0.0) if SUM else over
            f = load(q, q_t, at, live, i, D, BD, N)
            do = load(g, g_t, at, live, j, E, BE, N)
            tile = kept + ((at - start) // N) * (2 * BD + BE)
            a, e = tl.load(tile + i), tl.load(tile + BD + j)

            du = dot(do, tl.trans(y), None, PRECISION)
            du_mean = tl.sum(shown(du, weights, past, WEIGHTED), 1) + tl.sum(do.to(tl.float32) * e[None, :], 1)
            du_mean *= over
            du -= du_mean[:, None]
            df = dot(do, S16, None, PRECISION) * W_past - du_mean[:, None] * a[None, :]
            if FIRST:
                df = dot(lost(du, past, DOT), xw, df, PRECISION)
            df = dot(keep(du, past, DOT), xw, df, PRECISION) * gain[:, None]
            z = f.to(tl.float32) * scale
            zg = z * gain[:, None]
            zo = z * over[:, None] if SUM else zg
            zm = zo * (dot(past, xw, None, PRECISION) + a[None, :])
            # Divided by W before it is rounded, but for float16, whose range the quotient would leave.
            store(y_out, dq_t, at, live, i, -z * (z if DOT == tl.float16 else zo) * df, D, BD, N)
            store(f_out, dq_t, at, live, i, zg - zg * zm, D, BD, N)
            store(half_out, dq_t, at, live, i, 0.5 * z * zg, D, BD, N)
            P = tl.load(tile + BD + BE + i)
            df2 = dot(cast(do, SQUARE), T16, None, PRECISION) * W_past - du_mean[:, None] * P[None, :]
            if FIRST and SQUARE != tl.float32:
                df2 = dot(lost(du, past, SQUARE), xxw, df2, PRECISION)
                df2 = dot(keep(du, past, SQUARE), rest, df2, PRECISION)
            df2 = dot(keep(du, past, SQUARE), xxw, df2, PRECISION)
            df = scale * (df - 2.0 * zm * df + df2 * zg)
            store(dq, dq_t, at, live, i, df, D, BD, N)

            if block == 0:
                alpha = (1.0 - tl.load(means + at + n, mask=live, other=0.0)) * gain
                tl.store(rows + at + n, alpha, mask=live)
                tl.store(rows + plane + at + n, -du_mean, mask=live)
                if WEIGHTED:
                    tl.store(rows + 2 * plane + at + n, over, mask=live)


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


@triton.jit
def read_rows(g, y_in, f_in, half_in, rows, plane, b, hq, first, g_b, g_h, g_t, y_b, y_h, y_t, at, live, unit, i, j,
              D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
              UNIT: tl.constexpr):  # fmt: skip
    """Of the rows at, at + 1, ... of one query head: do, y, both f hat, 1 - ubar and -zbar hat."""
    do = load(head(g, b, hq, first, g_b, g_h, g_t, UNIT), g_t * UNIT, at, live, j, E, BE, N)
    f = load(head(f_in, b, hq, first, y_b, y_h, y_t, UNIT), y_t * UNIT, at, live, i, D, BD, N)
    half = load(head(half_in, b, hq, first, y_b, y_h, y_t, UNIT), y_t * UNIT, at, live, i, D, BD, N)
    y_row = load(head(y_in, b, hq, first, y_b, y_h, y_t, UNIT), y_t * UNIT, at, live, i, D, BD, N)
    n = at + tl.arange(0, N)
    alpha = tl.load(rows + n, mask=live, other=0.0) * unit
    zeta = tl.load(rows + plane + n, mask=live, other=0.0)
    return do, y_row, f, half, alpha, zeta


@kernel
def key_gradients(
    k, v, w, g, dk, dv, y_in, f_in, half_in, rows, after, later, state, offsets_q, offsets_k,
    k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    y_b, y_h, y_t, rows_b, rows_h, plane, length_q, length_k, heads, span, splits, all_tiles,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STATE: tl.constexpr, SUMS: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H splits). dk and dv of one part of one key head, from the last tile to the first.

    TILES: "all"; or "others", all but the first tile of a sequence, and R and R2 of its part go to `later`; or "first",
    that tile, in a launch after "others". Without weights it is in the first part: then the grid is (B H).
    """
    DOT: tl.constexpr = k.dtype.element_ty
    SQUARE: tl.constexpr = tl.bfloat16 if DOT == tl.bfloat16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    part, h = (pid % splits).to(tl.int32), pid // splits
    if TILES == "first" and not WEIGHTED:
        part, h = tl.zeros((), tl.int32), pid
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
    after += slot * GROUP * all_tiles * (2 * BD + BE)
    steps = tl.cdiv(end - start, N)
    seen = triangle(N, True, DOT)  # (key, row)
    begin = after_first_tile(w, w_t, start, end, length_k, DOT, WEIGHTED, N)
    others = steps - (begin - start + N - 1) // N
    there = tl.where(others > 0, 1, more) if TILES == "first" else more
    R, R2, _r, _s, _s2 = load_rows(later, i, j, there, ORDER, BD, BE)
    R, R2 = R * unit, R2 * unit
    matrices, later = later, later + (ORDER - 1) * BD * BE
    LEAST: tl.constexpr = 1 if TILES == "first" else 0
    MOST: tl.constexpr = 1 if TILES == "others" or DOT == tl.float32 else 2
    for FIRST in tl.static_range(LEAST, MOST):  # all tiles but the first, then that one
        first, last = others if FIRST else 0, steps if FIRST else others
        for step in tl.range(first, last, disable_licm=True, num_stages=1 if FIRST else None):
            tile = steps - 1 - step
            at = start + tile * N
            live = at + n < length_q
            if GROUP == 1:  # all that a turn reads, it asks for at its head
                do, y_row, f, half, alpha, zeta = read_rows(
                    g, y_in, f_in, half_in, rows, plane, b, h, first_q, g_b, g_h, g_t, y_b, y_h, y_t, at, live, unit,
                    i, j, D, E, BD, BE, N, UNIT,
                )  # fmt: skip
            r = rows_after(later, after, tile, at, all_tiles, more, length_q, j, unit, GROUP, 0, BD, BE)
            s = rows_after(later, after, tile, at, all_tiles, more, length_q, i, unit, GROUP, BE, BD, BE)
            s2 = rows_after(later, after, tile, at, all_tiles, more, length_q, i, unit, GROUP, BE + BD, BD, BE)
            x, _xw, y, _yw, weights, _total = read_keys(
                k, v, w, k_t, v_t, w_t, at, length_k, c, d, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
            )
            R16 = cast(R, DOT)
            xx, R16_2 = square(x, x, SQUARE), cast(R2, SQUARE)
            dy = dot(x, R16, each_row(r, N, SQUARE, PRECISION), PRECISION)
            dy = dot(xx, R16_2, dy, PRECISION)
            dx, dxx = tl.zeros((N, BD), tl.float32), tl.zeros((N, BD), tl.float32)
            if GROUP > 1:  # otherwise dv is written before dk is begun, which saves registers
                dx = dot(y, tl.trans(R16), each_row(s, N, SQUARE, PRECISION), PRECISION)
                dxx = dot(cast(y, SQUARE), tl.trans(R16_2), each_row(s2, N, SQUARE, PRECISION), PRECISION)
            for member in range(GROUP):
                row = rows + member * rows_h
                if GROUP > 1:
                    do, y_row, f, half, alpha, zeta = read_rows(
                        g, y_in, f_in, half_in, row, plane, b, h * GROUP + member, first_q, g_b, g_h, g_t,
                        y_b, y_h, y_t, at, live, unit, i, j, D, E, BD, BE, N, UNIT,
                    )  # fmt: skip
                f, half = in_unit(f, unit, DOT), in_unit(half, unit, SQUARE)
                # sum_i (u_i - ubar + 1) do_i; scores of order 3 may exceed the range of float16
                u = None if FIRST else each_row(alpha, N, SQUARE, PRECISION)
                u = dot(x, tl.trans(f), dot(xx, tl.trans(half), u, PRECISION), PRECISION)
                if FIRST and SQUARE != tl.float32:
                    u = dot(lost_square(x, x, SQUARE), tl.trans(half), u, PRECISION)
                if FIRST:
                    over = row_over(row, plane, at, live, length_k, WEIGHTED, N)
                    gain = tl.where(over > 0, 1.0, 0.0) if SUM else over * unit
                    u += centred(u, seen, weights, over, gain)[None, :]
                if FIRST and SQUARE != tl.float32:
                    dy = dot(lost(u, seen, SQUARE), do.to(SQUARE), dy, PRECISION)
                dy = dot(keep(u, seen, SQUARE), do.to(SQUARE), dy, PRECISION)
                if GROUP == 1:
                    store_gradient(
                        dv, dv_t, at, length, length_k, weights, unit, j, dy, SCALED, WEIGHTED, MASKED, E, BE, N
                    )
                    dx = dot(y, tl.trans(R16), each_row(s, N, SQUARE, PRECISION), PRECISION)
                du = dot(y, tl.trans(do), each_row(zeta, N, SQUARE, PRECISION), PRECISION)
                less = lost(du, seen, DOT) if FIRST else None
                if FIRST:
                    dx = dot(less, f, dx, PRECISION)
                du = keep(du, seen, DOT)
                dx = dot(du, f, dx, PRECISION)
                R = dot(tl.trans(f), do, R, PRECISION)
                if DOT == tl.float16:
                    y_row = times(y_row, row_over(row, plane, at, live, length_k, WEIGHTED, N) * unit)
                dx = dot(seen, y_row, dx, PRECISION)
                if GROUP == 1:
                    dxx = dot(cast(y, SQUARE), tl.trans(R16_2), each_row(s2, N, SQUARE, PRECISION), PRECISION)
                if FIRST and SQUARE != tl.float32:
                    dxx = dot(cast(less, SQUARE), half, dxx, PRECISION)
                dxx = dot(cast(du, SQUARE), half, dxx, PRECISION)
                R2 = dot(tl.trans(half), cast(do, SQUARE), R2, PRECISION)
            dx += 2.0 * x.to(tl.float32) * dxx
            store_gradient(dk, dk_t, at, length, length_k, weights, unit, i, dx, SCALED, WEIGHTED, MASKED, D, BD, N)
            if GROUP > 1:
                store_gradient(dv, dv_t, at, length, length_k, weights, unit, j, dy, SCALED, WEIGHTED, MASKED, E, BE, N)
    if TILES == "others":  # noqa: SIM102
        if (begin > start) & (others > 0):
            place = matrices + i[:, None] * BE + j[None, :]
            tl.store(place, R * (1.0 / unit))
            tl.store(place + BD * BE, R2 * (1.0 / unit))
