"""Near clusters of causal rows, each of which chooses its own: rows go to the clusters that they chose.

Shape legend: that of cluster/parts.py; n is the number of a row among those of all G query heads of a key head, T near
clusters of a row; pair n T + j is row n and the j-th of them.

`choose_rows` writes `named` (B H, G Lq, T), -1 for none. Pairs are sorted by cluster (cluster/order.py), so that the
rows of a cluster meet its tokens in whole tiles, whatever those beside them chose: a row costs T m (D + E) and depends
on no other row. In tiles that shared a choice later rows would choose for earlier ones. `answer_pairs` gives each pair
the mean value of the tokens under its weights and log2 of their sum, which `attend` joins to its own sums;
`pair_gradients` gives what the tokens add to dq. Both go through memory, T (E or D) numbers a row.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..cluster.parts import (
    LOG2E,
    LOWEST,
    NOTHING,
    finished,
    finite,
    first_row,
    mass_and_gain,
    origin_of,
    packed,
    parts,
    picked_tile,
    placed,
    query_head,
    tile,
)
from ..products import dot
from ..tokens import head, kernel


@triton.jit
def numbered(index, tiles, row, length_q, GROUP: tl.constexpr):
    """Numbers n of the rows of a tile."""
    if GROUP > 1:
        return (index // tiles) * length_q + row
    else:
        return row


@triton.jit
def gathered(
    x, n, there, length_q, x_h, x_t, columns,
    GROUP: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows n of x that are `there`, (M, BLOCK), 0 for others; x points to the first query head of a key head."""
    at = (n % length_q).to(tl.int64) * (x_t * UNIT)
    if GROUP > 1:
        at += (n // length_q).to(tl.int64) * (x_h * UNIT)
    mask = there[:, None]
    if WIDTH != BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(x + at[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def apart(seen, c, named, there, NEAR: tl.constexpr):
    """Which rows see which clusters c from afar: `seen` (M, CK) without those that they named, at `named` (M,)."""
    for j in tl.static_range(NEAR):
        own = tl.load(named + j, mask=there, other=-1)
        seen = seen & (c[None, :] != own[:, None])
    return seen


@triton.jit
def with_answers(
    answers, levels, named, n, there, top, total, out, NEAR: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Sums of a tile of rows n with those of their near clusters in them."""
    e = tl.arange(0, BE)
    for j in tl.static_range(NEAR):
        some = tl.load(named + j, mask=there, other=-1) >= 0
        pair = n.to(tl.int64) * NEAR + j
        level = tl.load(levels + pair, mask=some, other=NOTHING)
        answer = tl.load(answers + pair[:, None] * BE + e[None, :], mask=some[:, None], other=0.0).to(tl.float32)
        higher = tl.maximum(top, level)
        fading, weight = tl.exp2(top - finite(higher)), tl.exp2(level - finite(higher))
        total = total * fading + weight
        out = out * fading[:, None] + weight[:, None] * answer
        top = higher
    return top, total, out


@triton.jit
def with_pair_sums(sums, pair_sums, named, n, there, NEAR: tl.constexpr, BD: tl.constexpr):
    """dq of a tile of rows n with what their near clusters add."""
    d = tl.arange(0, BD)
    for j in tl.static_range(NEAR):
        some = tl.load(named + j, mask=there, other=-1) >= 0
        pair = n.to(tl.int64) * NEAR + j
        sums += tl.load(pair_sums + pair[:, None] * BD + d[None, :], mask=some[:, None], other=0.0)
    return sums


@kernel
def choose_rows(
    q, logs, vectors, factors, named, q_b, q_h, q_t,
    length_q, heads, tiles, clusters, per, size, recent, offset, scale,
    NEAR: tl.constexpr, BY_ERROR: tl.constexpr, POOLED: tl.constexpr, CLOSURE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N rows, B H). The NEAR clusters of largest mass that each row sees, with the digits of float32.

    BY_ERROR: of largest mass times x; POOLED: where one without spread borrows a response, so that it may come last.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    start, d = first_row(index, tiles, N, GROUP), tl.arange(0, BD)
    row = start + tl.arange(0, N)
    q = query_head(q, pid, heads, index, tiles, q_b, q_h, q_t, GROUP, UNIT)
    vectors += pid.to(tl.int64) * (KP * (2 * BD + BE))
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    logs += (pid // per) * KP
    named += pid.to(tl.int64) * (length_q * GROUP * NEAR)
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD).to(tl.float32) * scale
    squares, origin = rows * rows, origin_of(factors, d, BD)
    end = tl.minimum((offset + row) // size - recent, clusters)  # clusters that a row sees
    last = tl.minimum((offset + tl.minimum(start + N, length_q) - 1) // size - recent, clusters)
    part = tl.arange(0, KP // CK)[:, None, None]
    scores = tl.full((KP // CK, N, CK), NOTHING, tl.float32)
    for chunk in range(0, tl.maximum(last, 0), CK):
        c = chunk + tl.arange(0, CK)
        at = vectors + c[None, :] * (2 * BD + BE) + d[:, None]
        x = tl.maximum(dot(squares, tl.load(at + BD), None, "tf32x3"), 0.0)
        z = dot(rows, tl.load(at) - origin[:, None], None, "tf32x3")
        phi, _ = mass_and_gain(x, CLOSURE, False)
        z = z * LOG2E + phi + tl.load(logs + c)[None, :]
        if BY_ERROR:
            z += tl.log2(tl.maximum(x, 1.2e-38 if POOLED else 0.0))
        z = tl.where(c[None, :] < end[:, None], tl.where(z == z, z, LOWEST), NOTHING)
        scores = tl.where(part == chunk // CK, z[None, :, :], scores)
    left = tl.reshape(tl.permute(scores, (1, 0, 2)), (N, KP))
    named += numbered(index, tiles, row, length_q, GROUP).to(tl.int64) * NEAR
    for j in tl.static_range(NEAR):
        best, highest = tl.argmax(left, 1), tl.max(left, 1)
        tl.store(named + j, tl.where(highest == NOTHING, -1, best), mask=row < length_q)
        left = tl.where(tl.arange(0, KP)[None, :] == best[:, None], NOTHING, left)


@triton.jit
def pairs_of(pairs, ends, c, pid, length_q, NEAR: tl.constexpr, GROUP: tl.constexpr, KP: tl.constexpr):
    """The pairs of cluster c: where they are listed, the first and the end."""
    ends += pid.to(tl.int64) * (2 * KP + 2) + c
    return pairs + pid.to(tl.int64) * (length_q * GROUP * NEAR), tl.load(ends), tl.load(ends + KP + 1)


@kernel
def answer_pairs(
    q, k, v, answers, levels, bounds, order, factors, pairs, ends,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, length_q, length_k, heads, per, scale,
    NEAR: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (parts, clusters, B H). answers (B H, G Lq T, BE) and levels (B H, G Lq T) of the pairs of a cluster, M at a
    time; levels are log2 of sums, in units of z_l."""
    c, pid = tl.program_id(1), tl.program_id(2)
    line, d, e = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BE)
    pairs, first, end = pairs_of(pairs, ends, c, pid, length_q, NEAR, GROUP, KP)
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    skipped = pid.to(tl.int64) * (length_q * GROUP * NEAR)
    begin, stop = tl.load(bounds + c), tl.load(bounds + (KP + 1) + c)
    a = scale * LOG2E
    for at in range(first + tl.program_id(0) * M, end, tl.num_programs(0) * M):
        there = at + line < end
        pair = tl.load(pairs + at + line, mask=there, other=0)
        rows = gathered(q, pair // NEAR, there, length_q, q_h, q_t, d, GROUP, UNIT, D, BD)
        away = a * tl.sum(rows.to(tl.float32) * origin_of(factors, d, BD)[None, :], 1)
        top, total = tl.full((M,), NOTHING, tl.float32), tl.zeros((M,), tl.float32)
        out = tl.zeros((M, BE), tl.float32)
        for block in tl.range(begin, stop, N, num_stages=STAGES):
            token = block + tl.arange(0, N)
            place = placed(order, token, token < stop, ORDERED, False)
            keys = picked_tile(k, place, token < stop, k_t, d, D, BD, False)
            values = picked_tile(v, place, token < stop, v_t, e, E, BE, False)
            u = finished(dot(rows, tl.trans(keys), None, PRECISION))
            u = tl.where((token < stop)[None, :], u, NOTHING)
            higher = tl.maximum(top, tl.max(u, 1) * a - away)  # a > 0
            p = tl.exp2(u * a - (finite(higher) + away)[:, None])
            fading = tl.exp2(top - finite(higher))
            rounded = packed(p, rows.dtype)  # as in `with_window`
            total = total * fading + tl.sum(rounded.to(tl.float32), 1)
            out = finished(dot(rounded, values, out * fading[:, None], PRECISION))
            top = higher
        out *= (1.0 / total)[:, None]
        own = skipped + pair
        tl.store(levels + own, top + tl.log2(total), mask=there)
        out = packed(out, answers.dtype.element_ty)
        tl.store(answers + own[:, None] * BE + e[None, :], out, mask=there[:, None])


@kernel
def pair_gradients(
    q, k, v, o, rounding, g, pair_sums, lse, bounds, order, factors, pairs, ends,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, length_q, length_k, heads, per, scale,
    NEAR: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KP: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (parts, clusters, B H). What the pairs of a cluster add to dq, (B H, G Lq T, BD) float32, M at a time."""
    c, pid = tl.program_id(1), tl.program_id(2)
    line, d, e = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    pairs, first, end = pairs_of(pairs, ends, c, pid, length_q, NEAR, GROUP, KP)
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    q = head(q, pid // heads, pid % heads * GROUP, 0, q_b, q_h, q_t, UNIT)
    o = head(o, pid // heads, pid % heads * GROUP, 0, o_b, o_h, o_t, UNIT)
    g = head(g, pid // heads, pid % heads * GROUP, 0, g_b, g_h, g_t, UNIT)
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    k_t, v_t = k_t * UNIT, v_t * UNIT
    skipped = pid.to(tl.int64) * (length_q * GROUP * NEAR)
    lse += pid.to(tl.int64) * (length_q * GROUP)
    begin, stop = tl.load(bounds + c), tl.load(bounds + (KP + 1) + c)
    for at in range(first + tl.program_id(0) * M, end, tl.num_programs(0) * M):
        there = at + line < end
        pair = tl.load(pairs + at + line, mask=there, other=0)
        n = pair // NEAR
        rows = gathered(q, n, there, length_q, q_h, q_t, d, GROUP, UNIT, D, BD)
        grad = gathered(g, n, there, length_q, g_h, g_t, e, GROUP, UNIT, E, BE)
        outs = gathered(o, n, there, length_q, o_h, o_t, e, GROUP, UNIT, E, BE).to(tl.float32)
        if dtype != tl.float32:
            lost = head(rounding, pid // heads, pid % heads * GROUP, 0, o_b, o_h, o_t, UNIT)
            outs += gathered(lost, n, there, length_q, o_h, o_t, e, GROUP, UNIT, E, BE).to(tl.float32)
        delta = tl.sum(grad.to(tl.float32) * outs, 1) * scale
        away = tl.sum(rows.to(tl.float32) * origin_of(factors, d, BD)[None, :], 1) * (scale * LOG2E)
        away += tl.load(lse + n, mask=there, other=float("inf"))
        sums, changes = tl.zeros((M, BD), tl.float32), tl.zeros((M,), tl.float32)
        for block in tl.range(begin, stop, N, num_stages=STAGES):
            token = block + tl.arange(0, N)
            place = placed(order, token, token < stop, ORDERED, False)
            keys = picked_tile(k, place, token < stop, k_t, d, D, BD, False)
            values = picked_tile(v, place, token < stop, v_t, e, E, BE, False)
            z = dot(rows, tl.trans(keys), None, PRECISION) * (scale * LOG2E) - away[:, None]
            z = tl.where((token < stop)[None, :], z, NOTHING)
            change = tl.exp2(z) * (dot(grad, tl.trans(values), None, PRECISION) * scale - delta[:, None])
            changes += tl.sum(change, 1)
            change_high, change_low = parts(change, dtype)
            sums = dot(change_high, keys, sums, PRECISION)
            if dtype != tl.float32:
                sums = dot(change_low, keys, sums, PRECISION)
        sums -= changes[:, None] * origin_of(factors, d, BD)[None, :]
        own = (skipped + pair)[:, None] * BD + d[None, :]
        tl.store(pair_sums + own, sums, mask=there[:, None])
