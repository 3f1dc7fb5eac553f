"""Real query, key and value: what the attention layers of a trained model receive for real inputs.

Shape legend: B inputs, H heads, L tokens, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.items import labelled_items, pixels_of
from ..inspect.opening import open_model


@dataclass(frozen=True)
class Captured:
    """Query, key and value (B, H, L, D) of one layer, norms and temperatures applied, and how it was called."""

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False
    key_mask: Tensor | None = None
    grid: tuple[int, ...] | None = None
    prefix: int = 0

    @property
    def call(self) -> dict[str, Any]:
        """The keyword arguments under which a mechanism stands where the layer's own one stood."""
        return {name: getattr(self, name) for name in ("is_causal", "key_mask", "grid", "prefix")}


@torch.no_grad()
def capture(model: nn.Module, images: Tensor) -> list[Captured]:
    """Query, key and value of every `MultiheadAttention` of the model, in the order in which they are called.

    The model runs once in evaluation mode and is left as it was. Cost: one forward pass and its projections again.
    """
    from cumulant.nn import MultiheadAttention
    from cumulant.nn.axial import AxialAttention
    from cumulant.nn.cumulant import as_key_mask

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MultiheadAttention)}
    if not layers:
        raise ValueError(f"model must hold cumulant.nn.MultiheadAttention layers, got a {type(model).__name__}")
    axial = [name for name, layer in layers.items() if isinstance(layer, AxialAttention)]
    if axial:
        raise ValueError(f"{axial[0]} attends along two axes in turn: one set of q, k, v does not say what it does")
    found: list[Captured] = []

    def before(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
            x, context = given["x"], given.get("context")
            query, key, value = layer.project(x, context)
            grid, prefix = given.get("grid"), given.get("prefix", 0)
            if grid is None and context is None:
                grid, prefix = layer.grid_size, layer.prefix
            mask = given.get("key_mask", as_key_mask(given.get("attn_mask"), x))
            found.append(Captured(name, query, key, value, given.get("is_causal", False), mask, grid, prefix))

        return hook

    training = model.training
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(before(name), with_kwargs=True).remove)
        stack.callback(model.train, training)
        model.eval()
        model(images)
    return found


def from_checkpoint(path: str | Path, *, data: str | None = None, images: int = 32) -> tuple[list[Captured], str]:
    """What a model sees in `images` test inputs of its data, and that in words.

    `path` is a word of `inspect.open_model`; `data` replaces the data of the recipe in its weights.
    """
    opened = open_model(path)
    model: Any = opened.model.float()  # a file may hold half-precision weights
    config = getattr(model, "config", None) or {}
    if opened.recipe is None and data is None and config.get("name") == "vit_nano_patch2_8":
        data = "digits"
    pixels, _, source = labelled_items(opened, data, images)
    words = f"{config['name']} trained with {config.get('attention', 'softmax')}, {len(pixels)} of"
    return capture(model, pixels_of(opened).batch(pixels)), f"{words} {Path(source.name).name}"
