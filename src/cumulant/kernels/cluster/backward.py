"""Backward kernels of cluster attention. Formulas of the forward pass and shape legend: parts.py.

With do the gradient of the output, delta = do.out, h_c = (do S_c^T).q and dphi/dx = f/2, natural units:

    dz_c = p_c (do.v_mean_c + f_c h_c - delta)      dx_c = dz_c f_c / 2 + p_c h_c f'(x_c)
    dz_l = p_l (do.v_l - delta)                     tokens of near clusters
    dq   = scale (sum_c dz_c k_mean_c + sum_l dz_l k_l) + 2 scale^2 q sum_c dx_c var_c + sum_c p_c f_c do S_c^T
    d k_mean = scale dz^T q     d var = scale^2 dx^T q^2     d v_mean = p^T do     dS_c = q^T diag(p_c f_c) do
    dk = scale dz_l^T q + (d k_mean + 2 k~ d var + scale v~ dS^T) / n      dv = p_l^T do + (d v_mean + scale k~ dS) / n

`query_gradients` writes dq and, for the others, p, p f, dz and 2 dx of each tile, (B H, tiles, KP, M); the kernels of
sums.py sum over queries, `key_gradients` over the tiles that `tiles_of_clusters` lists for each cluster. One
matrix for all clusters makes h_c the same number h, and the last sum of dq (sum_c p_c f_c) do S^T.
Cost: about twice that of the forward pass. Partial sums are written, never added atomically: runs are bitwise equal.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import head, kernel, minus
from .parts import (
    LN2,
    LOG2E,
    NOTHING,
    block_tile,
    far_logs,
    finished,
    kept_short,
    key_means,
    laid_out,
    masses,
    near_block,
    origin_of,
    packed,
    parts,
    reciprocal,
    squared,
    store_tile,
    tile,
    twice_gain_slope,
    value_means,
    variances,
)


@triton.jit
def turned_back(grad, high, low, PRECISION: tl.constexpr):
    """do S^T with the one S of all clusters, rounded and what that lost: (n, BD)."""
    back = dot(grad, tl.trans(high), None, PRECISION)
    if grad.dtype != tl.float32:
        back = dot(grad, tl.trans(low), back, PRECISION)
    return back


@kernel
def query_gradients(
    q, k, v, o, rounding, g, dq, lse, shifts, deltas, starts, logs, vectors, factors, matrices, near, responding,
    weights, gains, dz, dx,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    length_q, heads, clusters, blocks, T, R, scale,
    CLOSURE: tl.constexpr, NEAR: tl.constexpr, RESPONSE: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CK: tl.constexpr,
    KP: tl.constexpr, SQUARE: tl.constexpr, CHUNK_STAGES: tl.constexpr, STAGES: tl.constexpr,
    NEAR_STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
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
    matrices += pid.to(tl.int64) * ((2 if RESPONSE == 3 else KP) * BD * BE)
    cell = d[:, None] * BE + e[None, :]
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    near += slot * T
    weights += slot * (KP * M)
    gains += slot * ((1 if RESPONSE == 3 else KP) * M)
    dz += slot * (KP * M)
    dx += slot * (KP * M)
    q = head(q, b, h, 0, q_b, q_h, q_t, UNIT)
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
    grad = tile(head(g, b, h, 0, g_b, g_h, g_t, UNIT), row, g_t * UNIT, e, length_q, E, BE)
    if RESPONSE == 3:  # asked for here and not where it is used, as below: it comes while other things are done
        S, S_low = tl.load(matrices + cell), tl.load(matrices + BD * BE + cell)
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
        common = tl.sum(rows.to(tl.float32) * turned_back(grad, S, S_low, PRECISION), 1)
    if RESPONSE == 1 or RESPONSE == 2:
        for chunk in range(0, KP, CK):
            c = chunk + tl.arange(0, CK)
            size = far_logs(logs, near, c, NEAR)
            var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
            high, low = key_means(factors, c, d, BD, BE)
            z, _, _, lift = masses(rows, squares, var, high, low, size, CLOSURE, PRECISION)
            at = c[None, :] * M + line[:, None]
            tl.store(gains + at, tl.exp2(z - total[:, None]) * lift)
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
    if RESPONSE == 1 or RESPONSE == 2:
        sums *= LOG2E  # factors of the key means carry it: it is taken off after the loop
    for chunk in tl.range(0, KP, CK, num_stages=CHUNK_STAGES):
        c = chunk + tl.arange(0, CK)
        at = c[None, :] * M + line[:, None]
        size = far_logs(logs, near, c, NEAR)
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
        high, low = key_means(factors, c, d, BD, BE)
        value_high, value_low = value_means(factors, c, e, BD, BE)
        change = dot(grad, tl.trans(value_high), None, PRECISION)
        if dtype != tl.float32:
            change = dot(grad, tl.trans(value_low), change, PRECISION)
        z, x, grow, lift = masses(rows, squares, var, high, low, size, CLOSURE, PRECISION)
        p = tl.exp2(z - total[:, None])
        if RESPONSE == 3:
            answering += tl.sum(p * lift, 1)
        p *= grow
        gain = lift * reciprocal(grow)
        if RESPONSE:
            if RESPONSE == 3:
                answer = tl.broadcast_to(common[:, None], (M, CK))
            else:
                answer = tl.load(dz + at, mask=(c < clusters)[None, :], other=0.0).to(tl.float32)
            change = p * (change + (gain * answer - delta[:, None]))
            spread = change * gain + (p * answer) * twice_gain_slope(x, gain, CLOSURE)
        else:
            change = p * (change - delta[:, None])
            spread = change * gain
        p, spread = packed(p, dtype), packed(spread, dtype)
        change_high, change_low = parts(change, dtype)
        sums = dot(change_high, high, sums, PRECISION)
        if dtype != tl.float32:  # gradients of neighbouring clusters nearly cancel: 16 bits are too few
            sums = dot(change_high, low, sums, PRECISION)
            sums = dot(change_low, high, sums, PRECISION)
        tl.store(weights + at, p)
        tl.store(dz + at, change_high)
        tl.store(dx + at, spread)
    sums *= LN2
    # Read again: held in registers meanwhile, the queries would push out what the loop above needs.
    again = tile(q, row, q_t * UNIT, d, length_q, D, BD)
    if RESPONSE == 3:
        S, S_low = tl.load(matrices + cell), tl.load(matrices + BD * BE + cell)
    # 2 sum_c dx_c var_c in a loop of its own: a second sum beside the first would not fit the registers.
    tl.debug_barrier()
    turned = tl.zeros((M, BD), tl.float32)
    for chunk in tl.range(0, KP, CK, num_stages=CHUNK_STAGES):
        c = chunk + tl.arange(0, CK)
        spread = tl.load(dx + c[:, None] * M + line[None, :])
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
        turned = dot(tl.trans(spread).to(SQUARE), var, turned, PRECISION)
    sums += again.to(tl.float32) * turned
    if RESPONSE == 3:
        tl.store(gains + line, answering)
        sums += answering[:, None] * turned_back(grad, S, S_low, PRECISION)
    if NEAR:
        for i in tl.range(0, T * blocks, num_stages=NEAR_STAGES):
            first, end = near_block(near, starts, i, blocks, N, EVEN)
            token = first + tl.arange(0, N)
            keys = block_tile(k, token, k_t, d, end, D, BD, EVEN)
            values = block_tile(v, token, v_t, e, end, E, BE, EVEN)
            z = dot(rows, tl.trans(keys), None, PRECISION) * (scale * LOG2E) - (total + away)[:, None]
            if not EVEN:
                z = tl.where((token < end)[None, :], z, NOTHING)
            change = tl.exp2(z) * (dot(grad, tl.trans(values), None, PRECISION) * scale - (delta * scale)[:, None])
            sums = dot(cast(change, dtype), minus(keys, origin, token < end), sums, PRECISION)
    store_tile(head(dq, b, h, 0, dq_b, dq_h, dq_t, UNIT), sums, row, dq_t * UNIT, d, length_q, D, BD)


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
    length_q, length_k, heads, tiles, scale,
    NEAR: tl.constexpr, RESPONSE: tl.constexpr, POOLED: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a cluster, K, B H). dk and dv of N keys: from queries near to them and through the statistics.

    POOLED: the gradient of one matrix for all clusters, their mean by size; each has n / Lk of it. WHOLE: all tiles
    are full.
    """
    c, pid = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + c), tl.load(starts + c + 1)
    first = begin + tl.program_id(0) * N
    if first < end:
        b, h = pid // heads, pid % heads
        d, e, line, token = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, ROWS), first + tl.arange(0, N)
        dtype: tl.constexpr = q.dtype.element_ty
        k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
        key_sums, value_sums = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
        if NEAR:
            q, g = head(q, b, h, 0, q_b, q_h, q_t, UNIT), head(g, b, h, 0, g_b, g_h, g_t, UNIT)
            count = tl.load(counts + pid * KP + c)
            lists += (pid.to(tl.int64) * KP + c) * tiles
            shifts += pid.to(tl.int64) * tiles * M
            deltas += pid.to(tl.int64) * tiles * M
            times: tl.constexpr = M // ROWS
            keys = tile(k, token, k_t * UNIT, d, end, D, BD)
            values = tile(v, token, v_t * UNIT, e, end, E, BE)
            for j in tl.range(0, count * times, num_stages=STAGES):
                row = tl.load(lists + j // times) * M + (j % times) * ROWS + line
                rows = block_tile(q, row, q_t * UNIT, d, length_q, D, BD, WHOLE)
                grad = block_tile(g, row, g_t * UNIT, e, length_q, E, BE, WHOLE)
                shift, delta = tl.load(shifts + row), tl.load(deltas + row)
                p = finished(dot(keys, tl.trans(rows), None, PRECISION))
                change = finished(dot(values, tl.trans(grad), None, PRECISION))
                p = tl.exp2(p * (scale * LOG2E) - shift[None, :])
                change = p * (change - delta[None, :])
                value_sums = dot(packed(p, dtype), grad, value_sums, PRECISION)
                key_sums = finished(dot(packed(change, dtype), rows, key_sums, PRECISION))
                value_sums = finished(value_sums)
            key_sums *= scale
        over = 1.0 / (end - begin).to(tl.float32)
        at = pid.to(tl.int64) * KP + c
        vectors += at * (2 * BD + BE)
        grad_vectors += at * (2 * BD + BE)
        # Read again: held in registers by the loop, keys and values would leave it fewer.
        dk_c = tile(k, token, k_t * UNIT, d, end, D, BD).to(tl.float32) - tl.load(vectors + d)[None, :]
        dv_c = tile(v, token, v_t * UNIT, e, end, E, BE).to(tl.float32) - tl.load(vectors + 2 * BD + e)[None, :]
        of_mean, of_spread = tl.load(grad_vectors + d), tl.load(grad_vectors + BD + d)
        key_sums += (of_mean[None, :] + 2.0 * dk_c * of_spread[None, :]) * over
        value_sums += (tl.load(grad_vectors + 2 * BD + e) * over)[None, :]
        if RESPONSE:
            if POOLED:
                at, over = pid.to(tl.int64), 1.0 / length_k.to(tl.float32)
            S = tl.load(grad_matrices + at * (BD * BE) + d[:, None] * BE + e[None, :])
            S, low = parts(S * (scale * over), dtype)
            key_sums = dot(cast(dv_c, dtype), tl.trans(S), key_sums, PRECISION)
            value_sums = dot(cast(dk_c, dtype), S, value_sums, PRECISION)
            if dtype != tl.float32:
                key_sums = dot(cast(dv_c, dtype), tl.trans(low), key_sums, PRECISION)
                value_sums = dot(cast(dk_c, dtype), low, value_sums, PRECISION)
        store_tile(head(dk, b, h, 0, dk_b, dk_h, dk_t, UNIT), key_sums, token, dk_t * UNIT, d, end, D, BD)
        store_tile(head(dv, b, h, 0, dv_b, dv_h, dv_t, UNIT), value_sums, token, dv_t * UNIT, e, end, E, BE)
