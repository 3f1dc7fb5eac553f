"""The Vision Transformer (Dosovitskiy et al. 2021) in the form that DeiT trains, with any attention.

Shape legend: B images, N = (H/P)(W/P) patches, T = prefix + N tokens, C width.
State-dict names are timm's: cls_token, pos_embed, patch_embed.proj, norm, head and
blocks.N.{norm1, attn.qkv, attn.proj, norm2, mlp.fc1, mlp.fc2}.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import shards
from ..call import check_choice, check_count, check_flag
from ..nn.attention import LAYER_NORM
from ..zoo.registry import options_of
from .backbone import Backbone, FeatureInfo
from .mechanisms import Projecting
from .parts import Block, DropPath, PatchEmbed, hidden_width, pair, reset_extras, reset_linear, resize_positions


class TokenBackbone(Backbone):
    """What networks of tokens share: tables, initialisation, blocks in a row, pooling and head.

    A subclass makes `patch_embed`, `grid_size`, `pos_embed` and `blocks`, then calls `_finish`.
    """

    poolings: tuple[str, ...] = ("cls", "gap")
    patch_embed: Any
    grid_size: Any
    pos_embed: nn.Parameter
    pos_drop: nn.Module
    blocks: nn.Sequential
    norm: nn.Module
    head: nn.Module

    def __init__(self, num_classes: int, embed_dim: int, pool: str, prefix: int, **counts: int) -> None:
        super().__init__(num_classes, embed_dim)
        check_choice("pool", pool, self.poolings)
        for name, count in counts.items():
            check_count(name, count)
        self.embed_dim, self.pool, self.num_prefix_tokens = embed_dim, pool, prefix

    def _table(self, rows: int, place: dict[str, Any]) -> nn.Parameter:
        return nn.Parameter(torch.empty(1, rows, self.embed_dim, **place))

    def reset_parameters(self, std: float | None = 0.02) -> None:
        """DeiT: truncated normal of that std for linear weights, tokens and positions; biases 0, norms 1.

        None is as ViViT was released. The patch convolution keeps PyTorch's default.
        """
        stacked = {f"{name}.qkv": module.widths for name, module in self.named_modules() if hasattr(module, "widths")}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                reset_linear(module, std, stacked.get(name, ()))
                if std is None and name.endswith((".fc1", ".fc2")):
                    nn.init.normal_(module.bias, std=1e-6)
            elif isinstance(module, nn.LayerNorm | nn.Conv2d | DropPath):
                module.reset_parameters()
        reset_extras(self)
        for name, table in self.named_parameters(recurse=False):
            if std is not None:
                nn.init.trunc_normal_(table, std=std)
            elif name.endswith("pos_embed"):
                nn.init.normal_(table, std=0.02)
            else:
                nn.init.zeros_(table)

    def _with_positions(self, x: Tensor, tokens: Iterable[Tensor | None], positions: Tensor) -> Tensor:
        """x (B, N, C) behind those of the tokens that there are, with their positions."""
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        return self.pos_drop(torch.cat([*prefix, x], dim=1) + positions)

    def _level(self, level: nn.Module, state: Any, at: Any) -> Any:
        return self._run(level, state, grid=at, prefix=self.num_prefix_tokens)

    def _normed(self, state: Any) -> Any:
        return self.norm(state)

    def _as_map(self, state: Any, at: Any) -> Tensor:
        return state[:, self.num_prefix_tokens :].mT.unflatten(-1, at)

    def position_tables(self) -> Mapping[str, tuple[int, ...]]:
        return {"pos_embed": self.grid_size}

    def _pooled(self, tokens: Tensor) -> Tensor:
        if shards.answerer() is not None:
            return self._pooled_of_all(tokens)
        if self.pool == "gap":
            return tokens[:, self.num_prefix_tokens :].mean(1)
        return tokens[:, 0 if self.pool == "cls" else -1]

    def _pooled_of_all(self, tokens: Tensor) -> Tensor:
        """The same of tokens (B, n, C) that are one part of a sequence which several workers hold."""
        start, whole = shards.place(tokens.shape[1])
        place = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        if self.pool == "gap":
            weight = (place >= self.num_prefix_tokens) / (whole - self.num_prefix_tokens)
        else:
            weight = place == (0 if self.pool == "cls" else whole - 1)
        return shards.summed((tokens * weight.to(tokens.dtype)[:, None]).sum(1))[0]


@options_of(Projecting)
class VisionTransformer(TokenBackbone):
    """Images (B, in_chans, H, W) to logits (B, num_classes), or to features (B, C) with `num_classes=0`.

    Which attention it has, and further arguments, are those of `Projecting`.

    Args:
        img_size: side (or height and width) that the positional table is made for. Other multiples of the
            patch size work too: the table is then resized bicubically on the way.
        pool: "cls" reads the class token, "gap" the mean of the patch tokens, "last" the last of them.
        is_causal: each token sees itself and those before it, row by row of the image. The last one has then seen all
            (`pool="last"`), the class token, which comes first, nothing but itself.
        class_token: whether there is a class token; by default only for pool="cls".
        distilled: DeiT's distillation token and second head. The answer is the mean of both heads, or
            the pair while training with `distilled_training=True`.
        gelu: "erf", or "tanh" for the approximation that Google's code uses.
    """

    poolings = ("cls", "gap", "last")

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        is_causal: bool = False,
        pool: str = "cls",
        class_token: bool | None = None,
        distilled: bool = False,
        distilled_training: bool = False,
        gelu: str = "erf",
        **attending: Any,
    ) -> None:
        class_token = pool == "cls" if class_token is None else class_token
        prefix = int(class_token) + int(distilled)
        super().__init__(num_classes, embed_dim, pool, prefix, patch_size=patch_size, depth=depth)
        check_flag("is_causal", is_causal)
        check_pooling(pool, class_token, is_causal, distilled)
        self.is_causal = is_causal
        how = Projecting(**attending)
        place, drop_rate = how.place, how.drop_rate
        self.distilled_training = distilled_training
        self.patch_embed = PatchEmbed(patch_size, how.in_chans, embed_dim, **place)
        self.grid_size = self.patch_embed.grid(*pair(img_size))
        self.cls_token = self._table(1, place) if class_token else None
        self.dist_token = self._table(1, place) if distilled else None
        self.pos_embed = self._table(prefix + math.prod(self.grid_size), place)
        self.pos_drop = nn.Dropout(drop_rate)

        layout: dict[str, Any] = {"grid_size": self.grid_size, "prefix": prefix}
        inner = embed_dim, hidden_width(embed_dim, mlp_ratio), drop_rate, gelu, is_causal
        layers = (how.made(embed_dim, num_heads, one, **layout) for one in how.each(depth))
        self.blocks = nn.Sequential(*(Block(attn, *inner, **place) for attn in layers))
        self.norm = LAYER_NORM(embed_dim, **place)
        for name, width in self.classifiers().items():
            setattr(self, name, self._made_classifier(width, place))
        levels = range(depth)
        self.feature_info = FeatureInfo.of((embed_dim, patch_size, f"blocks.{number}") for number in levels)
        self._finish(how)

    def embed(self, images: Tensor) -> Tensor:
        """Tokens with their positions, (B, T, C)."""
        patches = self.patch_embed(self.checked(images))
        positions = resize_positions(self.pos_embed, self.grid_size, self.patch_embed.grid(*images.shape[-2:]))
        return self._with_positions(patches, (self.cls_token, self.dist_token), positions)

    def classifiers(self) -> dict[str, int]:
        return dict.fromkeys(["head"] + ["head_dist"] * (self.dist_token is not None), self.embed_dim)

    def _begin(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        if self.dist_token is not None and shards.answerer() is not None:
            raise ValueError("distilled=True reads two tokens, which one worker may not hold: it cannot be split")
        return shards.cut(self.embed(images)), self.patch_embed.grid(*images.shape[-2:])

    def _end(self, state: Tensor, at: tuple[int, ...]) -> Tensor:
        """All tokens after the last block and norm, (B, T, C)."""
        return self.norm(state)

    def _set_pool(self, pool: str) -> dict[str, Any]:
        check_pooling(pool, self.cls_token is not None, self.is_causal, self.dist_token is not None)
        self.pool = pool
        return {"pool": pool, "class_token": self.cls_token is not None}

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Pooling and classification of tokens (B, T, C)."""
        answer = super().forward_head(tokens, pre_logits)
        if self.dist_token is None:
            return answer
        distilled = tokens[:, 1] if pre_logits else cast(nn.Module, self.head_dist)(tokens[:, 1])
        if self.distilled_training and self.training:
            return answer, distilled
        return (answer + distilled) / 2


def check_pooling(pool: str, class_token: bool, is_causal: bool, distilled: bool) -> None:
    """Refuse a pooling that would read what is not there, or has seen nothing."""
    check_choice("pool", pool, VisionTransformer.poolings)
    if pool == "cls" and not class_token:
        raise ValueError('pool="cls" reads the class token, but class_token=False; use pool="gap"')
    if is_causal and pool == "cls":
        raise ValueError(
            'pool="cls" reads the first token, which with is_causal=True sees only itself; use pool="last" or "gap"'
        )
    if distilled and pool != "cls":
        raise ValueError(f'distilled=True needs pool="cls", got pool={pool!r}')
