"""Parts of the Triton kernels of cluster attention.

Shape legend: B batch, H heads, L tokens, K clusters (KP: padded to a power of two), CK clusters of a chunk, M = n rows
of a query tile, D, E widths, BD, BE those padded to powers of two, T near clusters of a tile, R responding ones.

Cluster c holds the tokens from bounds[c] to bounds[KP + 1 + c]; those from K on are empty, and in column KP are prefix
tokens, near to every query. `order` (ORDERED) says where the tokens lie; those that no cluster holds come last. Bounds,
sizes and order may be the same for all heads or differ from sequence to sequence or head to head: `per` heads in a row
share them. Query heads that share a key head (GROUP) are more tiles of it. With a = scale log2(e) and a point `origin`
near the keys, which no result depends on, everything below the exponential is in powers of two:

    z_c = a q.(k_mean_c - origin) + log2 n_c + phi(x_c) log2(e)       x_c = scale^2 sum_i q_i^2 var_c(k_i)
    z_l = a q.(k_l - origin)                                         tokens of near clusters
    out = sum_c p_c (v_mean_c + f(x_c) q S_c) + sum_l p_l v_l         p = 2^(z - lse),  S_c = scale <k~ v~^T>_c

State of a cluster: `vectors` (2 BD + BE) float32, k_mean, var(k) and v_mean; `matrices` (BD, BE), S in the type of the
inputs; and `factors` (4 BD + 2 BE), also in that type, the vectors as products take them: a (k_mean - origin) and what
its rounding left over, scale^2 var(k), origin, v_mean and what its rounding left over. What there are few of (means,
weights of clusters) enters products as two numbers of 16 bits, so that masses have the digits of float32; S does not,
it would double the cost, unless there is one for all clusters.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import INTERPRET, cast, dot
from ..products import finished as finished
from ..tokens import head

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3e38)
HELD = tl.constexpr(8)  # clusters of a list that `near_row` holds in registers
CLOSURE_NUMBER = {"gauss": 0, "tanh": 1, "langevin": 2}


@triton.jit
def reciprocal(x):
    """1 / x of numbers x >= 1/2, in one instruction (its error is that of the last digit)."""
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def inverse_root(x):
    """1 / sqrt(x) of normal numbers, in one instruction, to 2^-22."""
    if INTERPRET:
        return tl.rsqrt(x)
    else:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log2_above_1(x):
    """log2 of numbers 1 <= x <= 2 in one instruction, to 2^-22; the general one takes twenty."""
    if INTERPRET:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def closed(x, CLOSURE: tl.constexpr, SHORT: tl.constexpr):
    """phi and f of the variance x = s^2 >= 0 as (r, m, n): 2^r m = exp(phi) and 2^r n = f exp(phi).

    So one exponential makes both p and p f, and tanh needs no logarithm and no division: r = s log2(e),
    2 m = 1 + exp(-2 s), 2 n = (1 - exp(-2 s)) / s. r is phi log2(e), or up to 1 more. SHORT: f is wanted to 4 digits
    only, those of 16 bits; else it is a power series where s leaves it no digits.
    """
    if CLOSURE == 0:
        return x * (0.5 * LOG2E), x * 0.0 + 1.0, x * 0.0 + 1.0
    small = x < 3e-2
    if CLOSURE == 1:
        y = tl.maximum(x, 1e-6)  # there phi is 5e-7 and f is 1 to 6 digits
        over = inverse_root(y)
        s = y * over
        e = tl.exp2(s * (-2.0 * LOG2E))
        grow, lift = 0.5 + 0.5 * e, (0.5 - 0.5 * e) * over
        if not SHORT:
            series = 1.0 + x * (-1.0 / 3.0 + x * (2.0 / 15.0 + x * (-17.0 / 315.0)))
            lift = tl.where(small, series * grow, lift)
        return s * LOG2E, grow, lift
    y = tl.sqrt(3.0 * tl.where(small, 1.0, x))
    e = tl.exp2(y * (-2.0 * LOG2E))
    phi = y * LOG2E + (tl.log2((1.0 - e) / y) - 1.0)
    gain = 3.0 * ((1.0 + e) / (1.0 - e) - 1.0 / y) / y
    phi_series = x * (0.5 + x * (-1.0 / 20.0 + x * (1.0 / 105.0))) * LOG2E
    series = 1.0 + x * (-1.0 / 5.0 + x * (2.0 / 35.0 + x * (-3.0 / 175.0)))
    return tl.where(small, phi_series, phi), x * 0.0 + 1.0, tl.where(small, series, gain)


@triton.jit
def mass_and_gain(x, CLOSURE: tl.constexpr, SHORT: tl.constexpr):
    """phi log2(e) and f of the variance x >= 0; SHORT as of `closed`."""
    rise, grow, lift = closed(x, CLOSURE, SHORT)
    if CLOSURE == 1:
        return rise + (log2_above_1(2.0 * grow) - 1.0), lift * reciprocal(grow)
    return rise, lift


@triton.jit
def twice_gain_slope(x, gain, CLOSURE: tl.constexpr):
    """2 df/dx, from f: (1 - f - x f^2) / x for tanh, 3 (1 - f - x f^2 / 3) / x for langevin. dphi/dx = f/2."""
    if CLOSURE == 0:
        return x * 0.0
    small = x < 3e-2
    over = inverse_root(tl.maximum(x, 1e-6))  # known already where the closure is tanh
    over *= over
    if CLOSURE == 1:
        slope = over * (1.0 - gain - x * gain * gain)
        series = -2.0 / 3.0 + x * (8.0 / 15.0 + x * (-34.0 / 105.0 + x * (496.0 / 2835.0)))
    else:
        slope = over * (3.0 - 3.0 * gain - x * gain * gain)
        series = -2.0 / 5.0 + x * (8.0 / 35.0 + x * (-18.0 / 175.0 + x * (144.0 / 3465.0)))
    return tl.where(small, series, slope)


@triton.jit
def gain_slope(x, gain, CLOSURE: tl.constexpr):
    return 0.5 * twice_gain_slope(x, gain, CLOSURE)


@triton.jit
def packed(x, dtype: tl.constexpr):
    """`cast`, two numbers an instruction: what goes to memory the compiler by itself converts one at a time."""
    if INTERPRET or x.dtype != tl.float32 or dtype != tl.bfloat16:
        return cast(x, dtype)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def widened(x):
    """x in float32, one instruction a number: the compiler by itself takes a number out of its pair first."""
    if INTERPRET or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )


@triton.jit
def parts(x, dtype: tl.constexpr):
    """x as the sum of two numbers of the type: rounded, and what that left over (nothing, for float32)."""
    high = packed(x, dtype)
    return high, packed(x - high.to(tl.float32), dtype)


@triton.jit
def factor(factors, c, at, columns, BD: tl.constexpr, BE: tl.constexpr, there=None):
    """One of the factors of clusters c, that from number `at` on: (CK, BD) or (CK, BE); 0 of those not `there`, if that
    is given."""
    place = factors + c[:, None] * (4 * BD + 2 * BE) + at + columns[None, :]
    return tl.load(place) if there is None else tl.load(place, mask=there[:, None], other=0.0)


@triton.jit
def key_means(factors, c, d, BD: tl.constexpr, BE: tl.constexpr, there=None):
    """a (k_mean_c - origin) of clusters c, (CK, BD), and what its rounding left over (not to be read for float32)."""
    return factor(factors, c, 0, d, BD, BE, there), factor(factors, c, BD, d, BD, BE, there)


@triton.jit
def value_means(factors, c, e, BD: tl.constexpr, BE: tl.constexpr, there=None):
    """v_mean_c, (CK, BE), and what its rounding left over (not to be read for float32)."""
    return factor(factors, c, 4 * BD, e, BD, BE, there), factor(factors, c, 4 * BD + BE, e, BD, BE, there)


@triton.jit
def variances(factors, vectors, c, d, scale, SQUARE: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, there=None):
    """scale^2 var_c(k), (CK, BD); out of the vectors where the factors' type has too small a range for it."""
    if factors.dtype.element_ty == SQUARE:
        return factor(factors, c, 2 * BD, d, BD, BE, there)
    else:
        place = vectors + c[:, None] * (2 * BD + BE) + BD + d[None, :]
        spread = tl.load(place) if there is None else tl.load(place, mask=there[:, None], other=0.0)
        return cast(spread * (scale * scale), SQUARE)


