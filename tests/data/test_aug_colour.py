"""Colour operations against Pillow on uint8 images, a batch in which every sample draws its own operation."""

import colorsys
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from cumulant.data import colour
from cumulant.data.augmentation import GEOMETRIC, NOTHING, OPERATION, RANDAUGMENT
from cumulant.optional import install

FACTORS = (0.1, 0.55, 1.0, 1.37, 1.9)
ARGUMENTS = {
    "autocontrast": (0.0,),
    "equalize": (0.0,),
    "invert": (0.0,),
    "posterize": (1.0, 2.0, 3.0, 4.0, 8.0),
    "solarize": (0.0, 1.0, 100.0, 255.0, 256.0),
    "solarize_add": (0.0, 40.0, 110.0),
    "saturation": FACTORS,
    "contrast": FACTORS,
    "brightness": FACTORS,
    "sharpness": FACTORS,
}
CASES = [(name, argument) for name, values in ARGUMENTS.items() for argument in values]


def pillow(name, argument, image):
    """The operation as the published recipes run it on a Pillow image."""
    if name in ("autocontrast", "equalize", "invert"):
        return getattr(ImageOps, name)(image)
    if name in ("posterize", "solarize"):
        return getattr(ImageOps, name)(image, int(argument))
    if name == "solarize_add":
        return image.point([min(255, i + int(argument)) if i < 128 else i for i in range(256)] * 3)
    enhance = {"saturation": "Color", "contrast": "Contrast", "brightness": "Brightness", "sharpness": "Sharpness"}
    return getattr(ImageEnhance, enhance[name])(image).enhance(argument)


def images(batch, height=20, width=24, seed=0):
    """uint8 images between flat and noisy, dark and bright: (b, 3, h, w)."""
    rng = np.random.default_rng(seed)
    spread = rng.uniform(3, 120, (batch, 3, 1, 1))
    middle = rng.uniform(20, 235, (batch, 3, 1, 1))
    waves = np.sin(np.arange(height)[:, None] / 3) + np.cos(np.arange(width) / 4) + rng.normal(0, 0.4, (batch, 3, 1, 1))
    noise = rng.normal(0, 0.3, (batch, 3, height, width))
    return torch.from_numpy(np.clip(middle + spread * (waves / 2 + noise), 0, 255).astype(np.uint8))


def to_pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pillow(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def recolour(pixels, names, values, choices=RANDAUGMENT):
    operation = torch.tensor([OPERATION.get(name, NOTHING) for name in names])
    return colour.recolour(pixels.float().unsqueeze(2), operation, torch.tensor(values), choices).squeeze(2)


def test_every_sample_gets_what_pillow_makes_of_it_with_the_operation_it_drew():
    pixels = images(len(CASES))
    names, values = zip(*CASES, strict=True)
    result = recolour(pixels, names, values)
    for sample, (name, value) in enumerate(CASES):
        expected = from_pillow(pillow(name, value, to_pillow(pixels[sample])))
        difference = (result[sample] - expected).abs()
        # Equal but for a product that falls exactly on a whole level, where double and single precision may disagree.
        assert difference.max() <= 1, (name, value)
        assert (difference > 0).float().mean() < 0.01, (name, value)


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name not in ("autocontrast", "brightness")])
def test_these_operations_equal_pillow_bit_for_bit(name):
    values = ARGUMENTS[name] * 3
    pixels = images(len(values), 60, 70, seed=1)  # enough pixels for steps of equalize well above one
    result = recolour(pixels, [name] * len(values), values)
    expected = torch.stack([from_pillow(pillow(name, v, to_pillow(p))) for v, p in zip(values, pixels, strict=True)])
    assert torch.equal(result, expected.float())


