"""Forward kernels of cluster attention: choice of clusters, attention. Formulas: parts.py.

Shape legend: that of parts.py; a tile is M queries of one head that share their near clusters.

Cost a head, in multiply-adds: choice 3 L K D (twice that where K is more than a chunk; a tile's worth
of it by means); attention L (3 K D + K E + R D E + T m (D + E)), with R = K unless responses are limited, 1 with one
for all. Bytes: k, v, q twice, the output; with a matrix for each cluster, n K gains written and read back, and the
matrices, K D E, once for each tile out of the L2 cache: n = 128 rows make 128 operations a byte of it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import dot
from ..tokens import head, kernel
from .parts import (
    LOG2E,
    LOWEST,
    NOTHING,
    block_tile,
    counted,
    far_logs_of,
    finished,
    finite,
    first_row,
    key_means,
    log2_above_1,
    mass_and_gain,
    masses,
    near_block,
    near_list,
    near_row,
    origin_of,
    packed,
    picked_tile,
    placed,
    query_head,
    ranks,
    reciprocal,
    rows_from,
    squared,
    tanh_masses,
    tile,
    token_in_row,
    value_means,
    variances,
    widened,
)
from .rows import with_means, write_rows


@triton.jit
def ranks_in_memory(scores, c, KP: tl.constexpr, CK: tl.constexpr):
    """`ranks` of scores (KP,) that lie in memory, CK of them at a time."""
    mine = tl.load(scores + c)[None, :]
    count = tl.zeros((KP,), tl.int32)
    for chunk in range(0, KP, CK):
        at = chunk + tl.arange(0, CK)
        other = tl.load(scores + at)[:, None]
        before = (other > mine) | ((other == mine) & (at[:, None] < c[None, :]))
        count += tl.sum(before.to(tl.int32), 0)
    return count


@triton.jit
def moments_of(
    q, pid, index, d, q_b, q_h, q_t, length_q, heads, tiles, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Mean and variance of the scaled queries of a tile, (BD,) each."""
    start = first_row(index, tiles, M, GROUP)
    row = start + tl.arange(0, M)
    q = query_head(q, pid, heads, index, tiles, q_b, q_h, q_t, GROUP, UNIT)
    over = scale / tl.minimum(length_q - start, M).to(tl.float32)
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD).to(tl.float32)
    mean, square = tl.sum(rows, 0) * over, tl.sum(rows * rows, 0) * (over * scale)
    return mean, tl.maximum(square - mean * mean, 0.0)


