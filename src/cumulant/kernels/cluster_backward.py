"""Backward kernels of cluster attention. Formulas of the forward pass and shape legend: cluster_parts.py.

With do the gradient of the output, delta = do.out, h_c = (do S_c^T).q and dphi/dx = f/2, natural units:

    dz_c = p_c (do.v_mean_c + f_c h_c - delta)      dx_c = dz_c f_c / 2 + p_c h_c f'(x_c)
    dz_l = p_l (do.v_l - delta)                     tokens of near clusters
    dq   = scale (sum_c dz_c k_mean_c + sum_l dz_l k_l) + 2 scale^2 q sum_c dx_c var_c + sum_c p_c f_c do S_c^T
    d k_mean = scale dz^T q     d var = scale^2 dx^T q^2     d v_mean = p^T do     dS_c = q^T diag(p_c f_c) do
    dk = scale dz_l^T q + (d k_mean + 2 k~ d var + scale v~ dS^T) / n      dv = p_l^T do + (d v_mean + scale k~ dS) / n

`query_gradients` writes dq and, for the others, p, p f, dz and dx of each tile, (B H, tiles, KP, M); `vector_gradients`
and `matrix_gradients` sum over queries, `key_gradients` over the tiles that `tiles_of_clusters` lists for each cluster.
One matrix for all clusters makes h_c the same number h, and the last sum of dq (sum_c p_c f_c) do S^T.
Cost: about twice that of the forward pass. Partial sums are written, never added atomically: runs are bitwise equal.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from .cluster_forward import kernel
from .cluster_parts import (
    LN2,
    LOG2E,
    NOTHING,
    finished,
    gain_slope,
    kept_short,
    key_means,
    laid_out,
    masses,
    near_tile,
    origin_of,
    packed,
    parts,
    scaled,
    squared,
    store_tile,
    tile,
    turned_tile,
    value_means,
    variances,
    weighed,
    without_near,
)
from .products import cast, dot
from .tokens import head, minus


@kernel
def query_gradients(
    q, k, v, o, rounding, g, dq, lse, shifts, deltas, starts, logs, vectors, factors, matrices, near, responding,
    weights, gains, dz, dx,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    length_q, heads, clusters, blocks, T, R, scale,
    CLOSURE: tl.constexpr, NEAR: tl.constexpr, RESPONSE: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CK: tl.constexpr,
    KP: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). dq of M queries. shifts (B H, tiles, M): lse + a q.origin, for `key_gradients`; inf beyond Lq.

    `rounding` is what the output lost when it was rounded to 16 bits: delta is a difference of larger numbers.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, M)
    row, d, e = index * M + line, tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    b, h = pid // heads, pid % heads
    k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    vectors += pid.to(tl.int64) * (KP * (2 * BD + BE))
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    origin = origin_of(factors, d, BD)
    matrices += pid.to(tl.int64) * ((1 if RESPONSE == 3 else KP) * BD * BE)
    cell = d[:, None] * BE + e[None, :]
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    near += slot * T
    weights += slot * (KP * M)
    gains += slot * ((1 if RESPONSE == 3 else KP) * M)
    dz += slot * (KP * M)
    dx += slot * (KP * M)
    rows = tile(head(q, b, h, 0, q_b, q_h, q_t, UNIT), row, q_t * UNIT, d, length_q, D, BD)
    grad = tile(head(g, b, h, 0, g_b, g_h, g_t, UNIT), row, g_t * UNIT, e, length_q, E, BE)
    outs = tile(head(o, b, h, 0, o_b, o_h, o_t, UNIT), row, o_t * UNIT, e, length_q, E, BE).to(tl.float32)
    if dtype != tl.float32:
        outs += tile(head(rounding, b, h, 0, o_b, o_h, o_t, UNIT), row, o_t * UNIT, e, length_q, E, BE).to(tl.float32)
    delta = tl.sum(grad.to(tl.float32) * outs, 1)
    at_row = pid.to(tl.int64) * length_q + row
    total = tl.load(lse + at_row, mask=row < length_q, other=float("inf"))
    away = tl.sum(rows.to(tl.float32) * origin[None, :], 1) * (scale * LOG2E)
    tl.store(deltas + slot * M + line, delta)
    tl.store(shifts + slot * M + line, total + away)

    sums = tl.zeros((M, BD), tl.float32)
    squares = squared(rows, SQUARE)
    answering, common = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    if RESPONSE == 3:
        back = dot(grad, tl.trans(tl.load(matrices + cell)), None, PRECISION)
        common = tl.sum(rows.to(tl.float32) * back, 1)
    if RESPONSE == 1 or RESPONSE == 2:
        for chunk in range(0, KP, CK):
            c = chunk + tl.arange(0, CK)
            z, _, gain = masses(rows, squares, factors, vectors, logs, c, d, scale, CLOSURE, BD, BE, PRECISION)
            if NEAR:
                z = without_near(z, near, c, T)
            at = c[None, :] * M + line[:, None]
            tl.store(gains + at, tl.exp2(z - total[:, None]) * gain)
            if RESPONSE == 2:
                tl.store(dz + at, tl.zeros((M, CK), tl.float32).to(dtype))
        tl.debug_barrier()
        count = clusters
        if RESPONSE == 2:
            responding += slot * R
            count = R
        mine = laid_out(rows, d, PRECISION)
        for i in tl.range(0, count, num_stages=STAGES):
            c = i
            if RESPONSE == 2:
                c = tl.load(responding + i)
            at = tl.maximum(c, 0)
            gain = tl.load(gains + at * M + line).to(tl.float32)
            S = tl.load(matrices + at * (BD * BE) + cell)
            if RESPONSE == 2:
                gain = tl.where(c >= 0, gain, 0.0)
            back = dot(grad, tl.trans(S), None, PRECISION)
            sums += gain[:, None] * back
            answer = tl.sum(kept_short(mine).to(tl.float32) * back, 1)
            if RESPONSE == 2:
                tl.store(dz + at * M + line, cast(answer, dtype), mask=line < tl.where(c >= 0, M, 0))
            else:
                tl.store(dz + at * M + line, cast(answer, dtype))
        tl.debug_barrier()
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        z, x, gain = masses(rows, squares, factors, vectors, logs, c, d, scale, CLOSURE, BD, BE, PRECISION)
        if NEAR:
            z = without_near(z, near, c, T)
        p = tl.exp2(z - total[:, None])
        at = c[None, :] * M + line[:, None]
        tl.store(weights + at, packed(p, dtype))
        high, low = value_means(factors, c, e, BD, BE)
        change = dot(grad, tl.trans(high), None, PRECISION) - delta[:, None]
        if dtype != tl.float32:
            change = dot(grad, tl.trans(low), change, PRECISION)
        if RESPONSE:
            if RESPONSE == 3:
                answer = tl.broadcast_to(common[:, None], (M, CK))
                answering += tl.sum(p * gain, 1)
            else:
                answer = tl.load(dz + at, mask=(c < clusters)[None, :], other=0.0).to(tl.float32)
            change = p * (change + gain * answer)
            spread = 0.5 * change * gain + p * answer * gain_slope(x, gain, CLOSURE)
        else:
            change = p * change
            spread = 0.5 * change * gain
        tl.store(dz + at, packed(change, dtype))
        tl.store(dx + at, packed(spread, dtype))
        high, low = key_means(factors, c, d, BD, BE)
        change_high, change_low = parts(change, dtype)
        along = dot(change_high, high, None, PRECISION)
        if dtype != tl.float32:  # gradients of neighbouring clusters nearly cancel: 16 bits are too few
            along = dot(change_high, low, along, PRECISION)
            along = dot(change_low, high, along, PRECISION)
        sums += along * LN2
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
        sums += rows.to(tl.float32) * dot(cast(2.0 * spread, SQUARE), var, None, PRECISION)
    if RESPONSE == 3:
        tl.store(gains + line, answering)
        sums += answering[:, None] * dot(grad, tl.trans(tl.load(matrices + cell)), None, PRECISION)
    if NEAR:
        for i in tl.range(0, T * blocks, num_stages=NEAR_STAGES):
            c = tl.load(near + i // blocks)
            first = tl.load(starts + tl.maximum(c, 0)) + (i % blocks) * N
            end = tl.where(c >= 0, tl.load(starts + tl.maximum(c, 0) + 1), 0)
            token = first + tl.arange(0, N)
            keys = near_tile(k, token, k_t, d, end, D, BD, EVEN)
            values = near_tile(v, token, v_t, e, end, E, BE, EVEN)
            z = dot(rows, tl.trans(keys), None, PRECISION) * (scale * LOG2E) - (total + away)[:, None]
            if not EVEN:
                z = tl.where((token < end)[None, :], z, NOTHING)
            change = tl.exp2(z) * (dot(grad, tl.trans(values), None, PRECISION) * scale - (delta * scale)[:, None])
            sums = dot(cast(change, dtype), minus(keys, origin, token < end), sums, PRECISION)
    store_tile(head(dq, b, h, 0, dq_b, dq_h, dq_t, UNIT), sums, row, dq_t * UNIT, d, length_q, D, BD)


@kernel
def vector_gradients(
    q, g, weights, dz, dx, vectors, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles, span, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, CK: tl.constexpr,
    KP: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP / CK, B H, splits). Sums over `span` tiles for d k_mean, d var and d v_mean of CK clusters."""
    pid, split = tl.program_id(1), tl.program_id(2)
    c, line = tl.program_id(0) * CK + tl.arange(0, CK), tl.arange(0, M)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads, 0, g_b, g_h, g_t, UNIT)
    start = pid.to(tl.int64) * tiles
    at = c[:, None] * M + line[None, :]
    dk, dv, ds = tl.zeros((CK, BD), tl.float32), tl.zeros((CK, BE), tl.float32), tl.zeros((CK, BD), tl.float32)
    for index in tl.range(split * span, tl.minimum(split * span + span, tiles), num_stages=STAGES):
        row = index * M + line
        rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(g, row, g_t * UNIT, e, length_q, E, BE)
        here = (start + index) * (KP * M)
        dk = dot(tl.load(dz + here + at), rows, dk, PRECISION)
        dv = dot(tl.load(weights + here + at), grad, dv, PRECISION)
        ds = dot(tl.load(dx + here + at).to(SQUARE), squared(rows, SQUARE), ds, PRECISION)
    row = (split.to(tl.int64) * tl.num_programs(1) + pid) * KP + c
    vectors += row[:, None] * (2 * BD + BE)
    tl.store(vectors + d[None, :], dk * scale)
    tl.store(vectors + BD + d[None, :], ds * (scale * scale))
    tl.store(vectors + 2 * BD + e[None, :], dv)


