"""Forward kernel of causal cluster attention. Formulas, state of a cluster and shape legend: cluster/parts.py.

Cluster c is seen by the rows from spans[c] to spans[KP + c], places among the keys; a tile of M rows has a list of
those that any of its rows sees. Row i sees token by token the block of `size` tokens that it stands in, up to itself,
and `recent` blocks before that. Cost a row: A (3 D + E + D E) and (recent + 1/2) size (D + E), with A listed clusters.

Sinks (PREFIX), the first tokens that take part, are in no cluster and in no window: column KP of the bounds holds them,
and every row from their place on sees them, in the loop over the window before its first block.

What a row may not see must not reach it, even if it is not a number: such clusters and tokens are left out by `where`,
and values that are not numbers are 0 with a logit that is none.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..cluster.parts import (
    LOG2E,
    NOTHING,
    finished,
    finite,
    first_row,
    key_means,
    masses,
    origin_of,
    packed,
    picked_tile,
    placed,
    query_head,
    squared,
    tile,
    value_means,
    variances,
)
from ..cluster.rows import with_means, write_rows
from ..products import dot
from ..tokens import ahead, head, kernel
from .near import apart, numbered, with_answers
from .pooled import through_pools


@triton.jit
def list_of(lists, index, tiles, listed, GROUP: tl.constexpr):
    """The list of a tile, and how many places of it are used; lists of `listed` places, after that number."""
    own = lists + (index % tiles if GROUP > 1 else index).to(tl.int64) * (listed + 1)
    return own + 1, tl.load(own)


@triton.jit
def list_within(lists, index, tiles, listed, begin, size, recent, GROUP: tl.constexpr, WITHIN: tl.constexpr):
    """The same; WITHIN: the list of rows from the place `begin` on, all of one block, is not read. It has the clusters
    before that block and `recent` others, from the first on."""
    if WITHIN:
        return lists, tl.maximum(begin // size - recent, 0)
    else:
        return list_of(lists, index, tiles, listed, GROUP)


@triton.jit
def seen_clusters(names, logs, spans, at, count, place, KP: tl.constexpr, WITHIN: tl.constexpr):
    """Clusters at places `at` of a list, log2 of their sizes, and which rows at `place` see which: (CK,), (M, CK).
    WITHIN: all rows see the first `count` of them, and those beyond have no size."""
    if WITHIN:
        there = at < count
        return at, tl.load(logs + at, mask=there, other=NOTHING), there[None, :]
    else:
        c = tl.load(names + at)
        own = tl.maximum(c, 0)
        since, until = tl.load(spans + own), tl.load(spans + KP + own)
        seen = (place[:, None] >= since[None, :]) & (place[:, None] < tl.where(c < 0, 0, until)[None, :])
        return own, tl.load(logs + own), seen


@triton.jit
def of_those(z, seen, c, named, there, NEAR: tl.constexpr, WITHIN: tl.constexpr):
    """z (M, CK), -inf for clusters c that a row does not see from afar; WITHIN: those that are not there have it."""
    if NEAR:
        seen = apart(seen, c, named, there, NEAR)
    if NEAR or not WITHIN:
        z = tl.where(seen, z, NOTHING)
    return z


@triton.jit
def window(
    bounds, start, end, length_k, size, recent, offset, KP: tl.constexpr, N: tl.constexpr, ORDERED: tl.constexpr,
    PREFIX: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """First token and end of those that the rows from `start` to `end` see one by one, in the order of the tokens; and
    where a loop over blocks of N of them begins: at the first, or so many blocks before it as sinks take. PLAIN: the
    rows are of one block, and tokens lie where they stand; then nothing is read."""
    low = tl.maximum((offset + start) // size - recent, 0)
    if PLAIN:
        first = low * size
        begin, stop = first, tl.minimum(offset + end, length_k)
    else:
        first = tl.load(bounds + low, mask=low * size < length_k, other=0)
        last = (tl.minimum(offset + end, length_k) - 1) // size
        stop = tl.load(bounds + (KP + 1) + last)
        if not ORDERED:
            stop = tl.minimum(stop, offset + end)
        stop = tl.where(low * size < length_k, stop, 0)
        begin = first
        if PREFIX:
            begin -= tl.cdiv(tl.load(bounds + (2 * KP + 1)), N) * N
            stop = tl.maximum(stop, first)  # sinks are met where the window is empty, too
    return begin, first, stop


@triton.jit
def window_block(
    bounds, at, begin, first, stop, place, size, recent, KP: tl.constexpr, N: tl.constexpr, PREFIX: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Of the block `at` of a `window`: its tokens (N,), which of them are there, and the place of the first token that
    rows at `place` see (PLAIN: not asked for)."""
    token, end, since = at + tl.arange(0, N), stop, place
    if not PLAIN:
        since = (place // size - recent) * size
    if PREFIX:
        sink = at < first
        token = tl.where(sink, token - begin, token)
        end, since = tl.where(sink, tl.load(bounds + (2 * KP + 1)), end), tl.where(sink, 0, since)
    return token, token < end, since


@triton.jit
def sees(place, token, since):
    """Whether rows at places (n, 1) see tokens at places (1, N) one by one, from those at `since` (n, 1) on."""
    return (token <= place) & (token >= since)


@triton.jit
def seen_tokens(z, place, at, there, since, length_k, PLAIN: tl.constexpr):
    """Scores z (M, N), -inf for tokens that rows at `place` do not see one by one. PLAIN: a `window` begins with the
    first that its rows see, so that they are those up to the row, of all that there are."""
    if PLAIN:
        return tl.where(at[None, :] <= tl.minimum(place, length_k - 1)[:, None], z, NOTHING)
    else:
        return tl.where(sees(place[:, None], at[None, :], since[:, None]) & there[None, :], z, NOTHING)


@triton.jit
def sound(values):
    """Values (N, width), 0 in place of what is not a number; and for each token 0, or not a number if it has such."""
    flaw = tl.sum(values.to(tl.float32) * 0.0, 1)
    return tl.where((flaw == 0.0)[:, None], values, tl.zeros_like(values)), flaw


@triton.jit
def calm(
    vectors, bounds, start, end, length_k, size, recent, offset, BD: tl.constexpr, BE: tl.constexpr, KP: tl.constexpr,
    ORDERED: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Whether all values in the window of rows `start` to `end` are numbers, or reach all of these rows: by the means
    of the keys of its blocks, which know of both. Not looked at, and then no, where blocks are short, or some of the
    rows stand before sinks."""
    low = tl.maximum((offset + start) // size - recent, 0)
    last = (tl.minimum(offset + end, length_k) - 1) // size
    flaw = tl.zeros((BD,), tl.float32)
    for block in range(low, tl.where(size >= 32, last + 1, low)):
        flaw += tl.load(vectors + block * (2 * BD + BE) + tl.arange(0, BD)) * 0.0
    fine = (tl.sum(flaw) == 0.0) & (size >= 32)
    if PREFIX:
        fine = fine & (offset + start >= tl.load(bounds + (2 * KP + 1)))
        if ORDERED:
            fine = fine & (start < 0)
    return fine


@triton.jit
def with_window(
    rows, k, v, bounds, order, met, place, away, a, top, total, out, length_k, size, recent, k_t, v_t,
    SOUND: tl.constexpr, ORDERED: tl.constexpr, PREFIX: tl.constexpr, PLAIN: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, KP: tl.constexpr, NEAR_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of a tile with those of its `window` in them. SOUND: some values may be no numbers; to look at each costs a
    way through registers."""
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    begin, first, stop = met
    for block in tl.range(begin, stop, N, num_stages=NEAR_STAGES):
        token, there, since = window_block(bounds, block, begin, first, stop, place, size, recent, KP, N, PREFIX, PLAIN)
        at = placed(order, token, there, ORDERED, False)
        keys = picked_tile(k, at, there, k_t, d, D, BD, False)
        values = picked_tile(v, at, there, v_t, e, E, BE, False)
        u = finished(dot(rows, tl.trans(keys), None, PRECISION))
        if SOUND:
            values, flaw = sound(values)
            u += flaw[None, :]
        u = seen_tokens(u, place, at, there, since, length_k, PLAIN)
        higher = tl.maximum(top, tl.max(u, 1) * a - away)  # a > 0
        p = tl.exp2(u * a - (finite(higher) + away)[:, None])
        fading = tl.exp2(top - finite(higher))
        rounded = packed(
            p, rows.dtype
        )  # what values get and its sum are rounded alike, or values far from 0 would move
        total = total * fading + tl.sum(rounded.to(tl.float32), 1)
        out = finished(dot(rounded, values, out * fading[:, None], PRECISION))
        top = higher
    return top, total, out


@kernel
def attend(
    q, k, v, o, rounding, lse, bounds, order, logs, spans, lists, vectors, factors, matrices, gains, tops, named,
    answers, levels, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    length_q, length_k, heads, tiles, per, listed, size, recent, offset, scale,
    CLOSURE: tl.constexpr, NEAR: tl.constexpr, KEEP: tl.constexpr, NOTED: tl.constexpr, GROUP: tl.constexpr,
    ORDERED: tl.constexpr, PREFIX: tl.constexpr, RESPONSE: tl.constexpr, WITHIN: tl.constexpr, AHEAD: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CK: tl.constexpr, KP: tl.constexpr,
    SQUARE: tl.constexpr, STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, B H). Output of M rows, and their log2 of the sum of all weights.

    RESPONSE: 1, clusters answer with their covariance, 3, with one for all (pooled.py), 0, with their mean. Gains p f
    of a tile go through memory, (listed, M), unless they are but summed; `tops` holds what each chunk's are relative
    to. KEEP: what the rounding of the output loses is written; NOTED: the sum of p f, (B H, tiles, M), too. NEAR: so
    many clusters that each row `named` are met token by token; what they answered is read (near.py). WITHIN: each tile
    lies in one block; AHEAD: what its `window` reads is asked for at the start.
    """
    index, pid = tl.program_id(0), tl.program_id(1)
    line, start = tl.arange(0, M), first_row(index, tiles, M, GROUP)
    row, d, e = start + line, tl.arange(0, BD), tl.arange(0, BE)
    place = offset + row
    q = query_head(q, pid, heads, index, tiles, q_b, q_h, q_t, GROUP, UNIT)
    k = head(k, pid // heads, pid % heads, 0, k_b, k_h, k_t, UNIT)
    v = head(v, pid // heads, pid % heads, 0, v_b, v_h, v_t, UNIT)
    bounds += (pid // per) * (2 * KP + 2)
    order += (pid // per).to(tl.int64) * length_k
    logs += (pid // per) * KP
    k_t, v_t = k_t * UNIT, v_t * UNIT
    vectors += pid.to(tl.int64) * (KP * (2 * BD + BE))
    factors += pid.to(tl.int64) * (KP * (4 * BD + 2 * BE))
    matrices += pid.to(tl.int64) * ((2 * KP if RESPONSE == 3 else KP) * BD * BE)
    slot = pid.to(tl.int64) * tl.num_programs(0) + index
    gains += slot * ((1 if RESPONSE == 3 else listed) * M)
    tops += slot * ((listed // CK) * M)
    end = tl.minimum(start + M, length_q)
    PLAIN: tl.constexpr = WITHIN and not ORDERED and not PREFIX
    if AHEAD and PLAIN:
        near = window(bounds, start, end, length_k, size, recent, offset, KP, N, ORDERED, PREFIX, PLAIN)
        ahead(k, k_t, near[0], near[2], 256)
        ahead(v, v_t, near[0], near[2], 256)
    names, count = list_within(lists, index, tiles, listed, offset + start, size, recent, GROUP, WITHIN)
    if AHEAD and PLAIN:
        ahead(matrices + tl.maximum(count - 1, 0) * (2 * BD * BE), 64, 0, 2 * BD * BE // 64, 256)
    rows = tile(q, row, q_t * UNIT, d, length_q, D, BD)
    if PLAIN:  # looked at here, while the rows come
        fine = calm(vectors, bounds, start, end, length_k, size, recent, offset, BD, BE, KP, ORDERED, PREFIX)
    if NEAR:
        own = pid.to(tl.int64) * (length_q * GROUP * NEAR)
        number = numbered(index, tiles, row, length_q, GROUP)
        named += own + number.to(tl.int64) * NEAR
        answers += own * BE
        levels += own

    top, total = tl.full((M,), NOTHING, tl.float32), tl.zeros((M,), tl.float32)
    out = tl.zeros((M, BE), tl.float32)
    squares, answering = squared(rows, SQUARE), tl.zeros((M,), tl.float32)
    for chunk in tl.range(0, count, CK, num_stages=STAGES if RESPONSE == 3 else 1):
        at = chunk + tl.arange(0, CK)
        c, tokens, seen = seen_clusters(names, logs, spans, at, count, place, KP, WITHIN)
        there = at < count if WITHIN else None
        var = variances(factors, vectors, c, d, scale, SQUARE, BD, BE, there)
        high, low = key_means(factors, c, d, BD, BE, there)
        z, _, grow, lift = masses(rows, squares, var, high, low, tokens, CLOSURE, PRECISION)
        z = of_those(z, seen, c, named, row < length_q, NEAR, WITHIN)
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.exp2(z - finite(higher)[:, None])
        fading = tl.exp2(top - finite(higher))
        top = higher
        if RESPONSE == 3:
            answering = answering * fading + tl.sum(p * lift, 1)
        elif RESPONSE:
            tl.store(gains + at[None, :] * M + line[:, None], packed(p * lift, gains.dtype.element_ty))
            tl.store(tops + (chunk // CK) * M + line, finite(top))
        p *= grow
        total = total * fading + tl.sum(p, 1)
        high, low = value_means(factors, c, e, BD, BE, there)
        out = with_means(out, fading, p, high, low, KEEP, PRECISION)
    far = top
    if RESPONSE == 3:
        last = offset + end - 1
        answer = through_pools(
            rows, matrices, place, offset + start, last, size, recent, BD, BE, False, WITHIN, PRECISION
        )
        out += answering[:, None] * answer
    elif RESPONSE:
        tl.debug_barrier()
        cell = d[:, None] * BE + e[None, :]
        for i in tl.range(0, count, num_stages=STAGES):
            c = tl.maximum(tl.load(names + i), 0)
            S = tl.load(matrices + c.to(tl.int64) * (BD * BE) + cell)
            g = tl.load(gains + i * M + line).to(tl.float32)
            g *= tl.exp2(tl.load(tops + (i // CK) * M + line) - finite(top))
            out += g[:, None] * dot(rows, S, None, PRECISION)
    a = scale * LOG2E
    away = a * tl.sum(rows.to(tl.float32) * origin_of(factors, d, BD)[None, :], 1)
    if not PLAIN:
        fine = calm(vectors, bounds, start, end, length_k, size, recent, offset, BD, BE, KP, ORDERED, PREFIX)
    met = window(bounds, start, end, length_k, size, recent, offset, KP, N, ORDERED, PREFIX, PLAIN)
    if fine:
        top, total, out = with_window(
            rows, k, v, bounds, order, met, place, away, a, top, total, out, length_k, size, recent, k_t, v_t,
            False, ORDERED, PREFIX, PLAIN, D, E, BD, BE, N, KP, NEAR_STAGES, PRECISION,
        )  # fmt: skip
    else:
        top, total, out = with_window(
            rows, k, v, bounds, order, met, place, away, a, top, total, out, length_k, size, recent, k_t, v_t,
            True, ORDERED, PREFIX, PLAIN, D, E, BD, BE, N, KP, NEAR_STAGES, PRECISION,
        )  # fmt: skip
    if NEAR:
        top, total, out = with_answers(answers, levels, named, number, row < length_q, top, total, out, NEAR, BE)
    if NOTED:
        share = answering * tl.exp2(far - finite(top)) * tl.where(total > 0.0, 1.0 / total, 0.0)
        tl.store(gains + line, share)
    write_rows(
        o, rounding, lse, out, top, total, row, length_q, pid, heads, index, tiles, o_b, o_h, o_t,
        KEEP, GROUP, E, BE, UNIT,
    )  # fmt: skip
