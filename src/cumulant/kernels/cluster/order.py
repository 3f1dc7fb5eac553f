"""Kernels that sort tokens by their cluster, and make the tables of `parts.py` on the way: `count_tokens` -> `offsets`
-> `place_tokens`, a counting sort in three launches. Tokens of a cluster stay in their order.

Shape legend: S sets of tables, L tokens, N tokens of a block, K clusters (KP padded), J blocks.

Grids have one dimension, whose other two hold 65,535 programs at most: there may be more sets than that.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import HAS_TRITON, INTERPRET, cdiv, on_device
from ..tokens import kernel
from .bounds import SORTABLE, padding

BLOCK = 128  # tokens of a block


@triton.jit
def clusters_of(ids, present, at, length_k, MASKED: tl.constexpr):
    """Cluster of each token `at`, -1 of those that take no part."""
    there = at < length_k
    if MASKED:
        there = there & (tl.load(present + at, mask=there, other=0) != 0)
    return tl.load(ids + at, mask=there, other=-1).to(tl.int32)


@kernel
def count_tokens(
    ids, present, counts, ids_b, length_k, per, blocks, MASKED: tl.constexpr, N: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """Grid (S J,). How many tokens of each block are in each cluster: counts (S, J, KP) int32. ids (S, L), present
    (S / per, L)."""
    block, s = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    at, c = block * N + tl.arange(0, N), tl.arange(0, KP)
    own = clusters_of(ids + s * ids_b, present + (s // per) * length_k, at, length_k, MASKED)
    number = tl.sum((c[:, None] == own[None, :]).to(tl.int32), 1)
    tl.store(counts + (s * blocks + block) * KP + c, number)


@kernel
def offsets(counts, places, bounds, logs, blocks, clusters, J: tl.constexpr, KP: tl.constexpr):
    """Grid (S,). Where the tokens of each block go, places (S, J, KP); bounds (S, 2, KP + 1) and logs (S, KP)."""
    s = tl.program_id(0).to(tl.int64)
    j, c = tl.arange(0, J)[:, None], tl.arange(0, KP)
    counts += s * blocks * KP
    places += s * blocks * KP
    number = tl.zeros((KP,), tl.int32)
    for first in range(0, blocks, J):
        number += tl.sum(tl.load(counts + (first + j) * KP + c[None, :], mask=first + j < blocks, other=0), 0)
    end = tl.cumsum(number, 0)
    start = end - number
    bounds += s * (2 * KP + 2)
    tl.store(bounds + c, tl.where(c < clusters, start, 0))
    tl.store(bounds + KP + 1 + c, tl.where(c < clusters, end, 0))
    tl.store(bounds + KP, 0)  # no prefix
    tl.store(bounds + 2 * KP + 1, 0)
    tl.store(logs + s * KP + c, tl.where(number > 0, tl.log2(tl.maximum(number, 1).to(tl.float32)), float("-inf")))
    for first in range(0, blocks, J):
        at = (first + j) * KP + c[None, :]
        here = tl.load(counts + at, mask=first + j < blocks, other=0)
        tl.store(places + at, start[None, :] + (tl.cumsum(here, 0) - here), mask=first + j < blocks)
        start += tl.sum(here, 0)


@kernel
def place_tokens(
    ids, present, places, order, ids_b, length_k, per, blocks, MASKED: tl.constexpr, N: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """Grid (S J,). order (S, L): the tokens by cluster, those that take no part left out."""
    block, s = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    ids += s * ids_b
    present += (s // per) * length_k
    mine, other = block * N + tl.arange(0, N)[:, None], block * N + tl.arange(0, N)[None, :]
    own = clusters_of(ids, present, mine, length_k, MASKED)
    before = (clusters_of(ids, present, other, length_k, MASKED) == own) & (other < mine)
    rank = tl.sum(before.to(tl.int32), 1)[:, None]
    first = tl.load(places + (s * blocks + block) * KP + own, mask=own >= 0, other=0)
    tl.store(order + s * length_k + first + rank, mine, mask=own >= 0)


def sortable(ids: Tensor, K: int) -> bool:
    """Whether these kernels can take ids (S, L) of K clusters."""
    return HAS_TRITON and ids.device.type == ("cpu" if INTERPRET else "cuda") and K <= SORTABLE and ids.shape[-1] > 0


def sorted_tables(ids: Tensor, present: Tensor | None, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """bounds, logs and order of tokens with clusters ids (S, L); present (S or fewer, L) bool: which take part."""
    with on_device(ids.device):
        return tables_on_device(ids if ids.stride(-1) == 1 else ids.contiguous(), present, K)


def tables_on_device(ids: Tensor, present: Tensor | None, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same on the current device, of ids with rows in one piece."""
    (S, L), KP, blocks = ids.shape, padding(K), cdiv(ids.shape[1], BLOCK)
    counts = torch.empty(S, blocks, KP, dtype=torch.int32, device=ids.device)
    places = torch.empty_like(counts)
    bounds, logs = counts.new_empty(S, 2, KP + 1), counts.new_empty(S, KP, dtype=torch.float32)
    # Nobody reads the place of a token that takes no part; still there is a number in it.
    order = counts.new_zeros(S, L) if present is not None else counts.new_empty(S, L)
    mask = counts if present is None else present.contiguous().view(torch.uint8)
    per = 1 if present is None else S // len(present)
    given = {"MASKED": present is not None, "N": BLOCK, "KP": KP}
    count_tokens[(S * blocks,)](
        ids, mask, counts, ids.stride(0), L, per, blocks, num_warps=8 if KP > 64 else 4, **given
    )
    offsets[(S,)](counts, places, bounds, logs, blocks, K, J=max(16, 4096 // KP), KP=KP, num_warps=8)
    place_tokens[(S * blocks,)](ids, mask, places, order, ids.stride(0), L, per, blocks, num_warps=4, **given)
    return bounds, logs, order
