"""Rotary positions (Su et al. 2021): queries and keys turned by their place, so that their product sees distances.

Shape legend: ... leading dimensions, H heads, L tokens, D width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..tensors import wide
from ..tracing import is_plain, transformed

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
    cos, sin = turns(X, half, base, start)[1:]
    a, b, rest = X.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1).to(x.dtype)


def turns(x: Tensor, half: int, base: float, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Angles place * base^(-i/half) of the tokens of x (..., L, D), (L, half), and their cosines and sines."""
    asked = x.shape[-2], half, base, start, x.device, x.dtype
    steady = is_plain(x) and not transformed() and not torch.compiler.is_compiling()
    if not steady or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _turns(*asked)
    return _kept_turns(*asked)


def _turns(
    length: int, half: int, base: float, start: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.arange(start, start + length, device=device, dtype=dtype)
    angles = places[:, None] * base ** (-torch.arange(half, device=device, dtype=dtype) / half)
    return angles, angles.cos(), angles.sin()


@lru_cache(8)  # every layer of a model asks for the same: eight small kernels, twice a layer
def _kept_turns(*asked: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):  # what is kept may meet gradients later
        return _turns(*asked)
