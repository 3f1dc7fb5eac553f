"""Kernels that halve every node of one level of a tree. What they compute is said in cluster/tree.py.

Shape legend: N heads of all sequences, L tokens (P padded), S columns of x (BS padded), m tokens of a node, R of them
that say in which direction it is cut.

A node is a run of m numbers of tokens, in ascending order. `cut` finds its direction and the place of each of its
tokens along it as a whole number, `key`, in the order of the places; tokens that take no part have the largest. The
lower half is the m / 2 tokens of least key, of equal ones those that come first: exact, the same in every run, and
without a sort. Both halves stay in ascending order, so that padding, whose numbers are the largest, ends up last.

The key t of which m / 2 are at most that is found by bisection where one program holds the node. Nodes of more tokens
have a program for each `span`: `cut` counts the 2,048 values of the upper 11 bits of all keys, `count` those of the
next 11 and of the last 10 among keys that agree with t so far, `tally` knows t and how many keys of each program of
`part` are below it. Counts are whole numbers: their sum does not depend on who comes first.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..tokens import kernel, tile_mask

GOLDEN = tl.constexpr(2654435769)  # 2^32 times the golden ratio less 1
LARGEST = tl.constexpr(0x7FFFFFFF)
BINS = tl.constexpr(2048)


@triton.jit
def numbered(order, at, valid, FIRST: tl.constexpr):
    """Tokens at places `at` of a node; before the first cut they are in their own order."""
    if FIRST:
        return at
    else:
        return tl.load(order + at, mask=valid, other=0)


@triton.jit
def taking(absent, token, valid, length, MASKED: tl.constexpr):
    """Which of these tokens take part: not padding, nor absent."""
    there = valid & (token < length)
    if MASKED:
        there = there & (tl.load(absent + token, mask=there, other=1) == 0)
    return there


@triton.jit
def seen(x, token, there, S: tl.constexpr, BS: tl.constexpr):
    """Rows of x (L, S) in float32, 0 where there are none and for what is no number."""
    s = tl.arange(0, BS)
    mask = tile_mask(there, s, S, S == BS)
    rows = tl.load(x + token[:, None] * S + s[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(tl.abs(rows) < float("inf"), rows, 0.0)


@triton.jit
def unit(x):
    x = x / tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1e-30)


@triton.jit
def direction(
    x, absent, order, size, length, FIRST: tl.constexpr, MASKED: tl.constexpr, ITERATIONS: tl.constexpr,
    S: tl.constexpr, BS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Mean and first principal direction, (BS,), of up to R tokens of a node, at places that follow the golden ratio.

    From the token farthest from the mean, by power iteration.
    """
    i = tl.arange(0, R)
    spread = (((i.to(tl.int64) * GOLDEN) & 0xFFFFFFFF) * size) >> 32
    at = tl.where(size > R, spread.to(tl.int32), i)
    token = numbered(order, at, i < size, FIRST)
    there = taking(absent, token, i < size, length, MASKED)
    some = seen(x, token, there, S, BS)
    mean = tl.sum(some, 0) / tl.maximum(tl.sum(there.to(tl.float32), 0), 1.0)
    some = tl.where(there[:, None], some - mean[None, :], 0.0)
    far = tl.argmax(tl.sum(some * some, 1), 0)
    along = unit(tl.sum(tl.where((i == far)[:, None], some, 0.0), 0))
    for _ in range(ITERATIONS):
        along = unit(tl.sum(some * tl.sum(some * along[None, :], 1)[:, None], 0))
    return mean, along


@triton.jit
def upper(key):
    """The bin of a key's upper 11 bits."""
    return (key >> 21) + 1024


@kernel
def clear(counts, size, N: tl.constexpr):
    """Grid (blocks of N). Sets `size` numbers to 0."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(counts + at, tl.zeros((N,), tl.int32), mask=at < size)


@kernel
def cut(
    x, absent, order, keys, counts, found, length_k, clusters, size, span, splits, FIRST: tl.constexpr,
    HALVED: tl.constexpr, COUNTED: tl.constexpr, MASKED: tl.constexpr, ITERATIONS: tl.constexpr, S: tl.constexpr,
    BS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Grid (nodes of all heads x splits,). Keys (N, P) of `span` tokens of a node, N at a time.

    COUNTED: and how many of them are in each upper bin, counts (nodes of all heads, 3, BINS). HALVED: one program has
    the whole node, of up to M tokens, and writes the order of its halves, found (N, P). clusters: nodes of a head.
    """
    node, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    x += node // clusters * length_k * S
    absent += node // clusters * length_k
    order += node * size
    keys += node * size
    mean, along = direction(x, absent, order, size, length_k, FIRST, MASKED, ITERATIONS, S, BS, R)
    end = tl.minimum(split * span + span, size)
    for first in range(split * span, end, N):
        at = first + tl.arange(0, N)
        token = numbered(order, at, at < end, FIRST)
        there = taking(absent, token, at < end, length_k, MASKED)
        rows = seen(x, token, there, S, BS)
        bits = tl.sum((rows - mean[None, :]) * along[None, :], 1).to(tl.int32, bitcast=True)
        key = tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), LARGEST)
        tl.store(keys + at, key, mask=at < end)
        if COUNTED:
            tl.atomic_add(counts + node * (3 * BINS) + upper(key), 1, mask=at < end, sem="relaxed")
    if HALVED:
        tl.debug_barrier()  # keys were written by other threads than those that read them
        bisected(keys, order, found + node * size, size, FIRST, M)


