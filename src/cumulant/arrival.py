"""Our names for transformers, registered when it is there. No heavy import: transformers brings in torch itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

READY = "transformers.modeling_utils"  # with this module transformers has its registries, and models


def register_on_arrival() -> None:
    """Register now if transformers is imported with its models, or else right after it will be; nothing is imported."""
    if READY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Arrival) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Arrival())


def _register() -> None:
    from .nn.swapped.hf import register_transformers

    register_transformers()


class _Arrival(MetaPathFinder):
    """Finds one module as Python does, and registers once it was loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != READY:
            return None
        sys.meta_path.remove(self)
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
        _register()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
