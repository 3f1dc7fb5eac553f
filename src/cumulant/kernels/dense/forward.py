"""Forward kernels of non-causal cumulant attention. Formulas and shape legend: parts.py.

Short sequences: `fused_forward`, one program for each sequence and key head. Long ones: `partial_moments` -> `merge` ->
`read_out`, each program taking `span` tokens. Partial results are written, never added atomically: runs are bitwise
equal.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from ..products import cast
from ..tokens import ahead, head, kernel, sequence
from .parts import factors, matrix, moments, read, store_state


@kernel
def fused_forward(
    q, k, v, w, o, matrices, vectors, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, o_b, o_h, o_t, length_q, length_k, heads, scale,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, SUM: tl.constexpr,
    KEEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, KEYS: tl.constexpr, KEY_STAGES: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H). Moments of the keys, kept in registers, then the output of the head's queries."""
    pid = tl.program_id(0)
    b, h = pid // heads, pid % heads
    first_q, length_q = sequence(offsets_q, b, length_q, RAGGED)
    first_k, length_k = sequence(offsets_k, b, length_k, RAGGED)
    d, e, zero = tl.arange(0, BD), tl.arange(0, BE), tl.zeros((), tl.int32)
    k = head(k, b, h, first_k, k_b, k_h, k_t, UNIT)
    v = head(v, b, h, first_k, v_b, v_h, v_t, UNIT)
    if WEIGHTED:
        w = head(w, b, h, first_k, w_b, 0, w_t, 1)
    ahead(head(q, b, h * GROUP, first_q, q_b, q_h, q_t, UNIT), q_t * UNIT, 0, length_q, 128)
    W, k_mean, v_mean, k_low, v_low, S, P, T = moments(
        k, v, w, k_t, v_t, w_t, zero, length_k, d, e,
        ORDER, WEIGHTED, D, E, BD, BE, KEYS, KEY_STAGES, ROWS, UNIT, PRECISION,
    )  # fmt: skip
    nu, alpha, over_W = factors(W, SUM)
    S = cast(S * (scale * alpha), q.dtype.element_ty)
    T = cast(T * (0.5 * scale * scale * alpha), matrices.dtype.element_ty)
    if KEEP:
        matrices += pid.to(tl.int64) * ((ORDER - 1) * D * E)
        vectors += pid.to(tl.int64) * (3 * D + 2 * E + 1)
        store_state(matrices, vectors, W, k_mean, v_mean, k_low, v_low, S, P * over_W, T, d, e, ORDER, D, E)
    for i in range(GROUP):
        at = h * GROUP + i
        read(
            head(q, b, at, first_q, q_b, q_h, q_t, UNIT), head(o, b, at, first_q, o_b, o_h, o_t, UNIT),
            q_t, o_t, zero, length_q, S, T, v_mean * nu, d, e, ORDER, D, E, BD, BE, N, STAGES, UNIT, PRECISION,
        )  # fmt: skip


