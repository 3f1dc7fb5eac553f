"""Handwritten digits, 8 x 8 grey pixels: 1,797 real images that come with scikit-learn, no download."""

from __future__ import annotations

from typing import Any

import torch

from ..optional import needed
from .split import Split

TEST_IMAGES = 450


def digits(seed: int = 0) -> Split:
    """1,347 training and 450 test images (N, 1, 8, 8), stratified by class.

    Pixels have mean 0 and std 1 over the training part; `seed` chooses the split. Needs scikit-learn, which
    the extra `train` installs.
    """
    train_x, test_x, train_y, test_y = digit_levels(seed)
    mean, std = train_x.mean(), train_x.std()
    train_images, test_images = (
        torch.tensor((x - mean) / std, dtype=torch.float32).reshape(-1, 1, 8, 8) for x in (train_x, test_x)
    )
    return Split(train_images, torch.tensor(train_y), test_images, torch.tensor(test_y), classes=10)


def digit_levels(seed: int = 0) -> Any:
    """The same split as arrays: grey levels 0 to 16, train (1347, 64) and test (450, 64), then the labels of both."""
    with needed("the digits need scikit-learn", "train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    pixels, labels = load_digits(return_X_y=True)
    return train_test_split(pixels, labels, test_size=TEST_IMAGES, random_state=seed, stratify=labels)