@triton.jit
def origin_of(factors, d, BD: tl.constexpr):
    """The point that keys of a head are measured from, (BD,) float32: written with each of its clusters."""
    return tl.load(factors + 3 * BD + d).to(tl.float32)


@triton.jit
def masses(q, squares, var, high, low, logs, CLOSURE: tl.constexpr, PRECISION: tl.constexpr):
    """Of clusters, given by `variances` and `key_means`, for rows q (n, BD) and their squares: (n, CK) each of

        z + r without phi in z,   x,   m   and   n:   masses are 2^(z + r) m, masses times f are 2^(z + r) n

    with r, m, n of `closed`. logs (CK,): log2 of the sizes, -inf of clusters without mass. Cost: 3 n CK BD.
    """
    x = dot(squares, tl.trans(var), None, PRECISION)
    z = dot(q, tl.trans(high), None, PRECISION)
    if q.dtype != tl.float32:
        z = dot(q, tl.trans(low), z, PRECISION)
    rise, grow, lift = closed(x, CLOSURE, q.dtype != tl.float32)
    return (z + logs[None, :]) + rise, x, grow, lift


@triton.jit
def far_logs(logs, near, c, T: tl.constexpr):
    """log2 of the sizes of clusters c, (CK,), out of logs (KP,), -inf of the T near ones listed at `near`."""
    size = tl.load(logs + c)
    if T <= 8:  # no loop inside that over chunks, which the compiler then runs ahead with loads
        for i in tl.static_range(T):
            size = tl.where(c == tl.load(near + i), NOTHING, size)
    else:
        for i in range(T):
            size = tl.where(c == tl.load(near + i), NOTHING, size)
    return size


