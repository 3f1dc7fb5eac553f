"""Argument checks and mask handling that the mechanisms of the zoo share with `cumulant.attention`."""

from __future__ import annotations

from torch import Tensor

from ..inputs import check_tensors, in_autocast_dtype, leading


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


def fold_groups(query: Tensor, key_heads: int) -> Tensor:
    """Query (..., H, Lq, D) as (..., Hk, G Lq, D): heads that share a key head become more rows of it."""
    return query.unflatten(-3, (key_heads, query.shape[-3] // max(1, key_heads))).flatten(-3, -2)