def test_equalize_leaves_flat_and_tiny_images_alone_as_pillow_does():
    flat = torch.full((1, 3, 40, 40), 77, dtype=torch.uint8)
    two_levels = flat.clone()
    two_levels[:, :, ::2] = 9
    for pixels in (flat, two_levels, images(1, 5, 5)):
        expected = from_pillow(ImageOps.equalize(to_pillow(pixels[0]))).float()
        assert torch.equal(recolour(pixels, ["equalize"], [0.0])[0], expected)


def test_geometric_operations_and_steps_not_taken_leave_colours_alone():
    names = ["nothing", *GEOMETRIC]
    pixels = images(len(names))
    assert torch.equal(recolour(pixels, names, [0.3] * len(names)), pixels.float())


def test_fewer_choices_give_the_same_result_for_the_operations_that_stay():
    pixels = images(3)
    names, values = ["solarize", "brightness", "saturation"], [100.0, 0.5, 0.3]
    assert torch.equal(recolour(pixels, names, values), recolour(pixels, names, values, choices=names))


def test_a_clip_is_treated_as_one_image():
    frames = images(4).float()
    clip = frames.permute(1, 0, 2, 3)[None]  # one clip of four frames
    tall = frames.permute(1, 0, 2, 3).flatten(1, 2)[None]  # the frames on top of each other
    for name in ("autocontrast", "equalize", "contrast", "saturation", "invert"):
        operation, argument = torch.tensor([OPERATION[name]]), torch.tensor([0.4])
        a = colour.recolour(clip, operation, argument, RANDAUGMENT)
        b = colour.recolour(tall.unsqueeze(2), operation, argument, RANDAUGMENT)
        assert torch.equal(a.flatten(2), b.flatten(2))


def test_smoothing_does_not_mix_the_frames_of_a_clip():
    clip = images(4).float().unflatten(0, (2, 2)).transpose(1, 2)
    each = torch.cat([colour.smoothed(frame) for frame in clip.split(1, 2)], 2)
    assert torch.equal(colour.smoothed(clip), each)


def test_grey_images_can_be_augmented():
    grey = images(2)[:, :1]
    result = recolour(grey, ["contrast", "saturation"], [0.5, 0.5])
    expected = ImageEnhance.Contrast(Image.fromarray(grey[0, 0].numpy())).enhance(0.5)
    assert torch.equal(result[0, 0], torch.from_numpy(np.array(expected)).float())
    assert torch.equal(result[1], grey[1].float())  # there is no colour to take away


def test_jitter_is_brightness_then_contrast_then_saturation_of_pillow():
    pixels = images(6)
    factors = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.5
    result = colour.jitter(pixels.float().unsqueeze(2), factors, (0.5, 0.5, 0.5, 0.0)).squeeze(2)
    for sample in range(6):
        image = to_pillow(pixels[sample])
        for name, factor in zip(("Brightness", "Contrast", "Color"), factors[:3, sample].tolist(), strict=True):
            image = getattr(ImageEnhance, name)(image).enhance(factor)
        # A level that differs by one after the first step may be two apart after contrast 1.5 of it.
        assert (result[sample] - from_pillow(image)).abs().max() <= 2


def test_hue_turns_as_in_the_standard_library():
    pixels = images(2, 6, 5)
    turns = torch.tensor([0.1, -0.3])
    result = colour.rotate_hue(pixels.float().unsqueeze(2), turns).squeeze(2)
    for sample in range(2):
        for row in range(6):
            for col in range(5):
                h, s, v = colorsys.rgb_to_hsv(*(pixels[sample, :, row, col] / 255).tolist())
                expected = torch.tensor(colorsys.hsv_to_rgb((h + turns[sample].item()) % 1, s, v)) * 255
                assert (result[sample, :, row, col] - expected).abs().max() < 0.51  # rounded to whole levels


def test_hue_without_kornia_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kornia.enhance", None)
    with pytest.raises(ImportError, match="kornia: " + re.escape(install("train"))):
        colour.rotate_hue(torch.zeros(1, 3, 1, 2, 2), torch.zeros(1))
