"""Launches of k-means. Formulas: steps.py. Nothing here waits for the GPU.

Shape legend: B sequences, H query heads, Hk key heads, Lq, L tokens, D width, K centres.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..launch import cdiv, layout, multiprocessors, on_device, padded, rows
from ..tokens import Fixed
from . import steps

LARGEST = 16384  # numbers of all centres of a head, KP x BD: what a program holds


def fits(K: int, D: int) -> bool:
    """Whether a program can hold the centres of a head."""
    return padded(K, 32) * padded(D, 32) <= LARGEST


def nearest(
    query: Tensor | None, key: Tensor, present: Tensor | None, centres: Tensor, iterations: int, step: int
) -> Tensor:
    """ids (B, Hk, L) int32 of key (B, Hk, L, D) after so many steps on every `step`-th key, from centres (B, Hk, K, D).

    Metric of query (B, H, Lq, D), None: plain distances; present (B, L) bool: keys that move centres.
    """
    with on_device(key.device):
        return _nearest(query, rows(key), present, centres, iterations, step)


def _nearest(
    query: Tensor | None, key: Tensor, present: Tensor | None, centres: Tensor, iterations: int, step: int
) -> Tensor:
    B, Hk, L, D = key.shape
    pairs, K, BD = B * Hk, centres.shape[-2], padded(D, 32)
    KP = padded(K, 32)
    middle = torch.zeros(pairs, KP, BD, dtype=torch.float32, device=key.device)
    middle[:, :K, :D] = centres.flatten(0, 1)
    metric = torch.eye(BD, device=key.device).expand(pairs, BD, BD).contiguous()
    if query is not None:
        metric = _metric(rows(query), pairs, BD, metric)
    weights = key.new_empty(pairs, 2, KP, BD)
    biases = middle.new_empty(pairs, KP)
    last = cdiv(L, step)
    splits = max(1, min(cdiv(2 * multiprocessors(key.device), pairs), cdiv(last, 128)))
    span = cdiv(cdiv(last, splits), 128) * 128
    splits = cdiv(last, span)
    sums, counts = middle.new_empty(splits, pairs, KP, BD), middle.new_empty(splits, pairs, KP)
    unit, (strides,) = layout(key)
    ids = torch.empty(B, Hk, L, dtype=torch.int32, device=key.device)
    mask = ids if present is None else present.contiguous().view(torch.uint8)
    first, then, sum_up, name = _launches(D, BD, KP, unit, key.dtype == torch.float32, present is not None)
    tensors = key, mask, weights, biases, ids, sums, counts, *strides, L, Hk, K
    state = middle, metric, sums, counts, weights, biases, splits, pairs
    steps.update.start((pairs, 1, 1), first, *state)
    for _ in range(iterations):
        steps.assign.start((splits, pairs, 1), sum_up, *tensors, span, step)
        steps.update.start((pairs, 1, 1), then, *state)
    steps.assign.start((cdiv(L, 128), pairs, 1), name, *tensors, 128, 1)
    return ids


@lru_cache(64)
def _launches(D: int, BD: int, KP: int, unit: int, single: bool, masked: bool) -> tuple[Fixed, ...]:
    """Constants of the launches: the first update and the others, sums of keys, and their names."""
    known = {"BD": BD, "KP": KP, "PRECISION": "tf32x3", "num_warps": 4}
    shared = known | {"D": D, "UNIT": unit, "PRECISION": "tf32x3" if single else "ieee"}
    shared |= {"num_warps": 8 if KP > 64 else 4}
    return (
        Fixed(known | {"FIRST": True}, True),
        Fixed(known | {"FIRST": False}, True),
        Fixed(shared | {"MASKED": masked, "SUMS": True, "N": 64}, unit == 8 and not masked),
        Fixed(shared | {"MASKED": masked, "SUMS": False, "N": 128}, unit == 8 and not masked),
    )


def _metric(query: Tensor, pairs: int, BD: int, plain: Tensor) -> Tensor:
    """Second moments (B Hk, BD, BD) of the queries, up to a factor; plain distances where one is not a number."""
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
    second = found.sum(0) * (B * H // pairs * Lq) ** -1.0
    return torch.where(second.isfinite().flatten(1).all(-1)[:, None, None], second, plain)
