"""Attention-score maps of trained models: where one patch of one image looks, under every mechanism.

Shape legend: B images, H heads, L tokens (class token first, then the patches row by row), D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def attention_inputs(model: nn.Module, images: Tensor) -> list[tuple[Any, Tensor]]:
    """Every attention layer of the model with the tokens (B, L, C) it receives for these images."""
    captured: list[tuple[Any, Tensor]] = []
    blocks: Any = model.blocks
    hooks = [
        block.attn.register_forward_pre_hook(lambda layer, inputs: captured.append((layer, inputs[0])))
        for block in blocks
    ]
    try:
        model.eval()
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return captured


@torch.no_grad()
def projections(model: nn.Module, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value (B, H, L, D) of every layer, as the mechanism receives them."""
    return [layer.project(tokens) for layer, tokens in attention_inputs(model, images)]


@torch.no_grad()
def score_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Weights (B, H, L, L) of every layer but the last: there only the class token's query reaches the output."""
    return [layer.scores(tokens) for layer, tokens in attention_inputs(model, images)[:-1]]


def negative_mass(scores: Tensor) -> Tensor:
    """Sum of the sizes of the negative weights, (..., L) -> (...). The weights sum to 1, so 0 means none."""
    return scores.clamp(max=0).sum(-1).neg()


def tokens_used(scores: Tensor) -> Tensor:
    """Over how many tokens a map is spread: (sum |a|)^2 / sum a^2, between 1 (one token) and L (all alike)."""
    return scores.abs().sum(-1).square() / scores.square().sum(-1)


def locality(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Means over images, layers, heads and patch queries: tokens used and negative mass."""
    maps = torch.stack([layer[..., 1:, :] for layer in score_maps(model, images)])
    return {"tokens_used": tokens_used(maps).mean().item(), "negative_mass": negative_mass(maps).mean().item()}


def inked_patch(image: Tensor, patch: int) -> int:
    """Number (row by row) of the patch with most ink: a query that sits on the stroke. image is (H, W)."""
    return int(image.unfold(0, patch, patch).unfold(1, patch, patch).sum((-1, -2)).argmax())


def examples(
    models: Mapping[str, nn.Module], images: Tensor, labels: Tensor, classes: Sequence[int] = (0, 2, 3, 4, 5, 7)
) -> dict[str, Any]:
    """Maps of the first test image of each class in `classes`: chosen before looking, right or wrong alike."""
    first = [int((labels == label).nonzero()[0]) for label in classes if bool((labels == label).any())]
    chosen = images[first]
    any_model: Any = next(iter(models.values()))
    grid = chosen.shape[-1] // any_model.patch_embed.proj.kernel_size[0]
    darkest, lightest = chosen.amin(), chosen.amax()
    pictures = ((chosen - darkest) / (lightest - darkest))[:, 0]
    maps = {name: score_maps(model, chosen) for name, model in models.items()}
    with torch.no_grad():
        predicted = {name: model(chosen).argmax(-1).tolist() for name, model in models.items()}
    shown = []
    for i, index in enumerate(first):
        query = inked_patch(pictures[i], chosen.shape[-1] // grid)
        shown.append(
            {
                "label": int(labels[index]),
                "test_image": index,
                "query": query,
                "image": _rounded(pictures[i], 3),
                "predicted": {name: predicted[name][i] for name in models},
                # [layer][head][token]; token 0 is the class token
                "scores": {name: [_rounded(layer[i, :, query + 1], 4) for layer in maps[name]] for name in models},
            }
        )
    return {"grid": grid, "examples": shown}


def _rounded(values: Tensor, digits: int) -> Any:
    if values.ndim == 1:
        return [round(x, digits) for x in values.tolist()]
    return [_rounded(row, digits) for row in values]
