"""Weights under the names of timm: matrices that stand apart there are stacked in one `qkv` here.

`apart` names, for each such layer, the parts and their rows: {"blocks.0.attn_in": {"qk": 48, "v": 24}}.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

Apart = Mapping[str, Mapping[str, int]]
KINDS = ("weight", "bias")


def join(state: MutableMapping[str, Tensor], apart: Apart, prefix: str = "") -> None:
    """In a state dict, make one `qkv` of the parts of every layer that has them all. In place."""
    for layer, parts in apart.items():
        for kind in KINDS:
            names = [f"{prefix}{layer}.{part}.{kind}" for part in parts]
            if all(name in state for name in names):
                state[f"{prefix}{layer}.qkv.{kind}"] = torch.cat([state.pop(name) for name in names])


def take_apart(state: MutableMapping[str, Tensor], apart: Apart) -> None:
    """The reverse, in place."""
    for layer, parts in apart.items():
        for kind in KINDS:
            whole = state.pop(f"{layer}.qkv.{kind}", None)
            rows = () if whole is None else whole.split(list(parts.values()))
            state.update({f"{layer}.{part}.{kind}": own for part, own in zip(parts, rows, strict=False)})
