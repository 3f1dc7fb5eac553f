"""Handwritten digits, 8 x 8 pixels: 1,797 real images that come with scikit-learn, no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..optional import needed
from .images import TensorImages
from .part import Source

TEST_IMAGES = 450


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
