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
    """What the model of a checkpoint sees in `images` test inputs of its data, and that in words.

    `path` is a file that `cumulant.train` wrote, or the folder of a run: then its last.safetensors. `data` replaces the
    data of the recipe in the file.
    """
    from cumulant.train import load
    from cumulant.train.checkpoint import read_header
    from cumulant.train.recipe_files import from_json

    path = Path(path)
    path = path / "last.safetensors" if path.is_dir() else path
    if images < 1:
        raise ValueError(f"images must be 1 or more, got {images}")
    model: Any = load(path).float()  # a file may hold half-precision weights
    header = read_header(path)
    if "recipe" in header:
        recipe = from_json(header["recipe"])
        pixels, source = _test_pixels(recipe, data, images)
    elif model.config["name"] == "vit_nano_patch2_8" and data in (None, "digits"):
        from cumulant.data import digits

        pixels, source = digits().test_images[:images], "digits"
    else:
        raise ValueError(f"{path} has no recipe inside, so its data is not known: use one that `cumulant train` wrote")
    attention = model.config.get("attention", "softmax")
    return capture(model, pixels), f"{model.config['name']} trained with {attention}, {len(pixels)} of {source}"


def labelled_items(path: str | Path, data: str | None, count: int) -> tuple[Tensor, Tensor]:
    """`count` test items of the recipe in a checkpoint, normalised as in evaluation, and their labels."""
    from cumulant.train.build import augment_of, open_recipe_source
    from cumulant.train.checkpoint import read_header
    from cumulant.train.recipe_files import from_json

    recipe = from_json(read_header(Path(path))["recipe"])
    source = open_recipe_source(recipe, data)
    chosen = torch.linspace(0, len(source.test) - 1, min(count, len(source.test))).long().tolist()
    pixels = torch.stack([source.test.decode(index, recipe.loaded_size) for index in chosen])
    labels = torch.tensor([int(source.test.labels[index]) for index in chosen])
    return augment_of(recipe, len(source.classes)).evaluate(pixels), labels


def _test_pixels(recipe: Any, data: str | None, images: int) -> tuple[Tensor, str]:
    """Test items, normalised as in evaluation, and the name of their source."""
    from cumulant.train.build import augment_of, open_recipe_source

    source = open_recipe_source(recipe, data)
    # Evenly spaced: the items of a folder may stand class by class.
    chosen = torch.linspace(0, len(source.test) - 1, min(images, len(source.test))).long().tolist()
    pixels = torch.stack([source.test.decode(index, recipe.loaded_size) for index in chosen])
    return augment_of(recipe, len(source.classes)).evaluate(pixels), Path(source.name).name
