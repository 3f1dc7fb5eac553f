"""How far the truncated expansion is from softmax, by order and by the size of the logits.

Shape legend: R repeats, L tokens, D key width, E value width.

With u = q.k (scaled), order m leaves a remainder of the m-th power of u's spread: on log-log axes the curves are
straight lines of slope 1, 2 and 3, and the size at which they leave that line is where the series stops helping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cumulant
from cumulant.call import check_count

ORDERS: dict[str, dict[str, Any]] = {
    "order 1": {"order": 1},
    "order 2": {"order": 2},
    "order 3, diagonal": {"order": 3},
    "order 3, full": {"order": 3, "full": True},
}
LOGIT_SIZES = (0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what was expected, in float64."""
    expected = expected.double()
    return ((result.double() - expected).norm() / expected.norm()).item()


def errors_against_softmax(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None
) -> dict[str, float]:
    """Relative error of every order for the given tensors (..., L, D), (..., L, D), (..., L, E). Cost: L^2 D."""
    expected = F.scaled_dot_product_attention(query, key, value, scale=scale)
    return {
        name: relative_error(
            cumulant.attention(query, key, value, scale=scale, backend="reference", **options), expected
        )
        for name, options in ORDERS.items()
    }


def logit_size(query: Tensor, key: Tensor, scale: float | None = None) -> float:
    """Standard deviation over keys of the scaled q.k, root mean square over queries: what the series is in."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * (query.double() @ key.double().transpose(-1, -2))
    return logits.var(dim=-1, correction=0).mean().sqrt().item()


def softmax_error(
    logit_sizes: Iterable[float] = LOGIT_SIZES,
    *,
    length: int = 256,
    dim: int = 16,
    repeats: int = 8,
    seed: int = 0,
    on_size: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Relative error against softmax of every order on random normal tokens, in float64.

    The queries are scaled so that the standard deviation of the scaled q.k is each of `logit_sizes` in turn; the
    draws are the same for every size and order. Cost: (sizes) (repeats) (L^2 D + L D^2 E).
    """
    sizes: Sequence[float] = tuple(logit_sizes)
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise ValueError(f"logit_sizes must hold positive numbers, got {sizes}")
    for name, number, least in (("length", length, 2), ("dim", dim, 1), ("repeats", repeats, 1)):
        check_count(name, number, least)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, repeats, length, dim, generator=generator, dtype=torch.float64)
    unit = query / logit_size(query, key, scale=1.0)
    curves: dict[str, list[float]] = {name: [] for name in ORDERS}
    for size in sizes:
        for name, error in errors_against_softmax(size * unit, key, value, scale=1.0).items():
            if not math.isfinite(error):
                raise ValueError(f"a logit size of {size:g} is too large: {name} is not finite in float64")
            curves[name].append(error)
        if on_size is not None:
            on_size(size)
    return {
        "logit_sizes": list(sizes),
        "relative_error": curves,
        "length": length,
        "dim": dim,
        "repeats": repeats,
        "seed": seed,
        "data": "queries, keys and values drawn independently from a normal distribution",
    }
