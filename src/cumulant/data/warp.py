"""Geometric augmentation: any chain of affine maps, each sample its own, in one resampling of the batch.

b samples, c channels (frames of a clip folded in), h x w the source frame, s x s the output frame.
A map (b, 2, 3) takes points of an image to points of the image it is resampled from, in pixels, with the origin in
the top left *corner* (the first pixel's centre is (1/2, 1/2)): Pillow's convention, so that one can be checked
against the other. kornia has every map used here, but resamples once per map and draws its own parameters; one
pass for the whole chain is cheaper and blurs once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .augmentation import OPERATION


def affine(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """The map (x, y) -> (a x + b y + c, d x + e y + f), Pillow's order of coefficients: (...,) each -> (..., 2, 3)."""
    return torch.stack([a, b, c, d, e, f], -1).unflatten(-1, (2, 3))


def view_map(top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor, size: int) -> Tensor:
    """The map from an output frame of side `size` to a box (in source pixels), mirrored where `flip` is true."""
    zero = torch.zeros_like(top)
    across = torch.where(flip, -width, width) / size
    return affine(across, zero, torch.where(flip, left + width, left), zero, height / size, top)


def distortion_map(operation: Tensor, argument: Tensor, size: int) -> Tensor:
    """The geometric RandAugment operations as maps (..., 2, 3); the identity where `operation` (...,) is another one.

    Rotation is about the centre, in degrees counter-clockwise; shears keep the top left corner fixed; translations
    are fractions of the side and move the image to the left or up when positive: all as Pillow has them.
    """

    def of(name: str) -> Tensor:
        return torch.where(operation == OPERATION[name], argument, 0.0)

    angle = of("rotate") * (math.pi / 180)
    cos, sin, centre = torch.cos(angle), torch.sin(angle), size / 2
    return affine(
        cos,
        of("shear_x") - sin,
        centre * (1 - cos + sin) + size * of("translate_x"),
        of("shear_y") + sin,
        cos,
        centre * (1 - cos - sin) + size * of("translate_y"),
    )


def warp(
    levels: Tensor,
    view: Tensor,
    size: int,
    distortions: Tensor | None = None,
    fill: Tensor | None = None,
    mode: str = "bilinear",
) -> Tensor:
    """levels (b, c, h, w) -> (b, c, size, size): the view of the source, then the distortions (n, b, 2, 3) in order.

    An output point p is read at view(d_1(...d_n(p))). Where any d_i leads out of its frame the result is `fill`
    (c,), as if each step had been a resampling of its own; the view repeats the border of the source instead.
    Cost: one grid_sample and about ten passes over (b, size, size), whatever the number of maps.
    """
    grid = torch.arange(size, device=levels.device, dtype=levels.dtype) + 0.5
    x, y = grid[None, None, :], grid[None, :, None]
    inside: Tensor | None = None
    for distortion in () if distortions is None else reversed(distortions.unbind()):
        x, y = _apply(distortion, x, y)
        within = (x >= 0) & (x < size) & (y >= 0) & (y < size)
        inside = within if inside is None else inside & within
    x, y = _apply(view, x, y)
    height, width = levels.shape[-2:]
    points = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], -1)
    sampled = _resample(levels, points, mode)
    if inside is not None and fill is not None:
        sampled = torch.where(inside[:, None], sampled, fill[:, None, None])
    return sampled


@torch.library.custom_op("cumulant::resample", mutates_args=())
def _resample(levels: Tensor, points: Tensor, mode: str) -> Tensor:
    # An operator of its own because torch.compile would take grid_sample apart and repeat it in every kernel that
    # reads the result: with bicubic interpolation the whole step took ten times as long (CPU, torch 2.13).
    return F.grid_sample(levels, points, mode=mode, padding_mode="border", align_corners=False)


@_resample.register_fake
def _resample_shape(levels: Tensor, points: Tensor, mode: str) -> Tensor:
    return levels.new_empty(*levels.shape[:2], *points.shape[1:3])


def _apply(transform: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    # Written out rather than as a matrix product, which may run in TF32 and lose a tenth of a pixel.
    a, b, c, d, e, f = transform.flatten(1)[:, :, None, None].unbind(1)
    return torch.addcmul(torch.addcmul(c, b, y), a, x), torch.addcmul(torch.addcmul(f, e, y), d, x)
