"""Rooms whose names are imported on first use. No heavy import.

A package lists its names once, in the imports that type checkers read, and asks for the rest:

    if TYPE_CHECKING:
        from .saving import load as load, save as save

    lazy(__name__)
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Room(ModuleType):
    """A package that imports a name, or a module of its own, when it is asked for."""

    _homes: dict[str, str]  # name -> the module that has it, seen from here: .saving

    def __getattr__(self, name: str) -> Any:
        homes = self.__dict__["_homes"]
        if name in homes:
            value = getattr(import_module(homes[name], self.__name__), name)
        elif not name.startswith("_") and find_spec(f"{self.__name__}.{name}") is not None:
            value = import_module(f".{name}", self.__name__)
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """The import system sets every module that it loads; of one named like a name of the room, that is kept."""
        if isinstance(value, ModuleType) and self._homes.get(name) == f".{name}":
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


def lazy(package: str) -> None:
    """Make a room of the package that is being imported, with the names under its `if TYPE_CHECKING:`."""
    room = sys.modules[package]
    source = room.__loader__.get_source(package)  # type: ignore[union-attr]
    if source is None:
        raise ImportError(f"{package} was installed without its source files, which it reads its names from")
    blocks = [x for x in ast.parse(source).body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"]
    lines = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    homes = {one.name: "." * line.level + line.module for line in lines for one in line.names if line.module}
    modules = [one.name for line in lines for one in line.names if not line.module]  # from . import nn
    room.__dict__.update(_homes=homes, __all__=sorted([*homes, *modules]))
    room.__class__ = Room
