"""Where kernels find the tokens of each cluster: tables of bounds, sizes and order (`kernels.cluster.parts`).

Shape legend: B batch, Hk key heads, L keys after the prefix, Lk all keys, K clusters (KP padded), S sets of tables: 1
for blocks, B with a key mask, B Hk where heads have clusters of their own.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Call, Grid
from ..kernels.cluster.bounds import padding
from ..kernels.cluster.bounds import tables as tables_of
from ..tracing import is_plain
from .backend import Assignment, Case, block_sizes, borders


class Tables(NamedTuple):
    """As `kernels.cluster.plan.Call` takes them."""

    bounds: Tensor  # (S, 2, KP + 1)
    logs: Tensor  # (S, KP)
    order: Tensor | None  # (S, Lk)
    clusters: int
    longest: int
    equal: bool


def flat_mask(call: Call) -> Tensor | None:
    """The key mask as (B, Lk)."""
    return None if call.key_mask is None else call.key_mask.expand(*call.lead, call.key.shape[-2]).flatten(0, -2)


def tables(case: Case) -> Tables:
    """Of blocks, or of an `Assignment`; with a key mask those of the tokens that take part.

    Layers of a model share a mask: the tables of the last few are kept, as long as they are not written to.
    """
    mask = case.call.key_mask
    if mask is None or isinstance(case.clusters, Assignment) or not _may_keep(mask):
        return _tables(case, flat_mask(case.call))
    kind = mask._version, case.clusters, case.call.grid, case.call.prefix, case.least, case.call.key.shape[:-1]
    for seen, same, found in _masked:
        if seen() is mask and same == kind:
            return found
    found = _tables(case, flat_mask(case.call))
    _masked.appendleft((ref(mask), kind, found))
    return found


_masked: deque[tuple[ref[Tensor], Any, Tables]] = deque(maxlen=8)


def _may_keep(mask: Tensor) -> bool:
    """Whether writing to it would show, and nothing records operations to run them again."""
    if not is_plain(mask) or mask.is_inference() or torch.is_inference_mode_enabled():
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _tables(case: Case, mask: Tensor | None) -> Tables:
    call, clusters = case.call, case.clusters
    Lk, prefix, device = call.key.shape[-2], call.prefix, call.key.device
    if isinstance(clusters, Assignment):
        ids = clusters.ids.flatten(0, 1)
        present = None if mask is None else mask.repeat_interleave(clusters.ids.shape[1], 0)
        return _sorted(ids, present, prefix, clusters.clusters, 0)
    blocks = clusters, Lk - prefix, call.grid, case.least
    if mask is None:
        return _made(*blocks, prefix, device) if torch.compiler.is_compiling() else _kept(*blocks, prefix, device)
    K, longest = block_sizes(*blocks)
    if isinstance(clusters, int) and call.grid is None:  # blocks of the tokens that take part
        taking = mask[:, prefix:]
        number = taking.sum(-1, keepdim=True)
        count = (-(-number // case.least)).clamp(min=1, max=K)
        ids = (taking.cumsum(-1) - 1).clamp(min=0) * count // number.clamp(min=1)
        return _sorted(ids, mask, prefix, K, max(case.least, longest))
    ids = _ids(*blocks, device) if torch.compiler.is_compiling() else _kept_ids(*blocks, device)
    return _sorted(ids.expand(len(mask), -1), mask, prefix, K, longest)


def _ids(clusters: Any, L: int, grid: Grid | None, least: int, device: torch.device) -> Tensor:
    """Block of each of L tokens."""
    starts, order = borders(clusters, L, grid, least)
    ids = torch.bucketize(torch.arange(L, device=device), torch.tensor(starts[1:], device=device), right=True)
    return ids if order is None else torch.empty_like(ids).scatter(0, torch.tensor(order, device=device), ids)


@lru_cache(64)
def _kept_ids(*blocks: Any) -> Tensor:
    with torch.inference_mode(False):
        return _ids(*blocks)


def _made(clusters: Any, L: int, grid: Grid | None, least: int, prefix: int, device: torch.device) -> Tables:
    """Of blocks, the same in every sequence."""
    starts, order = borders(clusters, L, grid, least)
    K, longest = block_sizes(clusters, L, grid, least)
    bounds, logs = tables_of([prefix + start for start in starts], prefix, device)
    places = None
    if order is not None:
        every = [*range(prefix), *(prefix + place for place in order)]
        places = torch.tensor([every], dtype=torch.int32, device=device)
    return Tables(bounds, logs, places, K, longest, longest * K == L)


@lru_cache(64)
def _kept(*blocks: Any) -> Tables:
    with torch.inference_mode(False):  # what is kept from a call under inference_mode serves training too
        return _made(*blocks)


def _sorted(ids: Tensor, present: Tensor | None, prefix: int, K: int, longest: int) -> Tables:
    """Of clusters ids (S, L), tokens that are not `present` (S, Lk) in none: sorted by cluster, prefix first."""
    kind = torch.int16 if K < 1 << 15 else torch.int32
    keys = F.pad(ids.to(kind), (prefix, 0), value=-1)
    if present is not None:
        keys = torch.where(present, keys, K)
    found, order = keys.sort(stable=True)
    numbers = torch.arange(K + 1, device=ids.device, dtype=torch.int32).expand(len(ids), -1)
    edges = torch.searchsorted(found.int(), numbers.contiguous())
    first, end = edges[:, :-1], edges[:, 1:]
    none, start = edges.new_zeros(len(ids), padding(K) - K), edges.new_zeros(len(ids), 1)
    bounds = torch.stack((torch.cat((first, none, start), -1), torch.cat((end, none, edges[:, :1]), -1)), 1)
    logs = torch.cat((end - first, none), -1).float().log2()
    return Tables(bounds.int(), logs, order.int(), K, longest, False)
