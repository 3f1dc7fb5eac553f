"""Images as parts: rows of a table, files of a folder tree, tensors that are already there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .decode import decode_image, fit, pillow_image, to_tensor
from .identity import file_contents, tensor_contents
from .part import DecodeError
from .rows import Rows, encoded


class ImageRows:
    """Images in a column of a table; `picks` are the rows of this part."""

    views = 1

    def __init__(self, rows: Rows, picks: NDArray[np.int64], column: str, labels: Tensor) -> None:
        self.rows, self.picks, self.column, self.labels = rows, picks, column, labels

    def __len__(self) -> int:
        return len(self.picks)

    def name(self, index: int) -> str:
        return self.rows.name(int(self.picks[index]))

    def contents(self) -> Iterable[bytes]:
        return (self.picks.tobytes(), *self.rows.contents(self.column))

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        row, name = int(self.picks[index]), self.name(index)
        return decode_image(encoded(self.rows.cell(row, self.column), self.rows.folder(row), name), size, name)


class ImageFiles:
    """Image files; `files` are relative to `folder`."""

    views = 1

    def __init__(self, folder: Path, files: Sequence[str], labels: Tensor) -> None:
        self.folder, self.files, self.labels = folder, list(files), labels

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return str(self.folder / self.files[index])

    def contents(self) -> Iterable[bytes]:
        return file_contents(self.folder, self.files)

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        return decode_image(self.folder / self.files[index], size, self.name(index))


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
