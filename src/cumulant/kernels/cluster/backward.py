"""Backward kernels of cluster attention. Formulas of the forward pass and shape legend: parts.py.

With do the gradient of the output, delta = do.out, h_c = (do S_c^T).q and dphi/dx = f/2, natural units:

    dz_c = p_c (do.v_mean_c + f_c h_c - delta)      dx_c = dz_c f_c / 2 + p_c h_c f'(x_c)
    dz_l = p_l (do.v_l - delta)                     tokens of near clusters
    dq   = scale (sum_c dz_c k_mean_c + sum_l dz_l k_l) + 2 scale^2 q sum_c dx_c var_c + sum_c p_c f_c do S_c^T
    d k_mean = scale dz^T q     d var = scale^2 dx^T q^2     d v_mean = p^T do     dS_c = q^T diag(p_c f_c) do
    dk = scale dz_l^T q + (d k_mean + 2 k~ d var + scale v~ dS^T) / n      dv = p_l^T do + (d v_mean + scale k~ dS) / n

`query_gradients` writes dq and, for the others, p, p f, dz and 2 dx of each tile, (B H, tiles, KP, M); the kernels of
sums.py sum over queries, those of keys.py over the tiles that chose a cluster. One
matrix for all clusters makes h_c the same number h, and the last sum of dq (sum_c p_c f_c) do S^T.
Cost: about twice that of the forward pass. Partial sums are written, never added atomically: runs are bitwise equal.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import head, kernel
from .parts import (
    LN2,
    LOG2E,
    NOTHING,
    far_logs,
    first_row,
    kept_short,
    key_means,
    laid_out,
    masses,
    near_block,
    near_list,
    near_row,
    origin_of,
    packed,
    picked_tile,
    placed,
    query_head,
    reciprocal,
    squared,
    store_tile,
    tile,
    token_in_row,
    value_means,
    variances,
)
from .rows import along_means, changes_of_means, read_rows


@triton.jit
def turned_back(grad, high, low, PRECISION: tl.constexpr):
    """do S^T with the one S of all clusters, rounded and what that lost: (n, BD)."""
    back = dot(grad, tl.trans(high), None, PRECISION)
    if grad.dtype != tl.float32:
        back = dot(grad, tl.trans(low), back, PRECISION)
    return back


@kernel
def query_gradients(
    q, k, v, o, rounding, g, dq, lse, shifts, deltas, bounds, order, logs, vectors, factors, matrices, near, responding,
    weights, gains, dz, dx,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    length_q, length_k, heads, tiles, clusters, per, blocks, all_blocks, T, R, scale,
    GROUP: tl.constexpr, ORDERED: tl.constexpr,
    CLOSURE: tl.constexpr, NEAR: tl.constexpr, RESPONSE: tl.constexpr, EVEN: tl.constexpr, LOOSE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CK: tl.constexpr, KP: tl.constexpr, SQUARE: tl.constexpr, CHUNK_STAGES: tl.constexpr, STAGES: tl.constexpr,
    NEAR_STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). dq of M queries. shifts (B H, tiles, M): lse + a q.origin, for `key_gradients`; inf beyond Lq.

    `rounding` is what the output lost when it was rounded to 16 bits: delta is a difference of larger numbers.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, M)
    row, d, e = first_row(index, tiles, M, GROUP) + line, tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    b, h = pid // heads, pid % heads
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    logs += (pid // per) * KP
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
    q = query_head(q, pid, heads, index, tiles, q_b, q_h, q_t, GROUP, UNIT)
    g = query_head(g, pid, heads, index, tiles, g_b, g_h, g_t, GROUP, UNIT)
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
    grad = tile(g, row, g_t * UNIT, e, length_q, E, BE)
    if RESPONSE == 3:  # asked for here and not where it is used, as below: it comes while other things are done
        S, S_low = tl.load(matrices + cell), tl.load(matrices + BD * BE + cell)
    delta, total = read_rows(
        o, rounding, lse, grad, row, length_q, pid, heads, index, tiles, o_b, o_h, o_t, GROUP, E, BE, UNIT
    )
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
        answer = change  # read only if clusters respond
        if RESPONSE == 3:
            answer = tl.broadcast_to(common[:, None], (M, CK))
        elif RESPONSE:
            answer = tl.load(dz + at, mask=(c < clusters)[None, :], other=0.0).to(tl.float32)
        change, spread = changes_of_means(p, x, gain, change, answer, delta, RESPONSE, CLOSURE)
        p, spread = packed(p, dtype), packed(spread, dtype)
        sums, change = along_means(sums, change, high, low, PRECISION)
        tl.store(weights + at, p)
        tl.store(dz + at, change)
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
        # Of keys from the origin on: sum_l dz_l (k_l - origin), the same dz_l in both sums, however they were rounded.
        one, changes = tl.trans(cast(tl.full((8, N), 1.0, tl.float32), dtype)), tl.zeros((M, 8), tl.float32)
        listed, near_blocks = near_list(near, NEAR), all_blocks
        if LOOSE:
            near_tokens, begins, shifts = near_row(near, bounds, NEAR, KP)
            near_blocks = tl.cdiv(near_tokens, N)
        for i in tl.range(0, near_blocks, num_stages=NEAR_STAGES):
            if LOOSE:
                token = i * N + tl.arange(0, N)
                there, token = token < near_tokens, token_in_row(token, begins, shifts, NEAR)
            else:
                first, end = near_block(near, listed, bounds, i, blocks, T, NEAR, KP, N, EVEN)
                token = first + tl.arange(0, N)
                there = token < end
            place = placed(order, token, there, ORDERED, EVEN)
            keys = picked_tile(k, place, there, k_t, d, D, BD, EVEN)
            values = picked_tile(v, place, there, v_t, e, E, BE, EVEN)
            z = dot(rows, tl.trans(keys), None, PRECISION) * (scale * LOG2E) - (total + away)[:, None]
            if not EVEN:
                z = tl.where(there[None, :], z, NOTHING)
            change = tl.exp2(z) * (dot(grad, tl.trans(values), None, PRECISION) * scale - (delta * scale)[:, None])
            rounded = packed(change, dtype)
            changes = dot(rounded, one, changes, PRECISION)
            sums = dot(rounded, keys, sums, PRECISION)
        sums -= (tl.sum(changes, 1) * 0.125)[:, None] * origin_of(factors, d, BD)[None, :]
    dq = query_head(dq, pid, heads, index, tiles, dq_b, dq_h, dq_t, GROUP, UNIT)
    store_tile(dq, sums, row, dq_t * UNIT, d, length_q, D, BD)
