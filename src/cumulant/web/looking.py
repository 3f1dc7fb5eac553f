"""Passes of the explorer's models, for which `cumulant.explain` is asked: those that a test may count.

Shape legend: L tokens (prefix first, then patches frame by frame and row by row), K classes, C width of the features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import explain
from ..explain.flow import logits_of
from ..explain.importance import answers
from ..models.ia_red2 import InterpretedViT
from ..nn import AxialAttention
from .explorable import Explorable
from .schemas import ModelInfo

Heads = tuple[tuple[int, int], ...]  # layer and head of each


def facts(name: str, one: Explorable) -> ModelInfo:
    """Seen on a pass over a grey image, so that a model whose maps cannot be had is refused at once."""
    model, kind = one.model, type(one.model).__name__
    sites, recording = explain.find_sites(model), explain.record(model, one.blank())
    if len(recording.layers) < len(sites):
        missing = next(site for site in sites if site.number not in recording.layers)
        raise ValueError(f"layer {missing.number} ({missing.name}) of {kind} shows no weights")
    layouts = {recording.layout(layer) for layer in recording.layers}
    if len(layouts) > 1 or len({site.heads for site in sites}) > 1:
        raise ValueError(f"the layers of {kind} differ in tokens or heads; the explorer shows plain ones")
    layout = layouts.pop()
    rows, cols = layout.grid[-2:]
    axial = any(isinstance(site.module, AxialAttention) for site in sites)
    return ModelInfo(
        name=name,
        title=one.title,
        attention=explain.model_info(model)["attention"],
        layers=len(sites),
        heads=sites[0].heads,
        prefix=layout.prefix,
        times=layout.grid[0] if len(layout.grid) == 3 else 1,
        grid=(rows, cols),
        axes=[site.axes for site in sites],
        size=one.size,
        classes=len(one.classes),
        accuracy=one.accuracy,
        lens=not axial and all(site.axes == "all" for site in sites),
        collection=one.collection,
        interpreter=isinstance(model, InterpretedViT),
    )


def record(one: Explorable, images: Tensor, off: Heads) -> explain.Recording:
    """One pass with these heads off, from which answer and maps follow."""
    with explain.head_off(one.model, off):
        return explain.record(one.model, images)


def probabilities(output: Any) -> Tensor:
    """Class probabilities (K,) of the first image."""
    return logits_of(output)[0].double().softmax(-1).cpu()


@torch.no_grad()
def answer(one: Explorable, images: Tensor, off: Heads) -> dict[str, Tensor]:
    """What a pass with these heads off ends in: "probabilities" (K,) of a classifier, and "features" (C,) before it."""
    with explain.head_off(one.model, off):
        if one.classes:
            said = answers(one.model, images)
            found = {"probabilities": probabilities(said.logits)}
            return found if said.features is None else {**found, "features": said.features[0].double().cpu()}
        output = one.model(images)
    if not isinstance(output, Tensor):
        pooled = getattr(output, "pooler_output", None)
        output = pooled if pooled is not None else output[0]
    return {"features": output.flatten(1)[0].double().cpu()}
