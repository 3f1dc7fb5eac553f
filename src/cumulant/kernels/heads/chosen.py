"""Rows that were chosen, head by head: taken together, and put back at their places with their gates. No gradients.

Shape legend: B batch, R routed heads of H = S + R, L tokens, n rows of the head that has most, D width.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, on_device, padded, rows

BLOCK = 64  # tokens of a program


@triton.jit
def take_kernel(
    query, out, place, R, L, D, most, qb, qh, qt, BLOCK: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Grid (B R blocks): the chosen tokens of a block to their places."""
    blocks = (L + BLOCK - 1) // BLOCK
    slot, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    n, c = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W)
    to = tl.load(place + slot * L + n, mask=n < L, other=-1)
    both = (to >= 0)[:, None] & (c < D)[None, :]
    at = query + (slot // R) * qb + (slot % R) * qh + n.to(tl.int64)[:, None] * qt + c[None, :]
    tl.store(out + (slot * most + to)[:, None] * D + c[None, :], tl.load(at, mask=both, other=0.0), mask=both)


@triton.jit
def put_kernel(
    shared, found, out, place, gates, S, R, L, D, sb, sh, st, fb, fh, ft, gb, gt,
    BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Grid (B H blocks): the rows of a head times their gates, 0 where a token did not choose it; out (B, L, H, D)."""
    blocks, H = (L + BLOCK - 1) // BLOCK, S + R
    slot, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    b, head = slot // H, slot % H
    n, c = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W)
    inside = (n < L)[:, None] & (c < D)[None, :]
    gate = tl.load(gates + b * gb + n.to(tl.int64) * gt + head, mask=n < L, other=0.0).to(tl.float32)
    if head < S:
        at = shared + b * sb + head * sh + n.to(tl.int64)[:, None] * st + c[None, :]
        x = tl.load(at, mask=inside, other=0.0)
    else:
        row = tl.load(place + (b * R + head - S) * L + n, mask=n < L, other=-1)
        at = found + b * fb + (head - S) * fh + row.to(tl.int64)[:, None] * ft + c[None, :]
        x = tl.load(at, mask=(row >= 0)[:, None] & inside, other=0.0)
    to = out + ((b * L + n.to(tl.int64)) * H + head)[:, None] * D + c[None, :]
    tl.store(to, (x.to(tl.float32) * gate[:, None]).to(out.dtype.element_ty), mask=inside)


def take(query: Tensor, place: Tensor, most: int) -> Tensor:
    """query (B, R, L, D) and the places (B, R, L) of its rows, -1 for those left out -> (B, R, most, D), 0 after a
    head's last row."""
    query, (B, R, L, D) = rows(query), query.shape
    out = query.new_zeros(B, R, most, D)
    with on_device(query.device):
        take_kernel[(B * R * cdiv(L, BLOCK),)](
            query, out, place, R, L, D, most, *query.stride()[:3], BLOCK=BLOCK, W=padded(D), num_warps=4
        )
    return out


def put(shared: Tensor | None, found: Tensor, place: Tensor, gates: Tensor) -> Tensor:
    """shared (B, S, L, D) of heads that all tokens use, found (B, R, n, D) of `take`, gates (B, L, H) -> (B, H, L, D)
    whose heads lie side by side in memory."""
    found, (B, R, L), D = rows(found), place.shape, found.shape[-1]
    shared = found[:, :0] if shared is None else rows(shared)
    S = shared.shape[1]
    out = found.new_empty(B, L, S + R, D)
    gates = gates if gates.stride(-1) == 1 else gates.contiguous()
    with on_device(found.device):
        put_kernel[(B * (S + R) * cdiv(L, BLOCK),)](
            shared, found, out, place, gates, S, R, L, D,
            *shared.stride()[:3], *found.stride()[:3], gates.stride(0), gates.stride(1),
            BLOCK=BLOCK, W=padded(D), num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2)
