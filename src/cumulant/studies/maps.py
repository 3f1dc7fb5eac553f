"""Attention-score maps of trained models: where one patch of an image or a clip looks, in several layers and heads.

Shape legend: B images or clips, H heads, D head width, (T, rows, columns) the grid of patches with T = 1 for images,
S = rows x columns, L = prefix + T S tokens (class token first, then the patches row by row, frame by frame).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.bench.error import errors_against_softmax, logit_size
from cumulant.data.part import DecodeError, Part, Source
from cumulant.explain.metrics import negative_mass, tokens_used
from cumulant.inspect.seen import Seen
from cumulant.inspect.sites import find_sites
from cumulant.inspect.watching import watching
from cumulant.train import TrainRecipe
from cumulant.train.build import augment_of

LAYERS_SHOWN = 4
ITEMS_SHOWN = {"image": 6, "video": 3}
WEIGHTS_AT_ONCE = 2**26  # of one layer; as many items take part in an average


@torch.no_grad()
def calls(model: nn.Module, images: Tensor) -> list[Seen]:
    """What every attention layer of the (first) encoder is asked to compute for these images."""
    seen: list[Seen] = []
    blocks: Any = model.blocks
    own = {block.attn for block in blocks}
    with watching(model, [s for s in find_sites(model) if s.module in own], lambda _, call, __: seen.append(call)):
        model.eval()
        model(images)
    return seen


def projections(model: nn.Module, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value (B, H, L, D) of every layer, as the mechanism receives them."""
    return [(seen.call.query, seen.call.key, seen.call.value) for seen in calls(model, images)]


@torch.no_grad()
def score_maps(model: nn.Module, images: Tensor) -> Iterator[Tensor]:
    """Weights (B, H, L, L) of the layers in `mapped_layers`, one after the other; (B T, H, L, L) within frames."""
    seen = calls(model, images)
    yield from (seen[number].weights() for number in mapped_layers(model))


def mapped_layers(model: Any) -> range:
    """Numbers of the layers with maps: all, but for the last where only the class token's query reaches the output."""
    return range(len(model.blocks) - (model.pool == "cls"))


def locality(model: Any, images: Tensor) -> dict[str, float]:
    """Means over images, layers, heads and patch queries: tokens used and negative mass; and how many tokens there are.

    With `normalization="sum"` a map does not sum to 1; both measures are still of its weights as they are.
    """
    used, negative, tokens = [], [], 0
    for layer in score_maps(model, images):
        rows = layer[..., model.num_prefix_tokens :, :].float()
        used.append(tokens_used(rows).mean().item())
        negative.append(negative_mass(rows).mean().item())
        tokens = rows.shape[-1]
    return {"tokens_used": sum(used) / len(used), "negative_mass": sum(negative) / len(negative), "tokens": tokens}


def clip_grid(model: Any) -> tuple[int, int, int]:
    """(T, rows, columns) of a model's patches; T is 1 for images."""
    grid = tuple(model.grid_size)
    return grid if len(grid) == 3 else (1, *grid)


def striking_patch(picture: Tensor, grid: tuple[int, int]) -> int:
    """Number (row by row) of the patch with most contrast: a query that sits on something. picture is (3, H, W).

    Patches at the border, where black bars end, take part only where there are few.
    """
    height, width = picture.shape[-2] // grid[0], picture.shape[-1] // grid[1]
    grey = picture.float().mean(0)[: height * grid[0], : width * grid[1]]
    patches = grey.unfold(0, height, height).unfold(1, width, width)
    contrast = patches.var((-1, -2), correction=0)
    if min(grid) >= 4:
        inside = torch.zeros_like(contrast)
        inside[1:-1, 1:-1] = 1
        contrast = contrast * inside
    return int(contrast.argmax())


def row_of(weights: Tensor, item: int, frame: int, patch: int, grid: tuple[int, int, int], prefix: int) -> Tensor:
    """What one patch takes from all others, (H, 1 + T S): first the tokens before the patches together.

    Where frames attend each to itself, weights are (B T, H, prefix + S, prefix + S): then the parts of the row are the
    views of the same place in every frame, and the first number is that of `frame`.
    """
    frames, places = grid[0], grid[1] * grid[2]
    if weights.shape[-1] == prefix + frames * places:
        row = weights[item, :, prefix + frame * places + patch]
        return torch.cat([row[:, :prefix].sum(-1, keepdim=True), row[:, prefix:]], -1)
    rows = weights[item * frames : (item + 1) * frames, :, prefix + patch]
    first = rows[frame, :, :prefix].sum(-1, keepdim=True)
    return torch.cat([first, rows[..., prefix:].transpose(0, 1).flatten(1)], -1)


