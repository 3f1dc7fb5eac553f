"""A random crop is taken from the whole picture: it is decoded stretched to a square, and the crop undoes that."""

import numpy as np
import pytest
import torch
from PIL import Image

from cumulant.data import Augment, Augmentation, Loader, TensorImages, open_source
from cumulant.data.memory import hold

WIDE, HIGH, SIDE = 48, 24, 16
COLOURS = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of twice their height in width whose red level is the column, green the row, blue their number."""
    place = tmp_path_factory.mktemp("wide")
    columns, rows = np.meshgrid(np.linspace(0, 240, WIDE), np.linspace(0, 240, HIGH))
    for part, count in (("train", 8), ("test", 2)):
        for i in range(count):
            target = place / part / "ab"[i % 2] / f"{i}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            picture = np.stack([columns, rows, np.full_like(rows, 20 * i)], -1).round().astype(np.uint8)
            Image.fromarray(picture).save(target)
    return place


def columns_seen(loader, settings, steps=40):
    """Smallest and largest column (0 to 1) that the crops of some steps show, and their height / width."""
    augment = Augment(settings, size=SIDE, classes=2, **COLOURS)
    found = []
    for pixels, labels, positions in loader.epoch(0):
        for seed in range(steps):
            images, _ = augment(pixels, labels, seed=seed, ratio=loader.ratios_of(positions))
            red, green = images[:, 0] * 255 / 240, images[:, 1] * 255 / 240
            across = (red[:, :, -1] - red[:, :, 0]).mean(1) * WIDE
            down = (green[:, -1] - green[:, 0]).mean(1) * HIGH
            found.append(torch.stack([red.amin((1, 2)), red.amax((1, 2)), across / down], -1))
    found = torch.cat(found)
    return found[:, 0].min(), found[:, 1].max(), found[:, 2]


def test_crops_reach_both_ends_of_a_wide_picture(folder):
    loader = Loader(open_source(folder).train, 8, size=SIDE, whole=True)
    first, last, _ = columns_seen(loader, Augmentation(crop_scale=(0.1, 0.4)))
    assert first < 0.04
    assert last > 0.96
    centre = Loader(open_source(folder).train, 8, size=SIDE)
    assert columns_seen(centre, Augmentation(crop_scale=(0.1, 0.4)))[0] > 0.2  # the reason for whole pictures


def test_a_crop_undoes_the_stretching(folder):
    loader = Loader(open_source(folder).train, 8, size=SIDE, whole=True)
    ratio = columns_seen(loader, Augmentation(crop_scale=(0.2, 0.3), crop_ratio=(1.0, 1.0)))[2]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.08, atol=0)


@pytest.mark.parametrize("in_memory", [True, False])
def test_whole_pictures_are_the_same_in_memory_streamed_held_and_on_two_ranks(folder, in_memory):
    source = open_source(folder)
    plain = Loader(source.train, 4, size=SIDE, seed=3, whole=True, in_memory=True)
    expected = [(pixels, plain.ratios_of(positions)) for pixels, _, positions in plain.epoch(1)]
    for part in (source.train, hold(source, SIDE, whole=True).train):
        loader = Loader(part, 4, size=SIDE, seed=3, whole=True, in_memory=in_memory, workers=0)
        for (pixels, _, positions), (same, ratio) in zip(loader.epoch(1), expected, strict=True):
            assert torch.equal(pixels, same)
            assert torch.equal(loader.ratios_of(positions), ratio)
    ranks = [
        Loader(source.train, 4, size=SIDE, seed=3, whole=True, in_memory=in_memory, workers=0, rank=r, world=2)
        for r in range(2)
    ]
    for halves, (pixels, ratio) in zip(zip(*(r.epoch(1) for r in ranks), strict=True), expected, strict=True):
        assert torch.equal(torch.cat([half[0] for half in halves]), pixels)
        ratios = [rank.ratios_of(half[2]) for rank, half in zip(ranks, halves, strict=True)]
        assert torch.equal(torch.cat(ratios), ratio)


def test_what_is_held_stretched_gives_its_centre_square_for_evaluation(folder):
    source = open_source(folder)
    held = hold(source, 32, whole=True).train
    assert held.ratio(0) == WIDE / HIGH
    difference = held.decode(0, SIDE).float() - source.train.decode(0, SIDE).float()
    assert difference.abs().max() <= 4


def test_pictures_of_one_ratio_and_none_are_cropped_alike():
    images = torch.randint(0, 256, (4, 3, SIDE, SIDE), dtype=torch.uint8)
    augment = Augment(Augmentation(crop_scale=(0.1, 1.0)), size=SIDE, classes=2, **COLOURS)
    labels = torch.zeros(4, dtype=torch.int64)
    square, given = (augment(images, labels, seed=1, ratio=ratio)[0] for ratio in (None, torch.ones(4)))
    assert torch.equal(square, given)


def test_a_ratio_without_a_crop_is_refused():
    augment = Augment(Augmentation(), size=SIDE, classes=2, **COLOURS)
    images, labels = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"ratio: .* only beside a random crop"):
        augment(images, labels, seed=0, ratio=torch.ones(2))


def test_grey_arrays_and_colours_become_one_another_as_pillow_has_it():
    colours = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    grey = Augment(Augmentation(), size=8, classes=2, mean=(0.0,), std=(1.0,)).evaluate(colours)
    for picture, found in zip(colours, grey, strict=True):
        pillow = np.asarray(Image.fromarray(picture.permute(1, 2, 0).numpy()).convert("L"))
        assert np.array_equal((found[0] * 255).round().numpy(), pillow)
    part = TensorImages(colours[:, :1], torch.zeros(5, dtype=torch.int64))
    assert part.decode(0, 8).shape == (1, 8, 8)
    assert part.decode(0, 4).shape == (1, 4, 4)
    spread = Augment(Augmentation(), size=8, classes=2, **COLOURS).evaluate(colours[:, :1])
    assert torch.equal(spread[:, 0], spread[:, 2])
