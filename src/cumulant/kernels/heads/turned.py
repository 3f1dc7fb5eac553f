"""z -> gain |z| exp(i (delta phase z + b + place g)) in one pass over the tokens, forward and backward.

Shape legend: B batch, H heads, L tokens, h complex channels, D = 2 h; channel c of z pairs with c + h, and the parts
of the result stand side by side, 2 c and 2 c + 1.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, empty_like_rows, on_device, padded, rows
from ..once import once_differentiable

BLOCK = 64  # tokens of a program


@triton.jit
def atan2(y, x):
    """In float32, to 2e-7: Cephes' polynomial on the octant, then the reflections."""
    ax, ay = tl.abs(x), tl.abs(y)
    t = tl.minimum(ax, ay) / tl.maximum(tl.maximum(ax, ay), 1e-38)
    high = t > 0.41421356237
    u = tl.where(high, (t - 1.0) / (t + 1.0), t)
    z = u * u
    p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    r = p * z * u + u + tl.where(high, 0.78539816339745, 0.0)
    r = tl.where(ay > ax, 1.57079632679490 - r, r)
    r = tl.where(x < 0, 3.14159265358979 - r, r)
    return tl.where(y < 0, -r, r)


@triton.jit
def sincos(a):
    """In float32, to 1e-7 for |a| up to some thousands: Cephes' polynomials on a quarter turn, which both share."""
    turns = tl.floor(a * 0.63661977236758 + 0.5)
    r = a - turns * 1.5703125 - turns * 4.837512969970703e-4 - turns * 7.549789954891882e-8
    z = r * r
    s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    quarter = turns.to(tl.int32) & 3
    odd = (quarter & 1) != 0
    sin, cos = tl.where(odd, c, s), tl.where(odd, s, c)
    return tl.where(quarter >= 2, -sin, sin), tl.where((quarter == 1) | (quarter == 2), -cos, cos)


@triton.jit
def turn(angle, cosines, sines, n, c, h, there, PLACES: tl.constexpr):
    """Sine and cosine of the angle, and of that of the place with it."""
    sin, cos = sincos(angle)
    if PLACES:
        at = n.to(tl.int64)[:, None] * h + c[None, :]
        C, S = tl.load(cosines + at, mask=there, other=1.0), tl.load(sines + at, mask=there, other=0.0)
        sin, cos = sin * C + cos * S, cos * C - sin * S
    return sin, cos


@triton.jit
def _at(x, b, head, n, c, sb, sh, st):
    return x + b.to(tl.int64) * sb + head.to(tl.int64) * sh + n.to(tl.int64)[:, None] * st + c[None, :]


@triton.jit
def turned_kernel(
    z, out, delta, shift, cosines, sines, gain, H, S, L, h,
    zb, zh, zt, ob, oh, ot, BLOCK: tl.constexpr, W: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Grid (B H blocks): a block of tokens of one head. Heads from S on are keys, without shift and gain."""
    blocks = (L + BLOCK - 1) // BLOCK
    slot, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, head = slot // H, slot % H
    n, c = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W)
    there = (n < L)[:, None] & (c < h)[None, :]
    at = _at(z, b, head, n, c, zb, zh, zt)
    x, y = tl.load(at, mask=there, other=0.0).to(tl.float32), tl.load(at + h, mask=there, other=0.0).to(tl.float32)
    asks = head < S
    own = tl.where(asks, head, head - S) * h + c
    angle = tl.load(delta + own, mask=c < h, other=0.0).to(tl.float32)[None, :] * atan2(y, x)
    angle += tl.where(asks, tl.load(shift + own, mask=c < h, other=0.0).to(tl.float32), 0.0)[None, :]
    sin, cos = turn(angle, cosines, sines, n, c, h, there, PLACES)
    size = tl.where(asks, gain, 1.0) * tl.sqrt(x * x + y * y)
    both, d = tl.interleave(size * cos, size * sin), tl.arange(0, 2 * W)
    to = _at(out, b, head, n, d, ob, oh, ot)
    tl.store(to, both.to(out.dtype.element_ty), mask=(n < L)[:, None] & (d < 2 * h)[None, :])


@triton.jit
def turned_backward_kernel(
    z, grad, dz, delta, shift, cosines, sines, sums, gain, H, L, h,
    zb, zh, zt, gb, gh, gt, db, dh, dt, BLOCK: tl.constexpr, W: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The same grid; sums (B H blocks, 2, h) of the gradients of delta and shift over the block."""
    blocks = (L + BLOCK - 1) // BLOCK
    slot, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, head = slot // H, slot % H
    n, c = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W)
    there = (n < L)[:, None] & (c < h)[None, :]
    at = _at(z, b, head, n, c, zb, zh, zt)
    x, y = tl.load(at, mask=there, other=0.0).to(tl.float32), tl.load(at + h, mask=there, other=0.0).to(tl.float32)
    of = _at(grad, b, head, n, 2 * c, gb, gh, gt)
    p, q = tl.load(of, mask=there, other=0.0).to(tl.float32), tl.load(of + 1, mask=there, other=0.0).to(tl.float32)
    d = tl.load(delta + head * h + c, mask=c < h, other=0.0)[None, :]
    phase = atan2(y, x)
    angle = d * phase + tl.load(shift + head * h + c, mask=c < h, other=0.0)[None, :]
    sin, cos = turn(angle, cosines, sines, n, c, h, there, PLACES)
    square = x * x + y * y
    size, inverse = tl.sqrt(square), tl.where(square > 0, 1.0 / tl.maximum(square, 1e-38), 0.0)
    along = gain * (p * cos + q * sin) * size * inverse  # of |z|, over it
    around = gain * size * (q * cos - p * sin)  # of the angle
    across = around * d * inverse
    to = _at(dz, b, head, n, c, db, dh, dt)
    tl.store(to, (along * x - across * y).to(dz.dtype.element_ty), mask=there)
    tl.store(to + h, (along * y + across * x).to(dz.dtype.element_ty), mask=there)
    place = sums + tl.program_id(0).to(tl.int64) * 2 * h + c
    tl.store(place, tl.sum(tl.where(there, around * phase, 0.0), 0), mask=c < h)
    tl.store(place + h, tl.sum(tl.where(there, around, 0.0), 0), mask=c < h)