@kernel
def query_moments(
    q, moments, q_b, q_h, q_t, length_q, heads, tiles, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). `moments_of` each tile, (B H, tiles, 2, BD) float32."""
    index, pid, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BD)
    mean, var = moments_of(
        q, pid, index, d, q_b, q_h, q_t, length_q, heads, tiles, scale, GROUP, D, BD, M, UNIT
    )  # fmt: skip
    moments += (pid.to(tl.int64) * tl.num_programs(0) + index) * (2 * BD) + d
    tl.store(moments, mean)
    tl.store(moments + BD, var)


@triton.jit
def mean_key(logs, vectors, BD: tl.constexpr, BE: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr):
    """The mean of all keys of a head, (BD,), out of those of its clusters."""
    total, tokens = tl.zeros((BD,), tl.float32), 0.0
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        size = tl.exp2(tl.load(logs + c))
        total += tl.sum(size[:, None] * tl.load(vectors + c[:, None] * (2 * BD + BE) + tl.arange(0, BD)[None, :]), 0)
        tokens += tl.sum(size)
    return total / tl.maximum(tokens, 1.0)


@triton.jit
def list_by_mean(
    mean, var, centre, logs, vectors, near, clusters, T,
    PREFIX: tl.constexpr, CLOSURE: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Writes the list of a tile, by two cumulants of its queries and the mean key, `centre`.

    The formula is that of `Far.mean_masses`. Cost: 3 K D.
    """
    d, part = tl.arange(0, BD), tl.arange(0, KP // CK)[:, None]
    square, half = mean * mean + var, 0.5 * var
    scores = tl.full((KP // CK, CK), NOTHING, tl.float32)
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        at = vectors + c[:, None] * (2 * BD + BE) + d[None, :]
        away = tl.load(at) - centre[None, :]
        x = tl.sum(square[None, :] * tl.load(at + BD), 1)
        z = tl.sum(away * (mean[None, :] + half[None, :] * away), 1)
        phi, _ = mass_and_gain(x, CLOSURE, True)
        z = z * LOG2E + phi + tl.load(logs + c)
        z = tl.where(c < clusters, tl.where(z == z, z, LOWEST), NOTHING)
        scores = tl.where(part == chunk // CK, z[None, :], scores)
    left = tl.reshape(scores, (KP,))
    for i in range(T - PREFIX):
        best = tl.argmax(left, 0)
        tl.store(near + i, tl.where(tl.max(left, 0) == NOTHING, -1, best))
        left = tl.where(tl.arange(0, KP) == best, NOTHING, left)
    if PREFIX:
        tl.store(near + T - 1, KP)


@kernel
def choose_by_mean(
    moments, logs, vectors, near, tiles, clusters, per, T,
    PREFIX: tl.constexpr, CLOSURE: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles / N, B H). Near clusters of N tiles, in float32, by two cumulants of their queries, -1 where there
    are fewer; PREFIX: then the prefix tokens."""
    first, pid, d = tl.program_id(0) * N, tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    vectors += pid * (KP * (2 * BD + BE))
    logs += (pid // per) * KP
    centre = mean_key(logs, vectors, BD, BE, CK, KP)
    for index in range(first, tl.minimum(first + N, tiles)):
        own = moments + (pid * tiles + index) * (2 * BD) + d
        listed = near + (pid * tiles + index) * T
        list_by_mean(
            tl.load(own), tl.load(own + BD), centre, logs, vectors, listed, clusters, T,
            PREFIX, CLOSURE, BD, BE, CK, KP,
        )  # fmt: skip


@kernel
def choose_alone(
    q, logs, vectors, near, q_b, q_h, q_t, length_q, heads, tiles, clusters, per, T, scale,
    PREFIX: tl.constexpr, CLOSURE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). `query_moments` and `choose_by_mean` in one, for so few tiles that each has a program."""
    index, pid, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BD)
    mean, var = moments_of(
        q, pid, index, d, q_b, q_h, q_t, length_q, heads, tiles, scale, GROUP, D, BD, M, UNIT
    )  # fmt: skip
    slot = pid.to(tl.int64)
    vectors += slot * (KP * (2 * BD + BE))
    logs += (slot // per) * KP
    centre = mean_key(logs, vectors, BD, BE, CK, KP)
    list_by_mean(
        mean, var, centre, logs, vectors, near + (slot * tl.num_programs(0) + index) * T, clusters, T,
        PREFIX, CLOSURE, BD, BE, CK, KP,
    )  # fmt: skip


@kernel
def choose_by_products(
    moments, logs, vectors, near, tiles, clusters, per, T,
    PREFIX: tl.constexpr, CLOSURE: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """What `choose_by_mean` does, of N tiles at once: by products of three tf32."""
    tile, pid, d = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    vectors += pid * (KP * (2 * BD + BE))
    logs += (pid // per) * KP
    centre = mean_key(logs, vectors, BD, BE, CK, KP)
    own = moments + (pid * tiles + tile)[:, None] * (2 * BD) + d[None, :]
    mean = tl.load(own, mask=(tile < tiles)[:, None], other=0.0)
    var = tl.load(own + BD, mask=(tile < tiles)[:, None], other=0.0)
    part = tl.arange(0, KP // CK)[:, None, None]
    scores = tl.full((KP // CK, N, CK), NOTHING, tl.float32)
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        at = vectors + c[None, :] * (2 * BD + BE) + d[:, None]
        away = tl.load(at) - centre[:, None]
        x = dot(mean * mean + var, tl.load(at + BD), None, "tf32x3")
        z = dot(mean, away, None, "tf32x3")
        z = dot(0.5 * var, away * away, z, "tf32x3")
        phi, _ = mass_and_gain(tl.maximum(x, 0.0), CLOSURE, True)
        z = z * LOG2E + phi + tl.load(logs + c)[None, :]
        z = tl.where((c < clusters)[None, :], tl.where(z == z, z, LOWEST), NOTHING)
        scores = tl.where(part == chunk // CK, z[None, :, :], scores)
    left = tl.reshape(tl.permute(scores, (1, 0, 2)), (N, KP))
    near += (pid * tiles + tile) * T
    for i in range(T - PREFIX):
        best, highest = tl.argmax(left, 1), tl.max(left, 1)
        tl.store(near + i, tl.where(highest == NOTHING, -1, best), mask=tile < tiles)
        left = tl.where(tl.arange(0, KP)[None, :] == best[:, None], NOTHING, left)
    if PREFIX:
        tl.store(near + T - 1, tl.full((N,), KP, tl.int32), mask=tile < tiles)


@kernel
def choose(
    q, logs, vectors, factors, scores, near, responding, q_b, q_h, q_t,
    length_q, heads, tiles, clusters, per, T, R, scale,
    CLOSURE: tl.constexpr, BY_ERROR: tl.constexpr, NEAR: tl.constexpr, GIVEN: tl.constexpr, LISTED: tl.constexpr,
    GROUP: tl.constexpr, PREFIX: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
    SQUARE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). Near clusters of each tile, and those that respond, where clusters make several chunks.

    Near are the T with the largest sum over rows of probability (or of that times x); of the others those R respond
    whose sum of probability times f is largest. Sums pass through `scores` (B H, tiles, 2, KP). GIVEN: the near
    clusters are known.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    row, d = first_row(index, tiles, M, GROUP) + tl.arange(0, M), tl.arange(0, BD)
    q = query_head(q, pid, heads, index, tiles, q_b, q_h, q_t, GROUP, UNIT)
    logs += (pid // per) * KP
    vectors += pid.to(tl.int64) * (KP * (2 * BD + BE))
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
    squares = squared(rows, SQUARE)
    scores += slot * (2 * KP)
    top, total = tl.full((M,), NOTHING, tl.float32), tl.zeros((M,), tl.float32)
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        size = tl.load(logs + c)
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
        high, low = key_means(factors, c, d, BD, BE)
        z, _, grow, _ = masses(rows, squares, var, high, low, size, CLOSURE, PRECISION)
        higher = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp2(top - finite(higher)) + tl.sum(tl.exp2(z - finite(higher)[:, None]) * grow, 1)
        top = higher
    over = tl.where(row < length_q, 1.0 / total, 0.0)  # rows beyond the last query choose nothing
    for chunk in range(0, KP, CK):
        c = chunk + tl.arange(0, CK)
        size = tl.load(logs + c)
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
        high, low = key_means(factors, c, d, BD, BE)
        z, x, grow, lift = masses(rows, squares, var, high, low, size, CLOSURE, PRECISION)
        share = tl.exp2(z - finite(top)[:, None]) * over[:, None]
        here = c < clusters
        if NEAR and not GIVEN:
            tl.store(scores + c, counted(tl.sum(share * (grow * x if BY_ERROR else grow), 0), here))
        if LISTED:
            tl.store(scores + KP + c, counted(tl.sum(share * lift, 0), here))
    tl.debug_barrier()
    c = tl.arange(0, KP)
    at_once: tl.constexpr = min(CK, 16384 // KP)  # comparisons that fit the registers
    if NEAR:
        near += slot * T
        if not GIVEN:
            rank = ranks_in_memory(scores, c, KP, at_once)
            tl.store(near + rank, c, mask=rank < T - PREFIX)
            tl.debug_barrier()
        if PREFIX:
            tl.store(near + T - 1, KP)
    if LISTED:
        if NEAR:
            for i in range(T - PREFIX):
                tl.store(scores + KP + tl.maximum(tl.load(near + i), 0), -1.0, mask=tl.load(near + i) >= 0)
            tl.debug_barrier()
        rank = ranks_in_memory(scores + KP, c, KP, at_once)
        tl.store(responding + slot * R + rank, c, mask=rank < R)


@triton.jit
def cut(x, M: tl.constexpr, HALF: tl.constexpr):
    """Columns of x (M, 2 HALF) in two halves."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, HALF)), (0, 2, 1)))


@triton.jit
def common_answer(rows, S, size, PRECISION: tl.constexpr):
    """q S with the one S of all clusters, rounded and, `size` further on, what that lost."""
    answer = dot(rows, tl.load(S), None, PRECISION)
    if rows.dtype != tl.float32:
        answer = dot(rows, tl.load(S + size), answer, PRECISION)
    return answer


@kernel
def attend(
    q, k, v, o, rounding, lse, bounds, order, logs, vectors, factors, matrices, near, responding, gains, tops,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    length_q, length_k, heads, tiles, clusters, per, blocks, all_blocks, T, R, scale,
    CLOSURE: tl.constexpr, CHOOSE: tl.constexpr, BY_ERROR: tl.constexpr, KEEP: tl.constexpr, NEAR: tl.constexpr,
    GROUP: tl.constexpr, PREFIX: tl.constexpr, ORDERED: tl.constexpr, WHOLE: tl.constexpr,
    RESPONSE: tl.constexpr, EVEN: tl.constexpr, LOOSE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CK: tl.constexpr, KP: tl.constexpr,
    SQUARE: tl.constexpr, CHUNK_STAGES: tl.constexpr, STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr,
    WIDE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). Output of M queries, and their log2 of the sum of all weights.

    CHOOSE: near and responding clusters are found here, by the rule of `choose`, and written; else they are read.

    RESPONSE: 0 means only, 1 all clusters respond, 2 those listed, 3 all with one matrix, that of `pool`. Gains p f
    of a tile go through memory, (KP, M), so that a row of them can be loaded beside each matrix; `tops` holds what each
    chunk's are relative to. With one matrix only their sum is needed. KEEP: what the rounding of the output loses is
    written too. WIDE: near tokens are met in 64 and so many columns, which hold a head of width D as one power of two
    would hold up to 128; 0: in BD. LOOSE: near tokens are a `near_row`.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    line = tl.arange(0, M)
    row, d, e = first_row(index, tiles, M, GROUP) + line, tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = q.dtype.element_ty
    q = query_head(q, pid, heads, index, tiles, q_b, q_h, q_t, GROUP, UNIT)
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    logs += (pid // per) * KP
    k_t, v_t = k_t * UNIT, v_t * UNIT
    vectors += pid.to(tl.int64) * (KP * (2 * BD + BE))
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    matrices += pid.to(tl.int64) * ((2 if RESPONSE == 3 else KP) * BD * BE)
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    near += slot * T
    gains += slot * (KP * M)
    tops += slot * ((KP // CK) * M)
    rows = block_tile(q, row, q_t * UNIT, d, length_q, D, BD, WHOLE)

    top, total = tl.full((M,), NOTHING, tl.float32), tl.zeros((M,), tl.float32)
    out = tl.zeros((M, BE), tl.float32)
    answering = tl.zeros((M,), tl.float32)
    squares = squared(rows, SQUARE)
    TANH: tl.constexpr = CLOSURE == 1 and dtype != tl.float32 and not CHOOSE
    for chunk in tl.range(0, KP, CK, num_stages=CHUNK_STAGES):
        c = chunk + tl.arange(0, CK)
        size = far_logs_of(logs, near, chunk, CK, 0 if CHOOSE else NEAR)
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE)
        high, low = key_means(factors, c, d, BD, BE)
        if TANH:
            z, x, e_s, over = tanh_masses(rows, squares, var, high, low, size, PRECISION)
        else:
            z, x, grow, lift = masses(rows, squares, var, high, low, size, CLOSURE, PRECISION)
        if CHOOSE:  # what is held while clusters are compared: z with all of phi, and f
            z, lift = z + (log2_above_1(2.0 * grow) - 1.0), lift * reciprocal(grow)
            share = tl.exp2(z - tl.max(z, 1)[:, None])
            share *= tl.where(row < length_q, 1.0 / tl.sum(share, 1), 0.0)[:, None]
            far = c < clusters
            if RESPONSE == 2:  # before anything else, so that shares and gains need not be kept
                answers = tl.sum(share * lift, 0)
            if NEAR:
                rank = ranks(counted(tl.sum(share * x if BY_ERROR else share, 0), far), c)
                tl.store(near + rank, c, mask=rank < T - PREFIX)
                if PREFIX:
                    tl.store(near + T - 1, KP)
                far = far & (rank >= T - PREFIX)
                z = tl.where(far[None, :], z, NOTHING)
            if RESPONSE == 2:
                rank = ranks(counted(answers, far), c)
                tl.store(responding + slot * R + rank, c, mask=rank < R)
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.exp2(z - finite(higher)[:, None])
        fading = tl.exp2(top - finite(higher))
        top = higher
        if TANH:
            lifted, p = (p - p * e_s) * over, p + p * e_s
        else:
            lifted = p * lift
            if not CHOOSE:
                p *= grow
        if RESPONSE == 3:
            answering = answering * fading + tl.sum(lifted, 1)
        elif RESPONSE:
            tl.store(gains + c[None, :] * M + line[:, None], packed(lifted, gains.dtype.element_ty))
            if KP > CK:
                tl.store(tops + (chunk // CK) * M + line, finite(top))
        total = total * fading + tl.sum(p, 1)
        high, low = value_means(factors, c, e, BD, BE)
        out = with_means(out, fading, p, high, low, KEEP, PRECISION)
        if WIDE:
            out = finished(out)
    if TANH:  # sums are twice as large as they are in units of 2^top
        top -= 1.0
    cell = d[:, None] * BE + e[None, :]
    if RESPONSE == 1 or RESPONSE == 2:
        tl.debug_barrier()
        count = clusters
        if RESPONSE == 2:
            responding += slot * R
            count = R
        for i in tl.range(0, count, num_stages=STAGES):
            c = i
            if RESPONSE == 2:
                c = tl.load(responding + i)
            S = tl.load(matrices + c * (BD * BE) + cell)
            g = tl.load(gains + c * M + line).to(tl.float32)
            if KP > CK:
                g *= tl.exp2(tl.load(tops + (c // CK) * M + line) - (finite(top) + (1.0 if TANH else 0.0)))
            out += g[:, None] * dot(rows, S, None, PRECISION)
    if NEAR:
        if CHOOSE:
            tl.debug_barrier()
        a = scale * LOG2E
        away = a * tl.sum(widened(rows) * origin_of(factors, d, BD)[None, :], 1)
        listed, near_blocks = near_list(near, NEAR), all_blocks
        if LOOSE:
            near_tokens, begins, shifts = near_row(near, bounds, NEAR, KP)
            near_blocks = tl.cdiv(near_tokens, N)
        if WIDE:
            x, y = tl.arange(0, 64), tl.arange(0, WIDE)
            rows_x = block_tile(q, row, q_t * UNIT, x, length_q, 64, 64, WHOLE)
            rows_y = block_tile(q + 64, row, q_t * UNIT, y, length_q, D - 64, WIDE, WHOLE)
            out, out_y = cut(out, M, 64)
            out_y, _ = cut(out_y, M, 32)
            if WIDE == 16:
                out_y, _ = cut(out_y, M, 16)
        for i in tl.range(0, near_blocks, num_stages=NEAR_STAGES):
            if LOOSE:
                token = i * N + tl.arange(0, N)
                there, token = token < near_tokens, token_in_row(token, begins, shifts, NEAR)
            else:
                first, end = near_block(near, listed, bounds, i, blocks, T, NEAR, KP, N, EVEN)
                token = first + tl.arange(0, N)
                there = token < end
            if EVEN and not ORDERED and D == BD and E == BE:
                keys, values = rows_from(k, first, k_t, d, N), rows_from(v, first, v_t, e, N)
            else:
                place = placed(order, token, there, ORDERED, EVEN)
                if WIDE and EVEN and not ORDERED and D == 64 + WIDE:
                    keys, keys_y = rows_from(k, first, k_t, x, N), rows_from(k + 64, first, k_t, y, N)
                    values, values_y = rows_from(v, first, v_t, x, N), rows_from(v + 64, first, v_t, y, N)
                elif WIDE:
                    keys = picked_tile(k, place, there, k_t, x, 64, 64, EVEN)
                    keys_y = picked_tile(k + 64, place, there, k_t, y, D - 64, WIDE, EVEN)
                    values = picked_tile(v, place, there, v_t, x, 64, 64, EVEN)
                    values_y = picked_tile(v + 64, place, there, v_t, y, D - 64, WIDE, EVEN)
                else:
                    keys = picked_tile(k, place, there, k_t, d, D, BD, EVEN)
                    values = picked_tile(v, place, there, v_t, e, E, BE, EVEN)
            if WIDE:
                u = dot(rows_x, tl.trans(keys), None, PRECISION)
                u = finished(dot(rows_y, tl.trans(keys_y), u, PRECISION))
            else:
                u = finished(dot(rows, tl.trans(keys), None, PRECISION))
            if not EVEN:
                u = tl.where(there[None, :], u, NOTHING)
            higher = tl.maximum(top, tl.max(u, 1) * a - away)  # a > 0
            p = tl.exp2(u * a - (finite(higher) + away)[:, None])
            fading = tl.exp2(top - finite(higher))
            # The weights that values get and their sum are rounded alike: the rest would move values far from 0.
            rounded = packed(p, dtype)
            total = total * fading + tl.sum(widened(rounded), 1)
            if RESPONSE == 3:
                answering *= fading
            out = dot(rounded, values, out * fading[:, None], PRECISION)
            if WIDE:
                out_y = dot(rounded, values_y, out_y * fading[:, None], PRECISION)
            out = finished(out)
            if WIDE:
                out_y = finished(out_y)
            top = higher
    if WIDE:
        if RESPONSE == 3:
            answer, answer_y = cut(common_answer(rows, matrices + cell, BD * BE, PRECISION), M, 64)
            answer_y, _ = cut(answer_y, M, 32)
            if WIDE == 16:
                answer_y, _ = cut(answer_y, M, 16)
            out += answering[:, None] * answer
            out_y += answering[:, None] * answer_y
        write_rows(
            o + 64, rounding + 64, lse, out_y, top, total, row, length_q, pid, heads, index, tiles, o_b, o_h, o_t,
            KEEP, GROUP, E - 64, WIDE, UNIT,
        )  # fmt: skip
    elif RESPONSE == 3:
        out += answering[:, None] * common_answer(rows, matrices + cell, BD * BE, PRECISION)
    write_rows(
        o, rounding, lse, out, top, total, row, length_q, pid, heads, index, tiles, o_b, o_h, o_t,
        KEEP, GROUP, 64 if WIDE else E, 64 if WIDE else BE, UNIT,
    )  # fmt: skip
