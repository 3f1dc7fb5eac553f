"""Images, of noise, for a model of timm or of this library.

Shape legend: B images or texts, L words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..models import Backbone, VisionTransformer, ViViT
from ..models.registry import input_shape
from ..models.tubelet import TubeletEmbed

B, L = 2, 12
SIDE = 224  # of images, where nothing says how large they are


def images(model: nn.Module) -> Iterator[Tensor]:
    """By its patches, by the config it was trained with, of the usual size."""
    generator = torch.Generator().manual_seed(0)
    embed = getattr(model, "patch_embed", None)
    if isinstance(model, VisionTransformer | ViViT):
        part = model.patch_embed
        cells = part.tubelet if isinstance(part, TubeletEmbed) else pair(part.patch_size)
        sides = (g * c for g, c in zip(model.grid_size, cells, strict=True))
        yield torch.randn(B, part.in_chans, *sides, generator=generator)
        return
    if isinstance(model, Backbone):
        told = model.config or {}
        shape = input_shape(**told) if told else ()
        yield torch.randn(B, *(shape or (model.in_chans, SIDE, SIDE)), generator=generator)
        return
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    size = getattr(embed, "img_size", None)
    config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if first is not None and size is not None:
        yield torch.randn(B, first.in_channels, *pair(size), generator=generator)
    if config:
        yield torch.randn(B, *config["input_size"], generator=generator)
    if first is not None and (size is not None or config):
        yield torch.randn(B, first.in_channels, SIDE, SIDE, generator=generator)
    words = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if first is None and words is not None:
        yield torch.randint(words.num_embeddings, (B, L), generator=generator)


def pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = (size.get("height") or size.get("shortest_edge"), size.get("width") or size.get("shortest_edge"))
    return (int(size), int(size)) if isinstance(size, int | float) else (int(size[-2]), int(size[-1]))
