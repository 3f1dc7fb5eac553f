"""Activator (Abdullah and Aydin 2024): gated linear units where a ViT has attention.

The gates act on the channels of each token by itself, there are no positions, and the mean over tokens comes last: as
published the network is a bag of patches, whose order changes nothing. Everything else here is ours: positions, and
mixers that do mix tokens.

Shape legend: B images, L = (H/P)(W/P) tokens, C width, F width inside the gates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice, check_count, check_flag, check_share
from ..nn.registry import number_layers
from ..zoo.registry import options_of
from .backbone import Backbone, FeatureInfo
from .mechanisms import Attending
from .parts import DropPath, Mlp, PatchEmbed, Repeated, checked_extras, pair, reset_extras, resize_positions

MIXERS = ("glu", "spatial_glu", "attention", "glu+attention")
GATES: dict[str, Callable[..., Tensor]] = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}


class GatedUnit(nn.Module):
    """W3(norm(gate(W1 x)) * norm(W2 x)) with one LayerNorm for both. Cost: 3 L C F.

    With `tokens` (ours, after gMLP) a matrix over the tokens and a bias mix the second factor; near 0 and 1 at first.
    """

    def __init__(self, dim: int, hidden: int, gate: str, tokens: int | None = None, **place: Any) -> None:
        super().__init__()
        self.gate = GATES[gate]
        self.fc1 = nn.Linear(dim, hidden, **place)
        self.fc2 = nn.Linear(dim, hidden, **place)
        self.norm = nn.LayerNorm(hidden, **place)
        self.fc3 = nn.Linear(hidden, dim, **place)
        self.spatial = None if tokens is None else nn.Linear(tokens, tokens, **place)

    def reset_extras(self) -> None:
        if self.spatial is not None:
            nn.init.normal_(self.spatial.weight, std=1e-3)
            nn.init.ones_(self.spatial.bias)

    def forward(self, x: Tensor) -> Tensor:
        gates, values = self.norm(self.gate(self.fc1(x))), self.norm(self.fc2(x))
        if self.spatial is not None:
            values = self.spatial(values.mT).mT
        return self.fc3(gates * values)


class ActivatorBlock(Repeated):
    """x + mixer(norm(x)), then x + mlp(norm(x)) where there is an MLP, with one LayerNorm for both."""

    def __init__(
        self, dim: int, unit: nn.Module | None, attn: nn.Module | None, mlp: nn.Module | None, **place: Any
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, **place)
        self.unit, self.attn, self.mlp = unit, attn, mlp
        self.drop_path = DropPath()

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.mixed(self.norm(x), grid))
        return x if self.mlp is None else x + self.drop_path(self.mlp(self.norm(x)))

    def mixed(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.attn is None or self.unit is None:
            return cast(nn.Module, self.attn)(x, grid=grid) if self.unit is None else self.unit(x)
        return self.unit(x) + self.attn(x, grid=grid)


@options_of(Attending, without=("init_std",))
class Activator(Backbone):
    """Images (B, in_chans, H, W) to logits (B, num_classes), or to features (B, C) with `num_classes=0`.

    Args:
        mixer: "glu" as published. Ours: "spatial_glu", whose gates mix tokens, for images of `img_size` alone;
            "attention"; "glu+attention", the sum of both.
        gate: "geglu", "swiglu" or "reglu".
        mlp: whether an MLP follows; the variant with gates alone has none.
        positions: add a learned table (ours), resized for images of another size.
        drop_rate: dropout inside the MLP, 0.5 as published.
        attention: see `Attending`, where the mixer has attention; with `num_heads` heads.
        attention_extras: further arguments of every attention layer.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 4,
        num_classes: int = 10,
        embed_dim: int = 256,
        hidden_dim: int = 512,
        depth: int = 4,
        num_heads: int = 4,
        mixer: str = "glu",
        gate: str = "geglu",
        mlp: bool = True,
        positions: bool = False,
        attention_extras: dict[str, Any] | None = None,
        drop_rate: float = 0.5,
        **attending: Any,
    ) -> None:
        super().__init__(num_classes, embed_dim)
        for name, count in {"hidden_dim": hidden_dim, "depth": depth}.items():
            check_count(name, count)
        check_choice("mixer", mixer, MIXERS)
        check_choice("gate", gate, tuple(GATES))
        check_flag("mlp", mlp)
        check_flag("positions", positions)
        check_share("drop_rate", drop_rate)
        attends, gated = "attention" in mixer, "glu" in mixer
        how = Attending(**attending)
        if not attends and (how.attention != "softmax" or how.layer or attention_extras or how.attention_options):
            asked = f"layer={how.layer!r}" if how.layer else f"attention={how.attention!r}"
            raise ValueError(
                f"{asked}, but Activator has gates in place of attention; mixer='attention' or 'glu+attention' has both"
            )
        place, self.in_chans, self.embed_dim = how.place, how.in_chans, embed_dim
        self.patch_embed = PatchEmbed(patch_size, how.in_chans, embed_dim, **place)
        self.grid_size = self.patch_embed.grid(*pair(img_size))
        tokens = math.prod(self.grid_size)
        self.fixed_size = mixer == "spatial_glu"
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, embed_dim, **place)) if positions else None
        given = {"grid_size": self.grid_size, **checked_extras(attention_extras, how.layer)}
        mixed = tokens if self.fixed_size else None

        def block(one: dict[str, Any]) -> ActivatorBlock:
            unit = GatedUnit(embed_dim, hidden_dim, gate, mixed, **place) if gated else None
            attn = how.made(embed_dim, num_heads, one, **given) if attends else None
            return ActivatorBlock(
                embed_dim, unit, attn, Mlp(embed_dim, hidden_dim, drop_rate, **place) if mlp else None, **place
            )

        self.blocks = nn.Sequential(*(block(one) for one in how.each(depth)))
        self.head = self._made_classifier(embed_dim, place)
        self.feature_info = FeatureInfo.of((embed_dim, patch_size, f"blocks.{i}") for i in range(depth))
        self.set_drop_path(how.drop_path)
        number_layers(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's defaults; the table, which is ours, truncated normal of 0.02."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm | DropPath):
                module.reset_parameters()
        reset_extras(self)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def position_tables(self) -> dict[str, tuple[int, int]]:
        return {} if self.pos_embed is None else {"pos_embed": self.grid_size}

    def _begin(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        grid = self.patch_embed.grid(*self.checked(images).shape[-2:])
        if self.fixed_size and math.prod(grid) != math.prod(self.grid_size):
            side = " x ".join(str(cells * self.patch_embed.patch_size) for cells in self.grid_size)
            raise ValueError(
                f"mixer='spatial_glu' has a matrix over {math.prod(self.grid_size)} tokens: images must be {side}, got "
                f"{images.shape[-2]} x {images.shape[-1]}"
            )
        x = self.patch_embed(images)
        return x if self.pos_embed is None else x + resize_positions(self.pos_embed, self.grid_size, grid), grid

    def _level(self, level: nn.Module, state: Tensor, at: tuple[int, int]) -> Tensor:
        return self._run(level, state, grid=at)

    def _as_map(self, state: Tensor, at: tuple[int, int]) -> Tensor:
        return state.mT.unflatten(-1, at)

    def _pooled(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1)
