"""Triton kernels of local linear attention. Launches: triton_lla.py; the mathematics: cumulant/zoo/lla.py.

Shape legend: B batch, H heads, L queries, S keys, D, E widths, BD, BE those padded to powers of two, M queries of a
program, N keys of a step.

A program holds M queries and walks over the keys as often as it needs: the weights w_j = 2^(z_j - lse) are computed
again in every pass and every step of the solver, so that no L x S tensor exists. Rows of a program stop together.

Float32 factors meet keys of 16 bits as two numbers of 16 bits (`times`): 16 digits, which the solver needs.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import head

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def place(length, COUNT: tl.constexpr):
    """First row of this program, and its head. Grid (heads times blocks of COUNT rows), the blocks of a head side by
    side: in one dimension, since the second holds 65,535 programs at most."""
    blocks = tl.cdiv(length, COUNT)
    return tl.program_id(0) % blocks * COUNT, (tl.program_id(0) // blocks).to(tl.int64)


@triton.jit
def load_rows(x, start, length, stride, WIDTH: tl.constexpr, BW: tl.constexpr, COUNT: tl.constexpr):
    """(COUNT, BW) rows from `start` of a head at x; 0 beyond its length and width."""
    at, columns = start + tl.arange(0, COUNT), tl.arange(0, BW)
    inside = (at < length)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + at.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(x, value, start, length, stride, WIDTH: tl.constexpr, BW: tl.constexpr, COUNT: tl.constexpr):
    at, columns = start + tl.arange(0, COUNT), tl.arange(0, BW)
    inside = (at < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + at.to(tl.int64)[:, None] * stride + columns[None, :], cast(value, x.dtype.element_ty), mask=inside)


@triton.jit
def times(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y for x in float32 and y as it was loaded."""
    if y.dtype == tl.float32:
        return dot(x, y, acc, PRECISION)
    else:
        high = cast(x, y.dtype)
        low = cast(x - high.to(tl.float32), y.dtype)
        return dot(low, y, dot(high, y, acc, PRECISION), PRECISION)


@triton.jit
def powers(
    q, k, added, row, column, length_k, scale, CAUSAL: tl.constexpr, ADDED: tl.constexpr, PRECISION: tl.constexpr
):
    """z (M, N) = log2(e) (scale q.k + added), -inf for keys that a row does not see."""
    z = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2E)
    seen = (column < length_k)[None, :]
    if CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
    if ADDED:
        z += tl.load(added + column, mask=column < length_k, other=NOTHING)[None, :] * LOG2E
    return tl.where(seen, z, NOTHING)


@triton.jit
def weights(z, lse):
    """2^(z - lse); 0 in rows that see nothing, whose lse is -inf."""
    return tl.exp2(z - tl.where(lse == NOTHING, 0.0, lse)[:, None])


@triton.jit
def solve(
    target, q, k, added, row, lse, mean, ridge, end, length_k, stride_k, scale, iterations, tolerance,
    D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, ADDED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x with C x + ridge x = target (M, BD), by conjugate gradients; C the covariance of the keys under the weights."""
    x = tl.zeros_like(target)
    r, p = target, target
    rr = tl.sum(r * r, 1)
    enough = tolerance * tl.maximum(rr, tolerance)
    active = rr > 0
    step = 0
    while (step < iterations) & (tl.max(active.to(tl.int32), 0) > 0):
        y = ridge[:, None] * p
        centre = tl.sum(p * mean, 1)
        for start in tl.range(0, end, N, num_stages=STAGES):
            column = start + tl.arange(0, N)
            keys = load_rows(k, start, length_k, stride_k, D, BD, N)
            w = weights(powers(q, keys, added, row, column, length_k, scale, CAUSAL, ADDED, PRECISION), lse)
            along = times(p, tl.trans(keys), None, PRECISION) - centre[:, None]
            y = times(w * along, keys, y, PRECISION)
        a = tl.where(active, rr, 0.0) / tl.where(active, tl.sum(p * y, 1), 1.0)
        x += a[:, None] * p
        r -= a[:, None] * y
        left = tl.sum(r * r, 1)
        active = active & (left > enough) & (left < float("inf"))
        p = r + (tl.where(active, left, 0.0) / tl.where(active, rr, 1.0))[:, None] * p
        rr = left
        step += 1
    return x


@triton.jit
def forward(
    q, k, v, added, ridge, out, lse, mean, slope,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t, ridge_b, ridge_h, ridge_t,
    length_q, length_k, heads, scale, iterations, tolerance,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, ADDED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out, and for a backward pass, in float32, lse, mean of the keys and slope g."""
    first, own = place(length_q, M)
    b, h = own // heads, own % heads
    q, k = head(q, b, h, 0, q_b, q_h, q_t, UNIT), head(k, b, h, 0, k_b, k_h, k_t, UNIT)
    v, out = head(v, b, h, 0, v_b, v_h, v_t, UNIT), head(out, b, h, 0, out_b, out_h, out_t, UNIT)
    added += b * length_k
    row = first + tl.arange(0, M)
    end = tl.minimum(first + M, length_k) if CAUSAL else length_k
    queries = load_rows(q, first, length_q, q_t * UNIT, D, BD, M)
    lam = tl.load(ridge + b * ridge_b + h * ridge_h + row * ridge_t, mask=row < length_q, other=1.0)

    top = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M,), tl.float32)
    centre = tl.zeros((M, BD), tl.float32)
    for start in tl.range(0, end, N, num_stages=STAGES):
        column = start + tl.arange(0, N)
        keys = load_rows(k, start, length_k, k_t * UNIT, D, BD, N)
        z = powers(queries, keys, added, row, column, length_k, scale, CAUSAL, ADDED, PRECISION)
        larger = tl.maximum(top, tl.max(z, 1))
        shift = tl.where(larger == NOTHING, 0.0, larger)
        w, shrink = tl.exp2(z - shift[:, None]), tl.exp2(top - shift)
        total = total * shrink + tl.sum(w, 1)
        centre = times(w, keys, centre * shrink[:, None], PRECISION)
        top = larger
    present = (total > 0) & (row < length_q)
    centre = centre / tl.where(present, total, 1.0)[:, None]
    log = tl.where(present, top + tl.log2(tl.where(present, total, 1.0)), NOTHING)

    target = tl.where(present[:, None], centre - queries.to(tl.float32), 0.0)
    g = solve(
        target, queries, k, added, row, log, centre, lam, end, length_k, k_t * UNIT, scale, iterations, tolerance,
        D, BD, N, CAUSAL, ADDED, PRECISION, STAGES,
    )  # fmt: skip
    level = 1.0 + tl.sum(g * centre, 1)
    answer = tl.zeros((M, BE), tl.float32)
    for start in tl.range(0, end, N, num_stages=STAGES):
        column = start + tl.arange(0, N)
        keys = load_rows(k, start, length_k, k_t * UNIT, D, BD, N)
        values = load_rows(v, start, length_k, v_t * UNIT, E, BE, N)
        w = weights(powers(queries, keys, added, row, column, length_k, scale, CAUSAL, ADDED, PRECISION), log)
        tilted = w * (level[:, None] - times(g, tl.trans(keys), None, PRECISION))
        answer = dot(cast(tilted, values.dtype), values, answer, PRECISION)
    store_rows(out, answer, first, length_q, out_t * UNIT, E, BE, M)
    tl.store(lse + own * length_q + row, log, mask=row < length_q)
    store_rows(mean + own * length_q * D, centre, first, length_q, D, D, BD, M)
    store_rows(slope + own * length_q * D, g, first, length_q, D, D, BD, M)


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