@triton.jit
def far_logs_of(logs, near, chunk, CK: tl.constexpr, T: tl.constexpr):
    """`far_logs` of the CK clusters from `chunk` on. Numbers are compared less `chunk`, which the compiler has in 64
    bits, for addresses, and would compare so."""
    i = tl.arange(0, CK)
    size = tl.load(logs + chunk + i)
    if T <= 8:
        for t in tl.static_range(T):
            size = tl.where(i == tl.load(near + t) - chunk, NOTHING, size)
    else:
        for t in range(T):
            size = tl.where(i == tl.load(near + t) - chunk, NOTHING, size)
    return size


@triton.jit
def tanh_masses(q, squares, var, high, low, logs, PRECISION: tl.constexpr):
    """What `masses` gives of tanh, with z one too large: z + r + 1, x, e and 1 / s, so that masses are 2^z (1 + e) and
    those times f 2^z (1 - e) / s. For 16 bits. Cost: 3 n CK BD."""
    x = dot(squares, tl.trans(var), None, PRECISION)
    z = dot(q, tl.trans(high), None, PRECISION)
    z = dot(q, tl.trans(low), z, PRECISION)
    y = tl.maximum(x, 1e-6)
    over = inverse_root(y)
    s = y * over
    return (z + logs[None, :]) + s * LOG2E, x, tl.exp2(s * (-2.0 * LOG2E)), over


@triton.jit
def counted(score, there):
    """Scores, -1 of clusters that are not there; also in place of what is not a number, which would have no rank."""
    return tl.where(there & (score >= 0.0), score, -1.0)


@triton.jit
def ranks(score, c):
    """How many clusters come before each one: those with a larger score, the first of equal ones first."""
    mine, other = score[:, None], score[None, :]
    before = (other > mine) | ((other == mine) & (c[None, :] < c[:, None]))
    return tl.sum(before.to(tl.int32), 1)


@triton.jit
def finite(m):
    """A maximum to subtract: 0 in place of -inf, of rows that have seen nothing."""
    return tl.where(m == NOTHING, 0.0, m)


@triton.jit
def squared(q, SQUARE: tl.constexpr):
    y = q.to(tl.float32)
    return cast(y * y, SQUARE)


@triton.jit
def scaled(rows, g):
    """Rows (n, width) times g (n,), in the type of the rows: two numbers an instruction where that has 16 bits."""
    if INTERPRET:
        return cast(rows.to(tl.float32) * g.to(tl.float32)[:, None], rows.dtype)
    else:
        return rows * g.to(rows.dtype)[:, None]


