"""Attention layers: `MultiheadAttention` for any mechanism, `CumulantAttention` for timm models, `AxialAttention`."""

from .attention import MultiheadAttention
from .axial import AxialAttention
from .cumulant import CumulantAttention

__all__ = ["AxialAttention", "CumulantAttention", "MultiheadAttention"]
