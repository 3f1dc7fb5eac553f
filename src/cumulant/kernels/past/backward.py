"""Backward kernels of causal cluster attention. Formulas: cluster/backward.py; who sees what: forward.py.

`query_gradients` writes dq and, for the others, p, p f, dz and 2 dx of each tile at the places of its list,
(B H, tiles, listed, M); with one response for all `attend` has written the sum of p f, (B H, tiles, M). A cluster has
the same place in every list that holds it, and those are of tiles in a row, so that sums over queries run over these.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..cluster.parts import (
    LN2,
    LOG2E,
    NOTHING,
    finished,
    first_row,
    kept_short,
    key_means,
    laid_out,
    masses,
    origin_of,
    packed,
    parts,
    picked_tile,
    placed,
    query_head,
    reciprocal,
    squared,
    stepped,
    store_picked,
    store_tile,
    tile,
    turned_tile,
    value_means,
    variances,
    weighed,
)
from ..cluster.rows import along_means, changes_of_means, met_by_rows, read_rows, through_matrix, through_statistics
from ..products import cast, dot
from ..tokens import ahead, head, kernel
from .forward import list_within, of_those, seen_clusters, seen_tokens, sees, window, window_block
from .near import gathered, numbered, pairs_of, with_pair_sums
from .pooled import through_pools


@kernel
def query_gradients(
    q, k, v, o, rounding, g, dq, lse, shifts, deltas, bounds, order, logs, spans, lists, vectors, factors, matrices,
    weights, gains, dz, dx, named, pair_sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    length_q, length_k, heads, tiles, per, listed, size, recent, offset, scale,
    NEAR: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr, PREFIX: tl.constexpr, CLOSURE: tl.constexpr,
    RESPONSE: tl.constexpr, WITHIN: tl.constexpr, AHEAD: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
    SQUARE: tl.constexpr, STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). dq of M rows. shifts (B H, tiles, M): lse + a q.origin, for `key_gradients`; inf beyond Lq."""
    index, pid = tl.program_id(0), tl.program_id(1)
    line, start = tl.arange(0, M), first_row(index, tiles, M, GROUP)
    row, d, e = start + line, tl.arange(0, BD), tl.arange(0, BE)
    place = offset + row
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
    matrices += pid.to(tl.int64) * ((2 * KP if RESPONSE == 3 else KP) * BD * BE)
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    weights += slot * (listed * M)
    gains += slot * ((1 if RESPONSE == 3 else listed) * M)
    dz += slot * (listed * M)
    dx += slot * (listed * M)
    names, count = list_within(lists, index, tiles, listed, offset + start, size, recent, GROUP, WITHIN)
    PLAIN: tl.constexpr = WITHIN and not ORDERED and not PREFIX
    end = tl.minimum(start + M, length_q)
    if AHEAD and PLAIN:
        begin, first, stop = window(bounds, start, end, length_k, size, recent, offset, KP, N, ORDERED, PREFIX, PLAIN)
        ahead(k, k_t, begin, stop, 256)
        ahead(v, v_t, begin, stop, 256)
    q = query_head(q, pid, heads, index, tiles, q_b, q_h, q_t, GROUP, UNIT)
    g = query_head(g, pid, heads, index, tiles, g_b, g_h, g_t, GROUP, UNIT)
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
    grad = tile(g, row, g_t * UNIT, e, length_q, E, BE)
    delta, total = read_rows(
        o, rounding, lse, grad, row, length_q, pid, heads, index, tiles, o_b, o_h, o_t, GROUP, E, BE, UNIT
    )
    away = tl.sum(rows.to(tl.float32) * origin[None, :], 1) * (scale * LOG2E)
    tl.store(deltas + slot * M + line, delta)
    tl.store(shifts + slot * M + line, total + away)
    if NEAR:
        own = pid.to(tl.int64) * (length_q * GROUP * NEAR)
        number = numbered(index, tiles, row, length_q, GROUP)
        named += own + number.to(tl.int64) * NEAR
        pair_sums += own * BD

    sums = tl.zeros((M, BD), tl.float32)
    squares = squared(rows, SQUARE)
    last = offset + end - 1
    common = tl.zeros((M,), tl.float32)
    if RESPONSE == 3:
        share = tl.load(gains + line) * LOG2E  # factors of the key means carry it: it is taken off after the loop
        back = through_pools(grad, matrices, place, offset + start, last, size, recent, BD, BE, True, WITHIN, PRECISION)
        common = tl.sum(rows.to(tl.float32) * back, 1)
        sums = share[:, None] * back
    elif RESPONSE:
        for chunk in range(0, count, CK):
            at = chunk + tl.arange(0, CK)
            c, tokens, seen = seen_clusters(names, logs, spans, at, count, place, KP, WITHIN)
            var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
            high, low = key_means(factors, c, d, BD, BE)
            z, _, _, lift = masses(rows, squares, var, high, low, tokens, CLOSURE, PRECISION)
            z = of_those(z, seen, c, named, row < length_q, NEAR, WITHIN)
            tl.store(gains + at[None, :] * M + line[:, None], tl.exp2(z - total[:, None]) * lift)
        tl.debug_barrier()
        mine = laid_out(rows, d, PRECISION)
        cell = d[:, None] * BE + e[None, :]
        for i in tl.range(0, count, num_stages=STAGES):
            c = tl.maximum(tl.load(names + i), 0)
            gain = tl.load(gains + i * M + line)
            S = tl.load(matrices + c.to(tl.int64) * (BD * BE) + cell)
            back = dot(grad, tl.trans(S), None, PRECISION)
            sums += gain[:, None] * back
            tl.store(dz + i * M + line, cast(tl.sum(kept_short(mine).to(tl.float32) * back, 1), dtype))
        tl.debug_barrier()
        sums *= LOG2E  # as above
    for chunk in tl.range(0, count, CK, num_stages=STAGES if RESPONSE == 3 else 1):
        at = chunk + tl.arange(0, CK)
        cells = at[None, :] * M + line[:, None]
        c, tokens, seen = seen_clusters(names, logs, spans, at, count, place, KP, WITHIN)
        some = at < count if WITHIN else None
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE, some)
        high, low = key_means(factors, c, d, BD, BE, some)
        value_high, value_low = value_means(factors, c, e, BD, BE, some)
        change = dot(grad, tl.trans(value_high), None, PRECISION)
        if dtype != tl.float32:
            change = dot(grad, tl.trans(value_low), change, PRECISION)
        z, x, grow, lift = masses(rows, squares, var, high, low, tokens, CLOSURE, PRECISION)
        z = of_those(z, seen, c, named, row < length_q, NEAR, WITHIN)
        p = tl.exp2(z - total[:, None]) * grow
        gain = lift * reciprocal(grow)
        answer = change  # read only if clusters respond
        if RESPONSE == 3:
            answer = tl.broadcast_to(common[:, None], (M, CK))
        elif RESPONSE:
            answer = tl.load(dz + cells, mask=(at < count)[None, :], other=0.0).to(tl.float32)
        change, spread = changes_of_means(p, x, gain, change, answer, delta, RESPONSE, CLOSURE)
        sums, change = along_means(sums, change, high, low, PRECISION)
        tl.store(weights + cells, packed(p, dtype))
        tl.store(dz + cells, change)
        tl.store(dx + cells, packed(spread, dtype))
    sums *= LN2
    again = tile(q, row, q_t * UNIT, d, length_q, D, BD)  # read again: fewer registers in the loop above
    tl.debug_barrier()
    turned = tl.zeros((M, BD), tl.float32)
    for chunk in tl.range(0, count, CK, num_stages=STAGES if RESPONSE == 3 else 1):
        at = chunk + tl.arange(0, CK)
        some = at < count if WITHIN else None
        c = at
        if not WITHIN:
            c = tl.maximum(tl.load(names + at), 0)
        spread = tl.load(dx + at[:, None] * M + line[None, :])
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE, some)
        turned = dot(tl.trans(spread).to(SQUARE), var, turned, PRECISION)
    sums += again.to(tl.float32) * turned
    changes = tl.zeros((M,), tl.float32)
    begin, first, stop = window(bounds, start, end, length_k, size, recent, offset, KP, N, ORDERED, PREFIX, PLAIN)
    for block in tl.range(begin, stop, N, num_stages=NEAR_STAGES):
        token, there, since = window_block(bounds, block, begin, first, stop, place, size, recent, KP, N, PREFIX, PLAIN)
        at = placed(order, token, there, ORDERED, False)
        keys = picked_tile(k, at, there, k_t, d, D, BD, False)
        values = picked_tile(v, at, there, v_t, e, E, BE, False)
        z = dot(rows, tl.trans(keys), None, PRECISION) * (scale * LOG2E) - (total + away)[:, None]
        z = seen_tokens(z, place, at, there, since, length_k, PLAIN)
        change = tl.exp2(z) * (dot(grad, tl.trans(values), None, PRECISION) * scale - (delta * scale)[:, None])
        changes += tl.sum(change, 1)
        change_high, change_low = parts(change, dtype)
        sums = dot(change_high, keys, sums, PRECISION)
        if dtype != tl.float32:
            sums = dot(change_low, keys, sums, PRECISION)
    sums -= changes[:, None] * origin[None, :]  # not off the keys: their differences would be rounded to 16 bits
    if NEAR:
        sums = with_pair_sums(sums, pair_sums, named, number, row < length_q, NEAR, BD)
    dq = query_head(dq, pid, heads, index, tiles, dq_b, dq_h, dq_t, GROUP, UNIT)
    store_tile(dq, sums, row, dq_t * UNIT, d, length_q, D, BD)


