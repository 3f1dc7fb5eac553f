"""Augmentation of a batch of images, on whatever device it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_shift(images: Tensor, pixels: int, generator: torch.Generator | None = None) -> Tensor:
    """Each image (B, channels, H, W) moved by up to `pixels` along both axes; border pixels are repeated."""
    if pixels < 0 or images.ndim != 4:
        raise ValueError(
            f"pixels must be at least 0 and images (B, channels, H, W), got {pixels} and {tuple(images.shape)}"
        )
    if pixels == 0:
        return images
    batch, _, height, width = images.shape
    padded = F.pad(images, (pixels,) * 4, mode="replicate")
    offset = torch.randint(0, 2 * pixels + 1, (2, batch, 1), generator=generator, device=images.device)
    rows = offset[0] + torch.arange(height, device=images.device)
    cols = offset[1] + torch.arange(width, device=images.device)
    sample = torch.arange(batch, device=images.device)[:, None, None]
    # Indices on both sides of the channel axis put the channels last.
    return padded[sample, :, rows[:, :, None], cols[:, None, :]].movedim(-1, 1)
