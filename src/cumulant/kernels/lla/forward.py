"""Forward kernel of local linear attention. Shape legend: parts.py; the mathematics: cumulant/zoo/lla.py."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from ..tokens import head
from .parts import NOTHING, load_rows, place, powers, solve, store_rows, times, weights


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
