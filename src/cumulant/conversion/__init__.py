"""Linear-time attention in models that exist: registration, conversion, diagnosis, saving and export."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache import MomentsCache
    from .choice import Choice, fitting
    from .conversion import ConversionReport, convert, count_calls, restore
    from .diagnosis import Diagnosis, diagnose
    from .distillation import DistillResult, distill
    from .export import export_onnx, export_program
    from .hf import register_transformers
    from .saving import load, save
    from .settings import DistillRecipe

# Found when they are first used: the command line reads `settings` and nothing else.
_HOMES = {
    "Choice": "choice",
    "ConversionReport": "conversion",
    "Diagnosis": "diagnosis",
    "DistillRecipe": "settings",
    "DistillResult": "distillation",
    "MomentsCache": "cache",
    "convert": "conversion",
    "count_calls": "conversion",
    "diagnose": "diagnosis",
    "distill": "distillation",
    "export_onnx": "export",
    "export_program": "export",
    "fitting": "choice",
    "load": "saving",
    "register_transformers": "hf",
    "restore": "conversion",
    "save": "saving",
}

__all__ = [
    "Choice",
    "ConversionReport",
    "Diagnosis",
    "DistillRecipe",
    "DistillResult",
    "MomentsCache",
    "convert",
    "count_calls",
    "diagnose",
    "distill",
    "export_onnx",
    "export_program",
    "fitting",
    "load",
    "register_transformers",
    "restore",
    "save",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


class _OldName(ModuleType):
    """`from cumulant.convert import load`, as this room was once called; `cumulant.convert` itself is a function."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # what the import machinery asks for
            raise AttributeError(name)
        instead = "import it from cumulant.conversion, or call cumulant.convert, .load, .save and .distill"
        warnings.warn(f"cumulant.convert.{name} has moved: {instead}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[__name__], name)


sys.modules["cumulant.convert"] = _OldName("cumulant.convert")