def launched(
    z: Tensor, delta: Tensor, shift: Tensor, tables: Sequence[Tensor], places: bool, gain: float, asking: int
) -> Tensor:
    """z (B, H, L, D) turned, of which the first `asking` heads are queries, the others keys. No gradients."""
    out, (B, H, L, D) = empty_like_rows(z, z.shape[-1]), z.shape
    with on_device(z.device):
        turned_kernel[(B * H * cdiv(L, BLOCK),)](
            z, out, delta, shift, *tables, gain, H, asking, L, D // 2, *z.stride()[:3], *out.stride()[:3],
            BLOCK=BLOCK, W=padded(D // 2), PLACES=places, num_warps=4,
        )  # fmt: skip
    return out


def turned_both(
    query: Tensor, key: Tensor, delta: Tensor, shift: Tensor, places: Sequence[Tensor] | None, gain: float
) -> tuple[Tensor, Tensor] | None:
    """Query and key (B, H, L, D) turned in one launch, where they lie beside each other as one projection leaves them;
    None where they do not. The keys have no shift and no gain. No gradients."""
    (B, H, L, D), steps = query.shape, query.stride()
    beside = key.data_ptr() == query.data_ptr() + H * steps[1] * query.element_size()
    if not beside or key.shape != query.shape or key.stride() != steps or rows(query) is not query:
        return None
    tables = places or (delta, delta)
    both = query.as_strided((B, 2 * H, L, D), steps)
    out = launched(both, delta.contiguous(), shift.contiguous(), tables, places is not None, gain, H)
    return out[:, :H], out[:, H:]


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, delta: Tensor, shift: Tensor, cosines: Tensor | None, sines: Tensor | None, gain: float
    ) -> Tensor:
        z, delta, shift = rows(z), delta.contiguous(), shift.contiguous()
        tables = (delta, delta) if cosines is None or sines is None else (cosines, sines)
        out = launched(z, delta, shift, tables, cosines is not None, gain, z.shape[1])
        ctx.save_for_backward(z, delta, shift, *tables)
        ctx.known = cosines is not None, gain
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, delta, shift, *tables = ctx.saved_tensors
        (places, gain), (B, H, L, D) = ctx.known, z.shape
        grad, dz, blocks = rows(grad), empty_like_rows(z, D), cdiv(L, BLOCK)
        sums = torch.empty(B, H, blocks, 2, D // 2, dtype=torch.float32, device=z.device)
        with on_device(z.device):
            turned_backward_kernel[(B * H * blocks,)](
                z, grad, dz, delta, shift, *tables, sums, gain, H, L, D // 2,
                *z.stride()[:3], *grad.stride()[:3], *dz.stride()[:3],
                BLOCK=BLOCK, W=padded(D // 2), PLACES=places, num_warps=4,
            )  # fmt: skip
        of_delta, of_shift = sums.sum((0, 2)).unbind(1)
        return dz, of_delta, of_shift, None, None, None


def turned(z: Tensor, delta: Tensor, shift: Tensor, places: Sequence[Tensor] | None, gain: float) -> Tensor:
    """z (B, H, L, D) of 16 or 32 bits, delta and shift (H, h) and cosine and sine of the angle of each place (L, h) in
    float32 -> (B, H, L, D)."""
    return _Turned.apply(z, delta, shift, *(places or (None, None)), gain)
