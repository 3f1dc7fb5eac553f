"""Backward kernels of cluster attention for short clusters. Formulas and shape legend: parts.py.

Cost: 2.5 times that of the forward pass where all slots of a head are one tile, else 3.5 times: two kernels compute t
and b. Nothing is added atomically: runs are bitwise equal.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from ..cluster.parts import squared, store_tile, tile
from ..products import cast, dot
from ..tokens import head, kernel
from .parts import (
    answers,
    gathered,
    masses,
    prefix_gradients,
    prefix_logits,
    prefix_sums,
    prefix_tile,
    repeated,
    row_sums,
    scattered,
    slopes,
    variances,
    weights,
)


@kernel
def query_gradients(
    q, k, v, o, rounding, g, dq, lse, deltas, spread, origin, partial, places, sizes,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    length_q, prefix, heads, clusters, tiles, scale,
    CLOSURE: tl.constexpr, FULL: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles B H). dq and delta of M queries, and their part of the prefix tokens' gradients.

    `rounding` is what the output lost when it was rounded to 16 bits: delta is subtracted from numbers near it.
    """
    KT: tl.constexpr = N // MP
    index, pid = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, d, e = index * M + tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    b, h = pid // heads, pid % heads
    k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    spread += pid.to(tl.int64) * (clusters * BD)
    origin += pid.to(tl.int64) * BD
    rows = tile(head(q, b, h, 0, q_b, q_h, q_t, UNIT), row, q_t * UNIT, d, length_q, D, BD)
    grad = tile(head(g, b, h, 0, g_b, g_h, g_t, UNIT), row, g_t * UNIT, e, length_q, E, BE)
    outs = tile(head(o, b, h, 0, o_b, o_h, o_t, UNIT), row, o_t * UNIT, e, length_q, E, BE).to(tl.float32)
    if dtype != tl.float32:
        outs += tile(head(rounding, b, h, 0, o_b, o_h, o_t, UNIT), row, o_t * UNIT, e, length_q, E, BE).to(tl.float32)
    delta = tl.sum(grad.to(tl.float32) * outs, 1)
    at_row = pid.to(tl.int64) * length_q + row
    tl.store(deltas + at_row, delta, mask=row < length_q)
    total = tl.load(lse + at_row, mask=row < length_q, other=0.0)
    squares = squared(rows, SQUARE)
    sums = tl.zeros((M, BD), tl.float32)
    through_spread = tl.zeros((M, BD), tl.float32)
    surplus = tl.zeros((M,), tl.float32)
    if PP:
        prefix_keys, prefix_values = prefix_tile(k, v, k_t, v_t, prefix, d, e, D, E, PP)
        p_l = tl.exp2(prefix_logits(rows, prefix_keys, prefix, scale, PRECISION) - total[:, None])
        b_l = dot(grad, tl.trans(prefix_values), None, PRECISION)
        dz_l = cast(p_l * scale * (b_l - delta[:, None]), dtype)
        sums = dot(dz_l, prefix_keys, None, PRECISION)
        surplus = prefix_sums(dz_l)
        partial += tl.program_id(0).to(tl.int64) * (prefix * (BD + BE))
        prefix_gradients(partial, rows, grad, p_l, dz_l, prefix, d, e, D, E, PRECISION)
    for first in tl.range(0, clusters, KT, num_stages=STAGES):
        c, place = first + tl.arange(0, KT), tl.load(places + first * MP + tl.arange(0, N))
        log_size, inverse = tl.load(sizes + c), tl.load(sizes + clusters + c)
        keys = gathered(k, place, k_t, d, D, BD)
        values = gathered(v, place, v_t, e, E, BE)
        spread_here = keys if FULL else variances(spread, first, d, P, KT, BD)
        t, z, x, gain = masses(
            rows, squares, keys, spread_here, log_size, inverse, place, scale, FULL, RAGGED, CLOSURE, KT, MP, PRECISION
        )
        away, r, dp = answers(grad, values, t, gain, inverse, scale, KT, MP, PRECISION)
        p = tl.exp2(z - total[:, None])
        dt, dx = slopes(t, away, r, dp, delta, p, x, gain, inverse, place, scale, FULL, RAGGED, CLOSURE, dtype)
        surplus += row_sums(dt)
        sums = dot(tl.reshape(dt, (M, N)), keys, sums, PRECISION)
        if not FULL:
            through_spread = dot(cast(repeated(dx, P // KT), SQUARE), spread_here, through_spread, PRECISION)
    if not FULL:
        sums += rows.to(tl.float32) * through_spread * (2.0 * scale * scale * (KT / P))
    sums -= surplus[:, None] * tl.load(origin + d).to(tl.float32)[None, :]
    store_tile(head(dq, b, h, 0, dq_b, dq_h, dq_t, UNIT), sums, row, dq_t * UNIT, d, length_q, D, BD)


@kernel
def key_gradients(
    q, k, v, g, dq, dk, dv, lse, deltas, spread, means, origin, dxs, partial, places, sizes,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    length_q, prefix, heads, clusters, tiles, scale,
    WHOLE: tl.constexpr, CLOSURE: tl.constexpr, FULL: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles B H). dk and dv of N slots.

    WHOLE: these are all slots of a head, so that delta is at hand and dq is written too; PP is then that of the prefix
    tokens, whose gradients are written for each M rows as `query_gradients` does, and else 0. dx passes through memory,
    dxs (B H, clusters, Lq up to whole tiles), to a second loop: registers hold no more sums in the first.
    """
    KT: tl.constexpr = N // MP
    index, pid = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    b, h = pid // heads, pid % heads
    q, g = head(q, b, h, 0, q_b, q_h, q_t, UNIT), head(g, b, h, 0, g_b, g_h, g_t, UNIT)
    k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    dq = head(dq, b, h, 0, dq_b, dq_h, dq_t, UNIT)
    spread += pid.to(tl.int64) * (clusters * BD)
    origin += pid.to(tl.int64) * BD
    lse += pid.to(tl.int64) * length_q
    deltas += pid.to(tl.int64) * length_q
    partial += pid.to(tl.int64) * (tl.cdiv(length_q, M) * prefix * (BD + BE))
    c, place = index * KT + tl.arange(0, KT), tl.load(places + index * N + tl.arange(0, N))
    log_size, inverse = tl.load(sizes + c), tl.load(sizes + clusters + c)
    keys = gathered(k, place, k_t, d, D, BD)
    values = gathered(v, place, v_t, e, E, BE)
    spread_here = keys if FULL else variances(spread, index * KT, d, P, KT, BD)
    length = tl.cdiv(length_q, M) * M
    dxs += pid.to(tl.int64) * clusters * length
    dk_sum, dv_sum = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
    for start in tl.range(0, length_q, M, num_stages=STAGES):
        row = start + tl.arange(0, M)
        rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(g, row, g_t * UNIT, e, length_q, E, BE)
        total = tl.load(lse + row, mask=row < length_q, other=0.0)
        if PP:
            prefix_keys, prefix_values = prefix_tile(k, v, k_t, v_t, prefix, d, e, D, E, PP)
            p_l = tl.exp2(prefix_logits(rows, prefix_keys, prefix, scale, PRECISION) - total[:, None])
            of_prefix = prefix_sums(p_l * dot(grad, tl.trans(prefix_values), None, PRECISION))
        t, z, x, gain = masses(
            rows, squared(rows, SQUARE), keys, spread_here, log_size, inverse, place, scale,
            FULL, RAGGED, CLOSURE, KT, MP, PRECISION,
        )  # fmt: skip
        p = tl.exp2(z - total[:, None])
        A = cast(tl.reshape(weights(t, p, gain, inverse, scale), (M, N)), dtype)
        dv_sum = dot(tl.trans(A), grad, dv_sum, PRECISION)
        away, r, dp = answers(grad, values, t, gain, inverse, scale, KT, MP, PRECISION)
        if WHOLE:
            delta = tl.sum(p * dp, 1)
            if PP:
                delta += of_prefix
        else:
            delta = tl.load(deltas + row, mask=row < length_q, other=0.0)
        dt, dx = slopes(t, away, r, dp, delta, p, x, gain, inverse, place, scale, FULL, RAGGED, CLOSURE, dtype)
        if WHOLE:
            surplus = row_sums(dt)
        dt = tl.reshape(dt, (M, N))
        dk_sum = dot(tl.trans(dt), rows, dk_sum, PRECISION)
        if not FULL:
            tl.store(dxs + c[None, :].to(tl.int64) * length + row[:, None], cast(dx, SQUARE))
        if WHOLE:
            sums = dot(dt, keys, None, PRECISION)
            if not FULL:
                through_spread = dot(cast(repeated(dx, P // KT), SQUARE), spread_here, None, PRECISION)
                sums += rows.to(tl.float32) * through_spread * (2.0 * scale * scale * (KT / P))
            if PP:  # read and computed once more: registers have no room for them meanwhile
                prefix_keys, prefix_values = prefix_tile(k, v, k_t, v_t, prefix, d, e, D, E, PP)
                p_l = tl.exp2(prefix_logits(rows, prefix_keys, prefix, scale, PRECISION) - total[:, None])
                b_l = dot(grad, tl.trans(prefix_values), None, PRECISION)
                dz_l = cast(p_l * scale * (b_l - delta[:, None]), dtype)
                sums = dot(dz_l, prefix_keys, sums, PRECISION)
                surplus += prefix_sums(dz_l)
                prefix_gradients(partial, rows, grad, p_l, dz_l, prefix, d, e, D, E, PRECISION)
                partial += prefix * (BD + BE)
            sums -= surplus[:, None] * tl.load(origin + d).to(tl.float32)[None, :]
            store_tile(dq, sums, row, dq_t * UNIT, d, length_q, D, BD)
    if not FULL:
        tl.debug_barrier()
        spread_sum = tl.zeros((N, BD), tl.float32)  # of the cluster of each slot
        of_slot = dxs + (index * KT + tl.arange(0, N) // MP)[:, None].to(tl.int64) * length
        for start in tl.range(0, length_q, M, num_stages=STAGES):
            row = start + tl.arange(0, M)
            squares = squared(tile(q, row, q_t * UNIT, d, length_q, D, BD), SQUARE)
            spread_sum = dot(tl.load(of_slot + row[None, :]), squares, spread_sum, PRECISION)
        cluster = pid.to(tl.int64) * clusters + index * KT + tl.arange(0, N) // MP
        own = gathered(k, place, k_t, d, D, BD).to(tl.float32) - tl.load(means + cluster[:, None] * BD + d[None, :])
        each = tl.load(sizes + clusters + index * KT + tl.arange(0, N) // MP) * (2.0 * scale * scale)
        dk_sum += own * spread_sum * each[:, None]
    scattered(head(dk, b, h, 0, dk_b, dk_h, dk_t, UNIT), dk_sum, place, dk_t * UNIT, d, D, BD)
    scattered(head(dv, b, h, 0, dv_b, dv_h, dv_t, UNIT), dv_sum, place, dv_t * UNIT, e, E, BE)


@kernel
def add_prefix(
    partial, dk, dv, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, prefix, heads, tiles,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (p B H). dk and dv of each prefix token: the sum of partial (B H, tiles, p, BD + BE) over tiles."""
    token, pid = tl.program_id(0) % prefix, tl.program_id(0) // prefix
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    partial += (pid.to(tl.int64) * tiles * prefix + token) * (BD + BE)
    of_key, of_value = tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
    for _ in range(tiles):
        of_key += tl.load(partial + d, mask=d < D, other=0.0)
        of_value += tl.load(partial + BD + e, mask=e < E, other=0.0)
        partial += prefix * (BD + BE)
    dk = head(dk, pid // heads, pid % heads, token, dk_b, dk_h, dk_t, UNIT)
    dv = head(dv, pid // heads, pid % heads, token, dv_b, dv_h, dv_t, UNIT)
    tl.store(dk + d, cast(of_key, dk.dtype.element_ty), mask=d < D)
    tl.store(dv + e, cast(of_value, dv.dtype.element_ty), mask=e < E)
