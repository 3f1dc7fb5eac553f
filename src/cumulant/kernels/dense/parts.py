"""Parts of the non-causal Triton kernels: loops over the tokens of one head.

Shape legend: B sequences, H key heads, G query heads for each, L tokens, D key width, E value width; BD, BE those
padded to powers of two (or the part of them that one program holds), N tokens of a block.

Sums run about a reference point near the tokens (`tokens.reference`) and move to the mean once at the end, so each key
and value is read once and no raw moment is ever formed. What travels between kernels, per key head, with W = sum w and
nu = 1 (W with normalization="sum"):

    matrices (1 or 2, D, E)   S' = nu scale S / W,  T' = nu scale^2/2 T / W, ready to be multiplied by queries
    vectors (3 D + 2 E + 1)   k_mean, <k~^2> (order 3), v_mean, W, and what float32 cuts off k_mean and v_mean

    out = nu v_mean + q S' + q^2 T'
    dq  = do S'^T + 2 q * (do T'^T)
    dS  = nu scale/W q^T do                 dT = nu scale^2/(2 W) (q^2)^T do
    dv  = w [ k~ dS + k~^2 dT + nu/W sum do - <k~^2> dT ]
    dk  = w [ v~ dS^T + 2 k~ * (v~ dT^T) - scale/W sum_e ((q^2)^T do) S' ]
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot, finished
from ..tokens import first_present, fma, fold, minus, present_reference, reference, sharing, squared, tile_mask, weigh


@triton.jit
def moments(
    k, v, w, k_t, v_t, w_t, start, end, d, e,
    ORDER: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W, k_mean, v_mean, what these are rounded by, S, P, T of the tokens [start, end) of one head, columns d and e.

    No P, T at order 2.
    """
    SQUARE: tl.constexpr = tl.bfloat16 if k.dtype.element_ty == tl.bfloat16 else tl.float32
    dtype: tl.constexpr = k.dtype.element_ty
    even_d: tl.constexpr = D % BD == 0
    even_e: tl.constexpr = E % BE == 0
    k_t, v_t = k_t * UNIT, v_t * UNIT
    W = (end - start).to(tl.float32)
    if dtype == tl.bfloat16 and not WEIGHTED:
        return plain_moments(k, v, k_t, v_t, start, end, d, e, ORDER, D, E, BD, BE, N, STAGES, PRECISION)
    if WEIGHTED:
        start = first_present(w, w_t, start, end, N)
    k += start.to(tl.int64) * k_t
    v += start.to(tl.int64) * v_t

    n = tl.arange(0, N)
    k_tile, v_tile = n[:, None] * k_t + d[None, :], n[:, None] * v_t + e[None, :]
    if WEIGHTED and w.dtype.element_ty == tl.float32:
        # One token may outweigh all others: unless the point is where it lies, its rounding is all that is left.
        k_ref, v_ref = tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
        total = 0.0
        for at in range(start, end, N):
            near, weights = weigh(w, w_t, at + n, end)
            far = (at - start).to(tl.int64)
            x = tl.load(k + far * k_t + k_tile, mask=tile_mask(near, d, D, even_d), other=0.0).to(tl.float32)
            y = tl.load(v + far * v_t + v_tile, mask=tile_mask(near, e, E, even_e), other=0.0).to(tl.float32)
            grown = total + tl.sum(weights)
            share = weights / tl.where(grown > 0, grown, 1.0)
            k_ref += tl.sum(tl.where(near[:, None], share[:, None] * (x - k_ref[None, :]), 0.0), 0)
            v_ref += tl.sum(tl.where(near[:, None], share[:, None] * (y - v_ref[None, :]), 0.0), 0)
            total = grown
        k_ref, v_ref = cast(k_ref, dtype).to(tl.float32), cast(v_ref, dtype).to(tl.float32)
    elif WEIGHTED:
        near, _ = weigh(w, w_t, start + n, end)
        k_near = tl.load(k + k_tile, mask=tile_mask(near, d, D, even_d), other=0.0)
        v_near = tl.load(v + v_tile, mask=tile_mask(near, e, E, even_e), other=0.0)
        k_ref, v_ref = present_reference(k_near, near), present_reference(v_near, near)
    else:
        k_ref, v_ref = reference(k, k_t, end - start, d, D), reference(v, v_t, end - start, e, E)
    S = tl.zeros((BD, BE), tl.float32)
    T = tl.zeros((BD, BE), tl.float32)
    k_sum = tl.zeros((ROWS, BD), tl.float32)
    p_sum = tl.zeros((ROWS, BD), tl.float32)
    v_sum = tl.zeros((ROWS, BE), tl.float32)
    w_sum = tl.zeros((N,), tl.float32)
    for at in tl.range(start, end, N, num_stages=STAGES):
        present = at + n < end
        x = tl.load(k + k_tile, mask=tile_mask(present, d, D, even_d), other=0.0)
        y = tl.load(v + v_tile, mask=tile_mask(present, e, E, even_e), other=0.0)
        k += N * k_t
        v += N * v_t
        if WEIGHTED:
            present, weights = weigh(w, w_t, at + n, end)
            w_sum += weights
        # All sums see the rounded tokens: what rounding moved is then taken out with the means.
        xb = cast(tl.where(present[:, None], x.to(tl.float32) - k_ref[None, :], 0.0), dtype)
        y = tl.where(present[:, None], y.to(tl.float32) - v_ref[None, :], 0.0)
        x = xb.to(tl.float32)
        wx = x
        if WEIGHTED:
            wx = x * weights[:, None]
            y = y * weights[:, None]
        yb = cast(y, dtype)
        k_sum += fold(wx, ROWS)
        v_sum += fold(yb.to(tl.float32), ROWS)
        S = dot(tl.trans(xb), yb, S, PRECISION)
        if ORDER == 3:
            p_sum += fold(wx * x, ROWS)
            T = dot(tl.trans(cast(x * x, SQUARE)), yb.to(SQUARE), T, PRECISION)

    if WEIGHTED:
        W = tl.sum(w_sum)
    over_W = tl.where(W > 0, 1.0 / tl.where(W > 0, W, 1.0), 0.0)
    a, s = tl.sum(k_sum, 0), tl.sum(v_sum, 0) * over_W
    shift = a * over_W
    P = a
    if ORDER == 3:
        P = tl.sum(p_sum, 0) - a * shift
    if ORDER == 3:
        T = T - (2.0 * shift)[:, None] * S + (a * shift - P)[:, None] * s[None, :]
    S = S - a[:, None] * s[None, :]
    k_mean, v_mean = k_ref + shift, v_ref + s
    return W, k_mean, v_mean, shift - (k_mean - k_ref), s - (v_mean - v_ref), S, P, T