@triton.jit
def weighed(columns, g):
    """The same for columns (width, n)."""
    if INTERPRET:
        return cast(columns.to(tl.float32) * g.to(tl.float32)[None, :], columns.dtype)
    else:
        return columns * g.to(columns.dtype)[None, :]


@triton.jit
def laid_out(x, d, PRECISION: tl.constexpr):
    """x (n, width) as the result of a product with 1: held by threads as the products are that it will multiply."""
    if INTERPRET or x.dtype == tl.float32:
        return x
    else:
        one = (d[:, None] == d[None, :]).to(tl.float32).to(x.dtype)
        return packed(dot(x, one, None, PRECISION), x.dtype)


@triton.jit
def kept_short(x):
    """x itself; what is computed of it in a loop stays there, so that only its 16 bits take registers meanwhile."""
    if INTERPRET or x.dtype == tl.float32:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def tile(x, row, stride, columns, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `row` < end of x, (n, BLOCK), 0 beyond the end and beyond WIDTH."""
    return picked_tile(x, row, row < end, stride, columns, WIDTH, BLOCK, False)


@triton.jit
def picked_tile(x, row, there, stride, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Rows of x that are `there`, (n, BLOCK), 0 for others and beyond WIDTH; EVEN: all are."""
    at = x + row.to(tl.int64)[:, None] * stride + columns[None, :]
    if EVEN and WIDTH == BLOCK:
        return tl.load(at)
    else:
        mask = there[:, None]
        if WIDTH != BLOCK:
            mask = mask & (columns < WIDTH)[None, :]
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def placed(order, token, there, ORDERED: tl.constexpr, EVEN: tl.constexpr):
    """Where tokens lie."""
    if not ORDERED:
        return token
    elif EVEN:
        return tl.load(order + token)
    else:
        return tl.load(order + token, mask=there, other=0)


@triton.jit
def query_head(x, pid, heads, index, tiles, x_b, x_h, x_t, GROUP: tl.constexpr, UNIT: tl.constexpr):
    """Pointer to the query head of tile `index`; `tiles` to a head."""
    h = pid % heads
    if GROUP > 1:
        h = h * GROUP + index // tiles
    return head(x, pid // heads, h, 0, x_b, x_h, x_t, UNIT)


@triton.jit
def own_head(pid, index, tiles, GROUP: tl.constexpr):
    """Number of the query head of a tile, of those of all sequences."""
    if GROUP > 1:
        return pid.to(tl.int64) * GROUP + index // tiles
    else:
        return pid.to(tl.int64)


@triton.jit
def first_row(index, tiles, M: tl.constexpr, GROUP: tl.constexpr):
    """Place of a tile's first query in its head."""
    if GROUP > 1:
        return (index % tiles) * M
    else:
        return index * M


@triton.jit
def stepped(x, index, tiles, x_h, GROUP: tl.constexpr, UNIT: tl.constexpr):
    """x, which points to the first query head of a key head, at that of tile `index`."""
    if GROUP > 1:
        return x + (index // tiles).to(tl.int64) * (x_h * UNIT)
    else:
        return x


@triton.jit
def turned_tile(x, row, stride, columns, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The transpose of `tile`, (BLOCK, n), read as such: what is computed of it then needs no exchange."""
    mask = (row < end)[None, :]
    if WIDTH != BLOCK:
        mask = mask & (columns < WIDTH)[:, None]
    return tl.load(x + row.to(tl.int64)[None, :] * stride + columns[:, None], mask=mask, other=0.0)


@triton.jit
def near_list(near, NEAR: tl.constexpr):
    """The first four of a list of NEAR clusters, the first again in place of those that it does not have."""
    c0 = tl.load(near)
    c1 = tl.load(near + (1 if NEAR > 1 else 0))
    c2 = tl.load(near + (2 if NEAR > 2 else 0))
    return c0, c1, c2, tl.load(near + (3 if NEAR > 3 else 0))


@triton.jit
def even_block(near, listed, i, blocks, NEAR: tl.constexpr, N: tl.constexpr):
    """`near_block` of EVEN clusters, of a list that `near_list` has read where it is so short: in the loop each block
    of tokens would wait for the list before it can be asked for."""
    number = i // blocks
    if NEAR > 4:
        c = tl.load(near + number)
    else:
        c0, c1, c2, c3 = listed
        c = c0
        if NEAR > 1:
            c = tl.where(number == 1, c1, c)
        if NEAR > 2:
            c = tl.where(number == 2, c2, c)
        if NEAR > 3:
            c = tl.where(number == 3, c3, c)
    return (c * blocks + i % blocks) * N, (c + 1) * (blocks * N)


@triton.jit
def near_block(
    near, listed, bounds, i, blocks, T, NEAR: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr
):
    """First token of the i-th block of near tokens, and the end of its cluster (0 where the list has a hole): `blocks`
    of each in a list of T, the last of which, a prefix, may have more or fewer.

    EVEN: clusters are whole numbers of blocks, all lists are full; then no more is read than the list, `listed`.
    """
    if EVEN:
        return even_block(near, listed, i, blocks, NEAR, N)
    else:
        number = tl.minimum(i // blocks, T - 1)
        c = tl.load(near + number)
        at = tl.maximum(c, 0)
        first = tl.load(bounds + at) + (i - number * blocks) * N
        return first, tl.where(c >= 0, tl.load(bounds + (KP + 1) + at), 0)


@triton.jit
def run_of(near, bounds, j, there, KP: tl.constexpr):
    """First token of number j in a list of clusters, and how many; 0 of a hole and of what is not `there`."""
    c = tl.load(near + j, mask=there, other=-1)
    first = tl.load(bounds + tl.maximum(c, 0))
    return first, tl.where(c >= 0, tl.load(bounds + (KP + 1) + tl.maximum(c, 0)) - first, 0)


@triton.jit
def near_row(near, bounds, NEAR: tl.constexpr, KP: tl.constexpr):
    """The tokens of the clusters in a list of NEAR in one row, cluster after cluster: how many, at which place each
    cluster begins, and what is to be added from there on to make a place a token. For clusters whose sizes only the
    device knows: a row has no gap but behind its end.

    Numbers, in registers, for up to HELD clusters; for more, vectors of a power of two.
    """
    if NEAR <= HELD:
        total, begins, shifts = 0, (), ()
        for j in tl.static_range(NEAR):
            first, size = run_of(near, bounds, j, True, KP)
            begins, shifts = begins + (total,), shifts + (first - total,)  # type: ignore[assignment]  # noqa: RUF005
            total += size
        return total, begins, shifts
    else:
        j = tl.arange(0, triton.next_power_of_2(NEAR))
        first, size = run_of(near, bounds, j, j < NEAR, KP)
        first_before, size_before = run_of(near, bounds, j - 1, (j > 0) & (j <= NEAR), KP)
        begins = tl.cumsum(size, 0) - size
        before = tl.where(j > 0, first_before - (begins - size_before), 0)
        return tl.sum(size, 0), begins, first - begins - before


@triton.jit
def token_in_row(place, begins, shifts, NEAR: tl.constexpr):
    """Tokens at places (N,) of a `near_row`; behind its end any number."""
    if NEAR <= HELD:
        token = place + shifts[0]
        for j in tl.static_range(1, NEAR):
            token = tl.where(place >= begins[j], place + shifts[j], token)
        return token
    else:
        return place + tl.sum(tl.where(place[:, None] >= begins[None, :], shifts[None, :], 0), 1)


@triton.jit
def rows_from(x, first, stride, columns, N: tl.constexpr):
    """N rows from `first` on, all there and BLOCK wide: one 64-bit address, and what each thread adds to it."""
    x += first.to(tl.int64) * stride
    return tl.load(x + (tl.arange(0, N)[:, None] * stride + columns[None, :]))


@triton.jit
def block_tile(x, row, stride, columns, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """`tile` of a block, EVEN: of which all rows are there."""
    return picked_tile(x, row, row < end, stride, columns, WIDTH, BLOCK, EVEN)


@triton.jit
def store_tile(x, values, row, stride, columns, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    store_picked(x, values, row, row < end, stride, columns, WIDTH, BLOCK)


@triton.jit
def store_picked(x, values, row, there, stride, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    mask = there[:, None]
    if WIDTH != BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(x + row.to(tl.int64)[:, None] * stride + columns[None, :], packed(values, x.dtype.element_ty), mask=mask)
