"""Geometry against Pillow: single operations, crops, chains in one resampling."""

import numpy as np
import pytest
import torch
from PIL import Image

from cumulant.data.augment_draws import arguments
from cumulant.data.augmentation import GEOMETRIC, NOTHING, OPERATION
from cumulant.data.warp import distortion_map, view_map, warp

SIDE = 32
FILL = (124, 116, 104)


def smooth(batch=1, height=SIDE, width=SIDE, seed=0):
    """Images without fine detail, so that resampling twice or once differs little: float levels (b, 3, h, w)."""
    rng = np.random.default_rng(seed)
    y, x = np.arange(height)[:, None] / height, np.arange(width) / width
    phase = rng.uniform(0, 6, (batch, 3, 2, 1, 1))
    waves = np.sin(4 * x + phase[:, :, 0]) + np.cos(3 * y + 2 * x + phase[:, :, 1])
    return torch.from_numpy(np.round(127.5 + 60 * waves)).float()


def noisy(batch=1, height=SIDE, width=SIDE):
    return torch.randint(0, 256, (batch, 3, height, width)).float()


def to_pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy().astype(np.uint8))


def from_pillow(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


def pillow(name, value, image, side=SIDE):
    options = dict(resample=Image.Resampling.BILINEAR, fillcolor=FILL)
    if name == "rotate":
        return image.rotate(value, **options)
    coefficients = {
        "shear_x": (1, value, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, value, 1, 0),
        "translate_x": (1, 0, value * side, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, value * side),
    }
    return image.transform(image.size, Image.Transform.AFFINE, coefficients[name], **options)


def whole_frame(batch, side=SIDE):
    zero = torch.zeros(batch)
    return view_map(zero, zero, zero + side, zero + side, zero > 0, side)


def distort(images, steps):
    """Each step one (operation, argument) per sample, drawn from names."""
    maps = []
    for names, values in steps:
        operation = torch.tensor([OPERATION.get(name, NOTHING) for name in names])
        maps.append(distortion_map(operation, torch.tensor(values), SIDE))
    return warp(images, whole_frame(len(images)), SIDE, torch.stack(maps), torch.tensor(FILL).float())


@pytest.mark.parametrize("make", [smooth, noisy])
def test_every_sample_is_moved_as_pillow_moves_it(make):
    cases = [(name, sign * value) for name in GEOMETRIC for sign in (1, -1) for value in (0.13, 0.29)]
    cases = [(name, 90 * value if name == "rotate" else value) for name, value in cases]
    images = make(len(cases))
    names, values = zip(*cases, strict=True)
    result = distort(images, [(names, values)])
    for sample, (name, value) in enumerate(cases):
        difference = (result[sample] - from_pillow(pillow(name, value, to_pillow(images[sample])))).abs().amax(0)
        # Whole levels; a point on the very edge of the frame may fall on either side of it.
        assert (difference > 1.01).sum() <= 2, (name, value)


def test_steps_not_taken_leave_the_image_alone():
    images = noisy(2)
    result = distort(images, [(["nothing", "equalize"], [20.0, 0.3])])
    torch.testing.assert_close(result, images, rtol=0, atol=1e-3)  # coordinates in float32: 1e-6 of a pixel


def test_two_operations_in_one_resampling_are_the_two_one_after_the_other():
    first = (["rotate", "shear_x", "translate_x", "shear_y"], [21.0, 0.25, -0.3, 0.2])
    second = (["shear_y", "translate_y", "translate_x", "rotate"], [-0.2, 0.2, 0.35, -15.0])
    images = smooth(4)
    result = distort(images, [first, second])
    for sample in range(4):
        image = to_pillow(images[sample])
        for names, values in (first, second):
            image = pillow(names[sample], values[sample], image)
        difference = (result[sample] - from_pillow(image)).abs().amax(0)
        # Pillow interpolates the first step's border with the fill: a seam of at most two pixels per edge differs.
        assert (difference > 3).float().mean() < 0.08
        assert difference.median() <= 2  # it cuts to whole levels twice


def test_what_one_step_pushes_out_the_next_does_not_bring_back():
    images = noisy(1)
    result = distort(images, [(["translate_x"], [0.25]), (["translate_x"], [-0.25])])
    torch.testing.assert_close(result[..., 8:], images[..., 8:], rtol=0, atol=1e-3)
    assert (result[0, :, :, :8] == torch.tensor(FILL)[:, None, None]).all()


@pytest.mark.parametrize(("height", "width"), [(SIDE, SIDE), (20, 28)])
def test_crops_are_those_of_pillow(height, width):
    boxes = torch.tensor([[0.0, 0.0, 20.0, 28.0], [2.25, 3.5, 10.0, 15.5], [7.0, 1.0, 5.5, 26.0]])
    images = noisy(3, height, width)
    flip = torch.zeros(3, dtype=torch.bool)
    result = warp(images, view_map(*boxes.T, flip, SIDE), SIDE)
    for sample, (top, left, tall, wide) in enumerate(boxes.tolist()):
        box = (left, top, left + wide, top + tall)
        expected = to_pillow(images[sample]).resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
        assert (result[sample] - from_pillow(expected)).abs().max() < 1.01  # whole levels


def test_a_flip_mirrors_the_crop():
    images, box = noisy(2), [torch.tensor([v, v]) for v in (3.0, 5.0, 17.0, 21.0)]
    plain = warp(images, view_map(*box, torch.tensor([False, False]), SIDE), SIDE)
    flipped = warp(images, view_map(*box, torch.tensor([True, False]), SIDE), SIDE)
    torch.testing.assert_close(flipped[0], plain[0].flip(-1), rtol=0, atol=1e-2)
    assert torch.equal(flipped[1], plain[1])


def test_a_view_beyond_the_border_repeats_it():
    images = noisy(1)
    down, right = torch.tensor([-3.0]), torch.tensor([-2.0])
    side = torch.tensor([float(SIDE)])
    result = warp(images, view_map(down, right, side, side, torch.tensor([False]), SIDE), SIDE)
    expected = torch.nn.functional.pad(images, (2, 0, 3, 0), mode="replicate")[..., :SIDE, :SIDE]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-3)


def test_magnitudes_mean_what_the_recipe_says():
    names = ("rotate", "shear_x", "translate_y", "contrast", "posterize", "solarize", "solarize_add", "invert")
    operation = torch.tensor([OPERATION[name] for name in names])
    ones = torch.ones(len(names))
    strong = arguments(operation, 9 * ones, -ones).tolist()
    assert strong == pytest.approx([-27, -0.27, -0.405, 0.19, 1, 26, 99, 0])
    weak = arguments(operation, 0 * ones, ones).tolist()
    assert weak == pytest.approx([0, 0, 0, 1, 4, 256, 0, 0])
    assert arguments(operation, 10 * ones, -ones)[3] == pytest.approx(0.1)
