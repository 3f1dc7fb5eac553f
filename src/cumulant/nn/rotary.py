"""Rotary positions (Su et al. 2021): queries and keys turned by their place, so that their product sees distances.

Shape legend: ... leading dimensions, H heads, L tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensors import wide

BASE = 10_000.0


def rotary_base(rotary: bool | float) -> float | None:
    """The base that an argument `rotary` stands for: True is 10,000, False none."""
    if isinstance(rotary, bool):
        return BASE if rotary else None
    if not rotary > 1:
        raise ValueError(f"rotary must be True, False or a base above 1, got {rotary!r}")
    return float(rotary)


def rotate(x: Tensor, base: float, start: int = 0) -> Tensor:
    """x (..., L, D) from place `start` on: channels i and i + D/2 are turned by place * base^(-2i/D).

    The last channel of an odd width stays as it is. Cost: 3 L D.
    """
    half = x.shape[-1] // 2
    if not half:
        return x
    X = wide(x)
    places = torch.arange(start, start + x.shape[-2], device=x.device, dtype=X.dtype)
    speeds = base ** (-torch.arange(half, device=x.device, dtype=X.dtype) / half)
    angles = places[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = X.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1).to(x.dtype)
