"""The explorer: a local web page that shows where attention looks. `cumulant explore` starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .explorable import Example, Explorable
    from .limits import Limits

__all__ = ["Example", "Explorable", "Limits", "create_app"]

_HOMES = {"create_app": "app", "Example": "explorable", "Explorable": "explorable", "Limits": "limits"}


def __getattr__(name: str) -> Any:
    """Imported on first use: the command line reads `web.settings` for its help and must not wait for FastAPI."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
