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
def size_of(bounds, c, KP: tl.constexpr):
    """Tokens of cluster c, float32."""
    return (tl.load(bounds + (KP + 1) + c) - tl.load(bounds + c)).to(tl.float32)


@triton.jit
def next_pool(total, tokens, S, size, pooled, SIZE: tl.constexpr):
    """The sums with S of a cluster of so many tokens in them, of which P is written."""
    total += tl.where(size > 0.0, size * S.to(tl.float32), 0.0)
    tokens += size
    high, low = parts(total * (1.0 / tl.maximum(tokens, 1.0)), pooled.dtype.element_ty)
    tl.store(pooled, high)
    tl.store(pooled + SIZE, low)
    return total, tokens


@kernel
def pools(matrices, bounds, pooled, per, clusters, KP: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Grid (SIZE / N, B H). P of each cluster, (B H, KP, 2, SIZE): rounded, and what that lost. Four are asked for
    together, and added one after the other: no thread waits for another."""
    cell, pid = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    bounds += (pid // per) * (2 * KP + 2)
    matrices += pid * (KP * SIZE) + cell
    pooled += pid * (KP * 2 * SIZE) + cell
    total, tokens = tl.zeros((N,), tl.float32), 0.0
    for c in range(0, clusters, 4):  # KP is a multiple of 4, and clusters beyond the last are empty
        S0, S1 = tl.load(matrices + c * SIZE), tl.load(matrices + (c + 1) * SIZE)
        S2, S3 = tl.load(matrices + (c + 2) * SIZE), tl.load(matrices + (c + 3) * SIZE)
        n0, n1 = size_of(bounds, c, KP), size_of(bounds, c + 1, KP)
        n2, n3 = size_of(bounds, c + 2, KP), size_of(bounds, c + 3, KP)
        at = pooled + c * (2 * SIZE)
        total, tokens = next_pool(total, tokens, S0, n0, at, SIZE)
        total, tokens = next_pool(total, tokens, S1, n1, at + 2 * SIZE, SIZE)
        total, tokens = next_pool(total, tokens, S2, n2, at + 4 * SIZE, SIZE)
        total, tokens = next_pool(total, tokens, S3, n3, at + 6 * SIZE, SIZE)


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
    rows, pooled, place, begin, last, size, recent, BD: tl.constexpr, BE: tl.constexpr, TURNED: tl.constexpr,
    WITHIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q P of each row (M, BE), or TURNED do P^T (M, BD); 0 for rows that see no cluster. They have the places (M,) from
    `begin` to `last`. WITHIN: all are of one block."""
    first, end = begin // size - recent - 1, last // size - recent
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
    """Grid (clusters, B H). dP over the rows of a block, N at a time; gains (B H, tiles of all query heads, M). For
    calls whose `vector_gradients` do not give it."""
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


@triton.jit
def next_back(total, tokens, P, size, grads):
    """The sums with dP of a cluster of so many tokens, the last of `tokens`, in them; dS of it is written."""
    total += P * (1.0 / tl.maximum(tokens, 1.0))
    tl.store(grads, size * total)
    return total, tokens - size


@triton.jit
def given(grads, c, cell, least, end, SIZE: tl.constexpr):
    """dP of cluster c, 0 but for those from `least` to `end`."""
    return tl.load(grads, mask=cell < tl.where((c >= least) & (c < end), SIZE, 0), other=0.0)


@kernel
def handed_back(grads, bounds, per, clusters, recent, least, KP: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Grid (SIZE / N, B H). dS in place of dP, (B H, KP, SIZE) float32, from the last cluster on, as `pools`. There is
    no dP of clusters before `least`, and none of the last one and `recent` before it."""
    cell, pid = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    bounds += (pid // per) * (2 * KP + 2)
    grads += pid * (KP * SIZE) + cell
    every = tl.arange(0, KP)
    tokens = tl.sum(tl.load(bounds + (KP + 1) + every) - tl.load(bounds + every)).to(tl.float32)
    total, number, end = tl.zeros((N,), tl.float32), tl.cdiv(clusters, 4), clusters - recent - 1
    for i in range(0, number):
        c = (number - 1 - i) * 4
        at = grads + c * SIZE
        P0, P1 = given(at, c, cell, least, end, SIZE), given(at + SIZE, c + 1, cell, least, end, SIZE)
        P2, P3 = (
            given(at + 2 * SIZE, c + 2, cell, least, end, SIZE),
            given(at + 3 * SIZE, c + 3, cell, least, end, SIZE),
        )
        n0, n1 = size_of(bounds, c, KP), size_of(bounds, c + 1, KP)
        n2, n3 = size_of(bounds, c + 2, KP), size_of(bounds, c + 3, KP)
        total, tokens = next_back(total, tokens, P3, n3, at + 3 * SIZE)
        total, tokens = next_back(total, tokens, P2, n2, at + 2 * SIZE)
        total, tokens = next_back(total, tokens, P1, n1, at + SIZE)
        total, tokens = next_back(total, tokens, P0, n0, at)
