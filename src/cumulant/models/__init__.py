"""Backbones that take any attention mechanism, and `create_model` to make them by name."""

from .registry import create_model, names, register_model
from .vit import VisionTransformer
from .vivit import ViViT

__all__ = ["ViViT", "VisionTransformer", "create_model", "names", "register_model"]
