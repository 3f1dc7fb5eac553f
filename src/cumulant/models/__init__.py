"""Backbones that take any attention mechanism, and `create_model` to make them by name."""

import warnings

from .backbone import Backbone, Features
from .lm import LanguageModel
from .registry import create_model, names, register_model
from .vit import VisionTransformer
from .vivit import ViViT

__all__ = [
    "Backbone",
    "Features",
    "LanguageModel",
    "ViViT",
    "VisionTransformer",
    "create_model",
    "names",
    "register_model",
]


def __getattr__(name: str) -> object:
    if name != "model_names":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("cumulant.models.model_names is now cumulant.models.names", DeprecationWarning, stacklevel=2)
    return names
