"""Kernels of the small products between the covariance and the map of tokens. Formulas and shape legend: host.py."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ..products import cast, dot, finished


@triton.jit
def rows_of(x, first, columns, D, C, stride, BD: tl.constexpr):
    """Rows first, ..., first + D - 1 of x, padded to BD, and the given columns; 0 outside."""
    d = tl.arange(0, BD)
    at = (first + d)[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(x + at, mask=(d < D)[:, None] & (columns < C)[None, :], other=0.0)


@triton.jit
def gram(x, y, first_x, first_y, D, C, stride_x, stride_y, BD: tl.constexpr, N: tl.constexpr):
    """x y^T (BD, BD) of D rows of each, over C columns."""
    acc = tl.zeros((BD, BD), tl.float32)
    for at in range(0, C, N):
        columns = at + tl.arange(0, N)
        a = rows_of(x, first_x, columns, D, C, stride_x, BD)
        b = rows_of(y, first_y, columns, D, C, stride_y, BD)
        acc = dot(a, tl.trans(b), acc, "ieee")
    return acc


@triton.jit
def read_kernel(
    A, qkv, bias, mean, R, C, K, D, heads, groups, tiles, wide, scale,
    BIAS: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Grid (B heads tiles). W columns of S_h Wq_h, and for the first tile Wv <x> + bv + S_h bq_h in column C."""
    pid = tl.program_id(0)
    tile, h, b = pid % tiles, pid // tiles % heads, (pid // (tiles * heads)).to(tl.int64)
    kv = h // groups
    key, value = qkv + C.to(tl.int64) * C, qkv + (C + K).to(tl.int64) * C
    A += b * K * C
    R += (b * C + h * D) * wide
    S = cast(gram(A, key, kv * D, kv * D, D, C, C, C, BD, N) * scale, A.dtype.element_ty)  # (value, key)
    columns = tile * W + tl.arange(0, W)
    d = tl.arange(0, BD)
    out = dot(S, rows_of(qkv, h * D, columns, D, C, C, BD), None, "ieee")
    at = d[:, None] * wide + columns[None, :]
    tl.store(R + at, cast(out, R.dtype.element_ty), mask=(d < D)[:, None] & (columns < C)[None, :])
    if tile == 0:
        inner = tl.zeros((BD,), tl.float32)
        for start in range(0, C, N):
            c = start + tl.arange(0, N)
            m = tl.load(mean + b * C + c, mask=c < C, other=0.0)
            inner += tl.sum(rows_of(value, kv * D, c, D, C, C, BD).to(tl.float32) * m[None, :], 1)
        if BIAS:
            q = tl.load(bias + h * D + d, mask=d < D, other=0.0).to(tl.float32)
            inner += tl.sum(S.to(tl.float32) * q[None, :], 1)
            inner += tl.load(bias + C + K + kv * D + d, mask=d < D, other=0.0).to(tl.float32)
        rest = tl.arange(0, 16)
        column = tl.where(rest[None, :] == 0, inner[:, None], 0.0)
        place = d[:, None] * wide + (C + rest)[None, :]
        tl.store(R + place, cast(column, R.dtype.element_ty), mask=(d < D)[:, None] & (rest < wide - C)[None, :])


