"""Triton's interpreter replaces the language's functions anew at every call of a device function: a third of its time.

Here they are replaced once a launch; what is put back after a launch is the same.
"""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: set[int] = set()

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            replaced.clear()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in replaced:
            return None  # of a device function, whose answer nobody reads
        replaced.add(id(function.__globals__))
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_once, patch_once
