"""Backward kernels of non-causal cumulant attention. Formulas and shape legend: parts.py.

Short sequences: `fused_backward`, one program for each sequence and key head. Long ones: `backward_queries` ->
`reduce` -> `backward_keys`, each program taking `span` tokens.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from ..tokens import ahead, head, kernel, sequence
from .parts import factors, key_gradients, matrix, query_gradients, store_matrix, wide_key_gradients


@kernel
def fused_backward(
    q, k, v, w, g, dq, dk, dv, matrices, vectors, offsets_q, offsets_k,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t,
    dv_b, dv_h, dv_t, length_q, length_k, heads, scale,
    ORDER: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, SUM: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    KEYS: tl.constexpr, KEY_STAGES: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H). dq and the gradients of the moments, kept in registers, then dk and dv."""
    pid = tl.program_id(0)
    b, h = pid // heads, pid % heads
    first_q, length_q = sequence(offsets_q, b, length_q, RAGGED)
    first_k, length_k = sequence(offsets_k, b, length_k, RAGGED)
    d, e, zero = tl.arange(0, BD), tl.arange(0, BE), tl.zeros((), tl.int32)
    dtype: tl.constexpr = q.dtype.element_ty
    k = head(k, b, h, first_k, k_b, k_h, k_t, UNIT)
    v = head(v, b, h, first_k, v_b, v_h, v_t, UNIT)
    ahead(k, k_t * UNIT, 0, length_k, 128)
    ahead(v, v_t * UNIT, 0, length_k, 128)
    matrices += pid.to(tl.int64) * ((ORDER - 1) * D * E)
    S = matrix(matrices, d, e, D, E).to(dtype)
    T = S
    if ORDER == 3:
        T = matrix(matrices + D * E, d, e, D, E)
    dS = tl.zeros((BD, BE), tl.float32)
    dT = tl.zeros((BD, BE), tl.float32)
    g_sum = tl.zeros((ROWS, BE), tl.float32)
    for i in range(GROUP):
        at = h * GROUP + i
        dS, dT, g_sum = query_gradients(
            head(q, b, at, first_q, q_b, q_h, q_t, UNIT), head(g, b, at, first_q, g_b, g_h, g_t, UNIT),
            head(dq, b, at, first_q, dq_b, dq_h, dq_t, UNIT), q_t, g_t, dq_t, zero, length_q, S, T, dS, dT, g_sum,
            d, e, ORDER, D, E, BD, BE, N, STAGES, ROWS, UNIT, PRECISION,
        )  # fmt: skip
    vectors += pid.to(tl.int64) * (3 * D + 2 * E + 1)
    k_mean = tl.load(vectors + d, mask=d < D, other=0.0)
    v_mean = tl.load(vectors + 2 * D + e, mask=e < E, other=0.0)
    k_low = tl.load(vectors + 2 * D + E + 1 + d, mask=d < D, other=0.0)
    v_low = tl.load(vectors + 3 * D + E + 1 + e, mask=e < E, other=0.0)
    _, alpha, over_W = factors(tl.load(vectors + 2 * D + E), SUM)
    v_constant = alpha * tl.sum(g_sum, 0)
    k_constant = tl.zeros((BD,), tl.float32)
    P = k_constant
    if ORDER == 3:
        P = tl.load(vectors + D + d, mask=d < D, other=0.0)
        k_constant = (scale * over_W) * tl.sum(dT * S.to(tl.float32), 1)
        dT = dT * (0.5 * scale * scale * alpha)
    if WEIGHTED:
        w = head(w, b, h, first_k, w_b, 0, w_t, 1)
    key_gradients(
        k, v, w,
        head(dk, b, h, first_k, dk_b, dk_h, dk_t, UNIT), head(dv, b, h, first_k, dv_b, dv_h, dv_t, UNIT),
        k_t, v_t, w_t, dk_t, dv_t, zero, length_k, dS * (scale * alpha), dT,
        k_mean, P, v_mean, k_low, v_low, k_constant, v_constant, d, e, ORDER, WEIGHTED, D, E, BD, BE, KEYS, KEY_STAGES,
        UNIT, PRECISION,
    )  # fmt: skip


