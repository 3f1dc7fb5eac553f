"""A class for every pixel: a segmentation head over the maps of any backbone.

Shape legend: B images, H x W pixels, C_l channels and S_l stride of level l, S the finest stride, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice, check_count
from ..zoo.registry import options_of
from .backbone import Features, check_classes
from .mechanisms import Attending
from .parts import Repeated
from .registry import create_model, register_model

HEADS = ("linear", "pyramid")


class LinearHead(nn.Module):
    """The last map alone; each place tells its S x S pixels by one matrix. Cost: C K a pixel."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int], classes: int, width: int, **place: Any) -> None:
        super().__init__()
        self.stride = strides[-1]
        self.read = nn.Conv2d(channels[-1], classes * self.stride**2, 1, **place)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return F.pixel_shuffle(self.read(maps[-1]), self.stride)


class PyramidHead(Repeated):
    """All maps, brought to one width and added on the finest of their grids, a 3 x 3 convolution, then one matrix.

    Cost: sum_l C_l width / S_l^2 + (9 width + K S^2) width / S^2 a pixel.
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int], classes: int, width: int, **place: Any) -> None:
        super().__init__()
        self.stride = min(strides)
        self.finest = list(strides).index(self.stride)
        self.lateral = nn.ModuleList(nn.Conv2d(channel, width, 1, **place) for channel in channels)
        self.norm = nn.GroupNorm(1, width, **place)
        self.smooth = nn.Conv2d(width, width, 3, padding=1, **place)
        self.read = nn.Conv2d(width, classes * self.stride**2, 1, **place)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        size = maps[self.finest].shape[-2:]
        levels = [lateral(one) for lateral, one in zip(self.lateral, maps, strict=True)]
        total = torch.stack([x if x.shape[-2:] == size else _resized(x, size) for x in levels]).sum(0)
        return F.pixel_shuffle(self.read(F.gelu(self.smooth(self.norm(total)))), self.stride)


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


@options_of(Attending, without=("drop_path", "init_std"))
class Segmenter(nn.Module):
    """Images (B, in_chans, H, W) to logits (B, K, H, W): a backbone without its classifier, and a head over its maps.

    Sizes are those that the backbone takes; a map that it padded is cut to the image.

    Args:
        backbone: name of a network of images, see `cumulant.models.names()`.
        backbone_options: further arguments of it.
        head: "linear" reads the last map, "pyramid" all of them.
        width: channels inside the pyramid.
        out_indices: levels that are read; all unless given.
        img_size: side that positions are made for; others work too.
    """

    takes_scenes = True

    def __init__(
        self,
        *,
        backbone: str = "vit_nano_patch4_32",
        backbone_options: dict[str, Any] | None = None,
        head: str = "linear",
        width: int = 64,
        out_indices: int | Sequence[int] | None = None,
        attention_extras: dict[str, Any] | None = None,
        num_classes: int = 1000,
        img_size: int = 64,
        **attending: Any,
    ) -> None:
        super().__init__()
        check_choice("head", head, HEADS)
        check_count("width", width)
        if not check_classes(num_classes):
            raise ValueError("num_classes must be positive: every pixel is given one; maps alone: features_only=True")
        self.config: dict[str, Any] | None = None  # set by create_model
        self.num_classes = num_classes
        place = Attending(**attending).place
        given = {"img_size": img_size, "attention_extras": attention_extras or None, **attending}
        given = {name: one for name, one in given.items() if one is not None} | (backbone_options or {})
        self.features: Features = create_model(backbone, features_only=True, out_indices=out_indices, **given)
        info = self.features.feature_info
        kind = LinearHead if head == "linear" else PyramidHead
        self.head = kind(info.channels(), info.reduction(), num_classes, width, **place)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        return self.head(self.features(images))[..., :height, :width]

    def set_drop_path(self, rate: float) -> None:
        self.features.set_drop_path(rate)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.features.set_grad_checkpointing(enable)


register_model("segmenter", Segmenter)
