"""Images as parts: files or rows that are decoded, tensors that are already there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .decode import decode_image, decode_whole, fit, pillow_image, to_tensor
from .identity import tensor_contents
from .part import DecodeError
from .rows import Encoded

if TYPE_CHECKING:
    from PIL.Image import Image


class Images(Encoded):
    """Encoded images with their labels."""

    views = 1

    @property
    def shard_of(self) -> NDArray[np.int64] | None:
        """The number of each item's shard, (N,), for data that lies in shards."""
        return getattr(self.items, "shard_of", None)

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        return decode_image(self.items.encoded(index), size, self.name(index))

    def decode_whole(self, index: int, size: int, seed: int | None = None) -> tuple[Tensor, float]:
        return decode_whole(self.items.encoded(index), size, self.name(index))


class TensorImages:
    """Images uint8 (N, 3, height, width), or grey (N, 1, height, width), in memory: your own arrays as a part.

    `ratios` (N,): width / height that the pictures had before they were stretched to these arrays.
    """

    views = 1

    def __init__(self, images: Tensor, labels: Tensor, title: str = "tensor", ratios: Tensor | None = None) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"images must be uint8 (N, 3 or 1, height, width), got {images.dtype} {tuple(images.shape)}"
            )
        if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64 ({len(images)},), got {labels.dtype} {tuple(labels.shape)}")
        self.images, self.labels, self.title, self.ratios = images, labels, title, ratios

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.title}[{index}]"

    def ratio(self, index: int) -> float:
        """Width / height of the picture."""
        return self.images.shape[3] / self.images.shape[2] if self.ratios is None else float(self.ratios[index])

    def check_index(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise DecodeError(self.name(index), f"there are {len(self)} images")

    def contents(self) -> Iterable[bytes]:
        return tensor_contents(self.images)

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        self.check_index(index)
        image, ratio = self.images[index], self.ratio(index)
        height, width = image.shape[1:]
        if ratio == 1 and (height, width) == (size, size):
            return image
        if self.ratios is None:
            return resized(image, size, 1)
        across, down = min(1.0, 1 / ratio) * width / 2, min(1.0, ratio) * height / 2  # half of the centre square
        box = (width / 2 - across, height / 2 - down, width / 2 + across, height / 2 + down)
        return to_tensor(picture(image).resize((size, size), pillow_image().Resampling.BICUBIC, box=box))

    def decode_whole(self, index: int, size: int, seed: int | None = None) -> tuple[Tensor, float]:
        self.check_index(index)
        return resized(self.images[index], size, 0), self.ratio(index)


def resized(image: Tensor, size: int, crops: int) -> Tensor:
    """uint8 (c, height, width) to (c, size, size), see `fit`."""
    return image if image.shape[1:] == (size, size) else to_tensor(fit(picture(image), size, crops=crops))


def picture(image: Tensor) -> Image:
    """uint8 (3 or 1, height, width) as a picture of Pillow."""
    array = image.permute(1, 2, 0).contiguous().numpy()
    return pillow_image().fromarray(array if len(image) == 3 else array[:, :, 0])
