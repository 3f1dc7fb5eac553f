"""Kernels of the backward pass of cluster attention that sum over queries. Formulas: backward.py.

Shape legend: that of parts.py. They read what `query_gradients` wrote of each tile: p, dz and 2 dx,
(B H, tiles, KP, M), and p f, of the same shape or, with one matrix for all clusters, summed over them, (B H, tiles, M).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from ..products import dot
from ..tokens import head, kernel
from .parts import block_tile, finished, first_row, scaled, squared, stepped, tile, turned_tile, weighed


@kernel
def add_up(partial, total, size, splits, N: tl.constexpr, C: tl.constexpr):
    """Grid (size / N). total (size,) = the sum over splits of partial (splits, size), C loads in flight."""
    cell = tl.program_id(0) * N + tl.arange(0, N)
    found = tl.zeros((N,), tl.float32)
    for at in range(0, splits, C):
        for i in tl.static_range(C):
            far = (at + i) * size.to(tl.int64)
            found += tl.load(partial + far + cell, mask=cell < tl.where(at + i < splits, size, 0), other=0.0)
    tl.store(total + cell, found, mask=cell < size)


@kernel
def vector_gradients(
    q, g, weights, gains, dz, dx, partial, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles, all_tiles, span, plane,
    scale, SHARED: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CK: tl.constexpr, KP: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP / CK, B H, splits). Sums over `span` tiles for d k_mean, d var and d v_mean of CK clusters.

    They go to partial, `plane` numbers for each split: (B H, KP, 2 BD + BE). SHARED: behind them dS of one matrix for
    all clusters, (B H, BD, BE), by the same reading of queries and gradients. WHOLE: all tiles are full.
    """
    pid, split = tl.program_id(1), tl.program_id(2)
    c, line = tl.program_id(0) * CK + tl.arange(0, CK), tl.arange(0, N)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads * GROUP, 0, g_b, g_h, g_t, UNIT)
    start = pid.to(tl.int64) * all_tiles
    at = c[:, None] * M + line[None, :]
    dk, dv, ds = tl.zeros((CK, BD), tl.float32), tl.zeros((CK, BE), tl.float32), tl.zeros((CK, BD), tl.float32)
    if SHARED:
        S = tl.zeros((BD, BE), tl.float32)
    parts: tl.constexpr = M // N
    for i in tl.range(split * span * parts, tl.minimum(split * span + span, all_tiles) * parts, num_stages=STAGES):
        row = first_row(i // parts, tiles, M, GROUP) + (i % parts) * N + line
        own_q, own_g = stepped(q, i // parts, tiles, q_h, GROUP, UNIT), stepped(g, i // parts, tiles, g_h, GROUP, UNIT)
        rows = block_tile(own_q, row, q_t * UNIT, d, length_q, D, BD, WHOLE)
        grad = block_tile(own_g, row, g_t * UNIT, e, length_q, E, BE, WHOLE)
        here = (start + i // parts) * (KP * M) + (i % parts) * N
        dk = dot(tl.load(dz + here + at), rows, dk, PRECISION)
        dv = dot(tl.load(weights + here + at), grad, dv, PRECISION)
        ds = dot(tl.load(dx + here + at).to(SQUARE), squared(rows, SQUARE), ds, PRECISION)
        if SHARED:  # read turned too: the first factor may lie in registers then, as in `matrix_gradients`
            turned = turned_tile(own_q, row, q_t * UNIT, d, length_q, D, BD)
            gain = tl.load(gains + (start + i // parts) * M + (i % parts) * N + line)
            S = finished(dot(weighed(turned, gain), grad, S, PRECISION))
    partial += split.to(tl.int64) * plane
    vectors = partial + (pid.to(tl.int64) * KP + c)[:, None] * (2 * BD + BE)
    tl.store(vectors + d[None, :], dk * scale)
    tl.store(vectors + BD + d[None, :], ds * (0.5 * scale * scale))
    tl.store(vectors + 2 * BD + e[None, :], dv)
    if SHARED:
        matrix = partial + tl.num_programs(1).to(tl.int64) * (KP * (2 * BD + BE)) + pid.to(tl.int64) * (BD * BE)
        tl.store(matrix + d[:, None] * BE + e[None, :], S)


@kernel
def matrix_gradients(
    q, g, gains, matrices, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles, all_tiles, span,
    GROUP: tl.constexpr,
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
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads * GROUP, 0, g_b, g_h, g_t, UNIT)
    start = pid.to(tl.int64) * all_tiles
    S0 = tl.zeros((BD, BE), tl.float32)
    S1, S2, S3, S4, S5, S6, S7 = S0, S0, S0, S0, S0, S0, S0
    parts: tl.constexpr = M // N
    for i in tl.range(split * span * parts, tl.minimum(split * span + span, all_tiles) * parts, num_stages=STAGES):
        row = first_row(i // parts, tiles, M, GROUP) + (i % parts) * N + line
        own_q, own_g = stepped(q, i // parts, tiles, q_h, GROUP, UNIT), stepped(g, i // parts, tiles, g_h, GROUP, UNIT)
        rows = turned_tile(own_q, row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(own_g, row, g_t * UNIT, e, length_q, E, BE)
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
    q, g, gains, matrices, counts, lists, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles, all_tiles,
    GROUP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, KP: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (KP, B H). dS of a cluster over the tiles to which it responds."""
    c, pid = tl.program_id(0), tl.program_id(1)
    line, d, e = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads * GROUP, 0, g_b, g_h, g_t, UNIT)
    gains += pid.to(tl.int64) * all_tiles * (KP * M) + c * M
    slot = pid.to(tl.int64) * KP + c
    lists += slot * all_tiles
    sums = tl.zeros((BD, BE), tl.float32)
    for j in tl.range(0, tl.load(counts + slot), num_stages=STAGES):
        index = tl.load(lists + j)
        row = first_row(index, tiles, M, GROUP) + line
        rows = tile(stepped(q, index, tiles, q_h, GROUP, UNIT), row, q_t * UNIT, d, length_q, D, BD)
        grad = tile(stepped(g, index, tiles, g_h, GROUP, UNIT), row, g_t * UNIT, e, length_q, E, BE)
        gain = tl.load(gains + index.to(tl.int64) * (KP * M) + line)
        sums = dot(tl.trans(rows), scaled(grad, gain), sums, PRECISION)
    tl.store(matrices + slot * (BD * BE) + d[:, None] * BE + e[None, :], sums)
