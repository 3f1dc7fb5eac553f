"""Attention mechanisms under one signature: `get("softmax")(query, key, value)`; `names()` lists them."""

# Importing registers; this is the order of names().
from . import softmax, linear, cumulant  # noqa: F401, I001
from . import cosformer, flow, focused_linear, rala, mala  # noqa: F401
from . import agent, combiner, aaren, lla, hierarchical  # noqa: F401
from . import cluster  # noqa: F401
from .probes import capabilities
from .registry import Mechanism, can, get, names, nearest, register

__all__ = ["Mechanism", "can", "capabilities", "get", "names", "nearest", "register"]
