"""The embedded digits: sizes, scaling, a stratified split that depends on its seed alone."""

import re
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from cumulant.data import Split, digits
from cumulant.optional import install


def test_sizes_types_and_classes():
    split = digits()
    assert split.train_images.shape == (1347, 1, 8, 8)
    assert split.test_images.shape == (450, 1, 8, 8)
    assert split.train_images.dtype == split.test_images.dtype == torch.float32
    assert split.train_labels.dtype == torch.int64
    assert split.classes == 10 == len(split.train_labels.unique())


def test_pixels_are_normalised_over_the_training_part():
    pixels = digits().train_images
    assert pixels.mean().abs() < 1e-5
    assert abs(pixels.std(correction=0) - 1) < 1e-5


def test_both_parts_hold_every_class_in_equal_share():
    split = digits()
    train, test = split.train_labels.bincount() / 1347, split.test_labels.bincount() / 450
    assert (train - test).abs().max() < 0.003


def test_both_parts_together_are_the_whole_data_set():
    split = digits()
    images = torch.cat([split.train_images, split.test_images]).flatten(1)
    # Grey levels 0 to 16 stay in order when normalised, so their rank gives the original pixels back.
    levels, pixels = images.unique(return_inverse=True)
    assert len(levels) == 17
    assert sorted(pixels.tolist()) == sorted(load_digits().data.astype(int).tolist())


def test_the_seed_chooses_the_split():
    assert torch.equal(digits(3).test_images, digits(3).test_images)
    assert not torch.equal(digits(3).test_images, digits(4).test_images)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="scikit-learn: " + re.escape(install("train"))):
        digits()


def test_a_split_whose_labels_do_not_match_is_refused():
    images, labels = torch.zeros(4, 1, 8, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"train_images must be .*\(4, 1, 8, 8\) and \(3,\)"):
        Split(images, labels, images, labels, classes=10)