@triton.jit
def tiles_that_see(spans, c, clusters, length_q, offset, M: tl.constexpr, KP: tl.constexpr):
    """First tile of a head that sees cluster c, the end, and its place in their lists; of one or of several."""
    since = tl.load(spans + c, mask=c < clusters, other=2147483647)
    until = tl.load(spans + KP + c, mask=c < clusters, other=0)
    rows = tl.minimum(since, offset + length_q) - offset, tl.minimum(until, offset + length_q) - offset
    first, end = tl.maximum(rows[0], 0) // M, (tl.maximum(rows[1], 0) + M - 1) // M
    return first, tl.where(rows[0] < length_q, end, 0), tl.load(spans + 2 * KP + c, mask=c < clusters, other=0)


@triton.jit
def share(split, first, end, whole, GROUP: tl.constexpr):
    """What program `split` of all takes of the tiles from `first` to `end` of GROUP heads: numbers of them, a multiple
    of `whole` ones but for the last."""
    number = tl.maximum(end - first, 0) * GROUP
    each = tl.cdiv(tl.cdiv(number, whole), tl.num_programs(2)) * whole
    return split * each, tl.minimum(split * each + each, number)


@kernel
def vector_gradients(
    q, g, weights, dz, dx, gains, spans, vectors, grad_pools, q_b, q_h, q_t, g_b, g_h, g_t,
    length_q, heads, tiles, clusters, listed, size, recent, offset, scale, POOLS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP / CK, B H, splits). d k_mean, d var and d v_mean of CK clusters, over the tiles that see them, N rows at
    a time. POOLS: these are all clusters, of blocks that hold whole tiles of one query head, and dP of the rows of each
    block is summed on the way (as of `pool_gradients`)."""
    pid, split = tl.program_id(1), tl.program_id(2)
    c, line = tl.program_id(0) * CK + tl.arange(0, CK), tl.arange(0, N)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads * GROUP, 0, g_b, g_h, g_t, UNIT)
    since, until, slot = tiles_that_see(spans, c, clusters, length_q, offset, M, KP)
    first, end = tl.min(since, 0), tl.max(until, 0)
    at = slot.to(tl.int64)[:, None] * M + line[None, :]
    dk, dv, ds = tl.zeros((CK, BD), tl.float32), tl.zeros((CK, BE), tl.float32), tl.zeros((CK, BD), tl.float32)
    number: tl.constexpr = M // N
    whole, S = 1, tl.zeros((BD, BE), tl.float32)
    if POOLS:
        whole = size // M
        gains += pid.to(tl.int64) * (tiles * M) + line
        grad_pools += pid.to(tl.int64) * (KP * BD * BE) + d[:, None] * BE + e[None, :]
    low, high = share(split, first, end, whole, GROUP)
    for i in tl.range(low * number, high * number, num_stages=STAGES):
        j = i // number
        own = first + j % (end - first)
        index = own + j // (end - first) * tiles
        row = own * M + (i % number) * N + line
        rows = tile(stepped(q, index, tiles, q_h, GROUP, UNIT), row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(stepped(g, index, tiles, g_h, GROUP, UNIT), row, g_t * UNIT, e, length_q, E, BE)
        here = (pid.to(tl.int64) * (tiles * GROUP) + index) * listed * M + (i % number) * N
        seen = ((own >= since) & (own < until))[:, None]  # else the place is another cluster's
        dk = dot(tl.load(dz + here + at, mask=seen, other=0.0), rows, dk, PRECISION)
        dv = dot(tl.load(weights + here + at, mask=seen, other=0.0), grad, dv, PRECISION)
        ds = dot(tl.load(dx + here + at, mask=seen, other=0.0).to(SQUARE), squared(rows, SQUARE), ds, PRECISION)
        if POOLS:
            gain = tl.load(gains + own * M + (i % number) * N)
            S = dot(weighed(tl.trans(rows), gain), grad, S, PRECISION)
        dk, dv, ds = finished(dk), finished(dv), finished(ds)
        if POOLS:
            S = finished(S)
            last = ((i + 1) % (whole * number) == 0) | (i + 1 == high * number)
            if last:
                block = (own * M + offset) // size
                tl.store(grad_pools + (block - recent - 1) * (BD * BE), S)
            S *= tl.where(last, 0.0, 1.0)
    row = (split.to(tl.int64) * tl.num_programs(1) + pid) * KP + c
    vectors += row[:, None] * (2 * BD + BE)
    tl.store(vectors + d[None, :], dk * scale)
    tl.store(vectors + BD + d[None, :], ds * (0.5 * scale * scale))
    tl.store(vectors + 2 * BD + e[None, :], dv)


@triton.jit
def gain_of(gains, slot, own, since, until, line, M: tl.constexpr, N: tl.constexpr):
    """Gains (N,) of a cluster in tile `own`, 0 where that does not see it: then its place is another's."""
    seen = (own >= since) & (own < until)
    return tl.load(gains + slot.to(tl.int64) * M + line, mask=line < tl.where(seen, N, 0), other=0.0)


