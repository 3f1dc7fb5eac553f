"""Attention mechanisms under one signature: `get("softmax")(query, key, value)`; `names()` lists them."""

from . import softmax, linear, cumulant  # noqa: F401, I001  (importing registers; this is the order of names())
from .registry import Mechanism, get, names, register

__all__ = ["Mechanism", "get", "names", "register"]
