"""Which tokens say much, in one pass over them, and those taken out end to end and put back. No gradients.

Shape legend: B images, L tokens, T of all that are kept, C width, H heads of width E.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, on_device, padded
from ..tokens import kernel

ELEMENTS = 8192  # of a tile


@kernel
def ask_kernel(first, weight, bias, asked, apart, C, E, step, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Grid (B H): what the first token asks of all others, the map of the keys turned on its query, and q . bias."""
    b, h, c = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.arange(0, W)
    y = tl.load(first + b * step + c, mask=c < C, other=0.0).to(tl.float32)
    y = tl.where(c < C, y - tl.sum(y, 0) / C, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / C + 1e-5)
    mapped, constant = tl.zeros((W,), tl.float32), 0.0
    for start in range(0, E, N):
        e = start + tl.arange(0, N)
        row, there = h * E + e, (e < E)[:, None] & (c < C)[None, :]
        of_query = tl.load(weight + row[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
        of_key = tl.load(weight + (row + C)[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
        q = tl.sum(of_query * y[None, :], 1) + tl.load(bias + row, mask=e < E, other=0.0).to(tl.float32)
        mapped += tl.sum(of_key * q[:, None], 0)
        constant += tl.sum(q * tl.load(bias + C + row, mask=e < E, other=0.0).to(tl.float32), 0)
    tl.store(asked + tl.program_id(0).to(tl.int64) * C + c, mapped, mask=c < C)
    tl.store(apart + tl.program_id(0), constant)


@kernel
def tell_kernel(
    x, asked, apart, told, kept, L, C, scale, threshold, xb, xt, H: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    DECIDES: tl.constexpr,
):  # fmt: skip
    """Grid (B blocks): told = mean over heads of sigmoid(scale (asked_h . layer_norm(x) + apart_h)), and which are
    above the threshold, or the first."""
    blocks = (L + N - 1) // N
    b, n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * N + tl.arange(0, N)
    c = tl.arange(0, W)
    there = (n < L)[:, None] & (c < C)[None, :]
    y = tl.load(x + b * xb + n.to(tl.int64)[:, None] * xt + c[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.where((c < C)[None, :], y - tl.sum(y, 1)[:, None] / C, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 1) / C + 1e-5)[:, None]
    total = tl.zeros((N,), tl.float32)
    for h in tl.static_range(H):
        u = tl.load(asked + (b * H + h) * C + c, mask=c < C, other=0.0)
        logit = scale * (tl.sum(y * u[None, :], 1) + tl.load(apart + b * H + h))
        total += 1.0 / (1.0 + tl.exp(-logit))
    tl.store(told + b * L + n, total / H, mask=n < L)
    if DECIDES:
        tl.store(kept + b * L + n, ((total / H > threshold) | (n == 0)).to(tl.uint8), mask=n < L)


@kernel
def number_kernel(kept, number, ends, L, N: tl.constexpr):
    """Grid (B): how many tokens are kept up to each one, of all images, and where each image's end."""
    b, n = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    before = 0
    for start in range(0, b * L, N):
        before += tl.sum(tl.load(kept + start + n, mask=start + n < b * L, other=0).to(tl.int32), 0)
    if b == 0:
        tl.store(ends, 0)
    for start in range(0, L, N):
        at = start + n
        stays = tl.load(kept + b * L + at, mask=at < L, other=0).to(tl.int32)
        tl.store(number + b * L + at, before + tl.cumsum(stays, 0), mask=at < L)
        before += tl.sum(stays, 0)
    tl.store(ends + b + 1, before)


@kernel
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


def tell(
    x: Tensor, first: Tensor, weight: Tensor, bias: Tensor, heads: int, threshold: float | None = None
) -> tuple[Tensor, Tensor]:
    """x (B, L, C), the first token (B, C) that asks, weight (2 C, C) and bias (2 C) of its query and of the keys ->
    how much each token says, (B, L) in float32, and which are kept, bool (B, L); nothing is in that without threshold.
    """
    x, first = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, first))
    (B, L, C), E = x.shape, x.shape[-1] // heads
    asked, told = (torch.empty(*shape, dtype=torch.float32, device=x.device) for shape in ((B, heads, C + 1), (B, L)))
    apart = asked.view(-1)[B * heads * C :]
    kept = torch.empty(B, L, dtype=torch.bool, device=x.device)
    N = max(1, ELEMENTS // padded(C))
    with on_device(x.device):
        ask_kernel[(B * heads,)](
            first, weight.contiguous(), bias, asked, apart, C, E, first.stride(0), H=heads, N=N, W=padded(C),
            num_warps=4,
        )  # fmt: skip
        tell_kernel[(B * cdiv(L, N),)](
            x, asked, apart, told, kept.view(torch.uint8), L, C, E**-0.5, 0.0 if threshold is None else threshold,
            *x.stride()[:2], H=heads, N=N, W=padded(C), DECIDES=threshold is not None, num_warps=4,
        )  # fmt: skip
    return told, kept


def numbered(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of tokens kept (B, L): how many are up to each, counted through all images, (B L), and where each image's begin
    and end, (B + 1), both in int32."""
    kept, (B, L) = kept.contiguous(), kept.shape
    number, ends = (torch.empty(count, dtype=torch.int32, device=kept.device) for count in (B * L, B + 1))
    with on_device(kept.device):
        number_kernel[(B,)](kept.view(torch.uint8), number, ends, L, N=min(4096, padded(L)), num_warps=8)
    return number, ends


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


def taken_out(x: Tensor, number: Tensor, kept: Tensor, room: int) -> Tensor:
    """The rows of x (B, L, C) that are kept (B, L), in the order of `number` (B L), which counts them from 1, as
    (room, C); rows after the last are not written."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens = x.new_empty(room, x.shape[-1])
    _move(x, tokens, number, kept, out=True)
    return tokens


def put_back(tokens: Tensor, number: Tensor, kept: Tensor) -> Tensor:
    """Tokens (T, C) at the places that they were taken from, (B, L, C); 0 elsewhere."""
    x = tokens.new_empty(*kept.shape, tokens.shape[-1])
    _move(x, tokens.contiguous(), number, kept, out=False)
    return x
