"""Tokens that tests draw: the same numbers for the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draw(*shapes: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """One tensor for each shape, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)


def one(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """A tensor whose numbers in other dtypes are those of float64, rounded."""
    return draw(shape, seed=seed)[0].to(dtype)


def tokens(
    queries: int = 13, keys: int = 13, heads: int = 2, key_heads: int = 2, dim: int = 8, value_dim: int = 6,
    batch: int = 2, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Query, key, value from three seeds. Ten channels and more make a ReLU that is 0 everywhere unlikely."""
    shapes = (batch, heads, queries, dim), (batch, key_heads, keys, dim), (batch, key_heads, keys, value_dim)
    query, key, value = (one(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    return query, key, value
