"""The operations of RandAugment and what a magnitude from 0 to 10 means for each (the "increasing" variant)."""

from __future__ import annotations

import torch
from torch import Tensor

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
