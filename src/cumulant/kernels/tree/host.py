"""Launches that order tokens by a tree. Kernels: halves.py, seen.py. Nothing here waits for the GPU.

Shape legend: N heads of all sequences, L tokens (P padded), S columns.

| tokens of a node | launches a level |
|---|---|
| up to ALONE | 1: a program finds the direction, the places and the halves |
| up to HELD | 2: places by programs of a part of the node each, halves by one that holds all keys |
| more | 5: places, two counts, a tally, halves, all by programs of a part of the node |
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...tracing import is_plain, transformed
from ..launch import available, cdiv, dot_precision, layout, multiprocessors, on_device, padded
from ..tokens import Fixed
from . import halves, seen

WIDEST = 128  # columns
TILE = 8192  # numbers of x that a program reads at a time
ALONE, HELD = 1024, 8192
ENOUGH = 128  # tokens of a node that say in which direction it is cut
COUNTED, MOVED = 4096, 1024  # tokens of a program that counts keys, or moves tokens, of a long node
RESIDENT = 2  # programs of a multiprocessor that find places
LONGEST = 1 << 31  # numbers of x in a head: places are 32-bit


def fits(x: Tensor) -> bool:
    """Whether the kernels take x (N, L, S)."""
    return available(x) and not transformed() and in_range(*x.shape[1:])


def in_range(L: int, S: int) -> bool:
    """Whether they take so many tokens of so many columns."""
    return 0 < S <= WIDEST and 0 < L * S < LONGEST // 2


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


def _order(x: Tensor, parts: int, iterations: int, absent: Tensor | None) -> Tensor:
    with on_device(x.device):
        found = padded_order(x.contiguous(), parts, iterations, absent)
    return found if found.shape[1] == x.shape[1] else found[:, : x.shape[1]].contiguous()


def padded_order(x: Tensor, parts: int, iterations: int, absent: Tensor | None) -> Tensor:
    """The same with its padding at the end, (N, P); x is contiguous, and its device the current one."""
    (N, L, S), P = x.shape, parts * cdiv(x.shape[1], parts)
    if parts == 1:
        return torch.arange(L, device=x.device).repeat(N, 1)
    mask = x if absent is None else absent.contiguous().view(torch.uint8)
    keys, order, later = (torch.empty(N, P, dtype=torch.int32, device=x.device) for _ in range(3))
    levels = [(1 << i, P >> i) for i in range(parts.bit_length() - 1)]  # nodes of a head, and their tokens
    long = sum(N * nodes for nodes, size in levels if size > HELD)
    counts = torch.empty(long * 3, 2048, dtype=torch.int32, device=x.device)
    if long:
        _start(halves.clear, cdiv(counts.numel(), 1024), {"N": 1024, "num_warps": 4}, counts, counts.numel())
    shape = {"MASKED": absent is not None, "ITERATIONS": iterations, "S": S, "BS": padded(S)}
    for nodes, size in levels:
        if 2 * nodes == parts:
            later = torch.empty(N, P, dtype=torch.int64, device=x.device)
        first, alone, held = {"FIRST": nodes == 1}, size <= ALONE, size <= HELD
        rows = min(_rows(S), padded(size)) if alone else _rows(S)
        span, splits = (size, 1) if alone else _split(N * nodes, size, rows, x.device)
        how = {"HALVED": alone, "COUNTED": not held, "N": rows, "R": min(ENOUGH, rows)}
        how |= {"M": padded(size) if alone else 16, "num_warps": 4 if rows * padded(S) < TILE else 8}
        _start(
            halves.cut, N * nodes * splits, first | how | shape, x, mask, order, keys, counts, later,
            L, nodes, size, span, splits,
        )  # fmt: skip
        if held and not alone:
            M = padded(size, 4096)
            warps = {"M": M, "num_warps": max(8, M // 512)}
            _start(halves.halve, N * nodes, first | warps, keys, order, later, size)
        elif not held:
            splits = cdiv(size, COUNTED)
            for last in (False, True):
                constants = {"LAST": last, "N": COUNTED, "num_warps": 8}
                _start(halves.count, N * nodes * splits, constants, keys, counts, size, COUNTED, splits)
            splits, constants = cdiv(size, MOVED), {"N": MOVED, "num_warps": 8}
            tallies = torch.empty(N * nodes, splits + 2, dtype=torch.int32, device=x.device)
            _start(halves.tally, N * nodes * splits, constants, keys, counts, tallies, size, splits)
            constants = first | constants | {"SPLITS": padded(splits)}
            _start(halves.part, N * nodes * splits, constants, keys, tallies, order, later, size, splits)
            counts = counts[3 * N * nodes :]
        order, later = later, order
    return order


def _split(nodes: int, size: int, rows: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a node that a program places, a multiple of `rows`, and how many programs a node has."""
    splits = max(1, min(cdiv(RESIDENT * multiprocessors(device), nodes), cdiv(size, rows)))
    span = cdiv(cdiv(size, splits), rows) * rows
    return span, cdiv(size, span)


