"""Backward kernels of local linear attention. Shape legend: parts.py; the mathematics: cumulant/zoo/lla.py."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import head
from .parts import NOTHING, load_rows, place, powers, solve, store_rows, times, weights


@triton.jit
def query_gradients(
    q, k, v, added, ridge, grad, lse, mean, slope, dq, response, numbers,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dq_b, dq_h, dq_t, ridge_b, ridge_h, ridge_t,
    length_q, length_k, heads, scale, iterations, tolerance,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, ADDED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, and for the keys h (`response`) and of each row k_bar.g, a_bar + k_bar.h and g.h (`numbers`)."""
    first, own = place(length_q, M)
    b, h = own // heads, own % heads
    q, k = head(q, b, h, 0, q_b, q_h, q_t, UNIT), head(k, b, h, 0, k_b, k_h, k_t, UNIT)
    v, grad = head(v, b, h, 0, v_b, v_h, v_t, UNIT), head(grad, b, h, 0, grad_b, grad_h, grad_t, UNIT)
    dq = head(dq, b, h, 0, dq_b, dq_h, dq_t, UNIT)
    added += b * length_k
    row = first + tl.arange(0, M)
    end = tl.minimum(first + M, length_k) if CAUSAL else length_k
    queries = load_rows(q, first, length_q, q_t * UNIT, D, BD, M)
    do = load_rows(grad, first, length_q, grad_t * UNIT, E, BE, M)
    lam = tl.load(ridge + b * ridge_b + h * ridge_h + row * ridge_t, mask=row < length_q, other=1.0)
    log = tl.load(lse + own * length_q + row, mask=row < length_q, other=NOTHING)
    centre = load_rows(mean + own * length_q * D, first, length_q, D, D, BD, M)

    average = tl.zeros((M,), tl.float32)
    for start in tl.range(0, end, N, num_stages=STAGES):
        column = start + tl.arange(0, N)
        keys = load_rows(k, start, length_k, k_t * UNIT, D, BD, N)
        values = load_rows(v, start, length_k, v_t * UNIT, E, BE, N)
        w = weights(powers(queries, keys, added, row, column, length_k, scale, CAUSAL, ADDED, PRECISION), log)
        average += tl.sum(w * dot(do, tl.trans(values), None, PRECISION), 1)
    target = tl.zeros((M, BD), tl.float32)
    for start in tl.range(0, end, N, num_stages=STAGES):
        column = start + tl.arange(0, N)
        keys = load_rows(k, start, length_k, k_t * UNIT, D, BD, N)
        values = load_rows(v, start, length_k, v_t * UNIT, E, BE, N)
        w = weights(powers(queries, keys, added, row, column, length_k, scale, CAUSAL, ADDED, PRECISION), log)
        a = dot(do, tl.trans(values), None, PRECISION) - average[:, None]
        target = times(w * a, keys, target, PRECISION)
    r = -solve(
        target, queries, k, added, row, log, centre, lam, end, length_k, k_t * UNIT, scale, iterations, tolerance,
        D, BD, N, CAUSAL, ADDED, PRECISION, STAGES,
    )  # fmt: skip
    g = load_rows(slope + own * length_q * D, first, length_q, D, D, BD, M)
    along_g = tl.sum(g * centre, 1)
    along_h = average + tl.sum(r * centre, 1)
    gh = tl.sum(g * r, 1)
    moved = tl.zeros((M, BD), tl.float32)
    for start in tl.range(0, end, N, num_stages=STAGES):
        column = start + tl.arange(0, N)
        keys = load_rows(k, start, length_k, k_t * UNIT, D, BD, N)
        values = load_rows(v, start, length_k, v_t * UNIT, E, BE, N)
        w = weights(powers(queries, keys, added, row, column, length_k, scale, CAUSAL, ADDED, PRECISION), log)
        upright = 1.0 + along_g[:, None] - times(g, tl.trans(keys), None, PRECISION)
        f = dot(do, tl.trans(values), times(r, tl.trans(keys), None, PRECISION), PRECISION) - along_h[:, None]
        dz = w * (upright * f - (lam * gh)[:, None])
        moved = dot(cast(dz, keys.dtype), keys, moved, PRECISION)
    store_rows(dq, scale * moved - r, first, length_q, dq_t * UNIT, D, BD, M)
    store_rows(response + own * length_q * D, r, first, length_q, D, D, BD, M)
    numbers += own * 3 * length_q + row
    tl.store(numbers, along_g, mask=row < length_q)
    tl.store(numbers + length_q, along_h, mask=row < length_q)
    tl.store(numbers + 2 * length_q, gh, mask=row < length_q)


