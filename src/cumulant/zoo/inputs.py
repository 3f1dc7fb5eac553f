"""Argument checks and mask handling that the mechanisms of the zoo share with `cumulant.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..inputs import check_tensors, in_autocast_dtype, leading, without_autocast

Method = TypeVar("Method", bound=Callable[..., Any])


def prepare(
    query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and key_mask, checked, in autocast's dtype, with their leading dimensions broadcast.

    Tokens of weight 0 become 0 in key and value, so that whatever they held (NaN included) goes nowhere.
    """
    query, key, value = in_autocast_dtype(query, key, value)
    check_tensors(query, key, value, key_mask, scale, enable_gqa)
    lead = leading(query, key)
    query, key, value = (x.expand(*lead, *x.shape[-3:]) for x in (query, key, value))
    if key_mask is not None:
        key_mask = key_mask.expand(*lead, key.shape[-2])
        absent = (key_mask == 0)[..., None, :, None]
        key, value = key.masked_fill(absent, 0), value.masked_fill(absent, 0)
    return query, key, value, key_mask


def prepare_queries(query: Tensor, query_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Query with absent rows set to 0, and the query mask (bool or weights), checked, as a factor (..., 1, Lq, 1)."""
    if query_mask is None:
        return query, None
    wanted = (*query.shape[:-3], query.shape[-2])
    if not isinstance(query_mask, Tensor) or query_mask.ndim < 1 or query_mask.shape[-1] != wanted[-1]:
        got = tuple(query_mask.shape) if isinstance(query_mask, Tensor) else type(query_mask).__name__
        raise ValueError(f"query_mask must have shape {wanted}, one entry for each query, got {got}")
    factor = query_mask.expand(wanted)[..., None, :, None]
    return query.masked_fill(factor == 0, 0), factor.to(wide(query).dtype)


def weights_of(key_mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The key mask as a factor (..., 1, Lk, 1) in the dtype of `key`, or None."""
    return None if key_mask is None else key_mask.to(key.dtype)[..., None, :, None]


def wide(x: Tensor) -> Tensor:
    """x in at least float32, in which the mechanisms keep their sums."""
    return x if x.dtype == torch.float64 else x.float()


def fold_groups(query: Tensor, key_heads: int) -> Tensor:
    """Query (..., H, Lq, D) as (..., Hk, G Lq, D): heads that share a key head become more rows of it."""
    return query.unflatten(-3, (key_heads, query.shape[-3] // max(1, key_heads))).flatten(-3, -2)


def outside_autocast(method: Method) -> Method:
    """A method of tensors, run without autocast: in 16 bits, the sums that a stream keeps would soon stand still."""

    @functools.wraps(method)
    def run(self: Any, first: Tensor, *rest: Any, **named: Any) -> Any:
        with without_autocast(first.device.type):
            return method(self, first, *rest, **named)

    return cast(Method, run)
