"""The data sets that come along: handwritten digits, small enough to look at, and scenes made of them.

Shape legend: N scenes, S x S pixels.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..optional import needed
from .images import TensorImages
from .part import DataError, DecodeError, Part, Source

TEST_IMAGES = 450
CELL = 32  # a digit or none in each square of so many pixels
FILLED = 0.7  # share of the squares with a digit
INK = 0.35  # from this level on a pixel belongs to its digit
COUNTS = (1024, 128)
CLASSES = ("ground", *map(str, range(10)))


def digits_source(seed: int = 0) -> Source:
    """1,347 training and 450 test images in three equal channels, stratified by class; `seed` chooses the split.

    Needs scikit-learn, which the extra `train` installs.
    """
    levels, labels = _digits()
    pixels = (torch.from_numpy(levels) * 255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    parts = [
        TensorImages(pixels[places].contiguous(), torch.from_numpy(labels[places]), f"digits {title}")
        for places, title in zip(_split(labels, seed), ("train", "test"), strict=True)
    ]
    return Source("digits", "image", parts[0], parts[1], classes=tuple("0123456789"))


def _digits() -> tuple[NDArray[Any], NDArray[Any]]:
    """Grey levels from 0 to 16, and labels: out of scikit-learn's file, for its import takes as long as torch's."""
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else Path()
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    with needed("the digits need scikit-learn", "train"):
        from sklearn.datasets import load_digits
    return load_digits(return_X_y=True)


def _split(labels: NDArray[Any], seed: int) -> tuple[list[int], list[int]]:
    """Places of both parts, drawn as scikit-learn's `train_test_split(..., stratify=labels)` draws them."""
    draw = np.random.RandomState(seed)
    sizes = np.bincount(labels)
    train = _shares(sizes, len(labels) - TEST_IMAGES, draw)
    test = _shares(sizes - train, TEST_IMAGES, draw)
    parts: tuple[list[int], list[int]] = ([], [])
    for label, (some, others) in enumerate(zip(train, test, strict=True)):
        places = np.flatnonzero(labels == label)[draw.permutation(sizes[label])]
        parts[0].extend(places[:some])
        parts[1].extend(places[some : some + others])
    return draw.permutation(parts[0]).tolist(), draw.permutation(parts[1]).tolist()


def _shares(sizes: NDArray[Any], count: int, draw: np.random.RandomState) -> NDArray[Any]:
    """`count` in proportion to `sizes`; what rounding leaves goes to the largest remainders, equal ones by lot."""
    exact = sizes / sizes.sum() * count
    shares, remainders = np.floor(exact).astype(int), exact - np.floor(exact)
    for remainder in np.unique(remainders)[::-1]:
        left = count - shares.sum()
        if left == 0:
            break
        tied = np.flatnonzero(remainders == remainder)
        shares[draw.choice(tied, size=min(len(tied), left), replace=False)] += 1
    return shares


class ScenePart(TensorImages):
    """Images uint8 (N, 3, S, S) with masks uint8 (N, S, S) of class numbers: your own arrays as a part.

    A loader hands over four channels, the mask behind the colours. `labels` are what most pixels of an object are.
    """

    def __init__(self, images: Tensor, masks: Tensor, title: str = "scenes") -> None:
        square = masks.ndim == 3 and masks.shape[1] == masks.shape[2]
        if masks.dtype != torch.uint8 or not square or masks.shape != (*images.shape[:1], *images.shape[2:]):
            raise ValueError(
                f"masks must be uint8 (N, side, side) as the images {tuple(images.shape)} are, got {masks.dtype} "
                f"{tuple(masks.shape)}"
            )
        counts = torch.stack([torch.bincount(mask.flatten().long(), minlength=256) for mask in masks])
        counts[:, 0] = 0
        super().__init__(images, counts.argmax(1), title)
        self.images, self.size = torch.cat([images, masks.unsqueeze(1)], 1), masks.shape[-1]

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        self.check_index(index)
        if size != self.size:
            raise DecodeError(self.name(index), f"scenes of {self.size} pixels are not resized to {size}")
        return self.images[index]

    decode_whole: Any = None  # there is nothing to crop from


def scenes_source(size: int = 64, *, seed: int = 0, counts: tuple[int, int] = COUNTS) -> Source:
    """Scenes of `size` pixels made of scikit-learn's digits: those of the training part in training scenes, those of
    the test part in test scenes. Known masks, no download; a larger scene has more digits, not larger ones.

    A digit is 16 to 31 pixels high, anywhere in its square, of any colour that is brighter than the ground, a smooth
    random gradient with noise.
    """
    if size < CELL or size % CELL:
        raise DataError(f"scenes: size must be a multiple of {CELL} pixels, got {size}")
    digits = digits_source()
    parts = [
        _made(part, size, count, f"scenes {title}", seed * 2 + number)
        for number, (part, count, title) in enumerate(
            zip((digits.train, digits.test), counts, ("train", "test"), strict=True)
        )
    ]
    return Source("scenes", "scene", parts[0], parts[1], classes=CLASSES)


def _made(digits: Part, size: int, count: int, title: str, seed: int) -> ScenePart:
    assert isinstance(digits, TensorImages)
    draw = torch.Generator().manual_seed(seed)
    many = (count, size // CELL, size // CELL)
    which = torch.randint(len(digits), many, generator=draw)
    height, down, across, there = torch.rand(4, *many, generator=draw).unbind()
    height = (16 + height * (CELL - 16)) / CELL
    middle = [(2 * place - 1) * (1 - height) for place in (across, down)]  # from -1 to 1 across the square
    zero = torch.zeros_like(height)
    turn = torch.stack([1 / height, zero, -middle[0] / height, zero, 1 / height, -middle[1] / height], -1)
    grid = F.affine_grid(turn.reshape(-1, 2, 3), [which.numel(), 1, CELL, CELL], align_corners=False)
    shapes = digits.images[:, :1].float()[which.flatten()] / 255
    ink = (
        F.grid_sample(shapes, grid, align_corners=False).reshape(*many, CELL, CELL) * (there < FILLED)[..., None, None]
    )
    label = (digits.labels[which] + 1)[..., None, None] * (ink > INK)
    ground = F.interpolate(torch.rand(count, 3, 4, 4, generator=draw), (size, size), mode="bicubic").clamp(0, 1)
    colours = _spread(torch.rand(3, *many, 1, 1, generator=draw).expand(3, *ink.shape))
    noise = 0.08 * torch.randn(ground.shape, generator=draw)
    picture = 0.5 * ground + noise + _spread(ink.unsqueeze(0)) * (0.2 + 0.6 * colours)
    return ScenePart(
        (picture.clamp(0, 1) * 255).round().to(torch.uint8), _spread(label[None])[:, 0].to(torch.uint8), title
    )


def _spread(squares: Tensor) -> Tensor:
    """Squares (c, N, rows, columns, CELL, CELL) side by side: (N, c, S, S)."""
    return squares.permute(1, 0, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
