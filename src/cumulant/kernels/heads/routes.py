"""Which heads a token uses and which regions a region looks at, each in one or two passes. No gradients.

Shape legend: B batch, L tokens, S shared and R routed heads, H = S + R, K chosen of R; or R regions of w tokens, C
channels of H heads of width D.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, on_device, padded, rows
from .regions import token

BLOCK = 64  # tokens of a program


@triton.jit
def gates_kernel(
    logits, gates, place, counts, L, S, R, K, EPS, lb, lt, first_routed, first_stage,
    N: tl.constexpr, WS: tl.constexpr, WR: tl.constexpr,
    WEIGHED: tl.constexpr, STAGES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Grid (B blocks): gates (B, L, H) of N tokens, and the places (B, R, L) of their rows, -1 where not chosen.

    Rows of a head stand in no certain order: each block takes the next free places of the count of its head.
    """
    blocks = (L + N - 1) // N
    b, n = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * N + tl.arange(0, N)
    inside, r, s = n < L, tl.arange(0, WR), tl.arange(0, WS)
    at, to = logits + b * lb + n.to(tl.int64)[:, None] * lt, gates + (b * L + n)[:, None] * (S + R)
    there = inside[:, None] & (r < R)[None, :]
    x = tl.load(at + first_routed + r[None, :], mask=there, other=float("-inf")).to(tl.float32)
    x = tl.where(inside[:, None], x, 0.0)
    p = tl.exp(x - tl.max(x, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    before = tl.zeros((N, WR), tl.int32)
    for j in range(R):
        other = tl.sum(tl.where((r == j)[None, :], p, 0.0), 1)[:, None]
        before += ((other > p) | ((other == p) & (j < r)[None, :])).to(tl.int32)
    m = (before < K) & there
    chosen = tl.where(m, p, 0.0)
    g = chosen / tl.maximum(tl.sum(chosen, 1), EPS)[:, None] * K
    common = tl.full((N, WS), 1.0, tl.float32)
    here = inside[:, None] & (s < S)[None, :]
    if WEIGHED:
        y = tl.load(at + s[None, :], mask=here, other=float("-inf")).to(tl.float32)
        y = tl.where(inside[:, None], y, 0.0)
        y = tl.exp(y - tl.max(y, 1)[:, None])
        common = y / tl.sum(y, 1)[:, None] * S
    if STAGES:
        one = tl.load(at + first_stage, mask=inside[:, None], other=0.0).to(tl.float32)
        two = tl.load(at + first_stage + 1, mask=inside[:, None], other=0.0).to(tl.float32)
        both = tl.maximum(one, two)
        one, two = tl.exp(one - both), tl.exp(two - both)
        common, g = common * (2.0 * one / (one + two)), g * (2.0 * two / (one + two))
    tl.store(to + s[None, :], common, mask=here)
    tl.store(to + S + r[None, :], g, mask=there)
    if PLACES:
        taken = m.to(tl.int32)
        free = tl.atomic_add(counts + b * R + r, tl.sum(taken, 0), mask=r < R)
        number = free[None, :] + tl.cumsum(taken, 0) - 1
        tl.store(place + (b * R + r)[None, :] * L + n[:, None], tl.where(m, number, -1), mask=there)


def routed(
    logits: Tensor, sizes: tuple[int, int, int], *, weighed: bool, stages: bool, places: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """logits (B, L, [S] + R + [2]) and sizes (S, R, K) -> gates (B, L, H) in float32; with `places`, where the row of a
    token stands among those that chose a head, (B, R, L), -1 if it did not, and how many did, (B, R)."""
    (S, R, K), (B, L, _) = sizes, logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    gates = torch.empty(B, L, S + R, dtype=torch.float32, device=logits.device)
    place = torch.empty(B, R, L, dtype=torch.int32, device=logits.device) if places else None
    counts = torch.zeros(B, R, dtype=torch.int32, device=logits.device) if places else None
    first = S if weighed else 0
    with on_device(logits.device):
        gates_kernel[(B * cdiv(L, BLOCK),)](
            logits, gates, place, counts, L, S, R, K, torch.finfo(torch.float32).eps, *logits.stride()[:2],
            first, first + R, N=BLOCK, WS=padded(S, 2), WR=padded(R, 2), WEIGHED=weighed, STAGES=stages, PLACES=places,
            num_warps=4,
        )  # fmt: skip
    return gates, place, counts


@triton.jit
def means_kernel(
    query, key, means, B, R, C, D, w, wide, down, across, cols, qb, qh, qt, kb, kh, kt,
    N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Grid (B R): the mean query and the mean key of one region; means (2, B, R, C)."""
    slot, c = tl.program_id(0).to(tl.int64), tl.arange(0, W)
    b, region, head = slot // R, tl.program_id(0) % R, (c // D).to(tl.int64)
    of_query, of_key = query + b * qb + head * qh + c % D, key + b * kb + head * kh + c % D
    q, k = tl.zeros((W,), tl.float32), tl.zeros((W,), tl.float32)
    for start in range(0, w, N):
        n = start + tl.arange(0, N)
        at = token(region, n, wide, down, across, cols).to(tl.int64)[:, None]
        there = (n < w)[:, None] & (c < C)[None, :]
        q += tl.sum(tl.load(of_query[None, :] + at * qt, mask=there, other=0.0).to(tl.float32), 0)
        k += tl.sum(tl.load(of_key[None, :] + at * kt, mask=there, other=0.0).to(tl.float32), 0)
    tl.store(means + slot * C + c, q / w, mask=c < C)
    tl.store(means + (B * R + slot) * C + c, k / w, mask=c < C)


@triton.jit
def choose_kernel(means, chosen, B, R, C, K, WR: tl.constexpr, N: tl.constexpr):
    """Grid (B R): the K regions of largest mean query times mean key, the first of equals."""
    slot, r = tl.program_id(0).to(tl.int64), tl.arange(0, WR)
    keys = means + (B * R + slot // R * R) * C
    related = tl.zeros((WR,), tl.float32)
    for start in range(0, C, N):
        c = start + tl.arange(0, N)
        q = tl.load(means + slot * C + c, mask=c < C, other=0.0)
        k = tl.load(keys + r[:, None] * C + c[None, :], mask=(r < R)[:, None] & (c < C)[None, :], other=0.0)
        related += tl.sum(k * q[None, :], 1)
    related = tl.where(r < R, related, float("-inf"))
    for one in range(K):
        best = tl.minimum(tl.argmax(related, 0), R - 1)
        tl.store(chosen + slot * K + one, best)
        related = tl.where(r == best, float("-inf"), related)


def related_regions(query: Tensor, key: Tensor, layout: tuple[int, int, int, int], top: int) -> Tensor:
    """query, key (B, H, L, D) of a grid without padding, layout as of `attend_regions` -> (B, R, top) in int32."""
    query, key, (B, H, _, D) = rows(query), rows(key), query.shape
    high, down, wide, across = layout
    R, C, w = high * wide, H * D, down * across
    means = torch.empty(2, B, R, C, dtype=torch.float32, device=query.device)
    chosen = torch.empty(B, R, top, dtype=torch.int32, device=query.device)
    with on_device(query.device):
        means_kernel[(B * R,)](
            query, key, means, B, R, C, D, w, wide, down, across, wide * across, *query.stride()[:3], *key.stride()[:3],
            N=max(1, 2048 // padded(C)), W=padded(C), num_warps=4,
        )  # fmt: skip
        choose_kernel[(B * R,)](means, chosen, B, R, C, top, WR=padded(R), N=max(16, 2048 // padded(R)), num_warps=4)
    return chosen