@kernel
def matrix_gradients(
    q, g, gains, spans, matrices, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles, clusters, listed, offset,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP / C, B H, splits). dS of C clusters (1, 2 or 4) over the tiles that see them, N rows at a time."""
    pid, split = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * C
    line, d, e = tl.arange(0, N), tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads * GROUP, 0, g_b, g_h, g_t, UNIT)
    since0, until0, slot0 = tiles_that_see(spans, c, clusters, length_q, offset, M, KP)
    since1, until1, slot1 = tiles_that_see(spans, c + 1, clusters if C > 1 else 0, length_q, offset, M, KP)
    since2, until2, slot2 = tiles_that_see(spans, c + 2, clusters if C > 2 else 0, length_q, offset, M, KP)
    since3, until3, slot3 = tiles_that_see(spans, c + 3, clusters if C > 2 else 0, length_q, offset, M, KP)
    first = tl.minimum(tl.minimum(since0, since1), tl.minimum(since2, since3))
    end = tl.maximum(tl.maximum(until0, until1), tl.maximum(until2, until3))
    S0 = tl.zeros((BD, BE), tl.float32)
    S1, S2, S3 = S0, S0, S0
    number: tl.constexpr = M // N
    low, high = share(split, first, end, 1, GROUP)
    for i in tl.range(low * number, high * number, num_stages=STAGES):
        j = i // number
        own = first + j % (end - first)
        index = own + j // (end - first) * tiles
        row = own * M + (i % number) * N + line
        rows = turned_tile(stepped(q, index, tiles, q_h, GROUP, UNIT), row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(stepped(g, index, tiles, g_h, GROUP, UNIT), row, g_t * UNIT, e, length_q, E, BE)
        here = gains + (pid.to(tl.int64) * (tiles * GROUP) + index) * listed * M + (i % number) * N
        gain = gain_of(here, slot0, own, since0, until0, line, M, N)
        S0 = finished(dot(weighed(rows, gain), grad, S0, PRECISION))
        if C > 1:
            gain = gain_of(here, slot1, own, since1, until1, line, M, N)
            S1 = finished(dot(weighed(rows, gain), grad, S1, PRECISION))
        if C > 2:
            gain = gain_of(here, slot2, own, since2, until2, line, M, N)
            S2 = finished(dot(weighed(rows, gain), grad, S2, PRECISION))
            gain = gain_of(here, slot3, own, since3, until3, line, M, N)
            S3 = finished(dot(weighed(rows, gain), grad, S3, PRECISION))
    matrices += ((split.to(tl.int64) * tl.num_programs(1) + pid) * KP + tl.program_id(0) * C) * (BD * BE)
    cell = d[:, None] * BE + e[None, :]
    tl.store(matrices + cell, S0)
    if C > 1:
        tl.store(matrices + BD * BE + cell, S1)
    if C > 2:
        tl.store(matrices + 2 * BD * BE + cell, S2)
        tl.store(matrices + 3 * BD * BE + cell, S3)


@triton.jit
def through_cluster(
    key_sums, value_sums, keys, values, vectors, grad_vectors, grad_matrices, cluster, over, scale,
    RESPONSE: tl.constexpr, dtype: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums for dk and dv of some tokens of a cluster of 1 / over, with those through its statistics."""
    at = cluster * (2 * BD + BE)
    key_sums, value_sums, dk, dv = through_statistics(
        key_sums, value_sums, keys.to(tl.float32), values.to(tl.float32), vectors + at, grad_vectors + at, over, BD, BE
    )
    if RESPONSE:
        key_sums, value_sums = through_matrix(
            key_sums, value_sums, dk, dv, grad_matrices + cluster * (BD * BE), scale * over, dtype, BD, BE, PRECISION
        )
    return key_sums, value_sums