def first_of_classes(part: Part, classes: int, count: int) -> list[int]:
    """The first test item of so many classes spread over all: chosen before looking, right or wrong alike."""
    wanted = sorted({round(i * (classes - 1) / max(count - 1, 1)) for i in range(count)})
    places = [(part.labels == label).nonzero().flatten() for label in wanted]
    return [int(place[0]) + part.views // 2 for place in places if len(place)]


def pixels_of(part: Part, items: list[int], size: int) -> Tensor:
    """uint8 pixels of those of the items that can be decoded."""
    found = []
    for item in items:
        with suppress(DecodeError):
            found.append(part.decode(item, size))
    return torch.stack(found)


def look(model: Any, recipe: TrainRecipe, source: Source, *, examples: bool) -> dict[str, Any] | None:
    """Locality of a trained model's maps and, with `examples`, maps to show; None for a mechanism without weights."""
    layer = model.blocks[0].attn
    if not (hasattr(layer.mix, "scores") if isinstance(layer.mix, nn.Module) else layer.mechanism.weights):
        return None
    part, size = source.test, recipe.loaded_size
    augment = augment_of(recipe, len(source.classes))
    heads, tokens = layer.num_heads, 1 + math.prod(clip_grid(model))
    count = max(1, min(200 if tokens < 20 else 64, len(part), WEIGHTS_AT_ONCE // (heads * tokens**2)))
    some = augment.evaluate(pixels_of(part, [i * len(part) // count for i in range(count)], size))
    found: dict[str, Any] = {"locality": locality(model, some)}
    if examples:
        shown = first_of_classes(part, len(source.classes), ITEMS_SHOWN[source.kind])
        found["maps"] = example_maps(model, part, shown, size, augment)
        plain = layer.mechanism.name == "softmax" and not recipe.attention_extras
        layers = projections(model, some if tokens < 20 else some[:16]) if plain else []
        found["trained"] = [
            {"layer": i, "logit_size": logit_size(q, k), "relative_error": errors_against_softmax(q, k, v)}
            for i, (q, k, v) in enumerate(layers, 1)
        ]
    return found


def example_maps(model: Any, part: Part, items: list[int], size: int, augment: Any) -> dict[str, Any]:
    """Maps of some test items as plain values: [item][layer][head][1 + patches], see `row_of`."""
    pixels = pixels_of(part, items, size)
    inputs = augment.evaluate(pixels)
    grid, prefix = clip_grid(model), model.num_prefix_tokens
    every = mapped_layers(model)
    count = min(LAYERS_SHOWN, len(every))
    layers = sorted({every[round(i * (len(every) - 1) / max(count - 1, 1))] for i in range(count)})
    frame = grid[0] // 2
    pictures = pixels if pixels.ndim == 5 else pixels[:, :, None]
    # Of every tubelet the frame in its middle is shown.
    times = [(2 * t + 1) * pictures.shape[2] // (2 * grid[0]) for t in range(grid[0])]
    queries = [striking_patch(picture[:, times[frame]], grid[1:]) for picture in pictures]
    digits = 4 if grid[0] * grid[1] * grid[2] < 100 else 5
    scores: list[list[Any]] = [[] for _ in pixels]
    for number, weights in zip(every, score_maps(model, inputs), strict=True):
        if number in layers:
            for i, query in enumerate(queries):
                scores[i].append(_rounded(row_of(weights, i, frame, query, grid, prefix), digits))
    with torch.no_grad():
        predicted = model(inputs).argmax(-1).tolist()
    shown = [
        {
            "item": item, "label": int(part.labels[item]), "predicted": predicted[i], "query": queries[i],
            "size": list(pictures.shape[-2:]), "pixels": _bytes(pictures[i][:, times].permute(1, 2, 3, 0)),
        }
        for i, item in enumerate(items)
    ]  # fmt: skip
    return {
        "grid": list(grid), "prefix": prefix, "frame": frame, "layers": [number + 1 for number in layers],
        "depth": len(model.blocks), "heads": model.blocks[0].attn.num_heads, "items": shown, "scores": scores,
    }  # fmt: skip


def _bytes(pictures: Tensor) -> str:
    """(T, H, W, 3) bytes in base 64."""
    return base64.b64encode(pictures.contiguous().numpy().tobytes()).decode()


def _rounded(values: Tensor, digits: int) -> Any:
    if values.ndim == 1:
        return [round(x, digits) for x in values.tolist()]
    return [_rounded(row, digits) for row in values]
