"""Arguments of layers, checked: sizes, masks, grids, names.

Shape legend: ... leading dimensions, L tokens, C width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..call import DTYPES, Grid, check_count, check_dense, check_dtype, check_mask, whole
from ..grammar import suggest
from ..zoo.registry import Mechanism

EXTRAS = (
    "num_kv_heads",
    "v_conv",
    "v_conv_init",
    "gate",
    "temperature",
)  # what a model passes on to each of its layers


def as_key_mask(attn_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The key mask (..., L) that an attention mask for keys of x (..., L, C) stands for; an error if it is none.

    Moments are taken once for all queries, so a mask that differs from query to query cannot be honoured.
    """
    if attn_mask is None:
        return None
    check_dtype("x", x)
    check_dense("attn_mask", attn_mask)
    if attn_mask.shape == x.shape[:-1]:
        check_mask(attn_mask, x, x.shape[:-2], "attn_mask")
        return attn_mask
    per_key = (*x.shape[:-2], 1, 1, x.shape[-2])
    if attn_mask.shape == per_key and attn_mask.dtype == torch.bool:
        return attn_mask[..., 0, 0, :]
    raise ValueError(
        f"attn_mask of shape {tuple(attn_mask.shape)} and dtype {attn_mask.dtype} cannot be honoured: "
        f"attention of linear cost takes one mask for all queries, {tuple(x.shape[:-1])} bool or weights, "
        f"or {per_key} bool; for a causal mask pass is_causal=True"
    )


def one_mask(key_mask: Tensor | None, attn_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The key mask of x (..., L, C), which may come under either name."""
    if key_mask is not None and attn_mask is not None:
        raise ValueError("key_mask and attn_mask were both given; they say the same, pass one of them")
    return key_mask if attn_mask is None else as_key_mask(attn_mask, x)


def check_name(attention: str) -> None:
    if not isinstance(attention, str):
        raise TypeError(f"attention must be the name of a mechanism, such as 'cumulant3+full', got {attention!r}")


def check_sizes(dim: int, num_heads: int, head_dim: int | None = None) -> None:
    for name, size in (("dim", dim), ("num_heads", num_heads), ("head_dim", head_dim)):
        given = size is not None or name != "head_dim"
        if given and (isinstance(size, bool) or not isinstance(size, int)):
            raise ValueError(f"{name} must be a whole number, at least 1, got {size!r}")
    if num_heads < 1 or dim < 1 or (head_dim is None and dim % num_heads):
        raise ValueError(f"dim must be a positive multiple of num_heads, got dim={dim}, num_heads={num_heads}")
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"head_dim must be a number of channels, at least 1, got {head_dim}")


def check_layout(grid_size: Grid | None, prefix: int) -> None:
    if grid_size is not None:
        sides = grid_size if isinstance(grid_size, tuple | list) else ()
        if len(sides) not in (2, 3) or not all(type(side) is int and side > 0 for side in sides):
            raise ValueError(f"grid_size must be (rows, cols) or (frames, rows, cols), got {grid_size!r}")
    check_count("prefix", prefix, 0)


def check_place(device: Any, dtype: Any) -> None:
    """Raises for what is no device, and for a dtype in which there is no attention."""
    try:
        device is None or torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device must be that of a torch.Tensor, got {device!r}: {error!s:.160}") from None
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in DTYPES):
        raise TypeError(f"dtype must be floating point ({', '.join(map(str, DTYPES))}) or None, got {dtype!r}")


def check_beside(name: str, x: Tensor, weight: Tensor | None) -> None:
    """Raises for x of another device, or floating point of another dtype, than the weight that it will meet."""
    if weight is None:
        return
    if x.device != weight.device and not weight.is_meta:  # weights that are brought in for each call are on meta before
        raise ValueError(f"{name} must be on the device of the weights, {weight.device}, got {x.device}")
    cast = weight.dtype not in DTYPES or (not x.is_meta and torch.is_autocast_enabled(x.device.type))
    if x.is_floating_point() and x.dtype != weight.dtype and not cast:
        raise TypeError(f"{name} must have the dtype of the weights, {weight.dtype}, got {x.dtype}")


def check_kv_heads(num_kv_heads: int | None, num_heads: int, mechanism: Mechanism) -> int:
    """The number of key heads of a layer; raises where query heads do not divide among them, or may not share them."""
    if num_kv_heads is None or (whole(num_kv_heads, 1) and num_kv_heads == num_heads):
        return num_heads
    if not whole(num_kv_heads, 1) or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads must be a whole number that divides num_heads={num_heads}, got {num_kv_heads!r}"
        )
    mechanism.require("grouped_queries", f"num_kv_heads={num_kv_heads} with num_heads={num_heads}")
    return num_kv_heads


def check_extras(extras: Mapping[str, Any], known: tuple[str, ...] = EXTRAS) -> None:
    """Raises for an argument that is none of the layer's extras."""
    for name in extras:
        if name not in known:
            raise ValueError(f"unknown attention extra {name!r}; {suggest(name, list(known))}")
