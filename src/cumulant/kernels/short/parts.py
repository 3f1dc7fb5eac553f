"""Parts of the Triton kernels of cluster attention for short clusters.

Shape legend: B batch, H heads, M rows (queries) and N slots of a tile, KT = N / MP clusters of MP slots in it, P
columns of products with variances (KT, repeated to at least 32), D, E widths, BD, BE those padded to powers of two,
p prefix tokens (PP padded).

This is flash attention whose softmax runs over clusters. `places` names the token of each slot, -1 for none; slots of a
cluster are a power of two in a row. With t_l = q.k_l, a product of tiles as in softmax, and <.>_c the mean over the
tokens of a cluster, in natural units:

    t~_l = t_l - <t>_c      x_c = scale^2 sum_i q_i^2 var_c(k_i), or scale^2 <t~^2>_c where the variance is full
    z_c  = scale <t>_c + log n_c + phi(x_c)       z_l = scale t_l for prefix tokens       p = exp(z - lse)
    out  = sum_l A_l v_l,   A_l = p_c / n_c (1 + f(x_c) scale t~_l), p_l for prefix tokens

so a head needs no statistics but var(k). Backward, with b_l = do.v_l, b~_l = b_l - <b>_c, r_c = scale <b t~>_c and
dphi/dx = f/2:

    dp_c = <b>_c + f_c r_c      delta = do.out = sum_c p_c dp_c + sum_l p_l b_l      dz = p (dp - delta)
    dx_c = dz_c f_c / 2 + p_c r_c f'(x_c)
    dt_l = scale (p_c f_c b~_l + dz_c) / n_c  (+ 2 scale^2 dx_c t~_l / n_c where the variance is full)
    dq   = sum_l dt_l k_l  (+ 2 scale^2 q sum_c dx_c var_c)                  dv_l = sum_rows A_l do
    dk_l = sum_rows dt_l q (+ 2 scale^2 k~_l / n_c sum_rows dx_c q^2)

The sum of dt over all tokens is 0, that of its rounded numbers is not quite: dq takes off what they sum up to times a
point near the keys (`origin`), so that rounding costs digits of their spread, not of where they lie. Means over a
cluster and their broadcast back stay inside a thread and its three neighbours: the threads of a product hold its
columns that way.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..cluster.parts import LOG2E, NOTHING, gain_slope, mass_and_gain, packed, store_tile, tile
from ..products import cast, dot


@triton.jit
def slot_mask(place, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    mask = (place >= 0)[:, None]
    if WIDTH != BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def gathered(x, place, stride, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens `place` of x, (N, BLOCK), 0 where there is none and beyond WIDTH."""
    at = x + place.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=slot_mask(place, columns, WIDTH, BLOCK), other=0.0)


@triton.jit
def scattered(x, values, place, stride, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = x + place.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, packed(values, x.dtype.element_ty), mask=slot_mask(place, columns, WIDTH, BLOCK))


@triton.jit
def repeated(x, COUNT: tl.constexpr):
    """(n, KT) -> (n, KT COUNT), each column COUNT times in a row."""
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], COUNT))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * COUNT))


@triton.jit
def variances(spread, first, d, P: tl.constexpr, KT: tl.constexpr, BD: tl.constexpr):
    """var(k) of the KT clusters from `first` on, each in P / KT rows: (P, BD)."""
    c = first + tl.arange(0, P) // (P // KT)
    return tl.load(spread + c[:, None] * BD + d[None, :])


@triton.jit
def present(t, place):
    """t (M, KT, MP) with 0 in empty slots."""
    return tl.where(tl.reshape(place >= 0, (t.shape[1], t.shape[2]))[None, :, :], t, 0.0)


