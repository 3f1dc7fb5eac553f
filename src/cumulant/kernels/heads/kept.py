"""Which tokens say much, in one pass over them, and those taken out end to end and put back. No gradients.

Shape legend: B images, L tokens, T of all that are kept, C width, H heads of width E.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, on_device, padded

ELEMENTS = 8192  # of a tile


@triton.jit
def tell_kernel(
    x, query, mapped, bias, told, L, C, E, scale, xb, xt, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    WE: tl.constexpr,
):  # fmt: skip
    """Grid (B blocks): told = mean over heads of sigmoid(scale (mapped_h . layer_norm(x) + query_h . bias_h))."""
    blocks = (L + N - 1) // N
    b, n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * N + tl.arange(0, N)
    c, e = tl.arange(0, W), tl.arange(0, WE)
    there = (n < L)[:, None] & (c < C)[None, :]
    y = tl.load(x + b * xb + n.to(tl.int64)[:, None] * xt + c[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.where((c < C)[None, :], y - tl.sum(y, 1)[:, None] / C, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 1) / C + 1e-5)[:, None]
    total = tl.zeros((N,), tl.float32)
    for h in tl.static_range(H):
        u = tl.load(mapped + (h * (tl.num_programs(0) // blocks) + b) * C + c, mask=c < C, other=0.0).to(tl.float32)
        q = tl.load(query + (b * H + h) * E + e, mask=e < E, other=0.0).to(tl.float32)
        k = tl.load(bias + h * E + e, mask=e < E, other=0.0).to(tl.float32)
        logit = scale * (tl.sum(y * u[None, :], 1) + tl.sum(q * k, 0))
        total += 1.0 / (1.0 + tl.exp(-logit))
    tl.store(told + b * L + n, total / H, mask=n < L)


@triton.jit
def move_kernel(
    x, tokens, number, kept, L, C, xb, xt, N: tl.constexpr, W: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """Grid (B blocks): the kept rows of x (B, L, C) to their numbers in tokens (T, C), or back, and 0 elsewhere."""
    blocks = (L + N - 1) // N
    b, n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * N + tl.arange(0, N)
    c, row = tl.arange(0, W), b * L + n
    stays = tl.load(kept + row, mask=n < L, other=0) != 0
    place = tl.load(number + row, mask=stays, other=1).to(tl.int64) - 1
    here = x + b * xb + n.to(tl.int64)[:, None] * xt + c[None, :]
    there = tokens + place[:, None] * C + c[None, :]
    both = stays[:, None] & (c < C)[None, :]
    if OUT:
        tl.store(there, tl.load(here, mask=both, other=0.0), mask=both)
    else:
        tl.store(here, tl.load(there, mask=both, other=0.0), mask=(n < L)[:, None] & (c < C)[None, :])


def tell(x: Tensor, query: Tensor, mapped: Tensor, bias: Tensor, heads: int) -> Tensor:
    """x (B, L, C), query (B, C), the map of its keys turned on it, mapped (H, B, C), bias (C) of keys -> (B, L) in
    float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (B, L, C), E = x.shape, x.shape[-1] // heads
    told = torch.empty(B, L, dtype=torch.float32, device=x.device)
    N = max(1, ELEMENTS // padded(C))
    with on_device(x.device):
        tell_kernel[(B * cdiv(L, N),)](
            x, query.contiguous(), mapped.contiguous(), bias, told, L, C, E, E**-0.5, *x.stride()[:2],
            H=heads, N=N, W=padded(C), WE=padded(E), num_warps=4,
        )  # fmt: skip
    return told


def _move(x: Tensor, tokens: Tensor, number: Tensor, kept: Tensor, *, out: bool) -> None:
    B, L, C = x.shape
    N = max(1, ELEMENTS // padded(C))
    with on_device(x.device):
        move_kernel[(B * cdiv(L, N),)](
            x,
            tokens,
            number,
            kept.contiguous().view(torch.uint8),
            L,
            C,
            *x.stride()[:2],
            N=N,
            W=padded(C),
            OUT=out,
            num_warps=4,
        )


def taken_out(x: Tensor, number: Tensor, kept: Tensor, many: int) -> Tensor:
    """The rows of x (B, L, C) that are kept (B, L), in the order of `number` (B L), which counts them from 1."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens = x.new_empty(many, x.shape[-1])
    _move(x, tokens, number, kept, out=True)
    return tokens


def put_back(tokens: Tensor, number: Tensor, kept: Tensor) -> Tensor:
    """Tokens (T, C) at the places that they were taken from, (B, L, C); 0 elsewhere."""
    x = tokens.new_empty(*kept.shape, tokens.shape[-1])
    _move(x, tokens.contiguous(), number, kept, out=False)
    return x
