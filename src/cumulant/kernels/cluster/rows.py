"""What the kernels of cluster attention and of its causal form (kernels/past) do alike with rows, clusters and keys.

Formulas and shape legend: parts.py, backward.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot
from .parts import block_tile, finished, own_head, packed, parts, query_head, store_tile, twice_gain_slope, widened


@triton.jit
def with_means(out, fading, p, high, low, KEEP: tl.constexpr, PRECISION: tl.constexpr):
    """Outputs (n, BE) times fading (n,), and what clusters of weights p (n, CK) add to them by their `value_means`.

    KEEP: with the digits of float32, for a backward pass, which takes differences of outputs and values.
    """
    p_high, p_low = parts(p, high.dtype)
    out = dot(p_high, high, out * fading[:, None], PRECISION)
    if KEEP:
        out = dot(p_high, low, out, PRECISION)
        out = dot(p_low, high, out, PRECISION)
    return out


@triton.jit
def write_rows(
    o, rounding, lse, out, top, total, row, length_q, pid, heads, index, tiles, o_b, o_h, o_t,
    KEEP: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile: sums `out` divided by those of the weights, `total` in units of 2^top; and log2 of the latter.
    A row that sees nothing gives 0. KEEP: what rounding takes from the outputs is written too."""
    e, some = tl.arange(0, BE), total > 0.0
    out *= tl.where(some, 1.0 / total, 0.0)[:, None]
    o = query_head(o, pid, heads, index, tiles, o_b, o_h, o_t, GROUP, UNIT)
    store_tile(o, out, row, o_t * UNIT, e, length_q, E, BE)
    if KEEP:
        rounding = query_head(rounding, pid, heads, index, tiles, o_b, o_h, o_t, GROUP, UNIT)
        lost = out - cast(out, o.dtype.element_ty).to(tl.float32)
        store_tile(rounding, lost, row, o_t * UNIT, e, length_q, E, BE)
    lse += own_head(pid, index, tiles, GROUP) * length_q
    tl.store(lse + row, tl.where(some, top + tl.log2(total), float("inf")), mask=row < length_q)


@triton.jit
def read_rows(
    o, rounding, lse, grad, row, length_q, pid, heads, index, tiles, o_b, o_h, o_t,
    GROUP: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Of what `write_rows` wrote of a tile: delta = do.out, and log2 of the sums of weights. WHOLE: the tile is full.

    `rounding` is what the output lost when it was rounded to 16 bits: delta is a difference of larger numbers.
    """
    e = tl.arange(0, BE)
    o = query_head(o, pid, heads, index, tiles, o_b, o_h, o_t, GROUP, UNIT)
    outs = widened(block_tile(o, row, o_t * UNIT, e, length_q, E, BE, WHOLE))
    if o.dtype.element_ty != tl.float32:
        rounding = query_head(rounding, pid, heads, index, tiles, o_b, o_h, o_t, GROUP, UNIT)
        outs += widened(block_tile(rounding, row, o_t * UNIT, e, length_q, E, BE, WHOLE))
    delta = tl.sum(widened(grad) * outs, 1)
    at_row = own_head(pid, index, tiles, GROUP) * length_q + row
    return delta, tl.load(lse + at_row, mask=row < length_q, other=float("inf"))


@triton.jit
def changes_of_means(p, x, gain, change, answer, delta, RESPONSE: tl.constexpr, CLOSURE: tl.constexpr):
    """dz and 2 dx of clusters with weights p, all (n, CK), where change = do.v_mean and answer = h, if they respond."""
    if RESPONSE:
        change = p * (change + (gain * answer - delta[:, None]))
        spread = change * gain + (p * answer) * twice_gain_slope(x, gain, CLOSURE)
    else:
        change = p * (change - delta[:, None])
        spread = change * gain
    return change, spread


@triton.jit
def along_means(sums, change, high, low, PRECISION: tl.constexpr):
    """sums (n, BD) + dz times `key_means`, both in two parts: gradients of neighbouring clusters nearly cancel, 16 bits
    are too few. And dz rounded."""
    change_high, change_low = parts(change, high.dtype)
    sums = dot(change_high, high, sums, PRECISION)
    if high.dtype != tl.float32:
        sums = dot(change_high, low, sums, PRECISION)
        sums = dot(change_low, high, sums, PRECISION)
    return sums, change_high


@triton.jit
def met_by_rows(rows, grad, p, change, key_sums, value_sums, PRECISION: tl.constexpr):
    """Sums for dk and dv of keys that rows met one by one, with theirs: p and change (keys, rows)."""
    value_sums = dot(packed(p, rows.dtype), grad, value_sums, PRECISION)
    key_sums = finished(dot(packed(change, rows.dtype), rows, key_sums, PRECISION))
    return key_sums, finished(value_sums)


@triton.jit
def through_statistics(
    key_sums, value_sums, keys, values, vectors, grad_vectors, over, BD: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Sums for dk and dv of a cluster's tokens with those through its means and variances, and the tokens less its
    means: k~ and v~. over: 1 / n."""
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    keys -= tl.load(vectors + d)[None, :]
    values -= tl.load(vectors + 2 * BD + e)[None, :]
    of_mean, of_spread = tl.load(grad_vectors + d), tl.load(grad_vectors + BD + d)
    key_sums += (of_mean[None, :] + 2.0 * keys * of_spread[None, :]) * over
    value_sums += (tl.load(grad_vectors + 2 * BD + e) * over)[None, :]
    return key_sums, value_sums, keys, values


@triton.jit
def through_matrix(
    key_sums, value_sums, keys, values, grad_matrix, factor, dtype: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The same through S: k~ and v~ are given, factor = scale / n."""
    S = tl.load(grad_matrix + tl.arange(0, BD)[:, None] * BE + tl.arange(0, BE)[None, :])
    S, low = parts(S * factor, dtype)
    key_sums = dot(cast(values, dtype), tl.trans(S), key_sums, PRECISION)
    value_sums = dot(cast(keys, dtype), S, value_sums, PRECISION)
    if dtype != tl.float32:
        key_sums = dot(cast(values, dtype), tl.trans(low), key_sums, PRECISION)
        value_sums = dot(cast(keys, dtype), low, value_sums, PRECISION)
    return key_sums, value_sums
