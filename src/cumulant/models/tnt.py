"""Transformer in Transformer (Han et al. 2021): a small transformer over the words inside each patch.

Shape legend: B images, n patches of m words each, c width of a word, C width of a patch, T = 1 + n.
State-dict names are timm's, except that query, key and value are one matrix `qkv` here, `qk` and `v` there: timm's
weights load as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice, check_count, check_flag
from ..nn import MultiheadAttention, create_layer
from ..zoo.registry import options_of
from .backbone import FeatureInfo
from .mechanisms import Projecting, by_block
from .parts import DropPath, Mlp, PatchEmbed, Repeated, hidden_width, pair, resize_positions
from .vit import TokenBackbone


class WordEmbed(PatchEmbed):
    """Images (B, channels, H, W) to words (B n, m, c): each patch by itself goes through one convolution.

    Zeros pad every patch, so that no word sees a neighbouring patch. `legacy` convolves the whole image instead.
    """

    def __init__(
        self, patch_size: int, stride: int, kernel: int, in_chans: int, dim: int, legacy: bool, **place: Any
    ) -> None:
        nn.Module.__init__(self)
        for name, size in {"patch_size": patch_size, "inner_stride": stride, "word_kernel": kernel}.items():
            check_count(name, size)
        if patch_size % stride:
            raise ValueError(f"inner_stride must divide patch_size={patch_size}, got {stride}")
        if kernel % 2 == 0:
            raise ValueError(f"word_kernel must be odd, got {kernel}")
        self.patch_size, self.side, self.legacy = patch_size, patch_size // stride, legacy
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, kernel // 2, **place)

    def forward(self, images: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """`positions` (1, c, side, side), the same in every patch."""
        grid = self.grid(*images.shape[-2:])
        words = cut(self.proj(images), grid) if self.legacy else self.proj(cut(images, grid))
        return (words + positions).flatten(2).mT


def cut(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """Maps (B, c, H, W) as one map of each cell of a grid, (B n, c, H / rows, W / cols)."""
    rows, cols = grid
    cells = maps.unflatten(-1, (cols, -1)).unflatten(-3, (rows, -1))  # B c rows h cols w
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


class TNTBlock(Repeated):
    """Words Y (B n, m, c) and sentences Z (B, T, C):

    Y += attn_in(norm_in(Y)); Y += mlp_in(norm_mlp_in(Y)); Z[1:] += norm2_proj(proj(norm1_proj(words of a patch)));
    Z += attn_out(norm_out(Z)); Z += mlp(norm_mlp(Z)). One DropPath serves all branches but the third.
    `legacy` normalises each word, not the patch, and nothing behind `proj`, which then has a bias.
    """

    def __init__(
        self,
        attn_in: nn.Module,
        attn_out: nn.Module,
        sizes: tuple[int, int, int],
        mlp_ratio: float,
        drop: float,
        legacy: bool,
        **place: Any,
    ) -> None:
        super().__init__()
        c, m, C = sizes
        self.legacy = legacy
        self.norm_in = nn.LayerNorm(c, **place)
        self.attn_in = attn_in
        self.norm_mlp_in = nn.LayerNorm(c, **place)
        self.mlp_in = Mlp(c, hidden_width(c, mlp_ratio), drop, **place)
        self.norm1_proj = nn.LayerNorm(c if legacy else m * c, **place)
        self.proj = nn.Linear(m * c, C, bias=legacy, **place)
        self.norm2_proj = nn.Identity() if legacy else nn.LayerNorm(C, **place)
        self.norm_out = nn.LayerNorm(C, **place)
        self.attn_out = attn_out
        self.drop_path = DropPath()
        self.norm_mlp = nn.LayerNorm(C, **place)
        self.mlp = Mlp(C, hidden_width(C, mlp_ratio), drop, **place)

    def forward(self, words: Tensor, tokens: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        words = words + self.drop_path(self.attn_in(self.norm_in(words)))
        words = words + self.drop_path(self.mlp_in(self.norm_mlp_in(words)))
        tokens = tokens + F.pad(self.merged(words, tokens.shape[0]), (0, 0, 1, 0))  # the class token gets nothing
        tokens = tokens + self.drop_path(self.attn_out(self.norm_out(tokens), grid=grid, prefix=1))
        return words, tokens + self.drop_path(self.mlp(self.norm_mlp(tokens)))

    def merged(self, words: Tensor, batch: int) -> Tensor:
        """What the words of each patch add to it, (B, n, C)."""
        if self.legacy:
            return self.proj(self.norm1_proj(words).reshape(batch, -1, self.proj.in_features))
        return self.norm2_proj(self.proj(self.norm1_proj(words.reshape(batch, -1, self.proj.in_features))))


@options_of(Projecting)
class TNT(TokenBackbone):
    """Images (B, in_chans, H, W) to logits (B, num_classes), or to features (B, C) with `num_classes=0`.

    Args:
        img_size: side (or height and width) that the table of patches is made for. Other multiples of the patch size
            work too: that table is then resized bicubically; that of the words never changes.
        inner_stride: pixels from one word to the next, m = (patch_size / inner_stride)^2 words in a patch.
        word_kernel: side of the convolution that makes them.
        inner_dim: width c of a word, in `inner_heads` heads.
        attention: over patches, like all else of `Projecting`.
        inner_attention: the same over the words of a patch. They are few: softmax is as quick there as anything.
        pool: "cls" reads the class token, "gap" the mean of the patches.
        legacy: the first release, which convolves before it cuts and merges words without the second norm.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        inner_stride: int = 4,
        word_kernel: int = 7,
        num_classes: int = 1000,
        embed_dim: int = 384,
        inner_dim: int = 24,
        depth: int = 12,
        num_heads: int = 6,
        inner_heads: int = 4,
        mlp_ratio: float = 4.0,
        inner_attention: str | Sequence[str] = "softmax",
        qkv_bias: bool = False,
        legacy: bool = False,
        pool: str = "cls",
        **attending: Any,
    ) -> None:
        super().__init__(num_classes, embed_dim, pool, 1, inner_dim=inner_dim, depth=depth)
        check_flag("legacy", legacy)
        how = Projecting(qkv_bias=qkv_bias, **attending)
        place, drop_rate = how.place, how.drop_rate
        self.pixel_embed = WordEmbed(patch_size, inner_stride, word_kernel, how.in_chans, inner_dim, legacy, **place)
        self.grid_size, side = self.pixel_embed.grid(*pair(img_size)), self.pixel_embed.side
        flat = side * side * inner_dim
        self.norm1_proj = nn.LayerNorm(flat, **place)
        self.proj = nn.Linear(flat, embed_dim, **place)
        self.norm2_proj = nn.LayerNorm(embed_dim, **place)
        self.cls_token = self._table(1, place)
        self.patch_pos = self._table(1 + math.prod(self.grid_size), place)
        self.pixel_pos = nn.Parameter(torch.empty(1, inner_dim, side, side, **place))
        self.pos_drop = nn.Dropout(drop_rate)

        inner: dict[str, Any] = {"grid_size": (side, side), **how.shared, **place}
        sizes = inner_dim, side * side, embed_dim
        mechanisms = by_block(inner_attention, None, depth), how.each(depth)
        self.blocks = nn.Sequential(
            *(
                TNTBlock(
                    create_layer("multihead", inner_dim, inner_heads, **one, **inner),
                    how.made(embed_dim, num_heads, other, grid_size=self.grid_size, prefix=1),
                    sizes, mlp_ratio, drop_rate, legacy, **place,
                )
                for one, other in zip(*mechanisms, strict=True)
            )
        )  # fmt: skip
        self.norm = nn.LayerNorm(embed_dim, **place)
        self.head = self._made_classifier(embed_dim, place)
        self.feature_info = FeatureInfo.of((embed_dim, patch_size, f"blocks.{i}") for i in range(depth))
        self._finish(how)

    def position_tables(self) -> dict[str, tuple[int, int]]:
        return {"patch_pos": self.grid_size}

    def timm_parts(self) -> dict[str, dict[str, int]]:
        return {
            name: {"qk": sum(module.widths[:2]), "v": module.widths[2]}
            for name, module in self.named_modules()
            if name.endswith((".attn_in", ".attn_out")) and isinstance(module, MultiheadAttention)
        }

    def _set_pool(self, pool: str) -> dict[str, Any]:
        check_choice("global_pool", pool, self.poolings)
        self.pool = pool
        return {"pool": pool}

    def _begin(self, images: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        grid = self.pixel_embed.grid(*self.checked(images).shape[-2:])
        words = self.pixel_embed(images, self.pixel_pos)
        flat = words.reshape(images.shape[0], math.prod(grid), -1)
        tokens = self.norm2_proj(self.proj(self.norm1_proj(flat)))
        positions = resize_positions(self.patch_pos, self.grid_size, grid)
        return (words, self._with_positions(tokens, (self.cls_token,), positions)), grid

    def _level(self, level: nn.Module, state: tuple[Tensor, Tensor], at: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return self._run(level, *state, grid=at)

    def _as_map(self, state: tuple[Tensor, Tensor], at: tuple[int, int]) -> Tensor:
        return super()._as_map(state[1], at)

    def _normed(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return state[0], self.norm(state[1])

    def _end(self, state: tuple[Tensor, Tensor], at: tuple[int, int]) -> Tensor:
        """Class token and patches after the last block and norm, (B, T, C); the words are done with."""
        return self.norm(state[1])
