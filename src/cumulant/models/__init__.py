"""Backbones that take any attention mechanism, and `create_model` to make them by name."""

import warnings

from .activator import Activator
from .backbone import Backbone, Features
from .crossvit import CrossViT
from .dense import Segmenter
from .lm import LanguageModel
from .registry import create_model, names, register_model
from .shvit import SHViT
from .tnt import TNT
from .vit import VisionTransformer
from .vivit import ViViT

__all__ = [
    "TNT",
    "Activator",
    "Backbone",
    "CrossViT",
    "Features",
    "LanguageModel",
    "SHViT",
    "Segmenter",
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
