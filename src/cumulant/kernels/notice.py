"""Said once: a call on a GPU that no kernel can take, what stood in the way, and how it is removed."""

from __future__ import annotations

import re
import sys
import warnings

import torch
from torch import Tensor

_said: set[tuple[str, str]] = set()


class SlowPathWarning(UserWarning):
    """A call on a GPU ran in plain torch: the result is the same, the speed is not."""


def expected(x: Tensor) -> bool:
    """Whether a caller with this tensor may expect a kernel."""
    return x.is_cuda


def plain_torch(operator: str, x: Tensor, obstacle: str) -> None:
    """Warns, once for an operator and an obstacle whatever its numbers are; nothing where no kernel is expected."""
    if not expected(x) or torch.compiler.is_compiling():
        return
    kind = operator, re.sub(r"\d[\d,]*", "#", obstacle)
    if kind in _said:
        return
    _said.add(kind)
    warnings.warn(
        f"{operator} runs in plain torch on this GPU, which is slower than a kernel: {obstacle}. This is said once; "
        'backend="reference" asks for plain torch.',
        SlowPathWarning,
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The stacklevel at which `plain_torch` points to the line that called this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("cumulant."):
        frame, level = frame.f_back, level + 1
    return level


def forget() -> None:
    """Everything may be said again."""
    _said.clear()
