"""ViViT, a Video Vision Transformer (Arnab et al. 2021): models 1 to 4 and a frame average, with any attention.

Shape legend: B clips, T x H x W pixels, (n_t, n_h, n_w) the grid of tubelets, S = n_h n_w, N = n_t S, C width.
State-dict names are those of `VisionTransformer`; what the image model lacks is called temporal_*.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from .. import shards
from ..call import check_choice, check_count, check_dtype
from ..nn import create_layer
from ..nn.arguments import check_beside
from ..nn.attention import LAYER_NORM
from ..nn.extras import conv_kernel
from ..zoo.grid import guess_grid, square_grid
from ..zoo.registry import options_of
from .backbone import FeatureInfo
from .mechanisms import Projecting
from .parts import Block, DropPath, Mlp, Repeated, drop_paths, hidden_width, pair, resize_positions, spread_drop_path
from .tubelet import TUBELET_INITS, TubeletEmbed, load_image_weights, resize_clip_positions, resize_time
from .vit import TokenBackbone, VisionTransformer

VARIANTS = (1, 2, 3, 4, "average")
AXIS_ORDERS = ("space-time", "time-space")
DROP_PATH_STYLES = ("scaled", "released")


class FactorisedBlock(Repeated):
    """Model 3: x + space(norm1(x)), then x + time(temporal_norm(x)), or the other way round, then x + mlp(norm2(x)).

    Space attends within each frame, (B n_t, S, C), time at each place, (B S, n_t, C).
    """

    def __init__(
        self,
        attn: nn.Module,
        temporal_attn: nn.Module,
        dim: int,
        hidden: int,
        drop: float = 0.0,
        gelu: str = "tanh",
        axis_order: str = "space-time",
        **place: Any,
    ) -> None:
        super().__init__()
        self.time_first = axis_order == "time-space"
        self.norm1 = LAYER_NORM(dim, **place)
        self.attn = attn
        self.temporal_norm = LAYER_NORM(dim, **place)
        self.temporal_attn = temporal_attn
        self.drop_path = DropPath()
        self.norm2 = LAYER_NORM(dim, **place)
        self.mlp = Mlp(dim, hidden, drop, gelu, **place)

    def forward(self, x: Tensor, grid: tuple[int, ...], prefix: int = 0) -> Tensor:
        """x (B, N, C), frame by frame; there are no tokens outside the grid."""
        for branch in (self._time, self._space) if self.time_first else (self._space, self._time):
            x = x + self.drop_path(branch(x, grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def _space(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        frames = self.norm1(x).reshape(-1, grid[1] * grid[2], x.shape[-1])
        with shards.answered_by(None):  # a worker's frames are whole
            return self.attn(frames, grid=grid[1:]).reshape(x.shape)

    def _time(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        places = self.temporal_norm(x).unflatten(1, (grid[0], -1)).transpose(1, 2)
        out = self.temporal_attn(places.flatten(0, 1), grid=(grid[0], 1))
        return out.unflatten(0, places.shape[:2]).transpose(1, 2).flatten(1, 2)


@options_of(Projecting)
class ViViT(TokenBackbone):
    """Clips (B, in_chans, T, H, W) to logits (B, num_classes), or to features (B, C) with `num_classes=0`.

    | variant | attention | sequences of |
    |---|---|---|
    | 1 | joint space-time | N tokens |
    | 2 | factorised encoder: each frame, then the frames' features | S, then n_t |
    | 3 | factorised self-attention: space, then time, in each block | S and n_t |
    | 4 | factorised dot product: half of the heads over time, half over space | n_t and S |
    | "average" | each frame by itself, features averaged: sees no order in time, a control | S |

    Which attention it has, and further arguments, are those of `Projecting`, for every attention here; of the extras a
    `v_conv` (k_t, k, k) becomes k x k within frames and k_t over time.
    `drop_path` is the stochastic depth of an encoder's last block, growing linearly from 0 at the first.
    `init_std` None initialises as released (Xavier-uniform matrices, each of query, key and value by itself; MLP
    biases N(0, 1e-6), positions N(0, 0.02), class tokens 0); a number as DeiT, with that deviation.

    Args:
        frames: of the clip that the positional tables are made for. Others whose sides are multiples of the tubelet's
            work too: tables are then resized, bicubically in space and linearly in time.
        img_size: side, or height and width, of that clip.
        tubelet: frames, height and width of a token.
        sample_frames: embed that many frames spread evenly over the clip instead ("uniform frame sampling");
            needs a tubelet of one frame.
        tubelet_init: "random"; or a 2-D kernel spread over time, "inflate" (repeated, divided by t) or "central" (at
            frame t // 2, zeros elsewhere). See also `load_image_weights`.
        temporal_depth: layers of the second encoder of variant 2.
        pool: "cls" or "gap" (mean of the tokens), of each encoder in variant 2. Variants 3 and 4 have no class token.
        axis_order: of variant 3. The paper's is "space-time", the released code's "time-space".
        gelu: "tanh" as released, or "erf" as in DeiT.
        zero_head: start with all logits 0, as released; then only the head has a gradient in the first step.
        drop_path_style: "scaled" divides kept branches by the keep probability, as our image models do; "released" does
            not, and leaves variant 3 alone, as the released code does.
    """

    takes_clips = True

    def __init__(
        self,
        *,
        variant: int | str = 1,
        frames: int = 32,
        img_size: int | tuple[int, int] = 224,
        tubelet: tuple[int, int, int] = (2, 16, 16),
        sample_frames: int | None = None,
        tubelet_init: str = "random",
        num_classes: int = 400,
        embed_dim: int = 768,
        depth: int = 12,
        temporal_depth: int = 4,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        pool: str | None = None,
        axis_order: str = "space-time",
        gelu: str = "tanh",
        zero_head: bool = True,
        drop_path_style: str = "scaled",
        init_std: float | None = None,
        **attending: Any,
    ) -> None:
        variant, how = check_variant(variant), Projecting(init_std=init_std, **attending)
        place, layer, drop_rate = how.place, how.layer, how.drop_rate
        if layer is not None and variant == 4:
            raise ValueError(f"layer={layer!r}, but variant 4 is made of axial layers; choose another variant")
        pool = pool or ("gap" if variant in (3, 4) else "cls")
        counts = {"depth": depth, "temporal_depth": temporal_depth}
        super().__init__(num_classes, embed_dim, pool, int(pool == "cls"), **counts)
        if pool == "cls" and variant in (3, 4):
            raise ValueError(f'pool="cls", but variant {variant} has no class token; use pool="gap"')
        check_choice("tubelet_init", tubelet_init, TUBELET_INITS)
        check_choice("axis_order", axis_order, AXIS_ORDERS)
        check_choice("drop_path_style", drop_path_style, DROP_PATH_STYLES)
        extras = how.extras
        self.variant, self.zero_head, self.tubelet_init = variant, zero_head, tubelet_init
        self.drop_path_style = drop_path_style

        check_count("frames", frames)
        self.patch_embed = TubeletEmbed(tubelet, how.in_chans, embed_dim, sample_frames, **place)
        self.grid_size = self.patch_embed.grid(frames, *pair(img_size))
        self.per_frame = self.variant in (2, "average")  # the first encoder sees one temporal index at a time
        n_t, patches = self.grid_size[0], math.prod(self.grid_size[1:] if self.per_frame else self.grid_size)
        self.cls_token = self._table(1, place) if pool == "cls" else None
        self.pos_embed = self._table(self.num_prefix_tokens + patches, place)
        self.pos_drop = nn.Dropout(drop_rate)

        hidden = hidden_width(embed_dim, mlp_ratio)
        blocks = depth + (temporal_depth if self.variant == 2 else 0)
        mechanisms = how.each(blocks, "blocks of both encoders" if blocks > depth else "blocks")

        def attn(axes: str, mechanism: dict[str, Any], prefix: int = 0) -> nn.Module:
            grid = {"both": self.grid_size, "space": self.grid_size[1:], "time": (n_t, 1)}[axes]
            kind = "axial" if self.variant == 4 else layer or "multihead"
            given = {"grid_size": grid, "prefix": prefix, **mechanism, **how.shared, **place}
            return create_layer(kind, embed_dim, num_heads, **given, **extras_along(axes, extras))

        def block(axes: str, mechanism: dict[str, Any]) -> nn.Module:
            inner = embed_dim, hidden, drop_rate, gelu
            if self.variant == 3:
                return FactorisedBlock(attn("space", mechanism), attn("time", mechanism), *inner, axis_order, **place)
            return Block(attn(axes, mechanism, self.num_prefix_tokens), *inner, **place)

        axes = "space" if self.per_frame else "both"
        self.blocks = nn.Sequential(*(block(axes, one) for one in mechanisms[:depth]))
        self.norm = LAYER_NORM(embed_dim, **place)
        if self.variant == 2:
            self.temporal_cls_token = self._table(1, place) if pool == "cls" else None
            self.temporal_pos_embed = self._table(self.num_prefix_tokens + n_t, place)
            self.temporal_blocks = nn.Sequential(*(block("time", one) for one in mechanisms[depth:]))
            self.temporal_norm = LAYER_NORM(embed_dim, **place)
        self.head = self._made_classifier(embed_dim, place)
        levels = range(depth)
        self.feature_info = FeatureInfo.of((embed_dim, tubelet[1], f"blocks.{number}") for number in levels)
        self._finish(how)
        self.register_load_state_dict_pre_hook(_resize_loaded_times)

    def reset_parameters(self, std: float | None = None) -> None:
        """The initialisation that `init_std` and the options of the model describe."""
        super().reset_parameters(std)
        self.patch_embed.reset_parameters(self.tubelet_init)
        if self.zero_head and isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)

    def set_drop_path(self, rate: float) -> None:
        """Stochastic depth that grows linearly from 0 in the first block of each encoder to `rate` in its last."""
        released = self.drop_path_style == "released"
        spread_drop_path(drop_paths(self.blocks), 0.0 if released and self.variant == 3 else rate, rescale=not released)
        if self.variant == 2:
            spread_drop_path(drop_paths(self.temporal_blocks), rate, rescale=not released)

    def load_image_weights(self, image_model: VisionTransformer, tubelet_init: str = "central") -> list[str]:
        """Start from an image model of the same width, depth and patch size; see `models/tubelet.py`.

        Returns the names of the parameters that the image model has nothing for.
        """
        return load_image_weights(self, image_model, tubelet_init)

    def embed(self, clips: Tensor) -> Tensor:
        """Tokens with their positions: (B, prefix + N, C), or (B n_t, prefix + S, C) where frames are encoded alone."""
        check_dtype("clips", clips)
        if clips.ndim != 5 or clips.shape[1] != self.patch_embed.in_chans:
            raise ValueError(
                f"clips must have shape (batch, {self.patch_embed.in_chans}, frames, height, width), got "
                f"{tuple(clips.shape)}; clips.movedim(-1, 1) brings channels forward from the end"
            )
        check_beside("clips", clips, self.patch_embed.proj.weight)
        grid = self.patch_embed.grid(*clips.shape[2:])
        x = self.patch_embed(clips)
        if self.per_frame:
            x = x.reshape(-1, grid[1] * grid[2], x.shape[-1])
            positions = resize_positions(self.pos_embed, self.grid_size[1:], grid[1:])
        else:
            positions = resize_clip_positions(self.pos_embed, self.grid_size, grid)
        return self._with_positions(x, (self.cls_token,), positions)

    def _begin(self, clips: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        x, grid = self.embed(clips), self.patch_embed.grid(*clips.shape[2:])
        if shards.answerer() is None:
            return x, grid
        if self.variant == 4:
            raise ValueError("variant=4 mixes time and space in one layer: it is not split over workers; use 1, 2 or 3")
        if self.variant == 1:
            return shards.cut(x), grid
        if grid[0] < shards.count():
            raise ValueError(f"a clip of {grid[0]} tubelets in time cannot be split over {shards.count()} workers")
        frames = shards.cut(x.reshape(clips.shape[0], grid[0], -1, x.shape[-1]))
        own = (frames.shape[1], *grid[1:])
        return frames.flatten(0 if self.per_frame else 1, 1 if self.per_frame else 2), own

    def _level(self, level: nn.Module, state: Tensor, at: tuple[int, ...]) -> Tensor:
        if not self.per_frame:
            return super()._level(level, state, at)
        with shards.answered_by(None):  # a worker's frames are whole
            return super()._level(level, state, at[1:])

    def _as_map(self, state: Tensor, at: tuple[int, ...]) -> Tensor:
        """(B, C, n_t, n_h, n_w), also where frames are encoded alone."""
        if not self.per_frame:
            return super()._as_map(state, at)
        return super()._as_map(state, at[1:]).unflatten(0, (-1, at[0])).transpose(1, 2)

    def _end(self, state: Tensor, at: tuple[int, ...]) -> Tensor:
        """Tokens after the last block and norm: (B, prefix + N, C) in variants 1, 3 and 4.

        In variant 2 these are the tokens over time, (B, prefix + n_t, C); for "average", each frame's pooled
        features, (B, n_t, C).
        """
        x = self.norm(state)
        if not self.per_frame:
            return x
        with shards.answered_by(None):
            x = super()._pooled(x).unflatten(0, (-1, at[0]))
        if self.variant == "average":
            return x
        start, whole = shards.place(at[0])
        positions = resize_time(self.temporal_pos_embed, self.num_prefix_tokens, whole)
        prefix, token = self.num_prefix_tokens, self.temporal_cls_token
        if token is not None and start:  # it stands before the frames of another worker; its gradient here is 0
            x, token = x + 0 * token, None
        first, last = start + prefix * (start > 0), start + at[0] + prefix
        x = self._with_positions(x, (token,), positions[:, first:last])
        for block in self.temporal_blocks:
            x = super()._level(block, x, (at[0], 1))
        return self.temporal_norm(x)

    def _pooled(self, tokens: Tensor) -> Tensor:
        if self.variant != "average":
            return super()._pooled(tokens)
        _, frames = shards.place(tokens.shape[1])
        return shards.summed(tokens.sum(1))[0] / frames

    def _fitted(self, table: Tensor, grid: tuple[int, ...]) -> Tensor:
        if self.per_frame:
            return resize_positions(table, square_grid(table.shape[1], self.num_prefix_tokens), self.grid_size[1:])
        clip = guess_grid(table.shape[1] - self.num_prefix_tokens, self.grid_size)
        return resize_clip_positions(table, clip, self.grid_size)


def check_variant(variant: int | str) -> int | str:
    """1, 2, 3, 4 or "average"; numbers may come as text, from a command line."""
    known = {str(v): v for v in VARIANTS}
    if str(variant) not in known:
        raise ValueError(f"variant must be one of {', '.join(map(repr, VARIANTS))}, got {variant!r}")
    return known[str(variant)]


def extras_along(axes: str, extras: dict[str, Any]) -> dict[str, Any]:
    """The extras of an attention over "both" axes, over "space" or over "time": each has its part of the kernel."""
    kernel = conv_kernel(extras.get("v_conv", False))
    if kernel is None or axes == "both":
        return extras
    if axes == "space":
        return {**extras, "v_conv": kernel[-2:]}
    return {**extras, "v_conv": (kernel[0], 1) if len(kernel) == 3 else False}


def _resize_loaded_times(model: ViViT, state: dict[str, Any], name: str, *_: Any) -> None:
    """Before loading: fit the temporal table of a checkpoint made for another number of frames."""
    times = state.get(f"{name}temporal_pos_embed")
    if times is not None and model.variant == 2 and times.shape[-1] == model.embed_dim:
        state[f"{name}temporal_pos_embed"] = resize_time(times, model.num_prefix_tokens, model.grid_size[0])
