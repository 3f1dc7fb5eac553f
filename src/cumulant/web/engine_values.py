"""Tensors as plain numbers for an answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DIGITS = 6  # of a weight that is sent


class NotFiniteError(ArithmeticError):
    """A model that answers with NaN or infinity, for which JSON has no word."""


def plain(values: Tensor, digits: int = DIGITS) -> Any:
    """Nested lists of rounded numbers."""
    if not bool(torch.isfinite(values).all()):
        raise NotFiniteError("the model gives values that are not finite for this image; it may have diverged")
    return values.double().mul(10**digits).round().div(10**digits).tolist()
