"""Starting a video model from an image model: kernels spread over time, positions repeated, the rest copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..call import check_choice
from .parts import resize_positions
from .tubelet import TUBELET_INITS, over_time
from .vit import VisionTransformer

if TYPE_CHECKING:
    from .vivit import ViViT


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
