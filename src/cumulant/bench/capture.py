"""Real query, key and value: what the attention layers of a trained model receive for real inputs.

Shape legend: B inputs, H heads, L tokens, D head width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..call import Call
from ..inspect.batches import evaluating
from ..inspect.items import labelled_items, pixels_of
from ..inspect.opening import open_model
from ..inspect.sites import find_sites
from ..inspect.watching import watching
from ..nn import AxialAttention


@torch.no_grad()
def capture(model: nn.Module, images: Tensor) -> dict[str, Call]:
    """What every attention layer of the model is asked to compute, by its name, in the order in which they run.

    Query, key and value (B, H, L, D) have norms and temperatures applied. The model runs once in evaluation mode and is
    left as it was. Cost: one forward pass and its projections again.
    """
    sites, found = find_sites(model), dict[str, Call]()
    for site in sites:
        if isinstance(site.module, AxialAttention):
            raise ValueError(f"{site.name} attends along two axes in turn: one set of q, k, v is not what it does")
    with evaluating(model), watching(model, sites, lambda site, seen, _: found.update({site.name: seen.call})):
        model(images)
    return found


def from_checkpoint(path: str | Path, *, data: str | None = None, images: int = 32) -> tuple[dict[str, Call], str]:
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
