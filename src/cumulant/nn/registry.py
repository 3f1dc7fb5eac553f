"""Attention layers by name: `create_layer("multihead", 384, 6, attention="cumulant3")`.

A layer maps tokens x (..., L, C) to tokens, `layer(x, context=None, key_mask=None, is_causal=False, grid=None,
prefix=0)`; which mechanism works between its projections is the name it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..grammar import suggest
from .attention import MultiheadAttention
from .axial import AxialAttention


@dataclass(frozen=True)
class Layer:
    """`build(dim, num_heads, *, attention, **options)` makes the module; the summary is what `cumulant list` shows."""

    name: str
    summary: str
    build: Callable[..., nn.Module]


_LAYERS: dict[str, Layer] = {}


def register_layer(layer: Layer) -> Layer:
    """Add a layer under its name, which must be new, and return it."""
    if layer.name in _LAYERS:
        raise ValueError(f"a layer named {layer.name!r} is registered already; choose another name")
    _LAYERS[layer.name] = layer
    return layer


def layers() -> list[str]:
    """Names of all registered layers."""
    return list(_LAYERS)


def get_layer(name: str) -> Layer:
    """The layer of that name."""
    if name not in _LAYERS:
        raise ValueError(f"unknown attention layer {name!r}; {suggest(name, layers())}")
    return _LAYERS[name]


def create_layer(name: str, dim: int, num_heads: int, *, attention: str = "softmax", **options: Any) -> nn.Module:
    """A freshly initialised layer of width `dim`; `options` are those of its class."""
    return get_layer(name).build(dim, num_heads, attention=attention, **options)


register_layer(Layer("multihead", "projections, a mechanism between them, an output projection", MultiheadAttention))
register_layer(Layer("axial", "half of the heads along time, the other half within a frame", AxialAttention))
