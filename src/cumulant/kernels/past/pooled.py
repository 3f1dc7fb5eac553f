"""One response for all clusters that a block of rows sees, those of the past: kernels and what `attend` takes of them.

Shape legend: that of cluster/parts.py. Blocks are not merged, so that rows of block b see the clusters 0 to
p = b - recent - 1, and with the sizes n_c

    P_p = sum_(c <= p) n_c S_c / sum_(c <= p) n_c        dS_c = n_c sum_(p >= c) dP_p / sum_(c' <= p) n_c'
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..cluster.backward import turned_back
from ..cluster.parts import finished, parts, stepped, tile, turned_tile, weighed
from ..products import dot
from ..tokens import head, kernel


@triton.jit
def sizes_until(bounds, chunk, KP: tl.constexpr, CK: tl.constexpr):
    """Sizes of the clusters from `chunk` on, (CK,) float32, and of all up to each."""
    c, every = chunk + tl.arange(0, CK), tl.arange(0, KP)
    size = (tl.load(bounds + (KP + 1) + c) - tl.load(bounds + c)).to(tl.float32)
    before = tl.load(bounds + (KP + 1) + every) - tl.load(bounds + every)
    return size, tl.sum(tl.where(every < chunk, before, 0)).to(tl.float32) + tl.cumsum(size, 0)


@kernel
def pools(
    matrices, bounds, pooled, per, clusters, KP: tl.constexpr, CK: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Grid (SIZE / N, B H). P of each cluster, (B H, KP, 2, SIZE): rounded, and what that lost."""
    cell, pid = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    bounds += (pid // per) * (2 * KP + 2)
    matrices += pid * (KP * SIZE)
    pooled += pid * (KP * 2 * SIZE)
    total = tl.zeros((N,), tl.float32)
    for chunk in range(0, clusters, CK):
        c = chunk + tl.arange(0, CK)
        size, tokens = sizes_until(bounds, chunk, KP, CK)
        S = tl.load(matrices + c[:, None] * SIZE + cell[None, :]).to(tl.float32)
        S = tl.where((size > 0.0)[:, None], size[:, None] * S, 0.0)
        sums = total[None, :] + tl.cumsum(S, 0)
        total += tl.sum(S, 0)
        high, low = parts(sums * (1.0 / tl.maximum(tokens, 1.0))[:, None], pooled.dtype.element_ty)
        at = pooled + c[:, None] * (2 * SIZE) + cell[None, :]
        tl.store(at, high)
        tl.store(at + SIZE, low)


@triton.jit
def through(rows, at, BD: tl.constexpr, BE: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr):
    """Rows times the matrix at `at`, which is followed by what its rounding lost; TURNED: times its transpose."""
    cell = tl.arange(0, BD)[:, None] * BE + tl.arange(0, BE)[None, :]
    if TURNED:
        found = turned_back(rows, tl.load(at + cell), tl.load(at + BD * BE + cell), PRECISION)
    else:  # not behind a return: that is compiled too, and does not fit where BD is not BE
        found = dot(rows, tl.load(at + cell), None, PRECISION)
        if rows.dtype != tl.float32:
            found = dot(rows, tl.load(at + BD * BE + cell), found, PRECISION)
    return found


@triton.jit
def through_pools(
    rows, pooled, place, last, size, recent, BD: tl.constexpr, BE: tl.constexpr, TURNED: tl.constexpr,
    WITHIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q P of each row (M, BE), or TURNED do P^T (M, BD); 0 for rows that see no cluster. They have the places (M,), the
    last of them `last`. WITHIN: all are of one block."""
    first, end = tl.min(place, 0) // size - recent - 1, last // size - recent
    found = tl.zeros((rows.shape[0], BD if TURNED else BE), tl.float32)
    if WITHIN:
        if first >= 0:
            found = through(rows, pooled + first * (2 * BD * BE), BD, BE, TURNED, PRECISION)
    else:
        own = place // size - recent - 1
        for p in range(tl.maximum(first, 0), end):
            x = through(rows, pooled + p * (2 * BD * BE), BD, BE, TURNED, PRECISION)
            found = tl.where((own == p)[:, None], x, found)
    return found


@kernel
def pool_gradients(
    q, g, gains, grad_pools, q_b, q_h, q_t, g_b, g_h, g_t, length_q, heads, tiles, size, recent, offset,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (clusters, B H). dP over the rows of a block, N at a time; gains (B H, tiles of all query heads, M)."""
    p, pid = tl.program_id(0), tl.program_id(1)
    line, d, e = tl.arange(0, N), tl.arange(0, BD), tl.arange(0, BE)
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    g = head(g, pid // heads, pid % heads * GROUP, 0, g_b, g_h, g_t, UNIT)
    gains += pid.to(tl.int64) * (tiles * GROUP) * M
    first = tl.maximum((p + recent + 1) * size - offset, 0)
    end = tl.minimum(tl.maximum((p + recent + 2) * size - offset, 0), length_q)
    number, S = tl.cdiv(tl.maximum(end - first, 0), N), tl.zeros((BD, BE), tl.float32)
    for i in tl.range(0, number * GROUP, num_stages=STAGES):
        member = i // number * tiles  # first tile of the query head
        row = first + i % number * N + line
        rows = turned_tile(stepped(q, member, tiles, q_h, GROUP, UNIT), row, q_t * UNIT, d, end, D, BD)
        grad = tile(stepped(g, member, tiles, g_h, GROUP, UNIT), row, g_t * UNIT, e, end, E, BE)
        gain = tl.load(gains + member * M + row, mask=row < end, other=0.0)
        S = finished(dot(weighed(rows, gain), grad, S, PRECISION))
    grad_pools += (pid.to(tl.int64) * KP + p) * (BD * BE)
    tl.store(grad_pools + d[:, None] * BE + e[None, :], S)


@kernel
def handed_back(grads, bounds, per, clusters, KP: tl.constexpr, CK: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Grid (SIZE / N, B H). dS in place of dP, (B H, KP, SIZE) float32."""
    cell, pid = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    bounds += (pid // per) * (2 * KP + 2)
    grads += pid * (KP * SIZE)
    total, number = tl.zeros((N,), tl.float32), tl.cdiv(clusters, CK)
    for i in range(0, number):
        chunk = (number - 1 - i) * CK
        c = chunk + tl.arange(0, CK)
        size, tokens = sizes_until(bounds, chunk, KP, CK)
        at = grads + c[:, None] * SIZE + cell[None, :]
        P = tl.load(at, mask=(c < clusters)[:, None], other=0.0) * (1.0 / tl.maximum(tokens, 1.0))[:, None]
        sums = total[None, :] + tl.cumsum(P, 0, reverse=True)
        total += tl.sum(P, 0)
        tl.store(at, size[:, None] * sums, mask=(c < clusters)[:, None])
