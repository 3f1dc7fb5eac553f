"""Linear-time attention in models that exist: registration, conversion, diagnosis, saving and export."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import cluster

if TYPE_CHECKING:
    from ..nn.swapped.choice import Choice, fitting
    from ..nn.swapped.hf import register_transformers
    from .cache import MomentsCache
    from .conversion import ConversionReport, convert, count_calls, restore
    from .diagnosis import Diagnosis, diagnose
    from .dial import ModelDial, choose_layers
    from .distillation import DistillResult, distill
    from .export import export_onnx, export_program
    from .saving import load, save
    from .settings import DistillRecipe

# Found when they are first used: the command line reads `settings` and nothing else.
_HOMES = {
    "Choice": ".nn.swapped.choice",
    "ConversionReport": "conversion",
    "Diagnosis": "diagnosis",
    "DistillRecipe": "settings",
    "DistillResult": "distillation",
    "ModelDial": "dial",
    "MomentsCache": "cache",
    "choose_layers": "dial",
    "convert": "conversion",
    "count_calls": "conversion",
    "diagnose": "diagnosis",
    "distill": "distillation",
    "export_onnx": "export",
    "export_program": "export",
    "fitting": ".nn.swapped.choice",
    "load": "saving",
    "register_transformers": ".nn.swapped.hf",
    "restore": "conversion",
    "save": "saving",
}

__all__ = [
    "Choice",
    "ConversionReport",
    "Diagnosis",
    "DistillRecipe",
    "DistillResult",
    "ModelDial",
    "MomentsCache",
    "choose_layers",
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


def _choose_layers(*arguments: Any, **options: Any) -> ModelDial:
    """`cumulant.conversion.choose_layers` under the name that it had."""
    said = "cumulant.cluster.choose_layers has moved: import it from cumulant.conversion"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    from .dial import choose_layers

    return choose_layers(*arguments, **options)


setattr(cluster, "choose_layers", _choose_layers)  # noqa: B010  # from here: cluster imports nothing above it