@triton.jit
def masses(
    q, squares, k, spread, log_size, inverse, place, scale,
    FULL: tl.constexpr, RAGGED: tl.constexpr, CLOSURE: tl.constexpr, KT: tl.constexpr, MP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """t~ (M, KT, MP); z in powers of two, x and f of the clusters, (M, KT). Cost: M (N + P) BD."""
    M: tl.constexpr = q.shape[0]
    t = tl.reshape(dot(q, tl.trans(k), None, PRECISION), (M, KT, MP))
    mean = tl.sum(t, 2) * inverse[None, :]
    t = t - mean[:, :, None]
    if RAGGED:
        t = present(t, place)
    if FULL:
        x = tl.sum(t * t, 2) * (inverse * (scale * scale))[None, :]
    else:
        P: tl.constexpr = spread.shape[0]
        x = dot(squares, tl.trans(spread), None, PRECISION)
        x = tl.sum(tl.reshape(x, (M, KT, P // KT)), 2) * (scale * scale * (KT / P))
    phi, gain = mass_and_gain(x, CLOSURE, q.dtype != tl.float32)
    return t, mean * (scale * LOG2E) + (log_size[None, :] + phi), x, gain


@triton.jit
def weights(t, p, gain, inverse, scale):
    """A (M, KT, MP)."""
    share = p * inverse[None, :]
    return share[:, :, None] + (share * gain * scale)[:, :, None] * t


@triton.jit
def answers(g, v, t, gain, inverse, scale, KT: tl.constexpr, MP: tl.constexpr, PRECISION: tl.constexpr):
    """b~ (M, KT, MP), r and dp (M, KT). Cost: M N BE."""
    b = tl.reshape(dot(g, tl.trans(v), None, PRECISION), (g.shape[0], KT, MP))
    mean = tl.sum(b, 2) * inverse[None, :]
    r = tl.sum(b * t, 2) * (inverse * scale)[None, :]
    return b - mean[:, :, None], r, mean + gain * r


@triton.jit
def slopes(
    t, b, r, dp, delta, p, x, gain, inverse, place, scale,
    FULL: tl.constexpr, RAGGED: tl.constexpr, CLOSURE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """dt (M, KT, MP), rounded to the type, and dx (M, KT)."""
    dz = p * (dp - delta[:, None])
    dx = 0.5 * gain * dz + p * r * gain_slope(x, gain, CLOSURE)
    each = (inverse * scale)[None, :]
    dt = (p * gain * each)[:, :, None] * b + (dz * each)[:, :, None]
    if FULL:
        dt += (dx * (2.0 * scale * each))[:, :, None] * t
    if RAGGED:
        dt = present(dt, place)
    return cast(dt, dtype), dx


@triton.jit
def row_sums(x):
    """Sums over the rows of x (M, KT, MP), in float32, held as numbers of a row are."""
    return tl.sum(tl.sum(x.to(tl.float32), 2), 1)


@triton.jit
def prefix_sums(x):
    """The same for x (M, PP)."""
    return row_sums(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8)))


@triton.jit
def prefix_tile(k, v, k_t, v_t, prefix, d, e, D: tl.constexpr, E: tl.constexpr, PP: tl.constexpr):
    """Keys and values of the prefix tokens: (PP, BD), (PP, BE)."""
    t = tl.arange(0, PP)
    return tile(k, t, k_t, d, prefix, D, d.shape[0]), tile(v, t, v_t, e, prefix, E, e.shape[0])


@triton.jit
def prefix_logits(q, keys, prefix, scale, PRECISION: tl.constexpr):
    """z (M, PP) of the prefix tokens in powers of two, -inf beyond the last."""
    z = dot(q, tl.trans(keys), None, PRECISION) * (scale * LOG2E)
    return tl.where((tl.arange(0, keys.shape[0]) < prefix)[None, :], z, NOTHING)


@triton.jit
def prefix_gradients(partial, q, g, p, dz, prefix, d, e, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr):
    """Sums over M rows for dk and dv of the prefix tokens, written to partial (p, BD + BE)."""
    t: tl.constexpr = p.shape[1]
    width: tl.constexpr = d.shape[0] + e.shape[0]
    row = tl.arange(0, t)
    dk, dv = dot(tl.trans(dz), q, None, PRECISION), dot(tl.trans(cast(p, g.dtype)), g, None, PRECISION)
    store_tile(partial, dk, row, width, d, prefix, D, d.shape[0])
    store_tile(partial + d.shape[0], dv, row, width, e, prefix, E, e.shape[0])
