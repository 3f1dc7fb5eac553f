"""Attention layers: `MultiheadAttention` for any mechanism, `CumulantAttention` for timm models, others by name."""

from .attention import MultiheadAttention
from .axial import AxialAttention
from .cumulant import CumulantAttention
from .registry import Layer, create_layer, layers, register_layer

__all__ = [
    "AxialAttention",
    "CumulantAttention",
    "Layer",
    "MultiheadAttention",
    "create_layer",
    "layers",
    "register_layer",
]
