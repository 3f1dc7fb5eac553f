"""Clips to tokens: tubelet embedding, sampled frames, kernels and positions made from those of an image model.

Shape legend: B clips, T x H x W pixels, t x h x w a tubelet, (n_t, n_h, n_w) the grid of tokens, C width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice
from .parts import as_product, resize_positions
from .vit import VisionTransformer

if TYPE_CHECKING:
    from .vivit import ViViT

Grid = tuple[int, int, int]
TUBELET_INITS = ("random", "inflate", "central")


class TubeletEmbed(nn.Module):
    """Clips (B, channels, T, H, W) to tokens (B, n_t n_h n_w, C), frame by frame: a 3-D convolution, kernel = stride.

    Cost: N t h w channels x C multiply-adds.

    Args:
        sample_frames: embed that many frames, spread evenly over the clip, in place of tubelets; needs t = 1.
    """

    def __init__(
        self, tubelet: Sequence[int], in_chans: int, dim: int, sample_frames: int | None = None, **place: Any
    ) -> None:
        super().__init__()
        if len(tubelet) != 3 or min(tubelet) < 1:
            raise ValueError(f"tubelet must be three positive numbers (frames, height, width), got {tuple(tubelet)}")
        if sample_frames is not None and (sample_frames < 1 or tubelet[0] != 1):
            raise ValueError(
                "sample_frames must be at least 1 and needs a tubelet of one frame, got "
                f"sample_frames={sample_frames}, tubelet={tuple(tubelet)}"
            )
        self.tubelet: Grid = (tubelet[0], tubelet[1], tubelet[2])
        self.in_chans, self.sample_frames = in_chans, sample_frames
        self.proj = nn.Conv3d(in_chans, dim, kernel_size=self.tubelet, stride=self.tubelet, **place)

    def grid(self, frames: int, height: int, width: int) -> Grid:
        """Tokens over time, rows and columns; every side must be a multiple of the tubelet's."""
        size = frames, height, width
        if self.sample_frames is not None and frames < self.sample_frames:
            raise ValueError(f"sample_frames={self.sample_frames} needs at least as many frames, got {frames}")
        time = frames if self.sample_frames is None else self.sample_frames
        if any(side < 1 or side % part for side, part in zip((time, height, width), self.tubelet, strict=True)):
            raise ValueError(
                f"clip size (frames, height, width) must be a multiple of the tubelet {self.tubelet}, got {size}"
            )
        t, h, w = self.tubelet
        return time // t, height // h, width // w

    def forward(self, clips: Tensor) -> Tensor:
        if self.sample_frames is not None:
            clips = clips[:, :, evenly_spaced(clips.shape[2], self.sample_frames)]
        return as_product(self.proj, clips)

    @torch.no_grad()
    def reset_parameters(self, method: str = "random") -> None:
        """PyTorch's default for a convolution; "inflate" and "central" draw a 2-D kernel and spread it over time."""
        check_choice("tubelet_init", method, TUBELET_INITS)
        self.proj.reset_parameters()
        if method != "random":
            flat = nn.Conv2d(self.in_chans, self.proj.out_channels, self.tubelet[1:], device=self.proj.weight.device)
            self.proj.weight.copy_(over_time(flat.weight, self.tubelet[0], method))


