"""Said once: a call on a GPU that no kernel can take, what stood in the way, and how it is removed."""

from __future__ import annotations

import re
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
        f"{operator} runs in plain torch on this GPU, several times slower than its kernels: {obstacle}. This is said "
        'once; backend="reference" asks for plain torch.',
        SlowPathWarning,
        stacklevel=2,
    )


def forget() -> None:
    """Everything may be said again."""
    _said.clear()
