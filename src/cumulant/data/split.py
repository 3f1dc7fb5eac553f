"""A data set held in memory, cut into a training and a test part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images (N, channels, height, width) and integer labels (N,) of two disjoint parts."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            if images.ndim != 4 or labels.shape != images.shape[:1]:
                raise ValueError(
                    f"{part}_images must be (N, channels, height, width) with {part}_labels (N,), "
                    f"got {tuple(images.shape)} and {tuple(labels.shape)}"
                )

    def to(self, device: torch.device | str) -> Split:
        """The same data on another device."""
        train = self.train_images.to(device), self.train_labels.to(device)
        test = self.test_images.to(device), self.test_labels.to(device)
        return Split(*train, *test, self.classes)
