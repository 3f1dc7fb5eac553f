"""Parts of the causal Triton kernels: tiles of tokens about a reference point, and the sums they add to.

Shape legend: N tokens of a tile, D, E widths, BD, BE those padded to powers of two. Formulas: host.py.

A walk over tiles spends its instructions on products, not on reductions. Reference points are rounded to the tokens'
dtype, so one subtraction gives the operand k'; and the sums of k', v' and k'^2 are products with a matrix of 16
columns, kept in accumulators (width, 16) whose first four columns are equal ("quads"). Where such a sum enters a
product again, it does so as two operands, high and low half, that together have twice the digits of the dtype.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import INTERPRET, cast, dot
from ..tokens import first_present, tile_mask, weigh


@triton.jit
def rows_of(at, N: tl.constexpr):
    """0, 1, ..., N - 1, which the compiler does not know to be the same in each turn of a loop over `at`.

    It would compute the addresses of all tiles once, before the loop, for which there are no registers: they are
    spilled, and read back in each turn. Behind a move that it does not look into, each is computed where it is used.
    """
    if INTERPRET:
        return tl.arange(0, N)
    else:
        same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [at], dtype=tl.int32, is_pure=True, pack=1)
        return tl.arange(0, N) + (same - at)


@triton.jit
def load(x, x_t, at, valid, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    """Tokens at, at + 1, ... of one head as a tile (N, BLOCK); 0 where not valid."""
    tile = rows_of(at, N)[:, None] * x_t + columns[None, :]
    return tl.load(x + at * x_t.to(tl.int64) + tile, mask=tile_mask(valid, columns, WIDTH, WIDTH == BLOCK), other=0.0)


@triton.jit
def store(x, x_t, at, valid, columns, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    to = x + at * x_t.to(tl.int64) + (rows_of(at, N)[:, None] * x_t + columns[None, :])
    tl.store(to, cast(tile, x.dtype.element_ty), mask=tile_mask(valid, columns, WIDTH, WIDTH == BLOCK))


@triton.jit
def minus(x, point):
    """x (N, width) - point (width,) in their own dtype, rounded once."""
    if INTERPRET:
        return cast(x.to(tl.float32) - point.to(tl.float32)[None, :], x.dtype)
    return x - point[None, :]


@triton.jit
def settled(x):
    """x (n,), but as a maximum over two equal rows.

    The compiler repeats elementwise work on what comes straight from memory for every layout in which a product wants
    the result; behind a reduction it computes k' once and keeps it in shared memory.
    """
    return tl.max(tl.zeros((2, 1), x.dtype) + x.to(tl.float32)[None, :], 0).to(x.dtype)


@triton.jit
def times(x, factor):
    """x (N, width) times factor (N,), in the dtype of x and rounded once: the factor comes in two halves."""
    if INTERPRET or x.dtype == tl.float32:
        return cast(x.to(tl.float32) * factor[:, None], x.dtype)
    high = cast(factor, x.dtype)
    low = cast(factor - high.to(tl.float32), x.dtype)
    return tl.fma(x, high[:, None] + tl.zeros_like(x), x * low[:, None])


@triton.jit
def keep(x, mask, dtype: tl.constexpr):
    """Scores x (N, N) as an operand, 0 where the mask (`triangle`) is."""
    if INTERPRET:
        return cast(x * mask.to(tl.float32), dtype)
    return cast(x, dtype) * mask.to(dtype)


@triton.jit
def lost(x, mask, dtype: tl.constexpr):
    """What `keep` takes from the digits of scores x, as an operand."""
    return keep(x - cast(x, dtype).to(tl.float32), mask, dtype)


@triton.jit
def centred(u, seen, weights, over, gain):
    """gain (1 - ubar) (row,) of scores u (key, row) that carry `gain`, of rows that see no other keys; over: 1 / W.

    Of u as it is, however its operands were rounded: a row that sees one key then weighs it with 1.
    """
    return gain - tl.sum(u * seen.to(tl.float32) * weights[:, None], 0) * over


@triton.jit
def after_first_tile(w, w_t, start, end, length, dtype: tl.constexpr, WEIGHTED: tl.constexpr, N: tl.constexpr):
    """Where the tile ends before which nothing counts, of a part from `start` to `end`; `start` if it is not in it.

    Its rows average few tokens, which lie away from the point, and weigh most in all gradients: what 16 bits take from
    its scores is a second product there. float32 has no such tile.
    """
    if dtype == tl.float32:
        return start
    else:
        token = first_token(w, w_t, start * 0, length, WEIGHTED, N)
        return tl.where(token < start, start, tl.minimum(start + ((token - start) // N + 1) * N, end))


@triton.jit
def triangle(N: tl.constexpr, TURNED: tl.constexpr, dtype: tl.constexpr):
    """1 where token (row) i sees token (column) j, the other way round if TURNED, else 0.

    Operand and mask at once (`keep`): a product with it costs less than a choice by predicates.
    """
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return cast(tl.where(i <= j if TURNED else i >= j, 1.0, 0.0), dtype)


@triton.jit
def inverse(x):
    """1 / x, and 0 where x is 0."""
    return tl.where(x > 0, 1.0 / tl.where(x > 0, x, 1.0), 0.0)


@triton.jit
def read_keys(k, v, w, k_t, v_t, w_t, at, length, c, d, i, j, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
              D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """k', w k', v', w v' of the tokens at, at + 1, ..., their weights w and the sum of these.

    Unless MASKED, tokens from `length` on are not 0 but finite: for walks in which nothing that they reach is used.
    """
    where = at + tl.arange(0, N)
    if WEIGHTED:
        present, weights = weigh(w, w_t, where, length)
        total = tl.sum(weights)
    else:
        present = where < length
        weights = present.to(tl.float32)
        total = tl.minimum(tl.maximum(length - at, 0), N).to(tl.float32)
    x = minus(load(k, k_t, at, present, i, D, BD, N), c)
    y = minus(load(v, v_t, at, present, j, E, BE, N), d)
    if MASKED:
        x = tl.where(present[:, None], x, tl.zeros_like(x))
        y = tl.where(present[:, None], y, tl.zeros_like(y))
    xw, yw = x, y
    if WEIGHTED:
        xw, yw = square(x, weights[:, None], x.dtype), square(y, weights[:, None], y.dtype)
    return x, xw, y, yw, weights, total


@triton.jit
def square(x, y, dtype: tl.constexpr):
    """x y, computed in float32."""
    return cast(x.to(tl.float32) * y.to(tl.float32), dtype)


@triton.jit
def lost_square(x, y, dtype: tl.constexpr):
    """What `square` takes from the digits of x y, as an operand."""
    whole = x.to(tl.float32) * y.to(tl.float32)
    return cast(whole - cast(whole, dtype).to(tl.float32), dtype)


@triton.jit
def quad(x):
    """x (n,) in the first four of 16 columns."""
    return tl.where(tl.arange(0, 16)[None, :] < 4, x[:, None], 0.0)


@triton.jit
def four(x, dtype: tl.constexpr):
    """x (n,) in the first four of 16 columns, as an operand.

    Turned, so that shared memory holds rows of n like those of other operands: where two operands of different row
    lengths take the same place in turn, ptxas 12.8 loses the address of the second, and the product reads anywhere.
    """
    return tl.trans(cast(tl.where(tl.arange(0, 16)[:, None] < 4, x[None, :], 0.0), dtype))


@triton.jit
def unquad(x):
    return 0.25 * tl.sum(x, 1)


@triton.jit
def halves(x, dtype: tl.constexpr):
    """A quad (n, 16) as an operand whose columns are high, low, high, low half."""
    high = cast(x, dtype).to(tl.float32)
    return cast(tl.where(tl.arange(0, 16)[None, :] % 2 == 0, high, x - high), dtype)


@triton.jit
def row_sum(x, y, scores, weights, unit, PRECISION: tl.constexpr):
    """unit x.y + sum_j w_j scores_j for each row; x (N, n), y an operand of `halves`, weights in columns 0 and 2."""
    past = dot(x, y, None, PRECISION) * unit
    return 0.5 * tl.sum(dot(scores, weights.to(scores.dtype), past, PRECISION), 1)


@triton.jit
def two(x, dtype: tl.constexpr):
    """x (n,) in columns 0 and 2 of 16, as an operand, turned as that of `four`."""
    column = tl.arange(0, 16)[:, None]
    return tl.trans(cast(tl.where((column == 0) | (column == 2), x[None, :], 0.0), dtype))


@triton.jit
def each_row(x, N: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """A matrix (N, n) with x (n,) in each row, the start of a product; x with twice the digits of the dtype."""
    if dtype == tl.float32:
        return tl.zeros((N, 1), tl.float32) + x[None, :]
    column, high = tl.arange(0, 16)[:, None], cast(x, dtype).to(tl.float32)[None, :]
    both = tl.where(column == 0, high, tl.where(column == 1, x[None, :] - high, 0.0))
    rows = tl.zeros((N, 1), tl.float32) + tl.where(tl.arange(0, 16)[None, :] < 2, 1.0, 0.0)
    return dot(cast(rows, dtype), cast(both, dtype), None, PRECISION)


@triton.jit
def outer(x, y, acc, N: tl.constexpr, PRECISION: tl.constexpr):
    """acc (N, n) + x y^T for x (N,) and y an operand (n, 16) of `halves`: both with twice the digits of the dtype."""
    column = tl.arange(0, 16)[None, :]
    if y.dtype == tl.float32:
        return dot(tl.where(column == 0, x[:, None], 0.0), tl.trans(y), acc, PRECISION)
    high = cast(x, y.dtype).to(tl.float32)
    both = tl.where(column < 2, high[:, None], tl.where(column < 4, (x - high)[:, None], 0.0))
    return dot(cast(both, y.dtype), tl.trans(y), acc, PRECISION)


@triton.jit
def everywhere(y, acc, N: tl.constexpr, PRECISION: tl.constexpr):
    """acc (N, n) + y in each row, y an operand (n, 16) of `halves`."""
    if y.dtype == tl.float32:  # the first column is all of it
        row = tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, y, 0.0), 1)[None, :]
        return (tl.zeros((N, 1), tl.float32) + row) if acc is None else acc + row
    rows = tl.zeros((N, 1), tl.float32) + tl.where(tl.arange(0, 16)[None, :] < 2, 1.0, 0.0)
    return dot(cast(rows, y.dtype), tl.trans(y), acc, PRECISION)


@triton.jit
def add_tile(a, b, S, P, T, xw, xxw, y, weights, ORDER: tl.constexpr, WEIGHTED: tl.constexpr, N: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Sums of w k', w v', w k' v'^T, w k'^2, w k'^2 v'^T with those of a tile. P and T as they are at order 2."""
    b = dot(tl.trans(y), four(weights, y.dtype), b, PRECISION)  # 1 for tokens that count, 0 for others
    if WEIGHTED:
        weights = tl.zeros((N,), tl.float32) + 1.0
    a = dot(tl.trans(xw), four(weights, xw.dtype), a, PRECISION)
    S = dot(tl.trans(xw), y, S, PRECISION)
    if ORDER == 3:
        P = dot(tl.trans(xxw), four(weights, xxw.dtype), P, PRECISION)
        T = dot(tl.trans(xxw), cast(y, xxw.dtype), T, PRECISION)
    return a, b, S, P, T


