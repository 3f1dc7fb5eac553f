"""Handwritten digits, 8 x 8 pixels: 1,797 real images that come with scikit-learn, no download."""

from __future__ import annotations

import torch

from ..optional import needed
from .images import TensorImages
from .part import Source

TEST_IMAGES = 450


def digits_source(seed: int = 0) -> Source:
    """1,347 training and 450 test images in three equal channels, stratified by class; `seed` chooses the split.

    Needs scikit-learn, which the extra `train` installs.
    """
    with needed("the digits need scikit-learn", "train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    levels, labels = load_digits(return_X_y=True)  # grey levels from 0 to 16
    pixels = (torch.from_numpy(levels) * 255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    both = train_test_split(range(len(labels)), test_size=TEST_IMAGES, random_state=seed, stratify=labels)
    parts = [
        TensorImages(pixels[places].contiguous(), torch.from_numpy(labels[places]), f"digits {title}")
        for places, title in zip(both, ("train", "test"), strict=True)
    ]
    return Source("digits", "image", parts[0], parts[1], classes=tuple("0123456789"))
