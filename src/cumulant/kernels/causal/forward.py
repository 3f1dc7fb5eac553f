"""Triton kernels of causal cumulant attention, forward: `part_sums` -> `prefixes` -> `outputs`.

A sequence is cut into parts of `span` tokens and a part into tiles of N. A program walks one part tile by tile with
the sums over all that came before in registers; those before a part come from the first two kernels, which sequences
of one part skip. Formulas and shape legend: host.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import ahead, head, kernel, sequence, weigh
from .parts import (
    add_tile,
    everywhere,
    first_token,
    halves,
    inverse,
    keep,
    load,
    load_steps,
    load_sums,
    moved,
    near,
    on_grid,
    quad,
    read_keys,
    row_sum,
    settled,
    square,
    store,
    store_sums,
    triangle,
    two,
    unquad,
)


@kernel
def part_sums(
    k, v, w, parts, offsets_q, offsets_k, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t,
    length_q, length_k, heads, span, splits,
    ORDER: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, STATE: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H (splits - 1)). Sums of each part but the last, which nothing follows, about a point near it."""
    SQUARE: tl.constexpr = tl.bfloat16 if k.dtype.element_ty == tl.bfloat16 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    part, h = (pid % (splits - 1)).to(tl.int32), pid // (splits - 1)
    parts += (h * splits + part) * STATE
    b, h = h // heads, h % heads
    _, length_q = sequence(offsets_q, b, length_q, RAGGED)
    first, length_k = sequence(offsets_k, b, length_k, RAGGED)
    k = head(k, b, h, first, k_b, k_h, k_t, UNIT)
    v = head(v, b, h, first, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    if WEIGHTED:
        w += b * w_b + first * w_t
    start = part * span
    length = tl.minimum(tl.minimum(length_k, length_q), start + span)
    end = tl.where(start + span < length_q, length, start)
    i, j = tl.arange(0, BD), tl.arange(0, BE)
    token = first_token(w, w_t, start, end, WEIGHTED, N)
    c, c_step = near(k, k_t, w, w_t, token, end, i, WEIGHTED, D, BD)
    d, d_step = near(v, v_t, w, w_t, token, end, j, WEIGHTED, E, BE)
    W = tl.zeros((), tl.float32)
    a_sum, b_sum = tl.zeros((BD, 16), tl.float32), tl.zeros((BE, 16), tl.float32)
    P = tl.zeros((BD, 16), tl.float32)
    S = tl.zeros((BD, BE), tl.float32)
    T = tl.zeros((BD, BE), tl.float32)
    for at in tl.range(start, end, N, disable_licm=True):
        x, xw, y, _yw, weights, total = read_keys(
            k, v, w, k_t, v_t, w_t, at, length, c, d, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
        )
        a_sum, b_sum, S, P, T = add_tile(
            a_sum, b_sum, S, P, T, xw, square(x, xw, SQUARE), y, weights, ORDER, WEIGHTED, N, PRECISION
        )
        W += total
    if start + span < length_q:
        a, e = unquad(a_sum), unquad(b_sum)
        store_sums(parts, W, c, d, c_step, d_step, a, e, S, unquad(P), T, i, j, ORDER, BD, BE)


@kernel
def prefixes(
    like, parts, state, offsets_q, length_q, heads, span, splits,
    ORDER: tl.constexpr, RAGGED: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """Grid (B H, BD / ROWS). Sums over all before each part but the first, about a point near their mean (`on_grid`) in
    the dtype of `like`.

    Centred moments merge one part after another; reads and writes each state once. A program carries ROWS rows of D.
    """
    pid, block = tl.program_id(0), tl.program_id(1)
    _, length_q = sequence(offsets_q, pid // heads, length_q, RAGGED)
    i, j = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    at = pid.to(tl.int64) * splits * STATE
    W, c, d = tl.zeros((), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((BE,), tl.float32)
    S, P = tl.zeros((ROWS, BE), tl.float32), tl.zeros((ROWS,), tl.float32)
    T = tl.zeros((ROWS, BE), tl.float32)
    c_step, d_step = c + float("inf"), d + float("inf")
    for _part in tl.range(0, tl.cdiv(length_q, span) - 1, num_stages=3):
        W1, c1, d1, a1, b1, S1, P1, T1 = load_sums(parts + at, i, j, tl.full((), 1, tl.int32), ORDER, BD, BE)
        c_own, d_own = load_steps(parts + at, i, j, ORDER, BD, BE)
        c_step = tl.where(W1 > 0, tl.minimum(c_step, c_own), c_step)
        d_step = tl.where(W1 > 0, tl.minimum(d_step, d_own), d_step)
        at += STATE
        r, s, share = a1 * inverse(W1), b1 * inverse(W1), W1 * inverse(W + W1)
        dk, dv = c1 + r - c, d1 + s - d  # from the mean of what came before to that of the part
        _a, _b, S, P, T = moved(W, tl.zeros_like(c), tl.zeros_like(d), S, P, T, share * dk, share * dv, ORDER)
        _a, _b, S1, P1, T1 = moved(
            W1, a1, b1, S1, P1, T1, r - (1.0 - share) * dk, s - (1.0 - share) * dv, ORDER
        )  # fmt: skip
        S += S1
        if ORDER == 3:
            P, T = P + P1, T + T1
        c, d, W = c + share * dk, d + share * dv, W + W1
        c2 = on_grid(c, tl.where(W > 0, c_step, 0.0), like.dtype.element_ty).to(tl.float32)
        d2 = on_grid(d, tl.where(W > 0, d_step, 0.0), like.dtype.element_ty).to(tl.float32)
        a2, b2, S2, P2, T2 = moved(W, tl.zeros_like(c), tl.zeros_like(d), S, P, T, c2 - c, d2 - d, ORDER)
        store_sums(state + at, W, c2, d2, c_step, d_step, a2, b2, S2, P2, T2, i, j, ORDER, BD, BE)


@triton.jit
def first_tile(q, k, v, w, o, q_t, k_t, v_t, w_t, o_t, at, end, length_k, c, d, i, j, scale,
               ORDER: tl.constexpr, WEIGHTED: tl.constexpr, SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
               BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Outputs of a tile before which nothing counts, and its sums and weight about (c, d).

    In float32: its point is a token, not a mean, and k', v' about it have more digits than a 16-bit type holds.
    """
    FINE: tl.constexpr = PRECISION if k.dtype.element_ty == tl.float32 else "tf32"
    n = tl.arange(0, N)
    live, present, weights = at + n < end, at + n < length_k, (at + n < length_k).to(tl.float32)
    Wi = tl.minimum(at + n + 1, length_k).to(tl.float32)
    if WEIGHTED:
        present, weights = weigh(w, w_t, at + n, length_k)
        Wi = tl.cumsum(weights, 0)
    x = load(k, k_t, at, present, i, D, BD, N).to(tl.float32) - c[None, :]
    y = load(v, v_t, at, present, j, E, BE, N).to(tl.float32) - d[None, :]
    x, y = tl.where(present[:, None], x, 0.0), tl.where(present[:, None], y, 0.0)
    xw, yw = x * weights[:, None], y * weights[:, None]
    over, past = inverse(Wi), triangle(N, False, tl.float32)
    z = load(q, q_t, at, live, i, D, BD, N).to(tl.float32) * scale
    S, T = dot(tl.trans(xw), y, None, FINE), tl.zeros((BD, BE), tl.float32)
    P = tl.zeros((BD,), tl.float32)
    if ORDER == 2:
        u = dot(z, tl.trans(x), None, FINE)
    else:
        T, P = dot(tl.trans(x * xw), y, None, FINE), tl.sum(x * xw, 0)
        m = dot(past, xw, None, FINE) * over[:, None]
        # In this order: the other way round ptxas 12.8 loses where x * x lies, in heads of 65 to 127.
        u = dot(z - z * z * m, tl.trans(x), dot(0.5 * z * z, tl.trans(x * x), None, FINE), FINE)
    u *= past
    mean = tl.sum(u * weights[None, :], 1) * over
    out = dot(u + (1.0 - mean)[:, None] * past, yw, None, FINE) * over[:, None] + d[None, :]
    if WEIGHTED:
        out = tl.where((Wi > 0)[:, None], out, 0.0)
    if SUM:
        out *= Wi[:, None]
    store(o, o_t, at, live, j, out, E, BE, N)
    return tl.sum(weights), tl.sum(xw, 0), tl.sum(yw, 0), S, P, T


@kernel
def outputs(
    q, k, v, w, o, means, state, kept, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, o_b, o_h, o_t, means_b, means_h,
    length_q, length_k, heads, span, splits, all_tiles, scale,
    ORDER: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr,
    MASKED: tl.constexpr, SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, STATE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B Hq splits). The outputs of one part of one query head; with KEEP, ubar of its rows, and at order 3
    in `kept` the sums of k', v' and k'^2 before each tile.

    Where nothing counts before the part, the point is its first token for one tile (`first_tile`), then one near that
    tile's mean, which is left in `state` for the backward pass; the ubar of that tile are those about the new point.
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
    o = head(o, b, hq, first_q, o_b, o_h, o_t, UNIT)
    k = head(k, b, h, first_k, k_b, k_h, k_t, UNIT)
    v = head(v, b, h, first_k, v_b, v_h, v_t, UNIT)
    q_t, k_t, v_t, o_t = q_t * UNIT, k_t * UNIT, v_t * UNIT, o_t * UNIT
    means += b * means_b + hq * means_h + first_q
    if WEIGHTED:
        w += b * w_b + first_k * w_t
    start = part * span
    end = tl.minimum(start + span, length_q)
    i, j, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    slot = (b * heads + h) * splits + part
    state += slot * STATE
    kept += slot * all_tiles * (2 * BD + BE)
    W, c, d, a, e, S, P, T = load_sums(state, i, j, tl.where(start > 0, 1, 0), ORDER, BD, BE)
    begin = start
    if (W == 0) & (start < end):
        key_end = tl.minimum(length_k, end)
        token = first_token(w, w_t, start, key_end, WEIGHTED, N)
        found = tl.where(token < key_end, 1, 0)
        begin = tl.minimum(start + ((token - start) // N + 1) * N, end)
        seen = tl.minimum(begin, key_end)
        c = tl.load(k + token * k_t.to(tl.int64) + i, mask=i < found * D, other=0.0).to(tl.float32)
        d = tl.load(v + token * v_t.to(tl.int64) + j, mask=j < found * E, other=0.0).to(tl.float32)
        _c, c_step = near(k, k_t, w, w_t, token, seen, i, WEIGHTED, D, BD)
        _d, d_step = near(v, v_t, w, w_t, token, seen, j, WEIGHTED, E, BE)
        last = start + (begin - 1 - start) // N * N
        for at in tl.range(start, begin, N, num_stages=1):
            W, a, e, S, P, T = first_tile(
                q, k, v, w, o, q_t, k_t, v_t, w_t, o_t, at, end, length_k, c, d, i, j, scale,
                ORDER, WEIGHTED, SUM, D, E, BD, BE, N, PRECISION,
            )  # fmt: skip
            if KEEP:
                tl.store(means + at + n, tl.zeros((N,), tl.float32), mask=at + n < last)
                if ORDER == 3 and hq % GROUP == 0:
                    tile = kept + ((at - start) // N) * (2 * BD + BE)
                    tl.store(tile + i, tl.zeros_like(c))
                    tl.store(tile + BD + j, tl.zeros_like(d))
                    tl.store(tile + BD + BE + i, tl.zeros_like(c))
        p = on_grid(c + a * inverse(W), c_step, DOT).to(tl.float32) - c
        r = on_grid(d + e * inverse(W), d_step, DOT).to(tl.float32) - d
        a, e, S, P, T = moved(W, a, e, S, P, T, p, r, ORDER)
        c, d = c + p, d + r
        if KEEP:
            if hq % GROUP == 0:
                vectors = state + (ORDER - 1) * BD * BE
                tl.store(vectors + i, c)
                tl.store(vectors + BD + j, d)
            at, c16, d16 = last, cast(c, DOT), cast(d, DOT)
            x, xw, _y, _yw, weights, _total = read_keys(
                k, v, w, k_t, v_t, w_t, at, length_k, c16, d16, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
            )
            Wi = tl.cumsum(weights, 0) if WEIGHTED else tl.minimum(at + n + 1, length_k).to(tl.float32)
            over = inverse(Wi)[:, None]
            z = load(q, q_t, at, at + n < end, i, D, BD, N).to(tl.float32) * scale
            m = dot(triangle(N, False, DOT), xw, None, PRECISION) * over
            mean = z * m
            if ORDER == 3:
                square_mean = dot(triangle(N, False, SQUARE), square(x, xw, SQUARE), None, PRECISION) * over
                mean += z * z * (0.5 * square_mean - m * m)
            tl.store(means + at + n, tl.sum(mean, 1), mask=at + n < end)
    a, e, P, c16, d16 = quad(a), quad(e), quad(P), settled(cast(c, DOT)), settled(cast(d, DOT))
    past = triangle(N, False, DOT)
    for at in tl.range(begin, end, N, disable_licm=True):
        live = at + n < end
        if ORDER == 2:  # at order 3 it takes registers that are not there
            ahead(k, k_t, at + N, length_k, N)
            ahead(v, v_t, at + N, length_k, N)
            ahead(q, q_t, at + N, end, N)
        x, xw, y, yw, weights, total = read_keys(
            k, v, w, k_t, v_t, w_t, at, length_k, c16, d16, i, j, WEIGHTED, MASKED, D, E, BD, BE, N
        )
        xxw = square(x, xw, SQUARE)
        if KEEP and ORDER == 3:  # noqa: SIM102
            if hq % GROUP == 0:
                tile = kept + ((at - start) // N) * (2 * BD + BE)
                tl.store(tile + i, unquad(a))
                tl.store(tile + BD + j, unquad(e))
                tl.store(tile + BD + BE + i, unquad(P))
        # Operands of float16 are kept in its range: averages over the past instead of sums.
        unit, W_past = (inverse(W), W) if DOT == tl.float16 else (1.0, 1.0)
        a16, e16, P16 = halves(a * unit, DOT), halves(e * unit, DOT), halves(P * unit, SQUARE)
        S16, T16 = cast(S * unit, DOT), cast(T * unit, SQUARE)
        a, e, S, P, T = add_tile(a, e, S, P, T, xw, xxw, y, weights, ORDER, WEIGHTED, N, PRECISION)
        Wi = tl.minimum(at + n + 1, length_k).to(tl.float32)
        if WEIGHTED:
            Wi = W + tl.cumsum(weights, 0)
        W += total
        over = inverse(Wi)
        f = load(q, q_t, at, live, i, D, BD, N)
        counted = two(weights, DOT) if WEIGHTED else two(tl.zeros((N,), tl.float32) + 1.0, DOT)
        if ORDER == 2:
            u = keep(dot(f, tl.trans(x), None, PRECISION), past, DOT)
            mean = row_sum(f, a16, u, counted, W_past, PRECISION) * (scale * over)
            rest = (1.0 - mean) * (1.0 / scale)
            out = dot(f, S16, None, PRECISION) * W_past
        else:
            z = f.to(tl.float32) * scale
            half = cast(0.5 * z * z, SQUARE)
            m = dot(past, xw, everywhere(a16, None, N, PRECISION) * W_past, PRECISION) * over[:, None]
            f = cast(z - z * z * m, DOT)
            u = dot(half, tl.trans(square(x, x, SQUARE)), dot(f, tl.trans(x), None, PRECISION), PRECISION)
            u = keep(u, past, SQUARE)
            mean = row_sum(f, a16, u, counted, W_past, PRECISION)
            mean = (mean + 0.5 * tl.sum(dot(half, P16, None, PRECISION), 1) * W_past) * over
            rest = 1.0 - mean
            out = dot(half, T16, dot(f, S16, None, PRECISION), PRECISION) * W_past
        # sum_j u_j v'_j, of the past by sums, and (1 - ubar) sum_j v'_j: 1 - ubar keeps its digits apart from u.
        out = dot(u, yw.to(u.dtype), out, PRECISION)
        out += rest[:, None] * dot(past, yw, everywhere(e16, None, N, PRECISION) * W_past, PRECISION)
        out = out * (scale * over if ORDER == 2 else over)[:, None] + d[None, :]
        if WEIGHTED:
            out = tl.where((Wi > 0)[:, None], out, 0.0)
        if SUM:
            out *= Wi[:, None]
        store(o, o_t, at, live, j, out, E, BE, N)
        if KEEP:
            tl.store(means + at + n, mean, mask=live)