@triton.jit
def turn_kernel(
    dR, A, qkv, bias, S, dS, C, K, D, heads, groups, wide, scale,
    BIAS: tl.constexpr, BD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (B heads). S_h again and its gradient times scale, (D, D) each: value, key."""
    pid = tl.program_id(0)
    h, b = pid % heads, (pid // heads).to(tl.int64)
    kv = h // groups
    key = qkv + C.to(tl.int64) * C
    d = tl.arange(0, BD)
    dR += (b * C + h * D) * wide
    found = gram(A + b * K * C, key, kv * D, kv * D, D, C, C, C, BD, N) * scale
    turned = gram(dR, qkv, 0, h * D, D, C, wide, C, BD, N)
    if BIAS:
        inner = tl.load(dR + d * wide + C, mask=d < D, other=0.0).to(tl.float32)
        q = tl.load(bias + h * D + d, mask=d < D, other=0.0).to(tl.float32)
        turned += inner[:, None] * q[None, :]
    at, mask = pid.to(tl.int64) * D * D + d[:, None] * D + d[None, :], (d < D)[:, None] & (d < D)[None, :]
    tl.store(S + at, cast(found, S.dtype.element_ty), mask=mask)
    tl.store(dS + at, cast(turned * scale, dS.dtype.element_ty), mask=mask)


@triton.jit
def weights_kernel(
    dR, A, qkv, S, dS, dA, dWq, dWk, dbq, C, K, D, heads, groups, tiles, wide, B, per,
    BIAS: tl.constexpr, BD: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Grid (key heads, tiles, chunks of `per` sequences). W columns of dA = dS Wk, and sums over the chunk for
    dWq = S^T dR, dWk = dS^T A and dbq."""
    pid = tl.program_id(0)
    kv_heads = heads // groups
    tile, kv, chunk = pid % tiles, pid // tiles % kv_heads, (pid // (tiles * kv_heads)).to(tl.int64)
    d, columns = tl.arange(0, BD), tile * W + tl.arange(0, W)
    mask = (d < D)[:, None] & (columns < C)[None, :]
    square, within = d[:, None] * D + d[None, :], (d < D)[:, None] & (d < D)[None, :]
    key = rows_of(qkv + C.to(tl.int64) * C, kv * D, columns, D, C, C, BD)
    start = chunk.to(tl.int32) * per
    end = tl.minimum(start + per, B)
    of_key = tl.zeros((BD, W), tl.float32)
    for i in range(groups):
        h = kv * groups + i
        of_query = tl.zeros((BD, W), tl.float32)
        of_bias = tl.zeros((BD,), tl.float32)
        for b in range(start, end):
            slot = (chunk * 0 + b) * heads + h
            s = tl.load(S + slot * D * D + square, mask=within, other=0.0)
            x = rows_of(dR + slot * D * wide, 0, columns, D, C, wide, BD)
            of_query = finished(dot(tl.trans(s), x, of_query, "ieee"))
            if BIAS:
                inner = tl.load(dR + slot * D * wide + d * wide + C, mask=d < D, other=0.0).to(tl.float32)
                of_bias += tl.sum(s.to(tl.float32) * inner[:, None], 0)
        at = chunk * C * C + (h * D + d)[:, None].to(tl.int64) * C + columns[None, :]
        tl.store(dWq + at, of_query, mask=mask)
        if BIAS:
            tl.store(dbq + chunk * C + h * D + d, of_bias, mask=d < tl.where(tile == 0, D, 0))
    for b in range(start, end):
        out = tl.zeros((BD, W), tl.float32)
        a = rows_of(A + (chunk * 0 + b) * K * C, kv * D, columns, D, C, C, BD)
        for i in range(groups):
            slot = (chunk * 0 + b) * heads + kv * groups + i
            g = tl.load(dS + slot * D * D + square, mask=within, other=0.0)
            out = dot(g, key, out, "ieee")
            of_key = dot(tl.trans(g), a, of_key, "ieee")
        at = ((chunk * 0 + b) * K + kv * D + d[:, None]) * C + columns[None, :]
        tl.store(dA + at, cast(out, dA.dtype.element_ty), mask=mask)
    at = chunk * K * C + (kv * D + d)[:, None].to(tl.int64) * C + columns[None, :]
    tl.store(dWk + at, of_key, mask=mask)


@triton.jit
def symmetric_kernel(dG, mean, inner, value, out, constant, over_L, C, K, tiles, W: tl.constexpr):
    """Grid (B tiles). W columns of D = (dG + dG^T) / L, and inner Wv / L - <x> D of these."""
    j, b = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    n = tl.arange(0, W)
    columns = j * W + n
    dG, out = dG + b * C * C, out + b * C * C
    total = tl.zeros((W,), tl.float32)
    for start in range(0, C, W):
        rows = start + n
        inside = (rows < C)[:, None] & (columns < C)[None, :]
        g = tl.load(dG + rows[:, None] * C + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        t = tl.load(dG + columns[:, None] * C + rows[None, :], mask=tl.trans(inside), other=0.0).to(tl.float32)
        rounded = cast((g + tl.trans(t)) * over_L, out.dtype.element_ty)
        tl.store(out + rows[:, None] * C + columns[None, :], rounded, mask=inside)
        m = tl.load(mean + b * C + rows, mask=rows < C, other=0.0)
        total -= tl.sum(m[:, None] * rounded.to(tl.float32), 0)
    for start in range(0, K, W):
        e = start + n
        x = tl.load(
            value + e[:, None] * C + columns[None, :], mask=(e < K)[:, None] & (columns < C)[None, :], other=0.0
        )
        total += tl.sum(tl.load(inner + b * K + e, mask=e < K, other=0.0)[:, None] * x.to(tl.float32), 0) * over_L
    tl.store(constant + b * C + columns, total, mask=columns < C)


@triton.jit
def affine_kernel(
    x, M, z, D, c, extra, y, L, C, x_b, x_t, M_b, M_t, z_b, z_t, c_b, c_t, rows, columns,
    TURNED: tl.constexpr, TWO: tl.constexpr, EXTRA: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (B rows columns): a tile of x M^T (TURNED) or x M, of + z D where there are TWO, and of + c + extra."""
    pid = tl.program_id(0)
    j, i, b = pid % columns, pid // columns % rows, (pid // (columns * rows)).to(tl.int64)
    r, n, k = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    seen, inside = (r < L)[:, None], n < C
    acc = tl.zeros((BM, BN), tl.float32)
    left = x + b * x_b + r[:, None].to(tl.int64) * x_t + k[None, :]
    if TURNED:
        right, step = M + b * M_b + n[None, :] * M_t + k[:, None], 1
    else:
        right, step = M + b * M_b + k[:, None] * M_t + n[None, :], M_t
    for at in tl.range(0, C, BK, num_stages=STAGES):
        if EVEN:
            p, q = tl.load(left, mask=seen, other=0.0), tl.load(right)
        else:
            p = tl.load(left, mask=seen & (at + k < C)[None, :], other=0.0)
            q = tl.load(right, mask=(at + k < C)[:, None] & inside[None, :], other=0.0)
        acc = dot(p, q, acc, "ieee")
        left += BK
        right += BK * step
    if TWO:
        left = z + b * z_b + r[:, None].to(tl.int64) * z_t + k[None, :]
        right = D + b * C * C + k[:, None] * C + n[None, :]
        for at in tl.range(0, C, BK, num_stages=STAGES):
            if EVEN:
                p, q = tl.load(left, mask=seen, other=0.0), tl.load(right)
            else:
                p = tl.load(left, mask=seen & (at + k < C)[None, :], other=0.0)
                q = tl.load(right, mask=(at + k < C)[:, None] & inside[None, :], other=0.0)
            acc = dot(p, q, acc, "ieee")
            left += BK
            right += BK * C
    constant = tl.load(c + b * c_b + n * c_t, mask=inside, other=0.0).to(tl.float32)
    if EXTRA:
        constant += tl.load(extra + n, mask=inside, other=0.0).to(tl.float32)
    out = y + (b * L + r[:, None]) * C + n[None, :]
    tl.store(out, cast(acc + constant[None, :], y.dtype.element_ty), mask=seen & inside[None, :])