@kernel
def matrix_gradients(
    q, g, gains, matrices, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles, span,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP / C, B H, splits). dS of C clusters (1, 2, 4 or 8) over `span` tiles.

    Queries times gains are the first factor: that one may lie in registers, so that nothing is written to shared memory
    and both factors are read once for C clusters.
    """
    pid, split = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * C
    line, d, e = tl.arange(0, N), tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads, 0, g_b, g_h, g_t, UNIT)
    start = pid.to(tl.int64) * tiles
    S0 = tl.zeros((BD, BE), tl.float32)
    S1, S2, S3, S4, S5, S6, S7 = S0, S0, S0, S0, S0, S0, S0
    parts: tl.constexpr = M // N
    for i in tl.range(split * span * parts, tl.minimum(split * span + span, tiles) * parts, num_stages=STAGES):
        row = i * N + line
        rows = turned_tile(q, row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(g, row, g_t * UNIT, e, length_q, E, BE)
        gain = gains + (start + i // parts) * (KP * M) + (first * M + (i % parts) * N) + line
        S0 = finished(dot(weighed(rows, tl.load(gain)), grad, S0, PRECISION))
        if C > 1:
            S1 = finished(dot(weighed(rows, tl.load(gain + M)), grad, S1, PRECISION))
        if C > 2:
            S2 = finished(dot(weighed(rows, tl.load(gain + 2 * M)), grad, S2, PRECISION))
            S3 = finished(dot(weighed(rows, tl.load(gain + 3 * M)), grad, S3, PRECISION))
        if C > 4:
            S4 = finished(dot(weighed(rows, tl.load(gain + 4 * M)), grad, S4, PRECISION))
            S5 = finished(dot(weighed(rows, tl.load(gain + 5 * M)), grad, S5, PRECISION))
            S6 = finished(dot(weighed(rows, tl.load(gain + 6 * M)), grad, S6, PRECISION))
            S7 = finished(dot(weighed(rows, tl.load(gain + 7 * M)), grad, S7, PRECISION))
    matrices += ((split.to(tl.int64) * tl.num_programs(1) + pid) * KP + first) * (BD * BE)
    cell = d[:, None] * BE + e[None, :]
    tl.store(matrices + cell, S0)
    if C > 1:
        tl.store(matrices + BD * BE + cell, S1)
    if C > 2:
        tl.store(matrices + 2 * BD * BE + cell, S2)
        tl.store(matrices + 3 * BD * BE + cell, S3)
    if C > 4:
        tl.store(matrices + 4 * BD * BE + cell, S4)
        tl.store(matrices + 5 * BD * BE + cell, S5)
        tl.store(matrices + 6 * BD * BE + cell, S6)
        tl.store(matrices + 7 * BD * BE + cell, S7)


@kernel
def listed_gradients(
    q, g, gains, matrices, counts, lists, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, KP: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP, B H). dS of a cluster over the tiles to which it responds."""
    c, pid = tl.program_id(0), tl.program_id(1)
    line, d, e = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads, 0, g_b, g_h, g_t, UNIT)
    gains += pid.to(tl.int64) * tiles * (KP * M) + c * M
    slot = pid.to(tl.int64) * KP + c
    lists += slot * tiles
    sums = tl.zeros((BD, BE), tl.float32)
    for j in tl.range(0, tl.load(counts + slot), num_stages=STAGES):
        index = tl.load(lists + j)
        row = index * M + line
        rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(g, row, g_t * UNIT, e, length_q, E, BE)
        gain = tl.load(gains + index.to(tl.int64) * (KP * M) + line)
        sums = dot(tl.trans(rows), scaled(grad, gain), sums, PRECISION)
    tl.store(matrices + slot * (BD * BE) + d[:, None] * BE + e[None, :], sums)