def over_time(kernel: Tensor, frames: int, method: str) -> Tensor:
    """A 2-D kernel (C, channels, h, w) as one of (C, channels, t, h, w).

    "inflate" repeats it and divides by t: a static clip gives what one of its frames gives.
    "central" puts it at frame t // 2 and zeros elsewhere: a clip gives what its central frames give.
    """
    if method == "inflate":
        return kernel.unsqueeze(2).repeat(1, 1, frames, 1, 1) / frames
    if method != "central":
        raise ValueError(f'method must be "inflate" or "central", got {method!r}')
    spread = kernel.new_zeros(*kernel.shape[:2], frames, *kernel.shape[2:])
    spread[:, :, frames // 2] = kernel
    return spread


def evenly_spaced(frames: int, count: int) -> list[int]:
    """The frames in the middle of `count` equal parts of a clip."""
    return [(2 * i + 1) * frames // (2 * count) for i in range(count)]


def resize_time(table: Tensor, prefix: int, frames: int) -> Tensor:
    """A table (1, prefix + n_t, C) for another number of frames, interpolated linearly."""
    if table.shape[1] == prefix + frames:
        return table
    first, times = table.tensor_split([prefix], dim=1)
    wide = torch.promote_types(table.dtype, torch.float32)
    times = F.interpolate(times.mT.to(wide), size=frames, mode="linear", align_corners=False)
    return torch.cat([first, times.mT.to(table.dtype)], dim=1)


def resize_clip_positions(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """A table (1, prefix + n_t n_h n_w, C) for another grid: bicubic within frames, linear over time."""
    if old == new:
        return table
    prefix = table.shape[1] - math.prod(old)
    first, grid = table.tensor_split([prefix], dim=1)
    frames = resize_positions(grid.unflatten(1, (old[0], -1)).squeeze(0), old[1:], new[1:])  # (n_t, n_h n_w, C)
    times = resize_time(frames.flatten(1).unsqueeze(0), 0, new[0])
    return torch.cat([first, times.reshape(1, -1, table.shape[-1])], dim=1)


@torch.no_grad()
def load_image_weights(video: ViViT, image: VisionTransformer, tubelet_init: str = "central") -> list[str]:
    """Copy the weights of `image` into `video`; returns the names of parameters that it has nothing for.

    - tubelet kernel: "central" or "inflate" of the 2-D kernel (see `over_time`), or "random", as it is;
    - positions: resized to the grid of a frame, repeated over time; class token and its position where both have one;
    - blocks, norm, and the head if the classes are as many, by name; variant 2 fills its spatial encoder;
    - variant 3: attention over time starts at zero output, so that the model begins as the image model on each frame.
    """
    check_choice("tubelet_init", tubelet_init, TUBELET_INITS)
    _check_alike(video, image)
    embed = video.patch_embed
    copied = {"pos_embed", *_copy(embed.proj, image.patch_embed.proj, "patch_embed.proj.", ("bias",))}
    if tubelet_init != "random":
        embed.proj.weight.copy_(over_time(image.patch_embed.proj.weight, embed.tubelet[0], tubelet_init))
        copied.add("patch_embed.proj.weight")

    table = resize_positions(image.pos_embed, image.grid_size, video.grid_size[1:])
    prefix, places = table.tensor_split([image.num_prefix_tokens], dim=1)
    patches = places.repeat(1, 1 if video.per_frame else video.grid_size[0], 1)
    video.pos_embed[:, video.num_prefix_tokens :].copy_(patches)
    if video.cls_token is not None and image.cls_token is not None:
        video.cls_token.copy_(image.cls_token)
        video.pos_embed[:, :1].copy_(prefix[:, :1])
        copied.add("cls_token")

    copied |= _copy(video.norm, image.norm, "norm.") | _copy(video.blocks, image.blocks, "blocks.")
    if video.num_classes == image.num_classes:
        copied |= _copy(video.head, image.head, "head.")
    if video.variant == 3:
        for name, module in video.named_modules():
            if name.endswith("temporal_attn.proj") and isinstance(module, nn.Linear):
                for parameter in module.parameters():
                    nn.init.zeros_(parameter)
    return [name for name, _ in video.named_parameters() if name not in copied]


def _copy(target: nn.Module, source: nn.Module, name: str, only: tuple[str, ...] = ()) -> set[str]:
    """Copy parameters by name; what only the image model has must not be lost without a word."""
    own: dict[str, Tensor] = target.state_dict()
    given: dict[str, Tensor] = {key: x for key, x in source.state_dict().items() if not only or key in only}
    wrong = [key for key, value in given.items() if key not in own or own[key].shape != value.shape]
    if wrong:
        has = f"of shape {tuple(own[wrong[0]].shape)}" if wrong[0] in own else "missing"
        raise ValueError(
            f"{name}{wrong[0]} of the image model has shape {tuple(given[wrong[0]].shape)}, but in the video model "
            f"it is {has}; make both with the same width, heads, attention and extras"
        )
    for key, value in given.items():
        own[key].copy_(value)
    return {name + key for key in given}


def _check_alike(video: ViViT, image: VisionTransformer) -> None:
    if not isinstance(image, VisionTransformer):
        raise TypeError(f"image_model must be a VisionTransformer, got {type(image).__name__}")
    _, height, width = video.patch_embed.tubelet
    side, heads = image.patch_embed.patch_size, "num_heads"
    for name, mine, theirs in (
        ("embed_dim", video.embed_dim, image.embed_dim),
        ("depth", len(video.blocks), len(image.blocks)),
        ("in_chans", video.patch_embed.in_chans, image.patch_embed.in_chans),
        ("patch size", (height, width), (side, side)),
        (heads, getattr(video.blocks[0].attn, heads), getattr(image.blocks[0].attn, heads)),
    ):
        if mine != theirs:
            raise ValueError(f"{name} of the image model must be that of the video model, {mine}, got {theirs}")
