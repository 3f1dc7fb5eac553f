"""Kernels for the gradients of keys and values of cluster attention. Formulas: backward.py; shape legend: parts.py.

A cluster's keys meet the tiles that `tiles_of_clusters` lists for it. Prefix tokens are near to every query, so that
their sums are split over the tiles.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import dot
from ..tokens import head, kernel
from .parts import (
    LOG2E,
    NOTHING,
    block_tile,
    finished,
    first_row,
    packed,
    parts,
    picked_tile,
    placed,
    stepped,
    store_picked,
)
from .rows import met_by_rows, through_matrix, through_statistics


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


@triton.jit
def near_sums(
    q, g, keys, values, shifts, deltas, lists, since, begin, end, length_q, tiles, q_h, q_t, g_h, g_t, scale,
    LISTED: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv, (N, BD) and (N, BE), of keys and values that queries met one by one: those of tiles `begin` to `end`,
    LISTED: of the tiles in `lists` from `begin` to `end`; CAUSAL: their rows from `since` (N,) on."""
    d, e, line = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, ROWS)
    times: tl.constexpr = M // ROWS
    key_sums, value_sums = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
    if LISTED:  # the number of each tile is read a turn before it: what waits for a list cannot be asked for ahead
        coming = tl.load(lists + begin, mask=begin < end, other=0)
    for j in tl.range(begin * times, end * times, num_stages=STAGES):
        index = j // times
        if LISTED:
            index = coming
            coming = tl.load(lists + tl.minimum((j + 1) // times, end - 1))
        at = (j % times) * ROWS + line
        row = first_row(index, tiles, M, GROUP) + at
        rows = block_tile(stepped(q, index, tiles, q_h, GROUP, UNIT), row, q_t * UNIT, d, length_q, D, BD, WHOLE)
        grad = block_tile(stepped(g, index, tiles, g_h, GROUP, UNIT), row, g_t * UNIT, e, length_q, E, BE, WHOLE)
        shift, delta = tl.load(shifts + index * M + at), tl.load(deltas + index * M + at)
        p = finished(dot(keys, tl.trans(rows), None, PRECISION))
        change = finished(dot(values, tl.trans(grad), None, PRECISION))
        p = p * (scale * LOG2E) - shift[None, :]
        if CAUSAL:
            p = tl.where(row[None, :] >= since[:, None], p, NOTHING)
        p = tl.exp2(p)
        change = p * (change - delta[None, :])
        key_sums, value_sums = met_by_rows(rows, grad, p, change, key_sums, value_sums, PRECISION)
    return key_sums * scale, value_sums


@triton.jit
def by_halves(x, high, low, PRECISION: tl.constexpr):
    """x (n, width), all its digits, times the matrix of which these are the halves."""
    a, b = parts(x, high.dtype)
    rest = packed(x - a.to(tl.float32) - b.to(tl.float32), high.dtype)
    found = dot(b, low, dot(rest, high, None, PRECISION), PRECISION)
    return dot(a, high, dot(a, low, dot(b, high, found, PRECISION), PRECISION), PRECISION)


@kernel
def key_terms(
    vectors, grad_vectors, grad_matrices, bounds, terms, halves, per, scale,
    BD: tl.constexpr, BE: tl.constexpr, KP: tl.constexpr, CK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP / CK, B H). What clusters with one matrix for all add to the gradients of their tokens:

        dk_l += A_c + B_c k_l + G v_l      dv_l += C_c + G^T k_l      G = scale dS / n of all tokens

    terms (B H, KP, 2 BD + BE): A, B and C; halves (B H, 2, BD, BE): G rounded, and what that lost.
    """
    pid = tl.program_id(1).to(tl.int64)
    c, all_c = tl.program_id(0) * CK + tl.arange(0, CK), tl.arange(0, KP)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    bounds += (pid // per) * (2 * KP + 2)
    tokens = tl.sum(tl.load(bounds + (KP + 1) + all_c) - tl.load(bounds + all_c), 0)
    over = 1.0 / tl.maximum(tl.load(bounds + (KP + 1) + c) - tl.load(bounds + c), 1).to(tl.float32)
    at = (pid * KP + c)[:, None] * (2 * BD + BE)
    key, value = tl.load(vectors + at + d[None, :]), tl.load(vectors + at + 2 * BD + e[None, :])
    grad_vectors += at
    cell = d[:, None] * BE + e[None, :]
    G = tl.load(grad_matrices + pid * (BD * BE) + cell) * (scale / tl.maximum(tokens, 1).to(tl.float32))
    slope = 2.0 * over[:, None] * tl.load(grad_vectors + BD + d[None, :])
    constant = over[:, None] * tl.load(grad_vectors + d[None, :]) - slope * key
    high, low = parts(G, halves.dtype.element_ty)
    constant -= by_halves(value, tl.trans(high), tl.trans(low), PRECISION)
    other = over[:, None] * tl.load(grad_vectors + 2 * BD + e[None, :]) - by_halves(key, high, low, PRECISION)
    tl.store(terms + at + d[None, :], constant)
    tl.store(terms + at + BD + d[None, :], slope)
    tl.store(terms + at + 2 * BD + e[None, :], other)
    if tl.program_id(0) == 0:
        tl.store(halves + pid * (2 * BD * BE) + cell, high)
        tl.store(halves + pid * (2 * BD * BE) + BD * BE + cell, low)


@triton.jit
def block_gradients(
    q, k, v, g, dk, dv, shifts, deltas, bounds, order, vectors, grad_vectors, grad_matrices, counts, lists,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    length_q, heads, tiles, all_tiles, scale, pid, c, first, begin, end,
    NEAR: tl.constexpr, RESPONSE: tl.constexpr, POOLED: tl.constexpr, TERMS: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What `key_gradients` does for the N tokens from `first` on of cluster c."""
    b, h = pid // heads, pid % heads
    d, e, token = tl.arange(0, BD), tl.arange(0, BE), first + tl.arange(0, N)
    dtype: tl.constexpr = q.dtype.element_ty
    there = token < tl.where(EVEN, first + N, end)
    place = placed(order, token, there, ORDERED, EVEN)
    k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
    key_sums, value_sums = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
    if NEAR or TERMS:
        keys = picked_tile(k, place, there, k_t * UNIT, d, D, BD, EVEN)
        values = picked_tile(v, place, there, v_t * UNIT, e, E, BE, EVEN)
    if NEAR:
        q, g = head(q, b, h * GROUP, 0, q_b, q_h, q_t, UNIT), head(g, b, h * GROUP, 0, g_b, g_h, g_t, UNIT)
        skipped = pid.to(tl.int64) * all_tiles * M
        key_sums, value_sums = near_sums(
            q, g, keys, values, shifts + skipped, deltas + skipped, lists + (pid.to(tl.int64) * KP + c) * all_tiles,
            place, 0, tl.load(counts + pid * KP + c), length_q, tiles, q_h, q_t, g_h, g_t, scale,
            True, False, GROUP, WHOLE, D, E, BD, BE, M, N, ROWS, STAGES, UNIT, PRECISION,
        )  # fmt: skip
    if TERMS:  # asked for all at once
        cell = d[:, None] * BE + e[None, :]
        halves = grad_matrices + pid.to(tl.int64) * (2 * BD * BE)
        high, low = tl.load(halves + cell), tl.load(halves + BD * BE + cell)
        again = picked_tile(k, place, there, k_t * UNIT, d, D, BD, False)
        terms = vectors + (pid.to(tl.int64) * KP + c) * (2 * BD + BE)
        constant, slope, other = tl.load(terms + d), tl.load(terms + BD + d), tl.load(terms + 2 * BD + e)
        key_sums = dot(values, tl.trans(high), key_sums, PRECISION)
        value_sums = dot(keys, high, value_sums, PRECISION)
        key_sums = dot(values, tl.trans(low), key_sums, PRECISION)
        value_sums = dot(keys, low, value_sums, PRECISION)
        key_sums += constant[None, :] + again.to(tl.float32) * slope[None, :]
        value_sums += other[None, :]
    else:
        over = 1.0 / (end - begin).to(tl.float32)
        at = pid.to(tl.int64) * KP + c
        vectors += at * (2 * BD + BE)
        grad_vectors += at * (2 * BD + BE)
        # Read again: held in registers by the loop, keys and values would leave it fewer.
        dk_c = picked_tile(k, place, there, k_t * UNIT, d, D, BD, False).to(tl.float32)
        dv_c = picked_tile(v, place, there, v_t * UNIT, e, E, BE, False).to(tl.float32)
        key_sums, value_sums, dk_c, dv_c = through_statistics(
            key_sums, value_sums, dk_c, dv_c, vectors, grad_vectors, over, BD, BE
        )
        if RESPONSE:
            if POOLED:
                all_c = tl.arange(0, KP)
                tokens = tl.sum(tl.load(bounds + (KP + 1) + all_c) - tl.load(bounds + all_c), 0)
                at, over = pid.to(tl.int64), 1.0 / tokens.to(tl.float32)
            own = grad_matrices + at * (BD * BE)
            key_sums, value_sums = through_matrix(
                key_sums, value_sums, dk_c, dv_c, own, scale * over, dtype, BD, BE, PRECISION
            )
    store_picked(head(dk, b, h, 0, dk_b, dk_h, dk_t, UNIT), key_sums, place, there, dk_t * UNIT, d, D, BD)
    store_picked(head(dv, b, h, 0, dv_b, dv_h, dv_t, UNIT), value_sums, place, there, dv_t * UNIT, e, E, BE)


@triton.jit
def block_of_all(bounds, block, KP: tl.constexpr, N: tl.constexpr):
    """The cluster of a block of N tokens, where those of all clusters are counted on, and its number there."""
    c = tl.arange(0, KP)
    blocks = tl.cdiv(tl.load(bounds + (KP + 1) + c) - tl.load(bounds + c), N)
    own = tl.minimum(tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0), KP - 1)
    return own, block - tl.sum(tl.where(c < own, blocks, 0), 0)


@kernel
def key_gradients(
    q, k, v, g, dk, dv, shifts, deltas, bounds, order, vectors, grad_vectors, grad_matrices, counts, lists,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    length_q, length_k, heads, tiles, all_tiles, per, scale,
    LOOSE: tl.constexpr, SPREAD: tl.constexpr, NEAR: tl.constexpr, RESPONSE: tl.constexpr, POOLED: tl.constexpr,
    TERMS: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a cluster, K, B H). dk and dv of N keys: from queries near to them and through the statistics.

    POOLED: the gradient of one matrix for all clusters, their mean by size; each has its share of it. WHOLE: all tiles
    are full. TERMS: `vectors` are the terms and `grad_matrices` the halves of `key_terms`. EVEN: all clusters are whole
    blocks of N, as many as there are programs. LOOSE: a cluster may have more blocks than there are programs for it,
    which then take several. SPREAD: the grid is (blocks of all clusters, at most; 1; B H), so that each program has
    one, however unequal the clusters.
    """
    c, pid = tl.program_id(1), tl.program_id(2)
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    if SPREAD:
        c, block = block_of_all(bounds, tl.program_id(0), KP, N)
    if EVEN:
        begin = c * tl.num_programs(0) * N
        end = begin + tl.num_programs(0) * N
    else:
        begin, end = tl.load(bounds + c), tl.load(bounds + (KP + 1) + c)
    first = begin + (block if SPREAD else tl.program_id(0)) * N
    if LOOSE:
        for at in range(first, end, tl.num_programs(0) * N):
            block_gradients(
                q, k, v, g, dk, dv, shifts, deltas, bounds, order, vectors, grad_vectors, grad_matrices, counts, lists,
                q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
                length_q, heads, tiles, all_tiles, scale, pid, c, at, begin, end, NEAR, RESPONSE, POOLED, TERMS, EVEN,
                WHOLE, GROUP, ORDERED, D, E, BD, BE, M, N, ROWS, KP, STAGES, UNIT, PRECISION,
            )  # fmt: skip
    elif first < end:
        block_gradients(
            q, k, v, g, dk, dv, shifts, deltas, bounds, order, vectors, grad_vectors, grad_matrices, counts, lists,
            q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
            length_q, heads, tiles, all_tiles, scale, pid, c, first, begin, end, NEAR, RESPONSE, POOLED, TERMS, EVEN,
            WHOLE, GROUP, ORDERED, D, E, BD, BE, M, N, ROWS, KP, STAGES, UNIT, PRECISION,
        )  # fmt: skip


@kernel
def prefix_gradients(
    q, k, v, g, partial, shifts, deltas, bounds, order,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, length_q, length_k, heads, tiles, all_tiles, span, per,
    offset, scale, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of the prefix, splits, B H). Sums for dk and dv of N prefix tokens over `span` tiles, which all see
    them (CAUSAL: from their place on, where the first row has the place `offset`): partial (splits, B H, blocks, N,
    BD + BE) float32."""
    block, split, pid = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = pid // heads, pid % heads
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    d, e, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    token = block * N + n
    there = token < tl.load(bounds + 2 * KP + 1)
    place = placed(order, token, there, ORDERED, False)
    k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
    keys = picked_tile(k, place, there, k_t * UNIT, d, D, BD, False)
    values = picked_tile(v, place, there, v_t * UNIT, e, E, BE, False)
    q, g = head(q, b, h * GROUP, 0, q_b, q_h, q_t, UNIT), head(g, b, h * GROUP, 0, g_b, g_h, g_t, UNIT)
    skipped = pid.to(tl.int64) * all_tiles * M
    key_sums, value_sums = near_sums(
        q, g, keys, values, shifts + skipped, deltas + skipped, shifts, place - offset, split * span,
        tl.minimum(split * span + span, all_tiles), length_q, tiles, q_h, q_t, g_h, g_t, scale,
        False, CAUSAL, GROUP, WHOLE, D, E, BD, BE, M, N, ROWS, STAGES, UNIT, PRECISION,
    )  # fmt: skip
    at = ((split.to(tl.int64) * tl.num_programs(2) + pid) * tl.num_programs(0) + block) * N
    partial += (at + n)[:, None] * (BD + BE)
    tl.store(partial + d[None, :], key_sums)
    tl.store(partial + BD + e[None, :], value_sums)


@kernel
def finish_prefix(
    partial, dk, dv, bounds, order, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, length_k, heads, splits, plane, per,
    ORDERED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    KP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of the prefix, B H). Sums over splits, `plane` numbers apart, written to dk and dv."""
    block, pid = tl.program_id(0), tl.program_id(1)
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    d, e, n = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, N)
    token = block * N + n
    there = token < tl.load(bounds + 2 * KP + 1)
    place = placed(order, token, there, ORDERED, False)
    partial += (((pid.to(tl.int64) * tl.num_programs(0) + block) * N) + n)[:, None] * (BD + BE)
    key_sums, value_sums = tl.zeros((N, BD), tl.float32), tl.zeros((N, BE), tl.float32)
    for _ in range(splits):
        key_sums += tl.load(partial + d[None, :])
        value_sums += tl.load(partial + BD + e[None, :])
        partial += plane
    dk = head(dk, pid // heads, pid % heads, 0, dk_b, dk_h, dk_t, UNIT)
    dv = head(dv, pid // heads, pid % heads, 0, dv_b, dv_h, dv_t, UNIT)
    store_picked(dk, key_sums, place, there, dk_t * UNIT, d, D, BD)
    store_picked(dv, value_sums, place, there, dv_t * UNIT, e, E, BE)