@triton.jit
def key_gradients(
    q, k, v, added, ridge, grad, lse, slope, response, numbers, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    ridge_b, ridge_h, ridge_t, length_q, length_k, heads, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, ADDED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys, over all queries that see any of them."""
    first, own = place(length_k, N)
    b, h = own // heads, own % heads
    q, k = head(q, b, h, 0, q_b, q_h, q_t, UNIT), head(k, b, h, 0, k_b, k_h, k_t, UNIT)
    v, grad = head(v, b, h, 0, v_b, v_h, v_t, UNIT), head(grad, b, h, 0, grad_b, grad_h, grad_t, UNIT)
    dk, dv = head(dk, b, h, 0, dk_b, dk_h, dk_t, UNIT), head(dv, b, h, 0, dv_b, dv_h, dv_t, UNIT)
    added, ridge = added + b * length_k, ridge + b * ridge_b + h * ridge_h
    lse, numbers = lse + own * length_q, numbers + own * 3 * length_q
    slope, response = slope + own * length_q * D, response + own * length_q * D
    column = first + tl.arange(0, N)
    keys = load_rows(k, first, length_k, k_t * UNIT, D, BD, N)
    values = load_rows(v, first, length_k, v_t * UNIT, E, BE, N)
    to_keys = tl.zeros((N, BD), tl.float32)
    to_values = tl.zeros((N, BE), tl.float32)
    begin = first // M * M if CAUSAL else 0
    for start in tl.range(begin, length_q, M, num_stages=STAGES):
        row = start + tl.arange(0, M)
        inside = row < length_q
        queries = load_rows(q, start, length_q, q_t * UNIT, D, BD, M)
        do = load_rows(grad, start, length_q, grad_t * UNIT, E, BE, M)
        g = load_rows(slope, start, length_q, D, D, BD, M)
        r = load_rows(response, start, length_q, D, D, BD, M)
        log = tl.load(lse + row, mask=inside, other=NOTHING)
        along_g = tl.load(numbers + row, mask=inside, other=0.0)
        along_h = tl.load(numbers + length_q + row, mask=inside, other=0.0)
        gh = tl.load(numbers + 2 * length_q + row, mask=inside, other=0.0)
        lam = tl.load(ridge + row * ridge_t, mask=inside, other=0.0)
        z = powers(queries, keys, added, row, column, length_k, scale, CAUSAL, ADDED, PRECISION)
        w = tl.where(inside[:, None], weights(z, log), 0.0)
        flat = w * (1.0 + along_g[:, None] - times(g, tl.trans(keys), None, PRECISION))
        f = dot(do, tl.trans(values), times(r, tl.trans(keys), None, PRECISION), PRECISION) - along_h[:, None]
        dz = scale * (flat * f - w * (lam * gh)[:, None])
        tilted = tl.trans(cast(flat, keys.dtype))
        to_values = dot(tilted, do, to_values, PRECISION)
        to_keys = dot(tilted, cast(r, keys.dtype), to_keys, PRECISION)
        to_keys = dot(tl.trans(cast(dz, keys.dtype)), queries, to_keys, PRECISION)
        to_keys = dot(tl.trans(cast(-w * f, keys.dtype)), cast(g, keys.dtype), to_keys, PRECISION)
    store_rows(dk, to_keys, first, length_k, dk_t * UNIT, D, BD, N)
    store_rows(dv, to_values, first, length_k, dv_t * UNIT, E, BE, N)
