"""Augmentation of whole batches on their device.

The order is that of the published recipes: crop, flip, shift and the geometric RandAugment operations (one resampling),
colour operations, colour jitter, normalisation, erasing, mixup or cutmix. Two differences follow from doing
the geometry at once: a colour operation drawn before a geometric one acts after it (so its statistics include the
fill), and every sample draws its own mixing weight, not one per batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .augment_draws import NOISE_STARTS, Draws, draws, rows
from .augmentation import OPERATION, Augmentation, check
from .colour import jitter, luma, recolour
from .mixing import beta_table, erase, mix, soft_targets
from .warp import warp


class Constants(NamedTuple):
    """Tensors that do not change from step to step, on the device of the pixels."""

    scale: Tensor  # (c, 1, 1, 1): normalised = level * scale + offset
    offset: Tensor  # (c, 1, 1, 1)
    fill: Tensor  # (c,), the mean colour as levels
    choices: Tensor  # ids of the RandAugment operations
    mixup: Tensor  # see beta_table
    cutmix: Tensor


class Augment:
    """Training pixels and labels to network input and soft targets, on the device of the pixels.

    pixels uint8 (b, c, h, w) or clips (b, c, t, h, w), labels (b,) -> float32 (b, c, [t,] size, size), (b, classes).
    A pure function of its arguments: the same seed gives the same result, and rank r of `world` gets what a
    single process would give to its slice of the global batch. Nothing waits for the device. `compile` passes the
    part after the draws through torch.compile. Mixing exchanges samples 2i and 2i + 1, so it needs an even b.
    `ratio` (b,) is the width / height that pictures had before they were stretched to h x w: a random crop is chosen in
    the picture as it was. One mean makes colours grey.

    A source much larger than `size` should be reduced when it is decoded: the resampling does not filter.
    """

    def __init__(
        self,
        settings: Augmentation,
        *,
        size: int,
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        label_smoothing: float = 0.0,
        compile: bool = False,
    ) -> None:
        check(size >= 1, "size", size, "at least 1")
        check(classes >= 1, "classes", classes, "at least 1")
        check(0 <= label_smoothing < 1, "label_smoothing", label_smoothing, "at least 0, below 1")
        lengths = (len(mean), len(std))
        check(len(mean) == len(std) > 0, "mean and std", lengths, "one number per channel each")
        check(min(std) > 0, "std", tuple(std), "positive numbers")
        check(not settings.jitter[3] or len(mean) == 3, "jitter", settings.jitter, "no hue unless there are 3 channels")
        self.settings = settings
        self.size = size
        self.classes = classes
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.label_smoothing = label_smoothing
        self._constants: dict[torch.device, Constants] = {}
        self._transform = torch.compile(self.transform, fullgraph=True, dynamic=False) if compile else self.transform

    @torch.no_grad()
    def __call__(
        self, pixels: Tensor, labels: Tensor, *, seed: int, rank: int = 0, world: int = 1, ratio: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        pixels = self._taken(pixels)
        batch, mixes = pixels.shape[0], self.settings.mixup > 0 or self.settings.cutmix > 0
        check(labels.shape == (batch,), "labels", tuple(labels.shape), f"shape ({batch},), one label per sample")
        check(0 <= rank < world, "rank", rank, f"0 to world - 1 = {world - 1}")
        check(not mixes or batch % 2 == 0, "batch", batch, "an even number: mixing pairs samples 2i and 2i + 1")
        good = ratio is None or (ratio.shape == (batch,) and self.settings.crops)
        check(good, "ratio", ratio, f"shape ({batch},), and only beside a random crop, which undoes the stretching")
        uniform, noise = self.random(batch, seed, rank, world, pixels.device)
        return self._transform(pixels, labels, uniform, noise, self.constants(pixels.device), ratio)

    @torch.no_grad()
    def evaluate(self, pixels: Tensor) -> Tensor:
        """uint8 pixels normalised; resized and cut to the centre first if they have another size. Nothing is random."""
        pixels = self._taken(pixels)
        clips = pixels if pixels.dim() == 5 else pixels.unsqueeze(2)
        x = self._normalised(self._fitted(clips.float()), self.constants(pixels.device))
        return x if pixels.dim() == 5 else x.squeeze(2)

    def random(self, batch: int, seed: int, rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """All randomness of a step: uniform numbers (rows, batch) of this rank, and the noise all ranks share."""
        generator = torch.Generator(device).manual_seed(seed)
        uniform = torch.rand(rows(self.settings.randaugment_ops), batch * world, generator=generator, device=device)
        length = NOISE_STARTS + len(self.mean) * self.size**2 if self.settings.erase else 0
        noise = torch.randn(length, generator=generator, device=device)
        return uniform[:, rank * batch : (rank + 1) * batch], noise

    def transform(
        self,
        pixels: Tensor,
        labels: Tensor,
        uniform: Tensor,
        noise: Tensor,
        constants: Constants,
        ratio: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The step with its randomness given: a pure function of tensors, whole under torch.compile."""
        settings = self.settings
        clips = pixels if pixels.dim() == 5 else pixels.unsqueeze(2)
        levels = clips.float()
        if not settings.crops:
            levels = self._fitted(levels)
        height, width = levels.shape[-2:]
        drawn = draws(uniform, settings, constants, (height, width), self.size, ratio)
        x = self._normalised(self._coloured(self._warped(levels, drawn, constants), drawn), constants)
        targets = soft_targets(labels, self.classes, self.label_smoothing)
        if drawn.erase is not None:
            x = erase(x, drawn.erase[0], noise, drawn.erase[1])
        if drawn.mix is not None:
            x, targets = mix(x, targets, *drawn.mix)
        return (x if pixels.dim() == 5 else x.squeeze(2)), targets

    def constants(self, device: torch.device) -> Constants:
        """Made once per device."""
        if device not in self._constants:
            mean, std = (torch.tensor(values)[:, None, None, None] for values in (self.mean, self.std))
            settings = self.settings
            made = Constants(
                scale=1 / (255 * std),
                offset=-mean / std,
                fill=torch.round(torch.tensor(self.mean) * 255),
                choices=torch.tensor([OPERATION[name] for name in settings.randaugment_choices]),
                mixup=beta_table(settings.mixup) if settings.mixup else torch.empty(0),
                cutmix=beta_table(settings.cutmix) if settings.cutmix else torch.empty(0),
            )
            self._constants[device] = Constants(*(tensor.to(device) for tensor in made))
        return self._constants[device]

    def _warped(self, levels: Tensor, drawn: Draws, constants: Constants) -> Tensor:
        if drawn.view is None:
            return levels
        frames = levels.shape[2]
        fill = constants.fill.repeat_interleave(frames)
        mode = self.settings.interpolation
        # One grid per sample moves all channels, and so all frames of a clip, alike.
        warped = warp(levels.flatten(1, 2), drawn.view, self.size, drawn.distortions, fill, mode)
        warped = warped.unflatten(1, (-1, frames))
        return warped.clamp(0, 255) if mode == "bicubic" else warped  # at edges cubics leave the range of levels

    def _coloured(self, levels: Tensor, drawn: Draws) -> Tensor:
        if drawn.operations is None and drawn.jitter is None:
            return levels
        levels = torch.round(levels).clamp(0, 255)
        if drawn.operations is not None:
            for operation, argument in zip(*drawn.operations, strict=True):
                levels = recolour(levels, operation, argument, self.settings.randaugment_choices)
        return levels if drawn.jitter is None else jitter(levels, drawn.jitter, self.settings.jitter)

    def _normalised(self, levels: Tensor, constants: Constants) -> Tensor:
        return levels * constants.scale + constants.offset

    def _fitted(self, levels: Tensor) -> Tensor:
        """Short side to size / eval_crop (anti-aliased), then the central square; frames of the right size stay."""
        height, width = levels.shape[-2:]
        if (height, width) == (self.size, self.size):
            return levels
        short = max(self.size, math.floor(self.size / self.settings.eval_crop + 0.5))
        side = (round(height * short / min(height, width)), round(width * short / min(height, width)))
        if side != (height, width):
            mode = self.settings.interpolation
            frames = F.interpolate(levels.flatten(1, 2), side, mode=mode, align_corners=False, antialias=True)
            levels = frames.clamp(0, 255).unflatten(1, levels.shape[1:3])
        top, left = (side[0] - self.size) // 2, (side[1] - self.size) // 2
        return levels[..., top : top + self.size, left : left + self.size]

    def _taken(self, pixels: Tensor) -> Tensor:
        """The pixels with as many channels as there are means: colours become grey as Pillow has it, grey is
        repeated."""
        channels = len(self.mean)
        good = pixels.dtype == torch.uint8 and pixels.dim() in (4, 5)
        found = pixels.shape[1] if good else 0
        received = f"{pixels.dtype} {tuple(pixels.shape)}"
        good = found == channels or {found, channels} == {1, 3}
        check(good, "pixels", received, f"uint8 (b, {channels}, h, w) or (b, {channels}, t, h, w)")
        if found == channels:
            return pixels
        if channels == 3:
            return pixels.expand(-1, 3, *pixels.shape[2:])
        return luma(pixels.float()).to(torch.uint8)
