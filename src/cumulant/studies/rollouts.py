"""Rollouts: where content comes from after several layers of causal maps, exactly and for random maps of operators.

The rollout of a map A over t layers is A^t. Token 1 sees itself only, so it absorbs: what has not reached it decays
with the largest |A_ii|, i > 1, of a product of maps.

Shape legend: N tokens, t layers, D width, T draws.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import zoo


def seen(tokens: int, *, window: int | None = None, prefix: int = 1) -> Tensor:
    """Which keys a query sees: the past, of it the last `window`, and the first `prefix` tokens each other."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    allowed = (j <= i) | ((i < prefix) & (j < prefix))
    return allowed if window is None else allowed & (i - j < window)


def uniform(allowed: Tensor) -> Tensor:
    return allowed.double() / allowed.sum(-1, keepdim=True)


def decayed(tokens: int, rate: float) -> Tensor:
    """A_ij proportional to exp(-rate (i - j)) over the past."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    return (-rate * (i - j)).double().masked_fill(j > i, -math.inf).softmax(-1)


def rotary(tokens: int, size: float, width: int = 64) -> Tensor:
    """Softmax of size * mean_k cos((i - j) theta_k) over the past: rotary embedding on identical content."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    theta = 10000.0 ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    scores = size * ((i - j).double()[..., None] * theta).cos().mean(-1)
    return scores.masked_fill(j > i, -math.inf).softmax(-1)


def last_row(A: Tensor, layers: int) -> Tensor:
    """Where the last token's content comes from after so many layers: (N,)."""
    return torch.linalg.matrix_power(A, layers)[-1]


def mode(rate: float, layers: int) -> int:
    """Preferred distance under decay: the mode of C(t-1+x, x) e^(-rate x)."""
    return math.floor((layers - 1) / math.expm1(rate) + 1e-9)


def mean_distance(A: Tensor, layers: int) -> float:
    """How far back the content of the last token lies on average."""
    return float(last_row(A, layers) @ torch.arange(A.shape[-1] - 1, -1, -1).double())


def random_maps(
    name: str, size: float, tokens: int, draws: int, generator: torch.Generator, decay: float = 1.0
) -> Tensor:
    """Causal maps (T, N, N) of Gaussian queries and keys whose logits have standard deviation `size`; with `decay` the
    keys of a query count decay^distance, by the operator's own weights of keys."""
    width = 64
    query, key = (torch.randn(draws, tokens, width, generator=generator, dtype=torch.float64) for _ in range(2))
    scale: dict[str, Any] = {"scale": size / math.sqrt(width)}
    if name.startswith("linear"):  # its scores have no scale: the size of the features takes the place
        query, key, scale = query * math.sqrt(size), key * math.sqrt(size), {}
    scores = zoo.get(name).scores
    assert scores is not None
    if decay == 1.0:
        return scores(query[:, None], key[:, None], is_causal=True, **scale)[:, 0]
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    weights = torch.where(j <= i, decay ** (i - j).clamp(min=0).double(), 0.0)
    rows = [
        scores(query[:, None, [n]], key[:, None, : n + 1], key_mask=weights[n, : n + 1].expand(draws, -1), **scale)[
            :, 0, 0
        ]
        for n in range(tokens)
    ]
    return torch.stack([F.pad(row, (0, tokens - row.shape[-1])) for row in rows], 1)


def absorbing_rate(A: Tensor) -> float:
    """exp of the Lyapunov exponent of what has not reached token 1, over a product of the maps A (T, N, N)."""
    x, logs = torch.ones(A.shape[-1] - 1, dtype=A.dtype), []
    for B in A[:, 1:, 1:]:
        x = B @ x
        size = x.abs().max()
        logs.append(float(size.log()))
        x = x / size
    return math.exp(mean(logs[len(logs) // 4 :]))


@lru_cache
def predicted_rate(name: str, size: float) -> float | None:
    """exp(E log |A_22|) for logits of two keys that differ by x, N(0, 2 size^2): A_22 is sigmoid(x) under softmax, and
    1/2 + x/4 under order 2 and 3 alike (two centred keys have no third cumulant)."""
    if not name.startswith(("softmax", "cumulant2", "cumulant3")):
        return None
    z = torch.linspace(-8, 8, 2**20, dtype=torch.float64)
    x = z * math.sqrt(2) * size
    logs = F.logsigmoid(x) if name.startswith("softmax") else (0.5 + x / 4).abs().clamp(min=1e-12).log()
    mass = (-z.square() / 2).exp()
    return math.exp(float((logs * mass).sum() / mass.sum()))