@kernel
def backward_queries(
    q, g, dq, matrices, partial_matrices, partial_sums, offsets_q,
    q_b, q_h, q_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, length_q, heads, group, span,
    ORDER: tl.constexpr, RAGGED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H G, splits, parts of D); `heads` counts query heads. dq of `span` queries; their sums for dS, dT."""
    pid, split = tl.program_id(0), tl.program_id(1)
    b, h = pid // heads, pid % heads
    first, length = sequence(offsets_q, b, length_q, RAGGED)
    start = tl.minimum(split * span, length)
    end = tl.minimum(start + span, length)
    d, e = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, BE)
    matrices += (pid // group).to(tl.int64) * ((ORDER - 1) * D * E)
    S = matrix(matrices, d, e, D, E).to(q.dtype.element_ty)
    T = S
    if ORDER == 3:
        T = matrix(matrices + D * E, d, e, D, E)
    dS, dT, g_sum = query_gradients(
        head(q, b, h, first, q_b, q_h, q_t, UNIT), head(g, b, h, first, g_b, g_h, g_t, UNIT),
        head(dq, b, h, first, dq_b, dq_h, dq_t, UNIT), q_t, g_t, dq_t, start, end, S, T,
        tl.zeros((BD, BE), tl.float32), tl.zeros((BD, BE), tl.float32), tl.zeros((ROWS, BE), tl.float32),
        d, e, ORDER, D, E, BD, BE, N, STAGES, ROWS, UNIT, PRECISION,
    )  # fmt: skip
    row = split.to(tl.int64) * tl.num_programs(0) + pid
    partial_matrices += row * ((ORDER - 1) * D * E)
    store_matrix(partial_matrices, dS, d, e, D, E)
    if ORDER == 3:
        store_matrix(partial_matrices + D * E, dT, d, e, D, E)
    tl.store(partial_sums + row * E + e, tl.sum(g_sum, 0), mask=e < E)


@kernel
def reduce(
    partial_matrices, partial_sums, matrices, vectors, grad_matrices, grad_vectors, splits, group, scale,
    ORDER: tl.constexpr, SUM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, BE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Grid (B H, D / R). dS and dT from the sums of all splits and of the group's query heads, C loads in flight.

    grad_vectors (D + E): scale/W sum_e ((q^2)^T do) S', then nu/W sum do.
    """
    pid, block, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0).to(tl.int64) * group
    rows, columns = block * R + tl.arange(0, R), tl.arange(0, BE)
    d, e = rows[:, None], columns[None, :]
    size: tl.constexpr = (ORDER - 1) * D * E
    cell, inside = d * E + e, (d < D) & (e < E)
    of_v, top = 0 * d + e, inside & (d == 0)
    W = tl.load(vectors + pid.to(tl.int64) * (3 * D + 2 * E + 1) + 2 * D + E)
    dS = tl.zeros((R, BE), tl.float32)
    dT = tl.zeros((R, BE), tl.float32)
    g_sum = tl.zeros((R, BE), tl.float32)
    parts = splits * group
    for at in range(0, parts, C):
        for i in tl.static_range(C):
            part = pid * 0 + at + i
            index, least = count * (part // group) + pid * group + part % group, tl.where(part < parts, 0, D)
            dS += tl.load(partial_matrices + index * size + cell, mask=inside & (d >= least), other=0.0)
            if ORDER == 3:
                dT += tl.load(partial_matrices + index * size + D * E + cell, mask=inside & (d >= least), other=0.0)
            g_sum += tl.load(partial_sums + index * E + of_v, mask=top & (d >= least), other=0.0)
    _, alpha, over_W = factors(W, SUM)
    grad_vectors += pid.to(tl.int64) * (D + E)
    grad_matrices += pid.to(tl.int64) * size
    store_matrix(grad_matrices, dS * (scale * alpha), rows, columns, D, E)
    if ORDER == 3:
        S = matrix(matrices + pid.to(tl.int64) * size, rows, columns, D, E).to(tl.float32)
        tl.store(grad_vectors + rows, (scale * over_W) * tl.sum(dT * S, 1), mask=rows < D)
        store_matrix(grad_matrices + D * E, dT * (0.5 * scale * scale * alpha), rows, columns, D, E)
    tl.store(grad_vectors + D + of_v, alpha * g_sum, mask=top)


@kernel
def backward_keys(
    k, v, w, dk, dv, vectors, grad_matrices, grad_vectors, offsets_k,
    k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, length_k, heads, span,
    ORDER: tl.constexpr, RAGGED: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B H, splits). dk and dv of `span` keys; wide heads take BD columns of D after the other."""
    pid = tl.program_id(0)
    b, h = pid // heads, pid % heads
    first, length = sequence(offsets_k, b, length_k, RAGGED)
    start = tl.minimum(tl.program_id(1) * span, length)
    end = tl.minimum(start + span, length)
    if start < end:
        d, e = tl.arange(0, BD), tl.arange(0, BE)
        chunks: tl.constexpr = (D + BD - 1) // BD
        k = head(k, b, h, first, k_b, k_h, k_t, UNIT)
        v = head(v, b, h, first, v_b, v_h, v_t, UNIT)
        dk = head(dk, b, h, first, dk_b, dk_h, dk_t, UNIT)
        dv = head(dv, b, h, first, dv_b, dv_h, dv_t, UNIT)
        if WEIGHTED:
            w = head(w, b, h, first, w_b, 0, w_t, 1)
        vectors += pid.to(tl.int64) * (3 * D + 2 * E + 1)
        grad_vectors += pid.to(tl.int64) * (D + E)
        grad_matrices += pid.to(tl.int64) * ((ORDER - 1) * D * E)
        v_mean = tl.load(vectors + 2 * D + e, mask=e < E, other=0.0)
        v_low = tl.load(vectors + 3 * D + E + 1 + e, mask=e < E, other=0.0)
        v_constant = tl.load(grad_vectors + D + e, mask=e < E, other=0.0)
        if chunks == 1:
            dS = matrix(grad_matrices, d, e, D, E).to(tl.float32)
            dT = dS
            k_mean = tl.load(vectors + d, mask=d < D, other=0.0)
            k_low = tl.load(vectors + 2 * D + E + 1 + d, mask=d < D, other=0.0)
            k_constant = tl.zeros((BD,), tl.float32)
            P = k_constant
            if ORDER == 3:
                P = tl.load(vectors + D + d, mask=d < D, other=0.0)
                dT = matrix(grad_matrices + D * E, d, e, D, E).to(tl.float32)
                k_constant = tl.load(grad_vectors + d, mask=d < D, other=0.0)
            key_gradients(
                k, v, w, dk, dv, k_t, v_t, w_t, dk_t, dv_t, start, end, dS, dT, k_mean, P, v_mean, k_low, v_low,
                k_constant, v_constant, d, e, ORDER, WEIGHTED, D, E, BD, BE, N, STAGES, UNIT, PRECISION,
            )  # fmt: skip
        else:
            if ORDER == 3:
                for i in range(chunks):
                    at = i * BD + d
                    P = tl.load(vectors + D + at, mask=at < D, other=0.0)
                    v_constant -= tl.sum(P[:, None] * matrix(grad_matrices + D * E, at, e, D, E).to(tl.float32), 0)
            wide_key_gradients(
                k, v, w, dk, dv, k_t, v_t, w_t, dk_t, dv_t, start, end, grad_matrices, vectors, grad_vectors, v_mean,
                v_low, v_constant, e, ORDER, WEIGHTED, D, E, BD, BE, N, STAGES, UNIT, PRECISION,
            )  # fmt: skip
