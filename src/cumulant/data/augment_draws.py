"""From uniform numbers to the parameters of every sample: where to crop, what to apply, whom to mix with.

All randomness of a step is one tensor of uniform numbers, (rows, samples of the global batch), plus one row of
noise for erasing. A rank takes its columns, so ranks together do what one process does; everything after is a pure
function of them without a generator and can be compiled. Each part owns fixed rows, RandAugment the last ones:
switching a part on or off leaves the draws of the others as they were.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .augmentation import GEOMETRIC, NOTHING, OPERATION, Augmentation
from .mixing import beta_quantile
from .warp import distortion_map, view_map

if TYPE_CHECKING:
    from .augment import Constants

ATTEMPTS = 10  # boxes tried per sample before giving up, as in the published recipes
NOISE_STARTS = 1 << 16  # places at which a sample may begin to read the row of noise
_SIZES = {"crop": 2 * ATTEMPTS + 2, "flip": 1, "shift": 2, "jitter": 5, "erase": 2 * ATTEMPTS + 4, "mix": 6}


def rows(steps: int) -> int:
    """How many uniform numbers a sample needs, with `steps` operations of RandAugment."""
    return sum(_SIZES.values()) + 4 * steps


def part(uniform: Tensor, name: str) -> Tensor:
    """The rows that belong to one part."""
    start = 0
    for other, size in _SIZES.items():
        if other == name:
            return uniform[start : start + size]
        start += size
    return uniform[start:]  # "randaugment"


class Draws(NamedTuple):
    """Parameters of a batch of b samples; a part that is off is None."""

    view: Tensor | None  # (b, 2, 3), see warp
    distortions: Tensor | None  # (steps of RandAugment, b, 2, 3)
    operations: tuple[Tensor, Tensor] | None  # operations and their arguments, (steps, b) each
    jitter: Tensor | None  # (4, b)
    erase: tuple[Tensor, Tensor] | None  # box (4, b) and where to begin in the noise (b,)
    mix: tuple[Tensor, Tensor, Tensor] | None  # own weight (b,), cut (b,), box (4, b)


def draws(
    uniform: Tensor,
    settings: Augmentation,
    constants: Constants,
    source: tuple[int, int],
    size: int,
    ratio: Tensor | None = None,
) -> Draws:
    """Parameters for images of `source` = (height, width) that become size x size; uniform (rows, b).

    `ratio` (b,): width / height that the pictures had before they were stretched to `source`.
    """
    operations = distortions = None
    if settings.randaugment_ops:
        operations = randaugment(part(uniform, "randaugment"), settings, constants)
        if any(name in GEOMETRIC for name in settings.randaugment_choices):
            distortions = distortion_map(*operations, size)
    moved = settings.crops or settings.flip or settings.shift or distortions is not None
    return Draws(
        view=view(uniform, settings, source, size, ratio) if moved else None,
        distortions=distortions,
        operations=operations,
        jitter=jitter_factors(part(uniform, "jitter"), settings) if any(settings.jitter) else None,
        erase=erasing(part(uniform, "erase"), settings, size) if settings.erase else None,
        mix=mixing(part(uniform, "mix"), settings, constants, size) if settings.mixup or settings.cutmix else None,
    )


def view(
    uniform: Tensor, settings: Augmentation, source: tuple[int, int], size: int, ratio: Tensor | None = None
) -> Tensor:
    """Crop, flip and shift as one map. The crop is chosen in the picture as it was before stretching."""
    height, width = source
    crop, shift = part(uniform, "crop"), part(uniform, "shift")
    if not settings.crops:
        top = left = torch.zeros_like(crop[0])
        box_height, box_width = torch.full_like(top, height), torch.full_like(top, width)
    else:
        across = 1.0 if ratio is None else ratio * (height / width)  # pixels of the picture for one of the source
        box_height, box_width = crop_sides(crop, settings, height, width * across)
        box_width = box_width / across
        top, left = crop[-2] * (height - box_height), crop[-1] * (width - box_width)
    if settings.shift:
        steps = torch.floor(shift * (2 * settings.shift + 1)) - settings.shift
        top, left = top + steps[0], left + steps[1]
    return view_map(top, left, box_height, box_width, part(uniform, "flip")[0] < settings.flip, size)


def crop_sides(uniform: Tensor, settings: Augmentation, height: int, width: float | Tensor) -> tuple[Tensor, Tensor]:
    """Height and width (b,) of a random resized crop: the first of ten boxes that fits, else the largest one."""
    low, high = settings.crop_ratio
    tall, wide = _sides(uniform, settings.crop_scale, settings.crop_ratio, height * width)
    tall, wide, found = _first_that_fits(tall, wide, (tall <= height) & (wide <= width))
    if not isinstance(width, Tensor):
        width = torch.full_like(tall, width)  # filled there: a copy from the host would wait for the device
    most = (width / low).clamp(max=height), width.clamp(max=height * high)
    return torch.where(found, tall, most[0]), torch.where(found, wide, most[1])


def randaugment(uniform: Tensor, settings: Augmentation, constants: Constants) -> tuple[Tensor, Tensor]:
    """Operations and arguments (steps, b); an operation is drawn with replacement and taken with its probability."""
    which, taken, strength, sign = uniform.unflatten(0, (4, -1))
    count = len(settings.randaugment_choices)
    choice = constants.choices[(which * count).long().clamp(max=count - 1)]
    operation = torch.where(taken < settings.randaugment_prob, choice, NOTHING)
    magnitude = torch.full_like(strength, settings.randaugment_magnitude)
    if math.isinf(settings.randaugment_std):
        magnitude = magnitude * strength
    elif settings.randaugment_std > 0:
        magnitude = magnitude + settings.randaugment_std * math.sqrt(2) * torch.erfinv(2 * strength - 1)
    signs = torch.where(sign < 0.5, -1.0, 1.0)
    return operation, arguments(operation, magnitude.clamp(0, 10), signs)


def arguments(operation: Tensor, magnitude: Tensor, sign: Tensor) -> Tensor:
    """The argument of each sample's operation, all of one shape; magnitude 0 is the weakest, 10 the strongest.

    rotate: up to 30 degrees; shears up to 0.3; translations up to 0.45 of the side; the enhancing operations have the
    factor 1 +- 0.9 (at least 0.1); posterize keeps 4 to 1 bits; solarize inverts from level 256 down to 0;
    solarize_add adds up to 110. The others take no argument.
    """
    level = magnitude / 10
    bounded = 1 + sign * 0.9 * level
    meaning = {
        "rotate": 30 * sign * level,
        "shear_x": 0.3 * sign * level,
        "shear_y": 0.3 * sign * level,
        "translate_x": 0.45 * sign * level,
        "translate_y": 0.45 * sign * level,
        "saturation": bounded.clamp(min=0.1),
        "contrast": bounded.clamp(min=0.1),
        "brightness": bounded.clamp(min=0.1),
        "sharpness": bounded.clamp(min=0.1),
        "posterize": (4 - torch.floor(4 * level)).clamp(min=1),  # no bits would be a black image
        "solarize": 256 - torch.floor(256 * level),
        "solarize_add": torch.floor(110 * level),
    }
    chosen = torch.zeros_like(level)
    for name, value in meaning.items():
        chosen = torch.where(operation == OPERATION[name], value, chosen)
    return chosen


def jitter_factors(uniform: Tensor, settings: Augmentation) -> Tensor:
    """Factors around 1 for brightness, contrast and saturation, turns around 0 for hue: (4, b)."""
    centred = 2 * uniform[1:] - 1
    brightness, contrast, saturation, hue = settings.jitter
    factors = torch.stack(
        [
            (1 + brightness * centred[0]).clamp(min=0),
            (1 + contrast * centred[1]).clamp(min=0),
            (1 + saturation * centred[2]).clamp(min=0),
            hue * centred[3],
        ]
    )
    neutral = (torch.arange(4, device=uniform.device) < 3).to(factors.dtype)[:, None]
    return torch.where(uniform[0] < settings.jitter_prob, factors, neutral)


def erasing(uniform: Tensor, settings: Augmentation, size: int) -> tuple[Tensor, Tensor]:
    """An erasing box (4, b), empty where none is wanted or none of ten fits, and a place in the noise (b,)."""
    tall, wide = _sides(uniform, settings.erase_scale, settings.erase_ratio, size * size)
    tall, wide = torch.round(tall), torch.round(wide)
    tall, wide, found = _first_that_fits(tall, wide, (tall < size) & (wide < size))
    row, col, start, wanted = uniform[-4:]
    tall = torch.where(found & (wanted < settings.erase), tall, 0.0)
    top = torch.floor(row * (size - tall + 1)).clamp(max=size - tall)
    left = torch.floor(col * (size - wide + 1)).clamp(max=size - wide)
    return torch.stack([top, top + tall, left, left + wide]), (start * NOISE_STARTS).long()


def mixing(uniform: Tensor, settings: Augmentation, constants: Constants, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Own weight (b,), whether to cut (b,), and the box to cut (4, b); weight 1 and an empty box for no mixing."""
    wanted, switch, weight, share, row, col = uniform
    mixes = wanted < settings.mix_prob
    own, cut = torch.ones_like(weight), torch.zeros_like(mixes)
    box = torch.zeros((4, *weight.shape), device=weight.device)
    if settings.mixup:
        own = torch.where(mixes, beta_quantile(constants.mixup, settings.mixup, weight), own)
    if settings.cutmix:
        # The box has the drawn share of the area around a centre anywhere in the frame; what sticks out is cut off.
        kept = beta_quantile(constants.cutmix, settings.cutmix, share)
        half = torch.floor(torch.floor(torch.sqrt(1 - kept) * size) / 2)
        cut = mixes & (switch < settings.switch_prob) if settings.mixup else mixes
        half = torch.where(cut, half, 0.0)
        row, col = torch.floor(row * size), torch.floor(col * size)
        box = torch.stack([row - half, row + half, col - half, col + half]).clamp(0, size)
    return own, cut, box


def _sides(
    uniform: Tensor, scale: tuple[float, float], ratio: tuple[float, float], area: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Heights and widths (attempts, b): the area uniform in `scale`, the logarithm of width / height in `ratio`."""
    areas = (scale[0] + (scale[1] - scale[0]) * uniform[:ATTEMPTS]) * area
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios = torch.exp(low + (high - low) * uniform[ATTEMPTS : 2 * ATTEMPTS])
    return torch.sqrt(areas / ratios), torch.sqrt(areas * ratios)


def _first_that_fits(tall: Tensor, wide: Tensor, fits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = fits.to(torch.int32).argmax(0, keepdim=True)
    return tall.gather(0, first)[0], wide.gather(0, first)[0], fits.any(0)
