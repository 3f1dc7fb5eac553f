"""Launches that order tokens by a tree. Kernels: halves.py. Nothing here waits for the GPU.

Shape legend: N heads of all sequences, L tokens (P padded), S columns.

| tokens of a node | launches a level |
|---|---|
| up to ALONE | 1: a program finds the direction, the places and the halves |
| up to HELD | 2: places by programs of a part of the node each, halves by one that holds all keys |
| more | 4: places, two counts, halves, all by programs of a part of the node |
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...tracing import is_plain, transformed
from ..launch import available, cdiv, multiprocessors, on_device, padded
from ..tokens import Fixed
from . import halves

WIDEST = 128  # columns
TILE = 16384  # numbers of x that a program reads at a time
ALONE, HELD = 2048, 16384
RESIDENT = 2  # programs of a multiprocessor that find places
LONGEST = 1 << 31  # numbers of x in a head: places are 32-bit


def fits(x: Tensor) -> bool:
    """Whether the kernels take x (N, L, S)."""
    numbers = x.shape[1] * x.shape[2]
    return available(x) and not transformed() and 0 < x.shape[2] <= WIDEST and 0 < numbers < LONGEST // 2


def order(x: Tensor, parts: int, iterations: int, absent: Tensor | None) -> Tensor:
    """As `cluster.tree.order_of`: (N, L) int64 of x (N, L, S), absent (N, L) bool."""
    if not is_plain(x):
        found: Tensor = tree_order(x, parts, iterations, absent)
        return found
    return _order(x, parts, iterations, absent)


@torch.library.custom_op("cumulant::tree_order", mutates_args=())
def tree_order(x: Tensor, parts: int, iterations: int, absent: Tensor | None) -> Tensor:
    return _order(x, parts, iterations, absent)


@tree_order.register_fake
def _(x: Tensor, parts: int, iterations: int, absent: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.int64)


class Level(NamedTuple):
    """What the launches of one level need."""

    size: int  # tokens of a node
    nodes: int  # of a head
    span: int  # tokens of a node that a program places
    splits: int


def _order(x: Tensor, parts: int, iterations: int, absent: Tensor | None) -> Tensor:
    with on_device(x.device):
        return _launched(x.contiguous(), parts, iterations, absent)


def _launched(x: Tensor, parts: int, iterations: int, absent: Tensor | None) -> Tensor:
    (N, L, S), size = x.shape, cdiv(x.shape[1], parts)
    P = parts * size
    if parts == 1:
        return torch.arange(L, device=x.device).repeat(N, 1)
    mask = x if absent is None else absent.contiguous().view(torch.uint8)
    known = x.data_ptr() % 16 == 0 and mask.data_ptr() % 16 == 0
    levels = [_level(N, P, S, nodes, x.device) for nodes in (1 << i for i in range(parts.bit_length() - 1))]
    keys, order, later = (torch.empty(N, P, dtype=torch.int32, device=x.device) for _ in range(3))
    long = [level for level in levels if level.size > HELD]
    counts = torch.zeros(sum(N * x.nodes for x in long) * 3, 2048, dtype=torch.int32, device=x.device)
    last = torch.empty(N, P, dtype=torch.int64, device=x.device)
    for level in levels:
        first, found = level.nodes == 1, last if level is levels[-1] else later
        all_nodes, alone, held = N * level.nodes, level.size <= ALONE, level.size <= HELD
        fixed = _cut(
            S, iterations, padded(level.size) if alone else 16, first, alone, not held, absent is not None, known
        )
        halves.cut.start(
            (all_nodes * level.splits, 1, 1), fixed, x, mask, order, keys, counts, found,
            L, level.nodes, level.size, level.span, level.splits,
        )  # fmt: skip
        if not alone and held:
            halves.halve.start((all_nodes, 1, 1), _halve(padded(level.size), first), keys, order, found, level.size)
        elif not held:
            splits = cdiv(level.size, 4096)
            for number in range(2):
                halves.count.start(
                    (all_nodes * splits, 1, 1), _count(number == 1), keys, counts, level.size, 4096, splits
                )
            splits = cdiv(level.size, 1024)
            halves.part.start((all_nodes * splits, 1, 1), _part(first), keys, counts, order, found, level.size, splits)
            counts = counts[3 * all_nodes :]
        order, later = found, order
    return order if P == L else order[:, :L].contiguous()


def _level(N: int, P: int, S: int, nodes: int, device: torch.device) -> Level:
    size, tile = P // nodes, _rows(S)
    if size <= ALONE:
        return Level(size, nodes, size, 1)
    splits = max(1, min(cdiv(RESIDENT * multiprocessors(device), N * nodes), cdiv(size, tile)))
    span = cdiv(cdiv(size, splits), tile) * tile
    return Level(size, nodes, span, cdiv(size, span))


def _rows(S: int) -> int:
    return TILE // padded(S)


@lru_cache(256)
def _cut(S: int, iterations: int, M: int, first: bool, alone: bool, long: bool, masked: bool, known: bool) -> Fixed:
    rows = _rows(S)
    constants = {"FIRST": first, "HALVED": alone, "COUNTED": long, "MASKED": masked, "ITERATIONS": iterations}
    constants |= {"S": S, "BS": padded(S), "R": min(256, rows), "N": rows, "M": M, "num_warps": 8}
    return Fixed(constants, known)


@lru_cache(64)
def _halve(M: int, first: bool) -> Fixed:
    return Fixed({"FIRST": first, "M": M, "num_warps": 8 if M <= 4096 else 16 if M <= 8192 else 32}, True)


@lru_cache(2)
def _count(last: bool) -> Fixed:
    return Fixed({"LAST": last, "N": 4096, "num_warps": 8}, True)


@lru_cache(2)
def _part(first: bool) -> Fixed:
    return Fixed({"FIRST": first, "N": 1024, "M": 8192, "num_warps": 8}, True)
