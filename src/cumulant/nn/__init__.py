"""Attention layers: `MultiheadAttention` for any mechanism, `CumulantAttention` for timm models."""

from .attention import CumulantAttention, MultiheadAttention

__all__ = ["CumulantAttention", "MultiheadAttention"]
