"""The only door from the explorer to `cumulant.explain`: what it asks for, in the shapes that the page needs.

Shape legend: N layers, H heads, L tokens (prefix first, then patches frame by frame and row by row), K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import explain
from ..explain.flow import logits_of
from ..explain.importance import answers
from ..nn import AxialAttention

Pair = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class Facts:
    """What there is to look at in a model."""

    layers: int
    heads: int
    prefix: int
    times: int
    """Steps in time of a clip's tokens; 1 for pictures."""
    grid: tuple[int, int]
    attention: str
    axes: tuple[str, ...]
    """Along what each layer looks: "all" tokens, "space", "time", or "frames"."""
    lens: bool
    """Whether other orders can be tried on the queries and keys of each layer."""

    @property
    def tokens(self) -> int:
        return self.prefix + self.times * self.grid[0] * self.grid[1]

    @property
    def weights(self) -> int:
        """Weights in all maps of one image."""
        return self.layers * self.heads * self.tokens**2


def facts(model: nn.Module, images: Tensor) -> Facts:
    """Seen on a pass over `images`, so that a model whose maps cannot be had is refused at once."""
    sites, told = explain.find_sites(model), explain.model_info(model)
    recording = explain.record(model, images)
    if len(recording.layers) < len(sites):
        missing = next(site for site in sites if site.number not in recording.layers)
        raise ValueError(f"layer {missing.number} ({missing.name}) of {type(model).__name__} shows no weights")
    layouts = {recording.layout(layer) for layer in recording.layers}
    if len(layouts) > 1 or len({site.heads for site in sites}) > 1:
        raise ValueError(
            f"the layers of {type(model).__name__} differ in tokens or heads; the explorer shows plain ones"
        )
    layout = layouts.pop()
    rows, cols = layout.grid[-2:]
    axial = any(isinstance(site.module, AxialAttention) for site in sites)
    return Facts(
        layers=len(sites),
        heads=sites[0].heads,
        prefix=layout.prefix,
        times=layout.grid[0] if len(layout.grid) == 3 else 1,
        grid=(rows, cols),
        attention=told["attention"],
        axes=tuple(site.axes for site in sites),
        lens=not axial and all(site.axes == "all" for site in sites),
    )


def record(model: nn.Module, images: Tensor, off: Sequence[Pair]) -> explain.Recording:
    """One pass with these heads off, from which answer and maps follow."""
    with explain.head_off(model, off):
        return explain.record(model, images)


def row(recording: explain.Recording, query: int) -> Tensor:
    """Signed weights (N, H, L) of one query of one image."""
    maps = [recording.maps(layer, queries=[query])[0, :, 0] for layer in recording.layers]
    return torch.stack([weights.float() for weights in maps]).cpu()


def probabilities(output: Any) -> Tensor:
    """Class probabilities (K,) of the first image."""
    return logits_of(output)[0].double().softmax(-1).cpu()


@torch.no_grad()
def answer(model: nn.Module, images: Tensor, off: Sequence[Pair], classes: bool) -> dict[str, Tensor]:
    """What a pass with these heads off ends in: "probabilities" (K,) of a classifier, and "features" (C,) before it."""
    with explain.head_off(model, off):
        if classes:
            said = answers(model, images)
            found = {"probabilities": probabilities(said.logits)}
            return found if said.features is None else {**found, "features": said.features[0].double().cpu()}
        output = model(images)
    if not isinstance(output, Tensor):
        pooled = getattr(output, "pooler_output", None)
        output = pooled if pooled is not None else output[0]
    return {"features": output.flatten(1)[0].double().cpu()}


@torch.no_grad()
def summary(recording: explain.Recording) -> tuple[dict[str, Tensor], Tensor]:
    """Every number that `explain.summary` has, (N, H) each, and the ring profile (N, H, hops) times L: 1 is uniform."""
    captured = recording.captured()
    tokens = captured.tokens
    rings = [explain.ring_profile(captured.maps(layer), tokens).per_neighbour[0] for layer in captured.layers]
    return explain.summary(captured), torch.stack(rings).cpu() * tokens.count
