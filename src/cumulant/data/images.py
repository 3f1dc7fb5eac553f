"""Images as parts: files or rows that are decoded, tensors that are already there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .decode import decode_image, fit, pillow_image, to_tensor
from .identity import tensor_contents
from .part import DecodeError
from .rows import Items


class Images:
    """Encoded images with their labels."""

    views = 1

    def __init__(self, items: Items, labels: Tensor) -> None:
        self.items, self.labels = items, labels

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return self.items.name(index)

    def contents(self) -> Iterable[bytes]:
        return self.items.contents()

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        return decode_image(self.items.encoded(index), size, self.name(index))


class TensorImages:
    """Images uint8 (N, 3, height, width) in memory: your own arrays as a part."""

    views = 1

    def __init__(self, images: Tensor, labels: Tensor, title: str = "tensor") -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be uint8 (N, 3, height, width), got {images.dtype} {tuple(images.shape)}")
        if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64 ({len(images)},), got {labels.dtype} {tuple(labels.shape)}")
        self.images, self.labels, self.title = images, labels, title

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.title}[{index}]"

    def contents(self) -> Iterable[bytes]:
        return tensor_contents(self.images)

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        if not 0 <= index < len(self):
            raise DecodeError(self.name(index), f"there are {len(self)} images")
        image = self.images[index]
        if image.shape[1:] == (size, size):
            return image
        return to_tensor(fit(pillow_image().fromarray(image.permute(1, 2, 0).contiguous().numpy()), size))
