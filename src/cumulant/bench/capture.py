"""Real query, key and value: what the attention layers of a trained model receive for real inputs.

Shape legend: B inputs, H heads, L tokens, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.batches import evaluating
from ..inspect.items import labelled_items, pixels_of
from ..inspect.opening import open_model
from ..inspect.seen import Seen
from ..inspect.sites import Site, find_sites
from ..inspect.watching import watching
from ..nn import AxialAttention


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
    """Query, key and value of every attention layer of the model, in the order in which they are called.

    The model runs once in evaluation mode and is left as it was. Cost: one forward pass and its projections again.
    """
    sites, found = find_sites(model), list[Captured]()
    for site in sites:
        if isinstance(site.module, AxialAttention):
            raise ValueError(
                f"{site.name} attends along two axes in turn: one set of q, k, v does not say what it does"
            )

    def see(site: Site, seen: Seen, _: Any) -> None:
        made = seen.call
        how: dict[str, Any] = {"key_mask": made.key_mask, "grid": made.grid, "prefix": made.prefix}
        found.append(Captured(site.name, *made[:3], made.is_causal, **how))

    with evaluating(model), watching(model, sites, see):
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
