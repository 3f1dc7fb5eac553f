"""Attention layers: `MultiheadAttention` for any mechanism, `CumulantAttention` for timm models, others by name."""

from . import heads  # noqa: F401  # importing registers
from .attention import MultiheadAttention
from .axial import AxialAttention
from .cumulant import CumulantAttention
from .heads.base import auxiliary_loss
from .probes import marks
from .registry import Layer, create_layer, get_layer, layers, register_layer

__all__ = [
    "AxialAttention",
    "CumulantAttention",
    "Layer",
    "MultiheadAttention",
    "auxiliary_loss",
    "create_layer",
    "get_layer",
    "layers",
    "marks",
    "register_layer",
]
