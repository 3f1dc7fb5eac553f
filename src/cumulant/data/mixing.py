"""Operations on finished pixels and targets: soft labels, random erasing, mixup and cutmix.

x is (b, c, t, h, w) normalised, targets (b, classes). A box is (4, b): top, bottom, left, right in pixels, the end
excluded; it covers all frames of a clip. Partners in mixing are the samples 2i and 2i + 1: a rank that holds an even
slice of the batch holds both.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """smoothing / classes everywhere and 1 - smoothing more at the label: (b,) -> (b, classes), rows sum to 1."""
    # Compared rather than one_hot, which looks at the values and waits for the device.
    hot = (labels[:, None] == torch.arange(classes, device=labels.device)).to(torch.float32)
    return hot * (1 - smoothing) + smoothing / classes


def box_mask(box: Tensor, height: int, width: int) -> Tensor:
    """True inside the box: (4, b) -> (b, 1, 1, height, width)."""
    top, bottom, left, right = box[:, :, None, None, None, None]
    rows = torch.arange(height, device=box.device)[:, None]
    cols = torch.arange(width, device=box.device)
    return (rows >= top) & (rows < bottom) & (cols >= left) & (cols < right)


def box_share(box: Tensor, height: int, width: int) -> Tensor:
    """The part of the frame a box covers, (b,)."""
    top, bottom, left, right = box
    return (bottom - top) * (right - left) / (height * width)


def erase(x: Tensor, box: Tensor, noise: Tensor, start: Tensor) -> Tensor:
    """The box of every sample filled with normal noise, the same in all frames of a clip.

    `noise` is one row of numbers for the whole batch, of which a sample reads c h w from its own place `start` (b,)
    on: drawing a fresh number per pixel of the global batch on every rank would cost more than the rest of the step.
    """
    batch, channels, _, height, width = x.shape
    windows = noise.unfold(0, channels * height * width, 1)[start]
    fresh = windows.reshape(batch, channels, 1, height, width)
    return torch.where(box_mask(box, height, width), fresh, x)


def partner(x: Tensor) -> Tensor:
    """Samples 2i and 2i + 1 exchanged."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def mix(x: Tensor, targets: Tensor, own: Tensor, cut: Tensor, box: Tensor) -> tuple[Tensor, Tensor]:
    """Mixup: own x + (1 - own) partner. Cutmix, where `cut` (b,) is true: the partner inside the box, x outside.

    Targets get the same weights: `own` (b,) for mixup, the part of the frame outside the box for cutmix.
    """
    height, width = x.shape[-2:]
    share = torch.where(cut, 1 - box_share(box, height, width), own)
    outside = (~box_mask(box, height, width)).to(x.dtype)
    weight = torch.where(cut[:, None, None, None, None], outside, own[:, None, None, None, None])
    # lerp returns its end points exactly at weights 0 and 1.
    return torch.lerp(partner(x), x, weight), torch.lerp(partner(targets), targets, share[:, None])


def beta_table(alpha: float, steps: int = 1024) -> Tensor:
    """Quantiles of Beta(alpha, alpha) in a form that is nearly straight, for `beta_quantile`: (steps + 1,).

    With s = (2 x)^alpha for x <= 1/2 the density of s is (1 - x)^(alpha - 1) up to a constant: smooth and bounded,
    where that of x has a pole for alpha < 1. The table holds s at equal steps of twice the probability; the upper
    half of the distribution mirrors the lower.
    """
    s = np.linspace(0.0, 1.0, 16 * steps + 1)
    if alpha > 1:  # the mass moves to tiny s, so that equal steps of x are needed beside those of s
        s = np.union1d(s, s**alpha)
    density = (1 - 0.5 * s ** (1 / alpha)) ** (alpha - 1)
    probability = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(s))])
    return torch.from_numpy(np.interp(np.linspace(0, 1, steps + 1), probability / probability[-1], s)).float()


def beta_quantile(table: Tensor, alpha: float, probability: Tensor) -> Tensor:
    """x with P(X <= x) = probability for X ~ Beta(alpha, alpha): a pure function of uniform numbers.

    torch draws Beta from its global generator only, and by rejection; this is one look-up per sample.
    """
    steps = table.numel() - 1
    place = 2 * torch.minimum(probability, 1 - probability) * steps
    cell = place.long().clamp(0, steps - 1)
    s = torch.lerp(table[cell], table[cell + 1], place - cell)
    lower = 0.5 * s ** (1 / alpha)
    return torch.where(probability < 0.5, lower, 1 - lower)