@kernel
def halve(keys, order, found, size, FIRST: tl.constexpr, M: tl.constexpr):
    """Grid (nodes of all heads,). The order of the halves of a node of up to M tokens, found (N, P)."""
    node = tl.program_id(0).to(tl.int64)
    bisected(keys + node * size, order + node * size, found + node * size, size, FIRST, M)


@triton.jit
def bisected(keys, order, found, size, FIRST: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, M)
    key = tl.load(keys + at, mask=at < size, other=LARGEST)
    half = size // 2
    low, high = tl.min(key, 0), tl.max(key, 0)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down, and below LARGEST: what is no token is not counted
        number = tl.sum((key <= middle).to(tl.int32), 0)
        low = tl.where(number < half, middle + 1, tl.where(number == half, middle, low))
        high = tl.where(number < half, high, middle)
    less = tl.sum((key < low).to(tl.int32), 0)
    halved(key, numbered(order, at, at < size, FIRST), at, at < size, found, low, half, half - less, 0, 0)


@triton.jit
def halved(key, token, at, valid, found, middle, half, equal, less_before, equal_before):
    """Writes tokens at places `at` of a node into its halves: those of keys below `middle` into the lower one, and the
    first `equal` of those that equal it. So many of both kinds stand before them."""
    same = ((key == middle) & valid).to(tl.int32)
    lower = (key < middle) | ((same > 0) & (equal_before + tl.cumsum(same, 0) <= equal))
    lower = (lower & valid).to(tl.int32)
    before = less_before + tl.minimum(equal_before, equal) + tl.cumsum(lower, 0) - lower
    tl.store(found + tl.where(lower > 0, before, half + at - before), token, mask=valid)


@triton.jit
def bin_of(counts, rank):
    """The bin of the key that has `rank` (from 1 on) among those counted, and its rank in the bin."""
    bins = tl.arange(0, BINS)
    number = tl.load(counts + bins)
    found = tl.sum((tl.cumsum(number, 0) < rank).to(tl.int32), 0)
    return found, rank - tl.sum(tl.where(bins < found, number, 0), 0)


@kernel
def count(keys, counts, size, span, splits, LAST: tl.constexpr, N: tl.constexpr):
    """Grid (nodes of all heads x splits,). Of `span` keys that agree with that in the middle so far, how many have each
    of the next 11 bits, LAST: of the last 10."""
    node, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    keys += node * size
    counts += node * (3 * BINS)
    found, rank = bin_of(counts, size // 2)
    found -= 1024
    if LAST:
        further, rank = bin_of(counts + BINS, rank)
        found = (found << 11) | further
    end = tl.minimum(split * span + span, size)
    for first in range(split * span, end, N):
        at = first + tl.arange(0, N)
        key = tl.load(keys + at, mask=at < end, other=0)
        if LAST:
            tl.atomic_add(counts + 2 * BINS + (key & 1023), 1, mask=(at < end) & (key >> 10 == found), sem="relaxed")
        else:
            bins = counts + BINS + ((key >> 10) & 2047)
            tl.atomic_add(bins, 1, mask=(at < end) & (key >> 21 == found), sem="relaxed")


@kernel
def tally(keys, counts, tallies, size, splits, N: tl.constexpr):
    """Grid (nodes of all heads x splits,). Of N keys of a node, how many are below t, and 2^16 times how many equal it;
    tallies (nodes of all heads, splits + 2) end with t and its rank (from 1 on) among those that equal it."""
    node, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    counts += node * (3 * BINS)
    top, rank = bin_of(counts, size // 2)
    next, rank = bin_of(counts + BINS, rank)
    last, rank = bin_of(counts + 2 * BINS, rank)
    middle = ((top - 1024) << 21) | (next << 10) | last
    at = split * N + tl.arange(0, N)
    key = tl.load(keys + node * size + at, mask=at < size, other=LARGEST)
    same = ((key == middle) & (at < size)).to(tl.int32)
    tallies += node * (splits + 2)
    tl.store(tallies + split, tl.sum((key < middle).to(tl.int32) + (same << 16), 0))
    tl.store(tallies + splits, middle, mask=split == 0)
    tl.store(tallies + splits + 1, rank, mask=split == 0)


@kernel
def part(keys, tallies, order, found, size, splits, FIRST: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr):
    """Grid (nodes of all heads x splits,). N tokens of a node into its halves, found (N, P); SPLITS >= splits."""
    node, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    tallies += node * (splits + 2)
    other = tl.arange(0, SPLITS)
    before = tl.load(tallies + other, mask=other < split, other=0)
    middle, rank = tl.load(tallies + splits), tl.load(tallies + splits + 1)
    at = split * N + tl.arange(0, N)
    key = tl.load(keys + node * size + at, mask=at < size, other=LARGEST)
    token = numbered(order + node * size, at, at < size, FIRST)
    halved(
        key, token, at, at < size, found + node * size, middle, size // 2, rank, tl.sum(before & 0xFFFF, 0),
        tl.sum(before >> 16, 0),
    )  # fmt: skip
