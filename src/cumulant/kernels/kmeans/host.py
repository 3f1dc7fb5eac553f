"""Launches of k-means. Formulas: steps.py. Nothing here waits for the GPU.

Shape legend: B sequences, H query heads, Hk key heads, Lq, L tokens, D width, K centres.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..launch import ROOM, cdiv, layout, multiprocessors, on_device, padded, rows, shared_memory
from ..tokens import Fixed
from . import steps

RESIDENT = 2  # programs of a multiprocessor that sum up keys
AT_ONCE = 16  # centres that a program moves
LARGEST = 16384  # numbers of all centres of a head, KP x BD: what a program holds


def fits(K: int, key: Tensor) -> bool:
    """Whether a program can hold the K centres of a head of key (B, Hk, L, D)."""
    KP, BD, room = padded(K, 32), padded(key.shape[-1], 32), shared_memory(key.device)
    taken = max((16 if key.dtype == torch.float32 else 7) * KP * BD, 8 * BD * BD)  # bytes, on smaller GPUs than an H100
    return KP * BD <= LARGEST and (room >= ROOM or taken <= room)


def nearest(
    query: Tensor | None,
    key: Tensor,
    present: Tensor | None,
    centres: Tensor | None,
    K: int,
    iterations: int,
    step: int,
) -> Tensor:
    """ids (B, Hk, L) int32 of key (B, Hk, L, D) after so many steps on every `step`-th key, from centres (B, Hk, K, D),
    None: keys, evenly spaced.

    Metric of query (B, H, Lq, D), None: plain distances; present (B, L) bool: keys that move centres.
    """
    with on_device(key.device):
        return launched(query, rows(key), present, centres, K, iterations, step)


def launched(
    query: Tensor | None,
    key: Tensor,
    present: Tensor | None,
    centres: Tensor | None,
    K: int,
    iterations: int,
    step: int,
) -> Tensor:
    """The same on the current device, of a key with rows in one piece."""
    B, Hk, L, D = key.shape
    pairs, BD, KP, last = B * Hk, padded(D, 32), padded(K, 32), cdiv(L, step)
    splits = max(1, min(cdiv(RESIDENT * multiprocessors(key.device), pairs), cdiv(last, 128)))
    span = cdiv(cdiv(last, splits), 128) * 128
    splits = cdiv(last, span)
    middle = key.new_empty(pairs, KP, BD, dtype=torch.float32)
    later = torch.empty_like(middle)
    metric, biases = middle.new_empty(pairs, BD, BD), middle.new_empty(pairs, KP)
    sums, counts = middle.new_empty(splits, pairs, KP, BD), middle.new_empty(splits, pairs, KP)
    weights = key.new_empty(pairs, 2, KP, BD)
    ids = key.new_empty(B, Hk, L, dtype=torch.int32)
    mask = ids if present is None else present.contiguous().view(torch.uint8)
    unit, (strides,) = layout(key)
    then, sum_up, name = _launches(D, BD, KP, unit, key.dtype == torch.float32, present is not None)
    moments, over = (metric, 1.0) if query is None else _second_moments(rows(query), pairs, BD)
    size, apart, start = last, step, key
    if centres is not None:
        size, apart, start = K, 1, rows(centres)
    start_unit, (start_strides,) = layout(start)
    steps.begin[(pairs,)](
        start, moments, middle, metric, weights, biases, *start_strides, size, apart, Hk, K,
        0 if query is None else len(moments), pairs, over, METRIC=query is not None, D=D, BD=BD, KP=KP,
        UNIT=start_unit, PRECISION="tf32x3", num_warps=8,
    )  # fmt: skip
    tensors = key, mask, weights, biases, ids, sums, counts, *strides, L, Hk, K
    for _ in range(iterations):
        steps.assign.start((splits, pairs, 1), sum_up, *tensors, span, step)
        steps.update.start(
            (pairs, KP // min(KP, AT_ONCE), 1),
            then,
            middle,
            later,
            metric,
            sums,
            counts,
            weights,
            biases,
            splits,
            pairs,
        )
        middle, later = later, middle
    steps.assign.start((cdiv(L, 128), pairs, 1), name, *tensors, 128, 1)
    return ids


@lru_cache(64)
def _launches(D: int, BD: int, KP: int, unit: int, single: bool, masked: bool) -> tuple[Fixed, ...]:
    """Constants of the launches: updates, sums of keys, and their names."""
    shared = {"BD": BD, "KP": KP, "D": D, "UNIT": unit, "PRECISION": "tf32x3" if single else "ieee", "MASKED": masked}
    shared |= {"num_warps": 8 if KP > 64 else 4}
    return (
        Fixed({"BD": BD, "KP": KP, "N": min(KP, AT_ONCE), "PRECISION": "tf32x3", "num_warps": 4}, True),
        Fixed(shared | {"SUMS": True, "N": 64, "STAGES": 3}, unit == 8 and not masked),
        Fixed(shared | {"SUMS": False, "N": 128, "STAGES": 1}, unit == 8 and not masked),
    )


def _second_moments(query: Tensor, pairs: int, BD: int) -> tuple[Tensor, float]:
    """Sums (S, B Hk, BD, BD) of q q^T over parts of the queries of a key head, and 1 over their number."""
    B, H, Lq, D = query.shape
    unit, (strides,) = layout(query)
    splits = max(1, min(cdiv(2 * multiprocessors(query.device), pairs), cdiv(Lq, 256)))
    span = cdiv(cdiv(Lq, splits), 64) * 64
    splits = cdiv(Lq, span)
    found = query.new_empty(splits, pairs, BD, BD, dtype=torch.float32)
    precision = "ieee" if query.dtype != torch.float32 else "tf32x3"
    steps.second_moments[(splits, pairs)](
        query, found, *strides, Lq, pairs // B, span, GROUP=B * H // pairs, D=D, BD=BD, N=64, UNIT=unit,
        PRECISION=precision, num_warps=4,
    )  # fmt: skip
    return found, (B * H // pairs * Lq) ** -1.0
