"""Backbones that take any attention mechanism, and `create_model` to make them by name."""

from .registry import create_model, model_names
from .vit import VisionTransformer

__all__ = ["VisionTransformer", "create_model", "model_names"]
