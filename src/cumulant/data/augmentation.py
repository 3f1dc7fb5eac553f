"""What is done to training samples: typed settings and presets, which `Augment` applies. No heavy import."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

# The operations of RandAugment.
RANDAUGMENT = (
    "autocontrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    "saturation",  # called Color elsewhere
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
TABLES = ("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize_add", "contrast", "brightness")

NOTHING = 0  # the id of a step that is not taken
OPERATION = {name: number for number, name in enumerate(RANDAUGMENT, start=NOTHING + 1)}


def check(good: bool, name: str, value: object, accepted: str) -> None:
    if not good:
        raise ValueError(f"{name}: got {value}, expected {accepted}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Augmentation:
    """What to do to training samples; everything is off by default. One draw per image or clip."""

    crop_scale: tuple[float, float] = (1.0, 1.0)
    """Random resized crop: smallest and largest part of the picture's area; (1, 1) is off."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width / height of the crop."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    shift: int = 0
    """Move by up to this many source pixels along both axes, repeating the border."""
    randaugment_ops: int = 0
    """RandAugment operations drawn per sample."""
    randaugment_magnitude: float = 9.0
    """Strength from 0 to 10."""
    randaugment_std: float = 0.5
    """Standard deviation of the strength; infinity draws it uniformly from 0 to the magnitude."""
    randaugment_prob: float = 0.5
    """Probability that a drawn operation is applied."""
    randaugment_choices: tuple[str, ...] = RANDAUGMENT
    """The operations to draw from."""
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Colour jitter: brightness, contrast and saturation factors within 1 +- this, hue within +- this of the circle."""
    jitter_prob: float = 1.0
    """Probability of colour jitter."""
    erase: float = 0.0
    """Probability that a box is filled with noise."""
    erase_scale: tuple[float, float] = (0.02, 1 / 3)
    """Area of the box."""
    erase_ratio: tuple[float, float] = (0.3, 1 / 0.3)
    """Width / height of the box."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution; 0 is off."""
    cutmix: float = 0.0
    """Alpha of cutmix's Beta distribution; 0 is off."""
    mix_prob: float = 1.0
    """Probability that a sample is mixed with its partner."""
    switch_prob: float = 0.5
    """Probability of cutmix where both are on."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Resampling of the geometric part and of evaluation."""
    eval_crop: float = 0.875
    """Evaluation of images of another size: part of the resized short side that is kept."""

    @property
    def crops(self) -> bool:
        """Whether there is a random resized crop."""
        return self.crop_scale != (1.0, 1.0)

    def __post_init__(self) -> None:
        for field in fields(self):  # a recipe file gives lists
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
            if isinstance(field.default, float):
                check(_is_number(value), field.name, repr(value), "a number")
            elif isinstance(value, list | tuple) and field.name != "randaugment_choices":
                check(all(map(_is_number, value)), field.name, value, "numbers")
        for name in ("flip", "randaugment_prob", "jitter_prob", "erase", "mix_prob", "switch_prob"):
            check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a probability from 0 to 1")
        for name in ("shift", "randaugment_ops"):
            value = getattr(self, name)
            check(isinstance(value, int) and value >= 0, name, value, "a whole number of at least 0")
        for name in ("randaugment_std", "mixup", "cutmix"):
            check(getattr(self, name) >= 0, name, getattr(self, name), "a number of at least 0")
        for name in ("mixup", "cutmix"):
            check(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite alpha")
        for name in ("crop_scale", "crop_ratio", "erase_scale", "erase_ratio"):
            value = getattr(self, name)
            check(isinstance(value, tuple) and len(value) == 2, name, value, "two numbers (smallest, largest)")
        for name in ("crop_scale", "erase_scale"):
            low, high = getattr(self, name)
            check(0 < low <= high <= 1, name, (low, high), "(smallest, largest) with 0 < smallest <= largest <= 1")
        for name in ("crop_ratio", "erase_ratio"):
            low, high = getattr(self, name)
            good = 0 < low <= high < math.inf
            check(good, name, (low, high), "(smallest, largest) with 0 < smallest <= largest, finite")
        magnitude, choices = self.randaugment_magnitude, self.randaugment_choices
        check(0 <= magnitude <= 10, "randaugment_magnitude", magnitude, "a number from 0 to 10")
        unknown = tuple(name for name in choices if name not in OPERATION)
        check(not unknown and len(choices) > 0, "randaugment_choices", unknown or choices, f"names among {RANDAUGMENT}")
        good = isinstance(self.jitter, tuple) and len(self.jitter) == 4
        good = good and min(self.jitter) >= 0 and max(self.jitter) < math.inf and self.jitter[3] <= 0.5
        check(good, "jitter", self.jitter, "(brightness, contrast, saturation, hue), at least 0 and hue at most 0.5")
        modes = ("bilinear", "bicubic")
        check(self.interpolation in modes, "interpolation", self.interpolation, f"one of {modes}")
        check(0 < self.eval_crop <= 1, "eval_crop", self.eval_crop, "a number above 0, at most 1")


DEIT = Augmentation(
    crop_scale=(0.08, 1.0), flip=0.5, randaugment_ops=2, erase=0.25, mixup=0.8, cutmix=1.0, interpolation="bicubic"
)
"""DeiT on ImageNet: RandAugment m9-std0.5-inc1, Mixup 0.8, CutMix 1.0, erasing 0.25; add label smoothing 0.1 and
repeated augmentation 3. Its colour jitter has no effect beside RandAugment in the published code and is left out."""

SMALL_DATA = Augmentation(
    shift=4,
    flip=0.5,
    randaugment_ops=2,
    erase=0.25,
    erase_scale=(0.02, 0.4),
    mixup=1.0,
    cutmix=1.0,
    mix_prob=0.5,
    eval_crop=1.0,
)
"""Small sets from scratch (CIFAR, Tiny-ImageNet at 32 to 64 pixels): shift by 4, flip, erasing 0.25, half of the
samples mixed (Mixup or CutMix, alpha 1); add label smoothing 0.1 and repeated augmentation 3. RandAugment of DeiT's
strength takes the place of the published AutoAugment policy."""

VIDEO = Augmentation(
    crop_scale=(0.5, 1.0), flip=0.5, jitter=(0.4, 0.4, 0.4, 0.0), jitter_prob=0.8, mixup=0.8, cutmix=1.0, eval_crop=1.0
)
"""Small video sets from scratch (UCF-101): crop, flip, colour jitter, Mixup 0.8 and CutMix 1.0, alike in all frames."""

PRESETS = {"none": Augmentation(), "deit": DEIT, "small-data": SMALL_DATA, "video": VIDEO}
