"""CrossViT (Chen et al. 2021): a fine and a coarse ViT side by side that meet in their class tokens.

Shape legend: B images, branch 0 (fine) and 1 (coarse), N_i patches of branch i, C_i its width, T_i = 1 + N_i.
State-dict names are timm's, except that query, key and value of the fusion are one matrix `qkv` here, `wq`, `wk` and
`wv` there: timm's weights load as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice, check_flag
from ..nn import create_layer, get_layer
from ..nn.attention import LAYER_NORM
from ..zoo.registry import options_of
from .backbone import FeatureInfo
from .mechanisms import Projecting
from .parts import Block, DropPath, PatchEmbed, Repeated, hidden_width, pair, resize_positions, spread_drop_path
from .vit import TokenBackbone

Pair = tuple[int, int]
SIZES = ("tables", "image")
# Kernel, stride and padding of the second and the third convolution of the stem, by patch size; the first is 7, 4, 3.
STEMS = {12: ((3, 3, 0), (3, 1, 1)), 16: ((3, 2, 1), (3, 2, 1))}


class ConvStem(PatchEmbed):
    """The embedding of the "dagger" variants: three convolutions with ReLU between, to C/4, C/2 and C channels."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, **place: Any) -> None:
        nn.Module.__init__(self)
        self.patch_size, self.in_chans = patch_size, in_chans
        widths, how = (in_chans, dim // 4, dim // 2, dim), ((7, 4, 3), *STEMS[patch_size])
        one, two, three = (
            nn.Conv2d(widths[i], widths[i + 1], kernel, stride, padding, **place)
            for i, (kernel, stride, padding) in enumerate(how)
        )
        self.proj: Any = nn.Sequential(one, nn.ReLU(), two, nn.ReLU(), three)

    def forward(self, images: Tensor) -> Tensor:
        self.grid(*images.shape[-2:])
        return self.proj(images).flatten(2).mT


class ClassFusion(Repeated):
    """query + DropPath(attn(norm1([query; patches]))), where the query (B, 1, C) alone asks. Cost: linear in N."""

    def __init__(self, attn: nn.Module, dim: int, **place: Any) -> None:
        super().__init__()
        self.norm1 = LAYER_NORM(dim, **place)
        self.attn = attn
        self.drop_path = DropPath()

    def forward(self, query: Tensor, patches: Tensor, grid: Pair) -> Tensor:
        """query (B, 1, C), patches (B, N, C) laid out as `grid` -> (B, 1, C)."""
        normed = self.norm1(torch.cat([query, patches], dim=1))
        return query + self.drop_path(self.attn(normed[:, :1], context=normed, grid=grid, prefix=1))


class Stage(nn.Module):
    """Blocks of either branch, then each class token asks the patches of the other branch.

        c_i = projs_i(CLS_i);  CLS_i = revert_projs_i(fusion_i(c_i, patches of the other branch))

    Both read what the blocks gave. Patches pass by the fusion unchanged.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], fusion: Sequence[nn.Module], fine: int, coarse: int, **place: Any
    ) -> None:
        super().__init__()

        def bridge(own: int, other: int) -> nn.Sequential:
            return nn.Sequential(LAYER_NORM(own, **place), nn.GELU(), nn.Linear(own, other, **place))

        self.blocks = nn.ModuleList(blocks)
        self.projs = nn.ModuleList([bridge(fine, coarse), bridge(coarse, fine)])
        self.fusion = nn.ModuleList(fusion)
        self.revert_projs = nn.ModuleList([bridge(coarse, fine), bridge(fine, coarse)])

    def forward(self, fine: Tensor, coarse: Tensor, grids: tuple[Pair, Pair]) -> tuple[Tensor, Tensor]:
        """Tokens (B, T_0, C_0) and (B, T_1, C_1)."""
        outs = []
        for tokens, blocks, grid in zip((fine, coarse), self.blocks, grids, strict=True):
            for block in cast(nn.Sequential, blocks):
                tokens = block(tokens, grid=grid, prefix=1)
            outs.append(tokens)
        return self.fused(0, outs[0], outs[1], grids[1]), self.fused(1, outs[1], outs[0], grids[0])

    def fused(self, branch: int, own: Tensor, other: Tensor, grid: Pair) -> Tensor:
        """Tokens of a branch with the class token that has asked the other one, whose patches lie on `grid`."""
        asking = self.fusion[branch](self.projs[branch](own[:, :1]), other[:, 1:], grid)
        return torch.cat([self.revert_projs[branch](asking), own[:, 1:]], dim=1)


@options_of(Projecting)
class CrossViT(TokenBackbone):
    """Images (B, in_chans, H, W) to logits (B, num_classes), or to features (B, C_0 + C_1) with `num_classes=0`.

    All pairs are of the fine branch and of the coarse one.

    Args:
        img_size: side (or height and width) that the positional tables are made for.
        img_scale: of the image in each branch: (1, 224/240) shows 240 pixels to one and 224 to the other.
        depth: blocks of a stage.
        stages: how many there are; each ends with the fusion of class tokens.
        conv_stem: the three convolutions of the "dagger" variants, for patches of 12 and of 16 pixels.
        other_sizes: for images of another size, "tables" resizes positional tables and each branch takes the multiple
            of its patch size that is nearest; "image" resizes every image to `img_size`, as the published code does.
        attention: see `Projecting`, for blocks and fusion; or one for each block, those of the fine branch first,
            "3xcumulant3,9xsoftmax": the fusion then has that of the last block of the branch which it reads.
        cross_attention: name of a mechanism for the fusion instead, in an ordinary layer.
        pool: "cls" reads the class tokens, "gap" the means of the patches.
        drop_path: stochastic depth of the last block of the coarse branch. A block of the fine one has the rate of the
            block of equal number of its stage, the fusion the last of its stage.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 240,
        img_scale: tuple[float, float] = (1.0, 224 / 240),
        patch_size: Pair = (12, 16),
        num_classes: int = 1000,
        embed_dim: Pair = (192, 384),
        depth: Pair = (1, 5),
        stages: int = 3,
        num_heads: Pair = (6, 6),
        mlp_ratio: float = 3.0,
        conv_stem: bool = False,
        other_sizes: str = "tables",
        cross_attention: str | None = None,
        pool: str = "cls",
        **attending: Any,
    ) -> None:
        check_pairs(patch_size=patch_size, embed_dim=embed_dim, depth=depth, num_heads=num_heads)
        super().__init__(num_classes, sum(embed_dim), pool, 1, stages=stages)
        check_flag("conv_stem", conv_stem)
        check_choice("other_sizes", other_sizes, SIZES)
        if conv_stem and any(size not in STEMS for size in patch_size):
            raise ValueError(f"conv_stem=True needs patches of 12 or 16 pixels, got patch_size={tuple(patch_size)}")
        how = Projecting(**attending)
        place, layer, drop_rate = how.place, how.layer, how.drop_rate
        self.widths_of, self.img_scale, self.other_sizes = embed_dim, img_scale, other_sizes
        self.img_size = pair(img_size)
        stem = ConvStem if conv_stem else PatchEmbed
        self.patch_embed = nn.ModuleList(
            stem(size, how.in_chans, dim, **place) for size, dim in zip(patch_size, embed_dim, strict=True)
        )
        self.grids = self.grids_of(*self.img_size)
        for i, (grid, dim) in enumerate(zip(self.grids, embed_dim, strict=True)):
            self.register_parameter(f"pos_embed_{i}", nn.Parameter(torch.empty(1, 1 + math.prod(grid), dim, **place)))
            self.register_parameter(f"cls_token_{i}", nn.Parameter(torch.empty(1, 1, dim, **place)))
        self.pos_drop = nn.Dropout(drop_rate)

        counts = tuple(stages * own for own in depth)
        every = how.each(sum(counts), "blocks, those of the fine branch first")
        mechanisms = every[: counts[0]], every[counts[0] :]

        def block(branch: int, one: dict[str, Any]) -> Block:
            dim = embed_dim[branch]
            attn = how.made(dim, num_heads[branch], one, grid_size=self.grids[branch], prefix=1)
            return Block(attn, dim, hidden_width(dim, mlp_ratio), drop_rate, **place)

        def fusion(read: int, one: dict[str, Any]) -> ClassFusion:
            kind, named = (layer or "multihead", one) if cross_attention is None else (
                "multihead", {"attention": cross_attention})  # fmt: skip
            more = {"grid_size": self.grids[read], "prefix": 1, **named, **how.shared, **place}
            check_cross(kind, embed_dim[read], num_heads[read], more)
            attn = create_layer(kind, embed_dim[read], num_heads[read], **more)
            return ClassFusion(attn, embed_dim[read], **place)

        def stage(number: int) -> Stage:
            own = [mechanisms[i][number * depth[i] : (number + 1) * depth[i]] for i in (0, 1)]
            branches = [nn.Sequential(*(block(i, one) for one in own[i])) for i in (0, 1)]
            return Stage(branches, [fusion(1, own[1][-1]), fusion(0, own[0][-1])], *embed_dim, **place)

        self.blocks = nn.Sequential(*(stage(number) for number in range(stages)))
        self.norm: Any = nn.ModuleList(LAYER_NORM(dim, **place) for dim in embed_dim)
        self.head: Any = nn.ModuleList(self._made_classifier(dim, place) for dim in embed_dim)
        levels = range(stages)
        self.feature_info = FeatureInfo.of((sum(embed_dim), patch_size[0], f"blocks.{number}") for number in levels)
        self._finish(how)

    def grids_of(self, height: int, width: int) -> tuple[Pair, Pair]:
        """Rows and columns of patches of the two branches for an image of that size: the nearest whole numbers."""
        one, other = (
            tuple(max(1, round(scale * side / embed.patch_size)) for side in (height, width))
            for scale, embed in zip(self.img_scale, cast(Any, self.patch_embed), strict=True)
        )
        return cast("tuple[Pair, Pair]", (one, other))  # in quotes: torch.compile does not read tuple[...]

    def position_tables(self) -> dict[str, Pair]:
        return {f"pos_embed_{i}": grid for i, grid in enumerate(self.grids)}

    def timm_parts(self) -> dict[str, dict[str, int]]:
        return {
            f"{name}.attn": dict(zip(("wq", "wk", "wv"), cast(Any, module.attn).widths, strict=True))
            for name, module in self.named_modules()
            if isinstance(module, ClassFusion) and hasattr(module.attn, "widths")
        }

    def classifiers(self) -> dict[str, int]:
        return {f"head.{i}": dim for i, dim in enumerate(self.widths_of)}

    def set_drop_path(self, rate: float) -> None:
        """Stochastic depth that grows linearly from 0 in the first block of the coarse branch to `rate` in its last."""
        stages = [cast(Stage, one) for one in self.blocks]
        spread_drop_path([cast(Block, block).drop_path for one in stages for block in cast(Any, one.blocks[1])], rate)
        for one in stages:
            rates = [block.drop_path.rate for block in cast(Any, one.blocks[1])]
            for block, own in zip(cast(Any, one.blocks[0]), rates, strict=False):
                block.drop_path.rate = own
            for fusion in cast(Any, one.fusion):
                fusion.drop_path.rate = rates[-1]

    def _set_pool(self, pool: str) -> dict[str, Any]:
        check_choice("global_pool", pool, self.poolings)
        self.pool = pool
        return {"pool": pool}

    def _begin(self, images: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Pair, Pair]]:
        self.checked(images)
        grids = self.grids if self.other_sizes == "image" else self.grids_of(*images.shape[-2:])
        embedded = []
        for i, (embed, grid) in enumerate(zip(cast(Any, self.patch_embed), grids, strict=True)):
            sides = tuple(side * embed.patch_size for side in grid)
            shown = images
            if sides != tuple(images.shape[-2:]):
                shown = F.interpolate(images, size=sides, mode="bicubic", align_corners=False)
            positions = resize_positions(getattr(self, f"pos_embed_{i}"), self.grids[i], grid)
            embedded.append(self._with_positions(embed(shown), (getattr(self, f"cls_token_{i}"),), positions))
        return (embedded[0], embedded[1]), grids

    def _level(self, level: nn.Module, state: tuple[Tensor, Tensor], at: tuple[Pair, Pair]) -> tuple[Tensor, Tensor]:
        return self._run(level, *state, grids=at)

    def _as_map(self, state: tuple[Tensor, Tensor], at: tuple[Pair, Pair]) -> Tensor:
        """The fine map, and the coarse one resized to it, (B, C_0 + C_1, rows, cols)."""
        fine, coarse = (tokens[:, 1:].mT.unflatten(-1, grid) for tokens, grid in zip(state, at, strict=True))
        return torch.cat([fine, F.interpolate(coarse, size=at[0], mode="bilinear", align_corners=False)], dim=1)

    def _normed(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.norm[0](state[0]), self.norm[1](state[1])

    def _end(self, state: tuple[Tensor, Tensor], at: tuple[Pair, Pair]) -> tuple[Tensor, Tensor]:
        """Tokens of both branches after their last norms, (B, T_0, C_0) and (B, T_1, C_1)."""
        return self._normed(state)

    def forward_head(self, x: tuple[Tensor, Tensor], pre_logits: bool = False) -> Tensor:
        """Mean of the answers of the two heads; with `pre_logits` what they read, side by side."""
        pooled = [self._pooled(tokens) for tokens in x]
        if pre_logits or not self.num_classes:
            return torch.cat(pooled, dim=1)
        return (self.head[0](pooled[0]) + self.head[1](pooled[1])) / 2


def check_pairs(**pairs: Any) -> None:
    for name, two in pairs.items():
        whole = isinstance(two, tuple | list) and all(type(one) is int and one > 0 for one in two)
        if not whole or len(two) != 2:
            raise ValueError(f"{name} must be two whole numbers, of the fine and the coarse branch, got {two!r}")


def check_cross(kind: str, dim: int, heads: int, given: dict[str, Any]) -> None:
    """Refuse a layer that one query cannot ask for many keys: tried, without numbers, on such a call."""
    tokens = torch.empty(1, 1 + math.prod(given["grid_size"]), dim, device="meta", dtype=given["dtype"])
    layer = create_layer(kind, dim, heads, **{**given, "device": "meta"}).eval()
    try:
        if not get_layer(kind).cross:
            raise ValueError(f"layer={kind!r} has no cross attention")
        with torch.no_grad():
            layer(tokens[:, :1], context=tokens, grid=given["grid_size"], prefix=1)
    except ValueError as error:
        raise ValueError(
            f"{error}. In the fusion one class token asks for the patches of the other branch: "
            'cross_attention="softmax" gives it attention of its own, which is linear in the patches too'
        ) from None