@kernel
def partial_moments(
    k, v, w, matrices, vectors, offsets_k, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, length_k, heads, span,
    ORDER: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H, splits, parts of E). Centred moments of `span` keys, unscaled, in float32."""
    pid, split = tl.program_id(0), tl.program_id(1)
    b, h = pid // heads, pid % heads
    first, length = sequence(offsets_k, b, length_k, RAGGED)
    start = tl.minimum(split * span, length)
    end = tl.minimum(start + span, length)
    d, e = tl.arange(0, BD), tl.program_id(2) * BE + tl.arange(0, BE)
    if WEIGHTED:
        w = head(w, b, h, first, w_b, 0, w_t, 1)
    W, k_mean, v_mean, k_low, v_low, S, P, T = moments(
        head(k, b, h, first, k_b, k_h, k_t, UNIT), head(v, b, h, first, v_b, v_h, v_t, UNIT), w,
        k_t, v_t, w_t, start, end, d, e, ORDER, WEIGHTED, D, E, BD, BE, N, STAGES, ROWS, UNIT, PRECISION,
    )  # fmt: skip
    row = split.to(tl.int64) * tl.num_programs(0) + pid
    matrices += row * ((ORDER - 1) * D * E)
    vectors += row * (3 * D + 2 * E + 1)
    store_state(matrices, vectors, W, k_mean, v_mean, k_low, v_low, S, P, T, d, e, ORDER, D, E)


@kernel
def merge(
    partial_matrices, partial_vectors, matrices, vectors, splits, scale,
    ORDER: tl.constexpr, SUM: tl.constexpr, RAW: tl.constexpr, FULL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CELLS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid (B H, D E / CELLS). Moments of the union of all splits; a thread for each cell of S and T.

    RAW: as those of a split, to be merged again; else as a state (see parts.py). FULL: the first split has tokens.

    About the means of one split (a_s and b_s: those of the others minus these), S = sum_s S_s + W_s a_s b_s^T and
    T = sum_s T_s + 2 a_s S_s + (P_s + W_s a_s^2) b_s^T, which move to the mean of all as in `moments`. Every thread
    reads what its cell needs of the vectors too: one pass over the splits, C of them in flight, and no exchange.
    """
    pid, block, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0).to(tl.int64)
    cell = block * CELLS + tl.arange(0, CELLS)
    d, e, inside = cell // E, cell % E, cell < D * E
    width: tl.constexpr = 3 * D + 2 * E + 1
    size: tl.constexpr = (ORDER - 1) * D * E
    first = tl.zeros((), tl.int32)
    if not FULL:  # a split without tokens is no point to start from
        found = tl.load(partial_vectors + pid.to(tl.int64) * width + 2 * D + E)
        while (found == 0) & (first < splits - 1):
            first += 1
            found = tl.load(partial_vectors + (count * first + pid) * width + 2 * D + E)
    start = partial_vectors + (count * first + pid) * width
    k_ref = tl.load(start + d, mask=inside, other=0.0)
    v_ref = tl.load(start + 2 * D + e, mask=inside, other=0.0)
    k_low = tl.load(start + 2 * D + E + 1 + d, mask=inside, other=0.0)
    v_low = tl.load(start + 3 * D + E + 1 + e, mask=inside, other=0.0)
    W = tl.zeros((), tl.float32)
    A, B, P, S, T = k_ref * 0.0, v_ref * 0.0, k_ref * 0.0, k_ref * 0.0, k_ref * 0.0
    for at in range(0, splits, C):
        for i in tl.static_range(C):
            index, seen = count * (at + i) + pid, splits > at + i
            row, here = partial_vectors + index * width, cell < tl.where(seen, D * E, 0)
            S_s = tl.load(partial_matrices + index * size + cell, mask=here, other=0.0)
            W_s = tl.load(row + 2 * D + E, mask=seen, other=0.0)
            a = tl.load(row + d, mask=here, other=0.0) - k_ref
            a += tl.load(row + 2 * D + E + 1 + d, mask=here, other=0.0) - k_low
            b = tl.load(row + 2 * D + e, mask=here, other=0.0) - v_ref
            b += tl.load(row + 3 * D + E + 1 + e, mask=here, other=0.0) - v_low
            Wa = W_s * a
            S_s_moved = S_s + Wa * b
            if ORDER == 3:
                P_s = tl.load(row + D + d, mask=here, other=0.0)
                T_s = tl.load(partial_matrices + index * size + D * E + cell, mask=here, other=0.0)
                P += P_s + Wa * a
                T += T_s + a * (S_s + S_s_moved) + P_s * b
            W += W_s
            A += Wa
            B += W_s * b
            S += S_s_moved
    _, alpha, over_W = factors(W, SUM)
    shift, s = A * over_W, B * over_W
    matrices += pid.to(tl.int64) * size
    vectors += pid.to(tl.int64) * width
    centred = S - A * s
    if not RAW:
        centred *= scale * alpha
    tl.store(matrices + cell, cast(centred, matrices.dtype.element_ty), mask=inside)
    if ORDER == 3:
        P -= A * shift
        T += (A * shift - P) * s - 2.0 * shift * S
        if not RAW:
            T *= 0.5 * scale * scale * alpha
            P *= over_W
        tl.store(matrices + D * E + cell, cast(T, matrices.dtype.element_ty), mask=inside)
        tl.store(vectors + D + d, P, mask=inside & (e == 0))
    shift, s = shift + k_low, s + v_low
    k_mean, v_mean = k_ref + shift, v_ref + s
    tl.store(vectors + d, k_mean, mask=inside & (e == 0))
    tl.store(vectors + 2 * D + e, v_mean, mask=inside & (d == 0))
    tl.store(vectors + 2 * D + E + 1 + d, shift - (k_mean - k_ref), mask=inside & (e == 0))
    tl.store(vectors + 3 * D + E + 1 + e, s - (v_mean - v_ref), mask=inside & (d == 0))
    if block == 0:
        tl.store(vectors + 2 * D + E, W)


@kernel
def read_out(
    q, o, matrices, vectors, offsets_q, q_b, q_h, q_t, o_b, o_h, o_t, length_q, heads, group, span,
    ORDER: tl.constexpr, RAGGED: tl.constexpr, SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H G, splits, parts of E); `heads` counts query heads. Output of `span` queries."""
    pid = tl.program_id(0)
    b, h = pid // heads, pid % heads
    first, length = sequence(offsets_q, b, length_q, RAGGED)
    start = tl.minimum(tl.program_id(1) * span, length)
    end = tl.minimum(start + span, length)
    if start < end:
        d, e = tl.arange(0, BD), tl.program_id(2) * BE + tl.arange(0, BE)
        matrices += (pid // group).to(tl.int64) * ((ORDER - 1) * D * E)
        vectors += (pid // group).to(tl.int64) * (3 * D + 2 * E + 1)
        S = matrix(matrices, d, e, D, E).to(q.dtype.element_ty)
        T = S
        if ORDER == 3:
            T = matrix(matrices + D * E, d, e, D, E)
        nu, _, _ = factors(tl.load(vectors + 2 * D + E), SUM)
        mean = tl.load(vectors + 2 * D + e, mask=e < E, other=0.0) * nu
        read(
            head(q, b, h, first, q_b, q_h, q_t, UNIT), head(o, b, h, first, o_b, o_h, o_t, UNIT), q_t, o_t,
            start, end, S, T, mean, d, e, ORDER, D, E, BD, BE, N, STAGES, UNIT, PRECISION,
        )  # fmt: skip