@triton.jit
def moved(W, a, b, S, P, T, p, q, ORDER: tl.constexpr):
    """Sums about a point, a (D,), b (E,), P (D,), S, T (D, E), become those about the point (p, q) away from it."""
    a_new = a - W * p
    if ORDER == 3:
        P_new = P - (a + a_new) * p
        T = T - 2.0 * p[:, None] * S + (p * p)[:, None] * b[None, :] - P_new[:, None] * q[None, :]
        P = P_new
    S = S - p[:, None] * b[None, :] - a_new[:, None] * q[None, :]
    return a_new, b - W * q, S, P, T


@triton.jit
def first_token(w, w_t, start, end, WEIGHTED: tl.constexpr, N: tl.constexpr):
    """Where the first token of [start, end) that counts is; `end` or beyond when there is none."""
    at = start
    if WEIGHTED:
        at = first_present(w, w_t, start, end, N)
        present, _ = weigh(w, w_t, at + tl.arange(0, N), end)
        at += tl.min(tl.where(present, tl.arange(0, N), N))
    return at


@triton.jit
def near(x, x_t, w, w_t, at, end, columns, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A point near the 16 tokens from `at` on, in their dtype: their mean but for the extremes, often outliers. And a
    step for points near them (`on_grid`): a power of two below their mean deviation. 0 in float32, and where weights
    may leave one token alone: that is where the point should be."""
    where = at + tl.arange(0, 16)
    present = where < end
    if WEIGHTED:
        present, _ = weigh(w, w_t, where, end)
    tile, mask = load(x, x_t, at, present, columns, WIDTH, BLOCK, 16).to(tl.float32), present[:, None]
    count, total = tl.sum(present.to(tl.float32)), tl.sum(tile, 0)
    few = count < 3
    top = tl.where(few, 0.0, tl.max(tl.where(mask, tile, -float("inf")), 0))
    bottom = tl.where(few, 0.0, tl.min(tl.where(mask, tile, float("inf")), 0))
    inner = tl.maximum(tl.where(few, count, count - 2.0), 1.0)
    mean = (total - top - bottom) / inner
    step = tl.zeros_like(mean)
    even: tl.constexpr = not WEIGHTED or w.dtype.element_ty != tl.float32
    if even and x.dtype.element_ty != tl.float32:
        apart = tl.sum(tl.where(mask, tl.abs(tile - mean[None, :]), 0.0), 0) - (top - bottom)
        apart = tl.where(few, 0.0, 0.5 * apart / inner)
        step = (apart.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.where(step > 0, step, 0.0)
    return on_grid(mean, step, x.dtype.element_ty), step


@triton.jit
def on_grid(mean, step, dtype: tl.constexpr):
    """A point that `dtype` holds near the mean: 0 or a few steps away. Differences of 16-bit tokens to it are exact
    wherever they are no larger than the tokens; to the mean itself nearly all would be rounded."""
    coarse = tl.floor(mean / tl.where(step > 0, step, 1.0) + 0.5) * step
    return cast(tl.where(step > 0, coarse, mean), dtype)


@triton.jit
def store_sums(
    state, W, c, d, c_step, d_step, a, b, S, P, T, i, j, ORDER: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Rows i of the sums about (c, d). What has no rows is the same in every program that writes it."""
    matrix, vectors = i[:, None] * BE + j[None, :], state + (ORDER - 1) * BD * BE
    tl.store(state + matrix, S)
    tl.store(vectors + i, c.to(tl.float32))
    tl.store(vectors + BD + j, d.to(tl.float32))
    tl.store(vectors + BD + BE + i, a)
    tl.store(vectors + 2 * BD + BE + j, b)
    tl.store(vectors + 3 * BD + 2 * BE, W)
    tl.store(vectors + 3 * BD + 2 * BE + 1 + i, c_step)
    tl.store(vectors + 4 * BD + 2 * BE + 1 + j, d_step)
    if ORDER == 3:
        tl.store(state + BD * BE + matrix, T)
        tl.store(vectors + 2 * BD + 2 * BE + i, P)


@triton.jit
def load_steps(state, i, j, ORDER: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """Steps for the points of rows i and of columns j."""
    steps = state + (ORDER - 1) * BD * BE + 3 * BD + 2 * BE + 1
    return tl.load(steps + i), tl.load(steps + BD + j)


@triton.jit
def load_sums(state, i, j, there, ORDER: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """Rows i of W, c, d, a, b, S, P, T; all but c and d are 0 unless `there` (1 or 0). P = a, T = S at order 2."""
    matrix, vectors = i[:, None] * BE + j[None, :], state + (ORDER - 1) * BD * BE
    rows = i < there * BD
    c, d = tl.load(vectors + i), tl.load(vectors + BD + j)
    a = tl.load(vectors + BD + BE + i, mask=rows, other=0.0)
    b = tl.load(vectors + 2 * BD + BE + j, mask=j < there * BE, other=0.0)
    W = tl.load(vectors + 3 * BD + 2 * BE, mask=there > 0, other=0.0)
    S = tl.load(state + matrix, mask=rows[:, None], other=0.0)
    P, T = a, S
    if ORDER == 3:
        T = tl.load(state + BD * BE + matrix, mask=rows[:, None], other=0.0)
        P = tl.load(vectors + 2 * BD + 2 * BE + i, mask=rows, other=0.0)
    return W, c, d, a, b, S, P, T
