"""Parts of the Triton kernels of local linear attention. The mathematics: cumulant/zoo/lla.py.

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