@kernel
def tiles_of_clusters(named, counts, lists, tiles, T, N: tl.constexpr):
    """Grid (KP, B H). The tiles whose list (B H, tiles, T) names a cluster, (B H, KP, tiles) in order, and how many."""
    c, pid = tl.program_id(0), tl.program_id(1)
    slot = pid.to(tl.int64) * tl.num_programs(0) + c
    named += pid.to(tl.int64) * tiles * T
    lists += slot * tiles
    found = 0
    for first in range(0, tiles * T, N):
        at = first + tl.arange(0, N)
        here = (tl.load(named + at, mask=at < tiles * T, other=-1) == c).to(tl.int32)
        tl.store(lists + found + tl.cumsum(here, 0) - 1, at // T, mask=here > 0)
        found += tl.sum(here)
    tl.store(counts + slot, found)


@kernel
def key_gradients(
    q, k, v, g, dk, dv, shifts, deltas, starts, vectors, grad_vectors, grad_matrices, counts, lists,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    length_q, heads, tiles, scale,
    NEAR: tl.constexpr, RESPONSE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a cluster, K, B H). dk and dv of N keys: from queries near to them and through the statistics."""
    c, pid = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + c), tl.load(starts + c + 1)
    first = begin + tl.program_id(0) * N
    if first < end:
        b, h = pid // heads, pid % heads
        d, e, line, token = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, ROWS), first + tl.arange(0, N)
        dtype: tl.constexpr = q.dtype.element_ty
        keys = tile(head(k, b, h, 0, k_b, k_h, k_t, UNIT), token, k_t * UNIT, d, end, D, BD)
        values = tile(head(v, b, h, 0, v_b, v_h, v_t, UNIT), token, v_t * UNIT, e, end, E, BE)
        key_sums, value_sums = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
        if NEAR:
            q, g = head(q, b, h, 0, q_b, q_h, q_t, UNIT), head(g, b, h, 0, g_b, g_h, g_t, UNIT)
            count = tl.load(counts + pid * KP + c)
            lists += (pid.to(tl.int64) * KP + c) * tiles
            shifts += pid.to(tl.int64) * tiles * M
            deltas += pid.to(tl.int64) * tiles * M
            times: tl.constexpr = M // ROWS
            for j in tl.range(0, count * times, num_stages=STAGES):
                row = tl.load(lists + j // times) * M + (j % times) * ROWS + line
                rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
                grad = tile(g, row, g_t * UNIT, e, length_q, E, BE)
                shift, delta = tl.load(shifts + row), tl.load(deltas + row)
                p = tl.exp2(dot(keys, tl.trans(rows), None, PRECISION) * (scale * LOG2E) - shift[None, :])
                value_sums = dot(cast(p, dtype), grad, value_sums, PRECISION)
                change = p * (dot(values, tl.trans(grad), None, PRECISION) - delta[None, :])
                key_sums = dot(cast(change, dtype), rows, key_sums, PRECISION)
            key_sums *= scale
        over = 1.0 / (end - begin).to(tl.float32)
        at = pid.to(tl.int64) * KP + c
        vectors += at * (2 * BD + BE)
        grad_vectors += at * (2 * BD + BE)
        dk_c = keys.to(tl.float32) - tl.load(vectors + d)[None, :]
        dv_c = values.to(tl.float32) - tl.load(vectors + 2 * BD + e)[None, :]
        of_mean, of_spread = tl.load(grad_vectors + d), tl.load(grad_vectors + BD + d)
        key_sums += (of_mean[None, :] + 2.0 * dk_c * of_spread[None, :]) * over
        value_sums += (tl.load(grad_vectors + 2 * BD + e) * over)[None, :]
        if RESPONSE:
            S = tl.load(grad_matrices + at * (BD * BE) + d[:, None] * BE + e[None, :])
            S, low = parts(S * (scale * over), dtype)
            key_sums = dot(cast(dv_c, dtype), tl.trans(S), key_sums, PRECISION)
            value_sums = dot(cast(dk_c, dtype), S, value_sums, PRECISION)
            if dtype != tl.float32:
                key_sums = dot(cast(dv_c, dtype), tl.trans(low), key_sums, PRECISION)
                value_sums = dot(cast(dk_c, dtype), low, value_sums, PRECISION)
        store_tile(head(dk, b, h, 0, dk_b, dk_h, dk_t, UNIT), key_sums, token, dk_t * UNIT, d, end, D, BD)
        store_tile(head(dv, b, h, 0, dv_b, dv_h, dv_t, UNIT), value_sums, token, dv_t * UNIT, e, end, E, BE)
