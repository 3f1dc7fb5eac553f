"""Associative memories: what they answer to their own keys, and how many pairs an operator holds.

A memory stores S = sum_i v_i k_i^T and answers S q. An operator of degree p in the query stores the moments of
the keys up to degree p: its capacity is the number of independent features of the keys among them.

Shape legend: T trials, n pairs, d key width, e value width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import zoo

SHARPNESS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)  # logit scales that are tried, in units of d + 2
MOST = 2048  # pairs; an operator that holds more is not followed further


def unit(*shape: int, generator: torch.Generator) -> Tensor:
    """Uniform on the sphere of the last dimension, in float64."""
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def signs(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


def hebb(key: Tensor, value: Tensor) -> Tensor:
    """What S = sum_i v_i k_i^T answers to its own keys: (T, n, e)."""
    return key @ (key.mT @ value)


def delta(key: Tensor, value: Tensor, passes: int = 1) -> Tensor:
    """What S answers after S += (v - S k) k^T, pair by pair, so many times over all pairs."""
    S = key.new_zeros(key.shape[0], key.shape[-1], value.shape[-1])  # (T, d, e)
    for _ in range(passes):
        for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
            S = S + k[:, :, None] * (v - (k[:, None] @ S)[:, 0])[:, None]
    return key @ S


def mse(answer: Tensor, value: Tensor) -> float:
    """Mean over pairs of ||answer - v||^2."""
    return (answer - value).square().sum(-1).mean().item()


def tail(x: float) -> float:
    """Q(x), the mass of a standard normal above x."""
    return math.erfc(x / math.sqrt(2)) / 2


def vote(p: float, heads: int) -> float:
    """Failure of a majority of an odd number of independent heads that fail with p each."""
    return sum(math.comb(heads, k) * p**k * (1 - p) ** (heads - k) for k in range(heads // 2 + 1, heads + 1))


def features(attention: str, width: float) -> float | None:
    """Features of unit keys in R^d that an operator stores, constants left out: d of degree 1; of degree 2 the d - 1
    traceless squares (diagonal third cumulant) or all (d + 2)(d - 1)/2 harmonics (full third cumulant)."""
    second = {"cumulant3": width - 1, "cumulant3+full": (width + 2) * (width - 1) / 2}
    return width + second.get(attention, 0) if attention in ("cumulant2", *second) else None


def interference(answer: Tensor, value: Tensor) -> float:
    """1/SNR of answers about their mean, at the best gain: 1/c^2 - 1 with c their correlation with the values; mean
    over trials. (n - 2 + 2/n) / d for a memory of d features, whose mean takes the place of one pair."""
    answer, value = (x - x.mean(-2, keepdim=True) for x in (answer, value))
    dots = (answer * value).sum((-1, -2)).square()
    return (answer.square().sum((-1, -2)) * value.square().sum((-1, -2)) / dots - 1).mean().item()


def filled(attention: str, width: int, pairs: int, trials: int, generator: torch.Generator) -> tuple[float, float]:
    """Least interference of an operator that holds so many pairs, and the logit scale over (d + 2) that gives it."""
    mechanism = zoo.get(attention)
    key, value = unit(trials, 1, pairs, width, generator=generator), unit(trials, 1, pairs, 64, generator=generator)
    found = []
    for sharp in SHARPNESS:
        if attention.startswith("linear"):  # its feature map is not linear: the size of the keys takes the place
            near = key * (sharp * 2)
            out = mechanism(near, near, value)
        else:
            out = mechanism(key, key, value, scale=sharp * (width + 2))
        found.append((interference(out[:, 0], value[:, 0]), sharp))
    return min(found)


def capacity(attention: str, width: int, trials: int, generator: torch.Generator) -> dict[str, float]:
    """n - 2 + 2/n for the n pairs at which signal and interference are equal, and the best scale there."""
    before, pairs = (1.0, 1e-12), width // 2
    while True:
        size = max(1, trials * 32 // pairs)
        noise, sharp = filled(attention, width, pairs, size, generator)
        if noise >= 1 or pairs >= MOST:
            break
        before, pairs = (pairs - 2 + 2 / pairs, max(noise, 1e-12)), 2 * pairs
    if noise < 1:
        return {"capacity": float(MOST), "sharpness": sharp, "beyond": 1.0}
    share = -math.log(before[1]) / (math.log(noise) - math.log(before[1]))
    found = before[0] * ((pairs - 2 + 2 / pairs) / before[0]) ** share
    return {"capacity": found, "sharpness": sharp, "beyond": 0.0}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y against log x."""
    a, b = (torch.tensor(z, dtype=torch.float64).log() for z in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / a.square().sum())
