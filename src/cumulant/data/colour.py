"""Colour operations on a batch, each sample its own operation and argument, with the results Pillow gives (but for
autocontrast, where Pillow's rounding now and then loses one level).

Levels are whole numbers 0..255 held in float32, (b, c, t, h, w): images have t = 1, and a clip is treated as one
large image, so all its frames change alike. Eight of the RandAugment operations map a level to a level and are
done together: a table of 256 entries per sample and channel, then one gather over the pixels.

kornia serves for hue only. Its other colour operations take per-sample arguments too, but each is a pass of its own
over the batch for the few samples that drew it, several differ from Pillow (contrast, solarize with an addition),
and its RandAugment draws one sequence of operations per batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from ..optional import needed
from .augmentation import OPERATION, TABLES

# 2^16 times the weights of Rec. 601; every sum below stays under 2^24 and is therefore exact in float32.
_LUMA = (19595.0, 38470.0, 7471.0)


def luma(levels: Tensor) -> Tensor:
    """Grey levels (b, 1, t, h, w), rounded as Pillow rounds; the mean of the channels where these are not three."""
    if levels.shape[1] != 3:
        return torch.floor(levels.mean(1, keepdim=True) + 0.5)
    red, green, blue = levels.split(1, 1)
    return torch.floor((_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue + 32768.0) / 65536.0)


def mean_grey(levels: Tensor) -> Tensor:
    """The mean grey level of each sample, rounded to a whole level: (b, 1, 1, 1, 1)."""
    return torch.floor(luma(levels).mean((1, 2, 3, 4), keepdim=True) + 0.5)


def smoothed(levels: Tensor) -> Tensor:
    """Every frame smoothed by [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13 and rounded; border pixels stay."""
    result = levels.clone()
    inner = levels[..., 1:-1, 1:-1]
    if inner.numel():
        nine = F.avg_pool2d(levels.flatten(1, 2), 3, stride=1, divisor_override=1).view_as(inner)  # their sum, exact
        result[..., 1:-1, 1:-1] = torch.round(torch.add(nine, inner, alpha=4) / 13)
    return result


def blend(degenerate: Tensor, levels: Tensor, factor: Tensor) -> Tensor:
    """degenerate + factor * (levels - degenerate), cut to 0..255 and to whole levels; factor 1 returns `levels`.

    Saturation blends with the grey image, contrast with its mean, brightness with black, sharpness with the smoothed.
    """
    return torch.floor(torch.addcmul(degenerate, factor, levels - degenerate).clamp(0, 255))


def rotate_hue(levels: Tensor, turns: Tensor) -> Tensor:
    """The hue moved by `turns` (b,) of the colour circle; kornia's conversion to HSV and back."""
    with needed("jitter with hue (other than 0) needs kornia", "train"):
        from kornia.enhance import adjust_hue
    # kornia wants the channels third from the end; the frames of a clip become one tall image.
    turned = adjust_hue(levels.flatten(2, 3) / 255, turns * (2 * math.pi))
    return torch.round(turned * 255).clamp(0, 255).reshape_as(levels)


def jitter(levels: Tensor, factors: Tensor, strength: tuple[float, float, float, float]) -> Tensor:
    """Brightness, contrast, saturation and hue in this order by factors (4, b); a part with strength 0 is left out."""
    brightness, contrast, saturation, hue = strength
    if brightness:
        levels = blend(torch.zeros_like(levels), levels, _per_sample(factors[0]))
    if contrast:
        levels = blend(mean_grey(levels), levels, _per_sample(factors[1]))
    if saturation:
        levels = blend(luma(levels), levels, _per_sample(factors[2]))
    return rotate_hue(levels, factors[3]) if hue else levels


def recolour(levels: Tensor, operation: Tensor, argument: Tensor, choices: Collection[str]) -> Tensor:
    """One RandAugment step: the colour operation of each sample (b,), nothing where it drew a geometric one.

    `choices` are the operations that may occur; others cost nothing. Cost with all: one gather, one histogram, two
    reductions and one blend, about 2.7 GB of memory traffic for 1024 images of 64 x 64 in eager mode.
    """
    if any(name in TABLES for name in choices):
        index = levels.flatten(2).long()
        table = tables(levels, index, operation, argument, choices)
        levels = table.gather(2, index).reshape_as(levels)
    degenerate = levels  # a blend with itself, whatever the factor, is the image
    for name, made in {"saturation": luma, "sharpness": smoothed}.items():
        if name in choices:
            degenerate = torch.where(_per_sample(operation == OPERATION[name]), made(levels), degenerate)
    return levels if degenerate is levels else blend(degenerate, levels, _per_sample(argument))


def tables(levels: Tensor, index: Tensor, operation: Tensor, argument: Tensor, choices: Collection[str]) -> Tensor:
    """What each sample's operation makes of every level: (b, c, 256); the identity for operations without a table.

    `index` is levels as int64 (b, c, pixels), which the gather afterwards needs as well.
    """
    level = torch.arange(256, device=levels.device, dtype=torch.int32)
    batch, channels = levels.shape[:2]
    table = level.expand(batch, channels, 256)
    value = argument[:, None, None]
    whole = value.to(torch.int32)

    def made(name: str) -> Tensor:
        if name == "autocontrast":
            return stretched(levels)
        if name == "equalize":
            return equalized(index)
        if name == "invert":
            return 255 - level
        if name == "posterize":
            step = torch.exp2(8 - value.clamp(0, 8)).round().to(torch.int32)
            return level.div(step, rounding_mode="floor") * step
        if name == "solarize":
            return torch.where(level < whole, level, 255 - level)
        if name == "solarize_add":
            return torch.where(level < 128, (level + whole).clamp(max=255), level)
        grey = mean_grey(levels)[:, 0, 0] if name == "contrast" else torch.zeros_like(value)
        return blend(grey, level.to(value.dtype), value).to(torch.int32)

    for name in TABLES:
        if name in choices:
            table = torch.where((operation == OPERATION[name])[:, None, None], made(name), table)
    return table.to(levels.dtype)


def stretched(levels: Tensor) -> Tensor:
    """Autocontrast as a table (b, c, 256): darkest level to 0, brightest to 255, per channel; constant ones stay."""
    level = torch.arange(256, device=levels.device, dtype=torch.int32)
    low, high = (edge.to(torch.int32)[..., None] for edge in torch.aminmax(levels.flatten(2), dim=2))
    spread = high - low
    table = ((level - low) * 255).div(spread.clamp(min=1), rounding_mode="floor").clamp(0, 255)
    return torch.where(spread > 0, table, level)


def equalized(index: Tensor) -> Tensor:
    """Histogram equalisation as a table, with Pillow's whole-number arithmetic: levels (b, c, pixels) -> (b, c, 256).

    table[i] = (step / 2 + pixels darker than i) / step, step = (pixels below the brightest level) / 255, all divisions
    rounded down; a step of 0 (few pixels or levels) leaves the channel alone.
    """
    level = torch.arange(256, device=index.device, dtype=torch.int32)
    one = torch.ones((), device=index.device, dtype=torch.int32)
    histogram = torch.zeros(*index.shape[:2], 256, device=index.device, dtype=torch.int32)
    histogram = histogram.scatter_add(2, index, one.expand(index.shape))
    darker = histogram.cumsum(-1, dtype=torch.int32) - histogram
    below_brightest = torch.where(histogram > 0, darker, 0).amax(-1, keepdim=True)
    step = below_brightest.div(255, rounding_mode="floor")
    table = (step.div(2, rounding_mode="floor") + darker).div(step.clamp(min=1), rounding_mode="floor")
    return torch.where(step > 0, table.clamp(max=255), level)


def _per_sample(factor: Tensor) -> Tensor:
    return factor[:, None, None, None, None]
