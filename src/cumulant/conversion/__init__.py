"""Linear-time attention in models that exist: registration, conversion, diagnosis, saving and export."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from ..nn.swapped.choice import Choice as Choice
    from ..nn.swapped.choice import fitting as fitting
    from ..nn.swapped.diffusers_backend import register_diffusers as register_diffusers
    from ..nn.swapped.hf import register_transformers as register_transformers
    from ..nn.swapped.kernel_repository import write_kernel_repository as write_kernel_repository
    from ..nn.swapped.timm_layers import register_timm as register_timm
    from .cache import MergedCache as MergedCache
    from .cache import MomentsCache as MomentsCache
    from .checks import count_calls as count_calls
    from .conversion import ConversionReport as ConversionReport
    from .conversion import convert as convert
    from .conversion import restore as restore
    from .diagnosis import Diagnosis as Diagnosis
    from .diagnosis import diagnose as diagnose
    from .dial import ModelDial as ModelDial
    from .dial import choose_layers as choose_layers
    from .distillation import DistillResult as DistillResult
    from .distillation import distill as distill
    from .export import export_onnx as export_onnx
    from .export import export_program as export_program
    from .paying import SlowerError as SlowerError
    from .saving import load as load
    from .saving import save as save
    from .settings import DistillRecipe as DistillRecipe

lazy(__name__)


class _OldName(ModuleType):
    """`from cumulant.convert import load`, as this room was once called; `cumulant.convert` itself is a function."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # what the import machinery asks for
            raise AttributeError(name)
        instead = "import it from cumulant.conversion, or call cumulant.convert, .load, .save and .distill"
        warnings.warn(f"cumulant.convert.{name} has moved: {instead}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[__name__], name)


sys.modules["cumulant.convert"] = _OldName("cumulant.convert")
