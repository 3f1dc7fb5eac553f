"""Our names for transformers, timm and diffusers, registered when these are there; nothing heavy is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _transformers() -> None:
    from .nn.swapped.hf import register_transformers

    register_transformers()


def _timm() -> None:
    from .nn.swapped.timm_layers import register_timm

    register_timm()


def _diffusers() -> None:
    from .nn.swapped.diffusers_backend import register_diffusers

    register_diffusers()


REGISTER = {  # with this module a library has its registry
    "transformers.modeling_utils": _transformers,
    "timm.models.vision_transformer": _timm,
    "diffusers.models.attention_dispatch": _diffusers,
}


def register_on_arrival() -> None:
    """Register now with what is imported, and with the rest right after it will be; nothing is imported."""
    for name, register in REGISTER.items():
        if name in sys.modules:
            register()
    if not any(isinstance(finder, _Arrival) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Arrival())


class _Arrival(MetaPathFinder):
    """Finds these modules as Python does, and registers once they were loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTER:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Loaded(found.loader)
        return found


class _Loaded(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        REGISTER[module.__name__]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