@triton.jit
def plain_moments(
    k, v, k_t, v_t, start, end, d, e,
    ORDER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`moments` of bfloat16 tokens without weights.

    Keys go from shared memory to registers, turned, and become k' and k'^2 there, left sides of all products; values
    are the right side as they lie in memory. So only the copies of the pipeline write to shared memory, and no product
    is waited for within a turn. Values need no reference point: their mean enters to the first power only, and sums of
    bfloat16 products keep float32's digits.
    """
    even_d: tl.constexpr = D % BD == 0
    even_e: tl.constexpr = E % BE == 0
    count = end - start
    k += start.to(tl.int64) * k_t
    v += start.to(tl.int64) * v_t
    n = tl.arange(0, N)
    k_tile, v_tile = d[:, None] + n[None, :] * k_t, n[:, None] * v_t + e[None, :]
    k_ref = reference(k, k_t, count, d, D)
    away = tl.broadcast_to((-k_ref).to(tl.bfloat16)[:, None], (BD, N))
    one = tl.full((BD, N), 1.0, tl.float32).to(tl.bfloat16)
    right = tl.full((N, 8), 0.125, tl.float32).to(tl.bfloat16)
    left = tl.full((64, N), 1 / 64, tl.float32).to(tl.bfloat16)
    S, T = tl.zeros((BD, BE), tl.float32), tl.zeros((BD, BE), tl.float32)
    k_sum, p_sum = tl.zeros((BD, 8), tl.float32), tl.zeros((BD, 8), tl.float32)
    v_sum = tl.zeros((64, BE), tl.float32)
    for at in tl.range(start, end, N, num_stages=STAGES):
        present = at + n < end
        x = tl.load(k + k_tile, mask=tl.trans(tile_mask(present, d, D, even_d)), other=0.0)
        y = tl.load(v + v_tile, mask=tile_mask(present, e, E, even_e), other=0.0)
        k += N * k_t
        v += N * v_t
        # All sums see the rounded keys: what rounding moved is then taken out with the means.
        x = fma(one, away, x)
        square = squared(x, tl.bfloat16)
        S = dot(x, y, S, PRECISION)
        if ORDER == 3:
            T = dot(square, y, T, PRECISION)
            p_sum = dot(square, right, p_sum, PRECISION)
        k_sum = dot(x, right, k_sum, PRECISION)
        v_sum = dot(left, y, v_sum, PRECISION)
    W = count.to(tl.float32)
    over_W = tl.where(W > 0, 1.0 / tl.where(W > 0, W, 1.0), 0.0)
    absent = (tl.cdiv(count, N) * N - count).to(tl.float32)  # of the last block: 0 - k_ref each
    a, s = tl.sum(k_sum, 1) + absent * k_ref, tl.sum(v_sum, 0) * over_W
    shift = a * over_W
    P = a
    if ORDER == 3:
        p = tl.sum(p_sum, 1) - absent * cast(k_ref * k_ref, tl.bfloat16).to(tl.float32)
        P = p - a * shift
        T = T - (2.0 * shift)[:, None] * S + (2.0 * a * shift - p)[:, None] * s[None, :]
    S = S - a[:, None] * s[None, :]
    k_mean = k_ref + shift
    return W, k_mean, s, shift - (k_mean - k_ref), tl.zeros((BE,), tl.float32), S, P, T


@triton.jit
def factors(W, SUM: tl.constexpr):
    """nu, nu / W and 1 / W; the last two are 0 without keys."""
    over_W = tl.where(W > 0, 1.0 / tl.where(W > 0, W, 1.0), 0.0)
    if SUM:
        return W, tl.where(W > 0, 1.0, 0.0), over_W
    else:
        return tl.where(W > 0, 1.0, 0.0), over_W, over_W


@triton.jit
def matrix(x, d, e, D: tl.constexpr, E: tl.constexpr):
    """Rows d and columns e of a contiguous (D, E) matrix; 0 outside."""
    return tl.load(x + d[:, None] * E + e[None, :], mask=(d < D)[:, None] & (e < E)[None, :], other=0.0)


@triton.jit
def store_matrix(x, y, d, e, D: tl.constexpr, E: tl.constexpr):
    tl.store(x + d[:, None] * E + e[None, :], cast(y, x.dtype.element_ty), mask=(d < D)[:, None] & (e < E)[None, :])


@triton.jit
def store_state(
    matrices, vectors, W, k_mean, v_mean, k_low, v_low, S, P, T, d, e,
    ORDER: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Writes one head's state. Programs that hold different columns e write the same k_mean, P and W."""
    store_matrix(matrices, S, d, e, D, E)
    if ORDER == 3:
        store_matrix(matrices + D * E, T, d, e, D, E)
        tl.store(vectors + D + d, P, mask=d < D)
    tl.store(vectors + d, k_mean, mask=d < D)
    tl.store(vectors + 2 * D + e, v_mean, mask=e < E)
    tl.store(vectors + 2 * D + E, W)
    tl.store(vectors + 2 * D + E + 1 + d, k_low, mask=d < D)
    tl.store(vectors + 3 * D + E + 1 + e, v_low, mask=e < E)


@triton.jit
def read(
    q, o, q_t, o_t, start, end, S, T, mean, d, e,
    ORDER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = mean + q S + q^2 T for the queries [start, end) of one head."""
    even_d: tl.constexpr = D % BD == 0
    even_e: tl.constexpr = E % BE == 0
    q_t, o_t = q_t * UNIT, o_t * UNIT
    q += start.to(tl.int64) * q_t
    o += start.to(tl.int64) * o_t
    n = tl.arange(0, N)
    q_tile, o_tile = n[:, None] * q_t + d[None, :], n[:, None] * o_t + e[None, :]
    for at in tl.range(start, end, N, num_stages=STAGES):
        valid = at + n < end
        x = tl.load(q + q_tile, mask=tile_mask(valid, d, D, even_d), other=0.0)
        y = dot(x, S, None, PRECISION)
        if ORDER == 3:
            y = dot(squared(x, T.dtype), T, y, PRECISION)
        y += mean[None, :]
        tl.store(o + o_tile, cast(y, o.dtype.element_ty), mask=tile_mask(valid, e, E, even_e))
        q += N * q_t
        o += N * o_t


@triton.jit
def query_gradients(
    q, g, dq, q_t, g_t, dq_t, start, end, S, T, dS, dT, g_sum, d, e,
    ORDER: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dq of the queries [start, end); adds to q^T do, (q^2)^T do and the partial sums of do (g)."""
    even_d: tl.constexpr = D % BD == 0
    even_e: tl.constexpr = E % BE == 0
    q_t, g_t, dq_t = q_t * UNIT, g_t * UNIT, dq_t * UNIT
    q += start.to(tl.int64) * q_t
    g += start.to(tl.int64) * g_t
    dq += start.to(tl.int64) * dq_t
    n = tl.arange(0, N)
    q_tile, g_tile, dq_tile = (
        n[:, None] * q_t + d[None, :],
        n[:, None] * g_t + e[None, :],
        n[:, None] * dq_t + d[None, :],
    )
    S, T = tl.trans(S), tl.trans(cast(2.0 * T.to(tl.float32), T.dtype))  # here, to reach shared memory only once
    share = sharing(ROWS, N)
    for at in tl.range(start, end, N, num_stages=STAGES):
        valid = at + n < end
        x = tl.load(q + q_tile, mask=tile_mask(valid, d, D, even_d), other=0.0)
        y = tl.load(g + g_tile, mask=tile_mask(valid, e, E, even_e), other=0.0)
        square = squared(x, T.dtype)
        dS = dot(tl.trans(x), y, dS, PRECISION)
        if y.dtype == tl.bfloat16:
            g_sum = dot(share, y, g_sum, PRECISION)
        else:
            g_sum += fold(y.to(tl.float32), ROWS)
        if ORDER == 3:
            u = y.to(T.dtype)
            dT = dot(tl.trans(square), u, dT, PRECISION)
            z = x.to(tl.float32) * dot(u, T, None, PRECISION)
            z = dot(y, S, z, PRECISION)
        else:
            z = dot(y, S, None, PRECISION)
        tl.store(dq + dq_tile, cast(z, dq.dtype.element_ty), mask=tile_mask(valid, d, D, even_d))
        dS = finished(dS)
        if ORDER == 3:
            dT = finished(dT)
        q += N * q_t
        g += N * g_t
        dq += N * dq_t
    return dS, dT, g_sum


@triton.jit
def key_gradients(
    k, v, w, dk, dv, k_t, v_t, w_t, dk_t, dv_t, start, end, dS, dT, k_mean, P, v_mean, k_low, v_low,
    k_constant, v_constant, d, e,
    ORDER: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of the tokens [start, end) of one head; tokens of weight 0 get 0. dS and dT in float32."""
    even_d: tl.constexpr = D % BD == 0
    even_e: tl.constexpr = E % BE == 0
    dtype: tl.constexpr = k.dtype.element_ty
    SQUARE: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float32
    k_t, v_t, dk_t, dv_t = k_t * UNIT, v_t * UNIT, dk_t * UNIT, dv_t * UNIT
    k += start.to(tl.int64) * k_t
    v += start.to(tl.int64) * v_t
    dk += start.to(tl.int64) * dk_t
    dv += start.to(tl.int64) * dv_t
    n = tl.arange(0, N)
    k_tile, v_tile = n[:, None] * k_t + d[None, :], n[:, None] * v_t + e[None, :]
    inside = n >= 0
    dk_tile, dv_tile = n[:, None] * dk_t + d[None, :], n[:, None] * dv_t + e[None, :]
    # Tokens are centred about the means as their own type holds them, and what is missing (dk, dv below) is constant:
    # k~ = x + k_off and v~ = y + v_off give k~ dS + k~^2 dT = x (dS + 2 k_off dT) + x^2 dT + k_off dS + k_off^2 dT.
    # Values in bfloat16 are not centred at all, and go from memory to the products as they are.
    RAW: tl.constexpr = dtype == tl.bfloat16
    k_point, v_point = cast(k_mean, dtype).to(tl.float32), tl.zeros((BE,), tl.float32)
    if not RAW:
        v_point = cast(v_mean, dtype).to(tl.float32)
    away = tl.broadcast_to((-k_point).to(tl.bfloat16)[None, :], (N, BD))
    one = tl.full((N, BD), 1.0, tl.float32).to(tl.bfloat16)
    k_off, v_off = (k_point - k_mean - k_low)[:, None], (v_point - v_mean - v_low)[None, :]
    k_slope = k_constant
    if ORDER == 3:
        dT = cast(dT, SQUARE).to(tl.float32)  # one and the same for k~^2 and <k~^2>, or their difference is off
        v_constant += tl.sum(k_off * dS + (k_off * k_off - P[:, None]) * dT, 0)
        k_slope = 2.0 * tl.sum(v_off * dT, 1)
        dS += 2.0 * k_off * dT
    else:
        v_constant += tl.sum(k_off * dS, 0)
    dS, dT = cast(dS, dtype), cast(dT, SQUARE)
    k_constant = tl.sum(v_off * dS.to(tl.float32), 1) - k_constant
    dS_t, dT_t = tl.trans(dS), tl.trans(dT)  # here, so that they reach shared memory once and not in every turn
    for at in tl.range(start, end, N, num_stages=STAGES):
        valid = at + n < end
        x = tl.load(k + k_tile, mask=tile_mask(valid, d, D, even_d), other=0.0)
        y = tl.load(v + v_tile, mask=tile_mask(valid, e, E, even_e), other=0.0)
        if WEIGHTED:
            present, weights = weigh(w, w_t, at + n, end)
        # Tokens outside, even NaN, reach only rows that are not written or set to 0.
        if RAW:
            x = fma(one, away, x)
        else:
            x, y = minus(x, k_point, inside), minus(y, v_point, inside)
        square = squared(x, SQUARE)  # all operands before any product: they pass shared memory in one go
        if ORDER == 3:
            dy = dot(square, dT, None, PRECISION)
            dy = dot(x, dS, dy, PRECISION)
        else:
            dy = dot(x, dS, None, PRECISION)
        dy += v_constant[None, :]
        if WEIGHTED:
            dy = tl.where(present[:, None], dy * weights[:, None], 0.0)
        tl.store(dv + dv_tile, cast(dy, dv.dtype.element_ty), mask=tile_mask(valid, e, E, even_e))
        if ORDER == 3:
            dx = dot(y.to(SQUARE), dT_t, None, PRECISION)
            dx = x.to(tl.float32) * (2.0 * dx + k_slope[None, :]) + k_constant[None, :]
            dx = dot(y, dS_t, dx, PRECISION)
        else:
            dx = dot(y, dS_t, None, PRECISION) + k_constant[None, :]
        if WEIGHTED:
            dx = tl.where(present[:, None], dx * weights[:, None], 0.0)
        tl.store(dk + dk_tile, cast(dx, dk.dtype.element_ty), mask=tile_mask(valid, d, D, even_d))
        k += N * k_t
        v += N * v_t
        dk += N * dk_t
        dv += N * dv_t


@triton.jit
def centred(x, mean, low, present):
    return tl.where(present[:, None], x.to(tl.float32) - mean[None, :] - low[None, :], 0.0)


@triton.jit
def wide_key_gradients(
    k, v, w, dk, dv, k_t, v_t, w_t, dk_t, dv_t, start, end, grad_matrices, vectors, grad_vectors, v_mean, v_low,
    v_constant, e,
    ORDER: tl.constexpr, WEIGHTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`key_gradients` for heads whose dS and dT do not fit a program: BD of their rows at a time, read when needed."""
    chunks: tl.constexpr = (D + BD - 1) // BD
    dtype: tl.constexpr = k.dtype.element_ty
    k_t, v_t, dk_t, dv_t = k_t * UNIT, v_t * UNIT, dk_t * UNIT, dv_t * UNIT
    n = tl.arange(0, N)
    for at in tl.range(start, end, N, num_stages=STAGES):
        rows = at + n
        valid = rows < end
        far = rows.to(tl.int64)[:, None]
        y = tl.load(v + far * v_t + e[None, :], mask=tile_mask(valid, e, E, False), other=0.0)
        present = valid
        if WEIGHTED:
            present, weights = weigh(w, w_t, rows, end)
        y = centred(y, v_mean, v_low, present)
        dy = tl.zeros((N, BE), tl.float32) + v_constant[None, :]
        for i in range(chunks):
            d = i * BD + tl.arange(0, BD)
            dS = matrix(grad_matrices, d, e, D, E).to(dtype)
            x = tl.load(k + far * k_t + d[None, :], mask=tile_mask(valid, d, D, False), other=0.0)
            low = tl.load(vectors + 2 * D + E + 1 + d, mask=d < D, other=0.0)
            x = centred(x, tl.load(vectors + d, mask=d < D, other=0.0), low, present)
            dy = dot(cast(x, dtype), dS, dy, PRECISION)
            if ORDER == 3:
                dT = matrix(grad_matrices + D * E, d, e, D, E)
                k_constant = tl.load(grad_vectors + d, mask=d < D, other=0.0)
                dx = 2.0 * x * dot(cast(y, dT.dtype), tl.trans(dT), None, PRECISION) - k_constant[None, :]
                dx = dot(cast(y, dtype), tl.trans(dS), dx, PRECISION)
                dy = dot(cast(x * x, dT.dtype), dT, dy, PRECISION)
            else:
                dx = dot(cast(y, dtype), tl.trans(dS), None, PRECISION)
            if WEIGHTED:
                dx = tl.where(present[:, None], dx * weights[:, None], 0.0)
            tl.store(dk + far * dk_t + d[None, :], cast(dx, dtype), mask=tile_mask(valid, d, D, False))
        if WEIGHTED:
            dy = tl.where(present[:, None], dy * weights[:, None], 0.0)
        tl.store(dv + far * dv_t + e[None, :], cast(dy, dtype), mask=tile_mask(valid, e, E, False))