@kernel
def key_gradients(
    q, k, v, g, dk, dv, shifts, deltas, bounds, order, ladder, vectors, grad_vectors, grad_matrices, pairs, ends,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    length_q, length_k, heads, tiles, per, size, recent, offset, levels, scale,
    NEAR: tl.constexpr, RESPONSE: tl.constexpr, PLAIN: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr,
    ORDERED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (parts of a block, blocks, B H). dk and dv of N keys: from rows that saw them one by one (NEAR: those that
    chose their block too), and through the statistics of the cluster of each level that holds them; `ladder`: first
    clusters of the levels, and how many. PLAIN: blocks are the clusters, of tokens where they stand, and tiles of rows
    lie within one.
    Sinks, which no block holds, have theirs from `cluster.keys.prefix_gradients`."""
    block, pid = tl.program_id(1), tl.program_id(2)
    b, h = pid // heads, pid % heads
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    if PLAIN:
        origin = block * size
        stop = tl.minimum(origin + size, tl.minimum(offset + length_q, length_k))
    else:
        origin, stop = tl.load(bounds + block), tl.load(bounds + (KP + 1) + block)
    first = origin + tl.program_id(0) * N
    if first < stop:
        d, e, token, line = tl.arange(0, BD), tl.arange(0, BE), first + tl.arange(0, N), tl.arange(0, ROWS)
        dtype: tl.constexpr = q.dtype.element_ty
        there = token < stop
        at = placed(order, token, there, ORDERED, False)
        k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
        q, g = head(q, b, h * GROUP, 0, q_b, q_h, q_t, UNIT), head(g, b, h * GROUP, 0, g_b, g_h, g_t, UNIT)
        keys = picked_tile(k, at, there, k_t * UNIT, d, D, BD, False)
        values = picked_tile(v, at, there, v_t * UNIT, e, E, BE, False)
        skipped = pid.to(tl.int64) * (tiles * GROUP) * M
        earliest = block * size if ORDERED else first  # rows from there to the end of the window see these tokens
        low = tl.maximum(earliest - offset, 0) // ROWS
        high = tl.cdiv(tl.minimum(tl.maximum((block + recent + 1) * size - offset, 0), length_q), ROWS)
        number = tl.maximum(high - low, 0)
        if AHEAD and PLAIN:
            ahead(q, q_t * UNIT, low * ROWS, length_q, 256)
            ahead(g, g_t * UNIT, low * ROWS, length_q, 256)
        # Before the loop: what it reads of the tokens is here then, and comes together.
        key_sums, value_sums = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
        if PLAIN:
            over = 1.0 / (stop - origin).to(tl.float32)
            key_sums, value_sums = through_cluster(
                key_sums, value_sums, keys, values, vectors, grad_vectors, grad_matrices, pid.to(tl.int64) * KP + block,
                over, scale, RESPONSE, dtype, BD, BE, PRECISION,
            )  # fmt: skip
        else:
            for j in range(levels):
                c = tl.load(ladder + j) + (block >> j)
                if (block >> j) < tl.load(ladder + levels + j):
                    over = 1.0 / (tl.load(bounds + (KP + 1) + c) - tl.load(bounds + c)).to(tl.float32)
                    key_sums, value_sums = through_cluster(
                        key_sums, value_sums, keys, values, vectors, grad_vectors, grad_matrices,
                        pid.to(tl.int64) * KP + c, over, scale, RESPONSE, dtype, BD, BE, PRECISION,
                    )  # fmt: skip
        for i in tl.range(0, number * GROUP, num_stages=STAGES):
            member = i // number * tiles  # first tile of the query head
            row = (low + i % number) * ROWS + line
            rows = tile(stepped(q, member, tiles, q_h, GROUP, UNIT), row, q_t * UNIT, d, length_q, D, BD)
            grad = tile(stepped(g, member, tiles, g_h, GROUP, UNIT), row, g_t * UNIT, e, length_q, E, BE)
            at_row = skipped + member * M + row
            shift, delta = tl.load(shifts + at_row), tl.load(deltas + at_row)
            p = finished(dot(keys, tl.trans(rows), None, PRECISION))
            change = finished(dot(values, tl.trans(grad), None, PRECISION))
            place = (offset + row)[None, :]
            if PLAIN:
                seen = at[:, None] <= place
            else:
                seen = sees(place, at[:, None], (place // size - recent) * size) & there[:, None]
            p = tl.exp2(tl.where(seen, p * (scale * LOG2E) - shift[None, :], NOTHING))
            change = p * (change * scale - (delta * scale)[None, :])
            key_sums, value_sums = met_by_rows(rows, grad, p, change, key_sums, value_sums, PRECISION)
        if NEAR:
            pairs, begin, end = pairs_of(pairs, ends, block, pid, length_q, NEAR, GROUP, KP)
            for i in tl.range(begin, end, ROWS, num_stages=STAGES):
                here = i + line < end
                n = tl.load(pairs + i + line, mask=here, other=0) // NEAR
                rows = gathered(q, n, here, length_q, q_h, q_t, d, GROUP, UNIT, D, BD)
                grad = gathered(g, n, here, length_q, g_h, g_t, e, GROUP, UNIT, E, BE)
                at_row = skipped + n
                if GROUP > 1:
                    at_row = skipped + (n // length_q) * (tiles * M) + n % length_q
                shift = tl.load(shifts + at_row, mask=here, other=float("inf"))
                delta = tl.load(deltas + at_row, mask=here, other=0.0)
                p = finished(dot(keys, tl.trans(rows), None, PRECISION))
                change = finished(dot(values, tl.trans(grad), None, PRECISION))
                p = tl.exp2(p * (scale * LOG2E) - shift[None, :])
                change = p * (change * scale - (delta * scale)[None, :])
                key_sums, value_sums = met_by_rows(rows, grad, p, change, key_sums, value_sums, PRECISION)
        store_picked(head(dk, b, h, 0, dk_b, dk_h, dk_t, UNIT), key_sums, at, there, dk_t * UNIT, d, D, BD)
        store_picked(head(dv, b, h, 0, dv_b, dv_h, dv_t, UNIT), value_sums, at, there, dv_t * UNIT, e, E, BE)
