"""What streams and moments have taken in, and whether what follows is of the same kind.

Shape legend: ... leading dimensions, H query heads, Hk key heads, L tokens, D key width, E value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .call import check_dtype


class Held(NamedTuple):
    """Of tokens that were taken in: what those that follow must agree with."""

    lead: torch.Size  # (..., Hk)
    key_width: int
    value_width: int
    dtype: torch.dtype  # that sums are kept in
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Held:
        return cls(key.shape[:-2], key.shape[-1], value.shape[-1], statistics_dtype(key.dtype), key.device)

    def shape(self) -> str:
        return f"({', '.join(map(str, (*self.lead, 'tokens', self.key_width)))})"


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics are kept in float64 for float64 tokens and in float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tokens(
    key: Tensor, value: Tensor, held: Held | None = None, *, heads: bool = True, grow: bool = False
) -> None:
    """Raises for key (..., Hk, L, D) and value (..., Hk, L, E) that are not of one kind, or not of that of `held`.

    `heads`: there must be a dimension of heads. `grow`: what one sequence holds may go on as several.
    """
    for name, x in (("key", key), ("value", value)):
        check_dtype(name, x)
        if x.ndim < (3 if heads else 2):
            raise ValueError(f"{name} must have shape (..., {'heads, ' * heads}tokens, width), got {tuple(x.shape)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must have the same tokens, got {tuple(key.shape)}, {tuple(value.shape)}")
    if (key.dtype, key.device) != (value.dtype, value.device):
        both = f"{key.dtype} on {key.device}, {value.dtype} on {value.device}"
        raise TypeError(f"key and value must share dtype and device, got {both}")
    if held is not None:
        _check_alike(key, value, held, grow)


def _check_alike(key: Tensor, value: Tensor, held: Held, grow: bool) -> None:
    if (key.shape[-1], value.shape[-1]) != (held.key_width, held.value_width):
        raise ValueError(
            f"key and value must be as wide as those before, {held.key_width} and {held.value_width}, got "
            f"{key.shape[-1]} and {value.shape[-1]}"
        )
    lead, before = key.shape[:-2], held.lead
    if lead != before:
        wider = grow and len(lead) == len(before) and lead[-1:] == before[-1:]
        if not wider or any(new != old and old != 1 for new, old in zip(lead, before, strict=True)):
            raise ValueError(f"key must be as the tokens before it, {held.shape()}, got {tuple(key.shape)}")
    if (statistics_dtype(key.dtype), key.device) != (held.dtype, held.device):
        kept = f"kept in {held.dtype} on {held.device}"
        raise TypeError(f"key must be as the tokens before it, {kept}, got {key.dtype} on {key.device}")


def check_rows(query: Tensor, held: Held, *, one: bool = False) -> None:
    """Raises for a query (..., H, L, D) that cannot ask tokens (..., Hk, S, D); with `one` it must hold one row."""
    check_dtype("query", query)
    if query.ndim < 3 or (one and query.shape[-2] != 1):
        rows = "1, width), one token" if one else "tokens, width)"
        raise ValueError(f"query must have shape (..., heads, {rows}, got {tuple(query.shape)}")
    heads, asking = held.lead[-1], query.shape[-3]
    if heads == 0 or asking == 0 or asking % heads:
        raise ValueError(f"query heads ({asking}) must be a multiple of key heads ({heads}), and neither may be 0")
    if (query.shape[:-3], query.shape[-1]) != (held.lead[:-1], held.key_width):
        shapes = f"{tuple(query.shape)} and {held.shape()}"
        raise ValueError(f"query and key must have the same batch and width, got {shapes}")
    if query.device != held.device:
        raise ValueError(f"query must be on the device of the keys, {held.device}, got {query.device}")


def check_step(query: Tensor, key: Tensor, value: Tensor, held: Held | None = None, *, grow: bool = False) -> None:
    """Raises for what is not one token of each, before any is taken in: a step that fails leaves nothing behind."""
    check_tokens(key, value, held, grow=grow)
    if key.shape[-2] != 1:
        raise ValueError(f"query and key must hold one token, (..., heads, 1, width), got a key {tuple(key.shape)}")
    check_rows(query, Held.of(key, value), one=True)
    if query.dtype != key.dtype:
        raise TypeError(f"query, key and value must share a dtype, got query {query.dtype}, key {key.dtype}")
