"""Random shifts move whole images, each by its own amount, and can be repeated."""

import pytest
import torch
import torch.nn.functional as F

from cumulant.data import random_shift


def images(batch=64):
    return torch.randn(batch, 2, 5, 6, generator=torch.Generator().manual_seed(0))


def test_every_image_is_one_of_the_crops_of_its_padded_self():
    x = images()
    shifted = random_shift(x, 1, torch.Generator().manual_seed(1))
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    crops = torch.stack([padded[..., i : i + 5, j : j + 6] for i in range(3) for j in range(3)])
    matches = (crops == shifted).flatten(2).all(-1)
    assert matches.any(0).all()
    assert matches.any(1).all()  # 64 images: each of the nine shifts comes up


def test_no_shift_leaves_the_images_alone():
    x = images()
    assert random_shift(x, 0) is x


def test_the_generator_decides():
    def shifted(seed):
        return random_shift(images(), 2, torch.Generator().manual_seed(seed))

    assert torch.equal(shifted(1), shifted(1))
    assert not torch.equal(shifted(1), shifted(2))


@pytest.mark.parametrize(("shape", "pixels"), [((2, 1, 5, 6), -1), ((2, 5, 6), 1)])
def test_arguments_of_a_shift_that_make_no_sense_are_named(shape, pixels):
    with pytest.raises(ValueError, match=rf"pixels must be at least 0 and images .* got {pixels} and \({shape[0]}, "):
        random_shift(torch.zeros(shape), pixels)
