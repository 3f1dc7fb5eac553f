"""Forward kernels of cluster attention for short clusters. Formulas and shape legend: parts.py.

Cost a head, in multiply-adds of products: Lq Lk (D + E), and Lq K D' with the variances (D' = D P / KT).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from ..cluster.parts import NOTHING, squared, store_tile, tile
from ..products import cast, dot
from ..tokens import head, kernel
from .parts import gathered, masses, prefix_logits, prefix_tile, present, row_sums, variances, weights


@kernel
def statistics(
    k, spread, means, origin, places, sizes, k_b, k_h, k_t, heads, clusters, tiles,
    FULL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MP: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles B H). Mean and variance of the keys of COUNT clusters, one after the other, means and spread
    (B H, clusters, BD), unless FULL; the mean of the first cluster, origin (B H, BD)."""
    index, pid = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    d = tl.arange(0, BD)
    at = pid.to(tl.int64) * (clusters * BD) + d
    for i in tl.static_range(COUNT):
        c = index * COUNT + i
        place, inverse = tl.load(places + c * MP + tl.arange(0, MP)), tl.load(sizes + clusters + c)
        keys = gathered(k, place, k_t * UNIT, d, D, BD).to(tl.float32)
        mean = tl.sum(keys, 0) * inverse
        middle = cast(mean, origin.dtype.element_ty)
        tl.store(origin + pid.to(tl.int64) * BD + d, middle, mask=d < tl.where(c == 0, BD, 0))
        if not FULL:
            away = tl.where((place >= 0)[:, None], keys - mean[None, :], 0.0)
            tl.store(means + at + c * BD, mean)
            tl.store(spread + at + c * BD, cast(tl.sum(away * away, 0) * inverse, spread.dtype.element_ty))


@kernel
def attend(
    q, k, v, o, rounding, lse, spread, places, sizes,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    length_q, prefix, heads, clusters, tiles, scale,
    KEEP: tl.constexpr,
    CLOSURE: tl.constexpr, FULL: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles B H). Output of M queries and log2 of the sum of their weights; KEEP: what rounding lost too."""
    KT: tl.constexpr = N // MP
    index, pid = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, d, e = index * M + tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    b, h = pid // heads, pid % heads
    k, v = head(k, b, h, 0, k_b, k_h, k_t, UNIT), head(v, b, h, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    spread += pid.to(tl.int64) * (clusters * BD)
    rows = tile(head(q, b, h, 0, q_b, q_h, q_t, UNIT), row, q_t * UNIT, d, length_q, D, BD)
    squares = squared(rows, SQUARE)
    top, total = tl.full((M,), NOTHING, tl.float32), tl.zeros((M,), tl.float32)
    given = tl.zeros((M,), tl.float32)  # what rounded weights sum up to: not quite the total, and values may be large
    out = tl.zeros((M, BE), tl.float32)
    if PP:
        prefix_keys, prefix_values = prefix_tile(k, v, k_t, v_t, prefix, d, e, D, E, PP)
        z_l = prefix_logits(rows, prefix_keys, prefix, scale, PRECISION)
        top = tl.max(z_l, 1)
        p_l = tl.exp2(z_l - top[:, None])
        total, rounded = tl.sum(p_l, 1), cast(p_l, dtype)
        given = tl.sum(rounded.to(tl.float32), 1)
        out = dot(rounded, prefix_values, None, PRECISION)
    for first in tl.range(0, clusters, KT, num_stages=STAGES):
        c, place = first + tl.arange(0, KT), tl.load(places + first * MP + tl.arange(0, N))
        log_size, inverse = tl.load(sizes + c), tl.load(sizes + clusters + c)
        keys = gathered(k, place, k_t, d, D, BD)
        values = gathered(v, place, v_t, e, E, BE)
        spread_here = keys if FULL else variances(spread, first, d, P, KT, BD)
        t, z, _, gain = masses(
            rows, squares, keys, spread_here, log_size, inverse, place, scale, FULL, RAGGED, CLOSURE, KT, MP, PRECISION
        )
        higher = tl.maximum(top, tl.max(z, 1))  # finite: no tile is without a cluster
        p = tl.exp2(z - higher[:, None])
        fading = tl.exp2(top - higher)
        total = total * fading + tl.sum(p, 1)
        A = weights(t, p, gain, inverse, scale)
        if RAGGED:
            A = present(A, place)
        A = cast(A, dtype)
        given = given * fading + row_sums(A)
        out = dot(tl.reshape(A, (M, N)), values, out * fading[:, None], PRECISION)
        top = higher
    out *= (1.0 / given)[:, None]
    o = head(o, b, h, 0, o_b, o_h, o_t, UNIT)
    store_tile(o, out, row, o_t * UNIT, e, length_q, E, BE)
    if KEEP:
        rounding = head(rounding, b, h, 0, o_b, o_h, o_t, UNIT)
        store_tile(rounding, out - cast(out, dtype).to(tl.float32), row, o_t * UNIT, e, length_q, E, BE)
    tl.store(lse + pid.to(tl.int64) * length_q + row, top + tl.log2(total), mask=row < length_q)
