"""Closures: how the cumulant series of the logits inside a cluster is summed beyond second order.

Shape legend: x = s^2 the variance of the logits u = q.k inside a cluster, any shape.

| closure | phi, the log of <exp u> / exp <u> | f, the gain of the response | exact for |
|---|---|---|---|
| gauss | s^2 / 2 | 1 | normal u; grows without bound |
| tanh | log cosh s | tanh(s) / s | u of two values |
| langevin | log(sinh y / y), y = sqrt(3) s | 3 (coth y - 1 / y) / y | uniform u |

All agree through second order. Both functions are smooth in s^2, also at 0, where s itself is not: below a small
variance their power series is taken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLOSURES = ("gauss", "tanh", "langevin")

# Powers of x = s^2. What is left out is below the rounding of the type at its threshold.
_PHI = {
    "tanh": (1 / 2, -1 / 12, 1 / 45, -17 / 2520, 31 / 14175),
    "langevin": (1 / 2, -1 / 20, 1 / 105, -3 / 1400, 27 / 51975),
}
_GAIN = {"tanh": (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835), "langevin": (1.0, -1 / 5, 2 / 35, -3 / 175, 18 / 3465)}


def check_closure(closure: str) -> None:
    if not isinstance(closure, str) or closure not in CLOSURES:
        raise ValueError(f"closure must be one of {', '.join(map(repr, CLOSURES))}, got {closure!r}")


def log_mass(variance: Tensor, closure: str) -> Tensor:
    """phi of the variance s^2 >= 0: what the spread of the logits adds to log n + <u>."""
    if closure == "gauss":
        return 0.5 * variance
    small, s = _split(variance)
    if closure == "tanh":
        large = s + torch.log1p(torch.exp(-2 * s)) - math.log(2)
    else:
        y = math.sqrt(3) * s
        large = y + torch.log(-torch.expm1(-2 * y)) - math.log(2) - torch.log(y)
    return torch.where(small, _series(variance, _PHI[closure], small) * variance, large)


def gain(variance: Tensor, closure: str) -> Tensor:
    """f of the variance s^2 >= 0: the factor of the linear response S^T q; 1 at 0, falling as 1 / s."""
    if closure == "gauss":
        return torch.ones_like(variance)
    small, s = _split(variance)
    if closure == "tanh":
        large = torch.tanh(s) / s
    else:
        y = math.sqrt(3) * s
        large = 3 * (1 / torch.tanh(y) - 1 / y) / y
    return torch.where(small, _series(variance, _GAIN[closure], small), large)


def _split(variance: Tensor) -> tuple[Tensor, Tensor]:
    """Where the series is taken, and s elsewhere (1 where it is: the branch not taken must have no infinite slope)."""
    small = variance < (1e-3 if variance.dtype == torch.float64 else 3e-2)
    return small, torch.where(small, 1, variance).sqrt()


def _series(variance: Tensor, coefficients: tuple[float, ...], small: Tensor) -> Tensor:
    x = torch.where(small, variance, 0)
    out = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        out = out * x + coefficient
    return out