def _rows(S: int) -> int:
    return TILE // padded(S)


def order_of_queries(query: Tensor, key: Tensor, places: Tensor, runs: int, iterations: int) -> Tensor:
    """`padded_order` (B H, P) of query (B, H, Lq, D): runs that are alike to keys `places` (S,) of key (B, Hk, Lk, D).

    Rows lie in one piece, and their device is the current one.
    """
    return padded_order(columns(query, key, places), runs, iterations, None)


def one_search(query: Tensor, key: Tensor, places: Tensor, of_queries: Tensor, parts: int, runs: int) -> bool:
    """Whether `orders` finds both as tokens of one search: runs of as many parts are those of fewer, cut further."""
    Lq, Lk = query.shape[2], key.shape[2]
    return runs > 0 and Lq == Lk and Lk % max(parts, runs) == 0 and len(places) == len(of_queries)


def orders(
    query: Tensor, key: Tensor, places: Tensor, of_queries: Tensor, parts: int, runs: int, iterations: int
) -> tuple[Tensor, Tensor]:
    """The order (B H, P) of key (B, H, Lk, D) in parts that are alike to queries `places` (S,) of query (B, H, Lq, D),
    and `order_of_queries` by the keys `of_queries`. In `one_search` both are in the first tensor, (2 B H, Lk), and the
    second is empty, as it is of 0 runs."""
    N = key.shape[0] * key.shape[1]
    if one_search(query, key, places, of_queries, parts, runs):
        both = query.new_empty(2 * N, key.shape[2], len(places))
        columns(key, query, places, both[:N], centred=False)
        columns(query, key, of_queries, both[N:])
        order = padded_order(both, max(parts, runs), iterations, None)
    else:
        order = padded_order(columns(key, query, places, centred=False), parts, iterations, None)
        if runs:
            return order, order_of_queries(query, key, of_queries, runs, iterations)
    return order, order.new_empty(N, 0)


def columns(query: Tensor, key: Tensor, places: Tensor, x: Tensor | None = None, centred: bool = True) -> Tensor:
    """x (B H, Lq, S) of query (B, H, Lq, D): products with S keys `places` of key (B, Hk, Lk, D), less their mean if
    they are to be `centred`. Either may be keys and the other queries."""
    (B, H, Lq, D), Hk, S = query.shape, key.shape[1], len(places)
    x = query.new_empty(B * H, Lq, S) if x is None else x
    unit, (own, other) = layout(query, key)
    constants: dict[str, Any] = {"GROUP": H // Hk, "CENTRED": centred, "S": S, "BS": padded(S), "D": D, "BD": padded(D)}
    constants |= {"N": 128, "UNIT": unit, "PRECISION": _precision(query.dtype), "num_warps": 8}
    known = unit == 8 and not (places.data_ptr() | x.data_ptr()) & 15
    fixed = _fixed(seen.columns, (query.dtype, key.dtype), known, tuple(constants.items()))
    seen.columns.start((cdiv(Lq, 128), B * H, 1), fixed, query, key, places, x, *own, *other, Lq, H)
    return x


def _precision(dtype: torch.dtype) -> str:
    """As of the kernels of clusters: float32 without tf32 multiplies three times in tf32, on tensor cores."""
    usual = dot_precision(dtype)
    return "tf32x3" if usual == "ieee" else usual


def _start(kernel: Any, programs: int, constants: dict[str, Any], *given: Any) -> None:
    kinds, away = [], 0
    for x in given:
        if isinstance(x, Tensor):
            kinds.append(x.dtype)
            away |= x.data_ptr()
    kernel.start((programs, 1, 1), _fixed(kernel, tuple(kinds), away & 15 == 0, tuple(constants.items())), *given)


@lru_cache(256)
def _fixed(kernel: Any, kinds: tuple[torch.dtype, ...], known: bool, constants: tuple[tuple[str, Any], ...]) -> Fixed:
    """Constants of a launch of tensors of these types; `known`: at addresses that Triton always compiles for."""
    return Fixed(dict(constants), known)
