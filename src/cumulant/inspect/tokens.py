"""How the tokens of a model's maps lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of a map lie: `prefix` of them (class token, registers) and then the patches of `grid`, row by
    row, (rows, cols) for images and (frames, rows, cols) for clips."""

    prefix: int
    grid: tuple[int, ...]

    @property
    def patches(self) -> int:
        return math.prod(self.grid)

    @property
    def count(self) -> int:
        return self.prefix + self.patches


def expected_layout(model: nn.Module) -> TokenLayout | None:
    """Layout at the image size the model was made for; None for models that do not tell, such as text models."""
    for module in model.modules():
        grid = getattr(module, "grid_size", None)
        embed = getattr(module, "patch_embed", None)
        if embed is not None:
            grid = grid or getattr(embed, "grid_size", None)
            prefix = getattr(module, "num_prefix_tokens", None)
            if grid is not None and prefix is not None:
                return TokenLayout(int(prefix), tuple(int(side) for side in grid))
    config = getattr(model, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    frames, tubelet = getattr(config, "num_frames", None), getattr(config, "tubelet_size", None)
    if isinstance(tubelet, list | tuple) and len(tubelet) == 3:  # ViViT of transformers: frames, height, width
        tubelet, patch = tubelet[0], tubelet[1]
    if isinstance(size, int) and isinstance(patch, int):
        time = (frames // tubelet,) if isinstance(frames, int) and isinstance(tubelet, int) else ()
        return TokenLayout(_prefix_of(model), (*time, size // patch, size // patch))
    return None


def layout_of(length: int, model: nn.Module) -> TokenLayout:
    """Layout of so many tokens: square after the model's prefix, or one row of tokens where that does not fit."""
    expected = expected_layout(model)
    if expected is not None:
        if expected.count == length:
            return expected
        side = math.isqrt(max(0, length - expected.prefix))
        if side * side == length - expected.prefix and len(expected.grid) == 2:
            return TokenLayout(expected.prefix, (side, side))
    return TokenLayout(0, (1, length))


def _prefix_of(model: nn.Module) -> int:
    """Tokens before the patches of a transformers model: the tokens that its embeddings own, and registers."""
    names = {name.rsplit(".", 1)[-1]: p for name, p in model.named_parameters()}
    count = sum(key in names for key in ("cls_token", "distillation_token", "class_embedding"))
    registers = names.get("register_tokens")
    return count + (registers.shape[1] if registers is not None else 0)
