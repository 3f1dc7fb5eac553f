"""The embedded digits: sizes, levels, a stratified split that depends on its seed alone."""

import re
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from cumulant.data import digits_source
from cumulant.optional import install


def test_sizes_types_and_classes():
    source = digits_source()
    assert source.train.images.shape == (1347, 3, 8, 8)
    assert source.test.images.shape == (450, 3, 8, 8)
    assert source.train.images.dtype == source.test.images.dtype == torch.uint8
    assert source.train.labels.dtype == torch.int64
    assert len(source.classes) == 10 == len(source.train.labels.unique())


def test_both_parts_hold_every_class_in_equal_share():
    source = digits_source()
    train, test = source.train.labels.bincount() / 1347, source.test.labels.bincount() / 450
    assert (train - test).abs().max() < 0.003


def test_both_parts_together_are_the_whole_data_set_with_its_labels():
    source = digits_source()
    images = torch.cat([source.train.images, source.test.images])
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    # Grey levels 0 to 16 stay in order when they are spread to 255, so their rank gives the original pixels back.
    levels, pixels = images[:, 0].flatten(1).unique(return_inverse=True)
    assert len(levels) == 17
    labels = torch.cat([source.train.labels, source.test.labels])
    original = load_digits()
    expected = torch.from_numpy(original.data).long(), torch.from_numpy(original.target)
    found, known = (sorted(torch.cat([x, y[:, None]], 1).tolist()) for x, y in ((pixels, labels), expected))
    assert found == known


def test_the_seed_chooses_the_split():
    assert torch.equal(digits_source(3).test.images, digits_source(3).test.images)
    assert not torch.equal(digits_source(3).test.images, digits_source(4).test.images)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="scikit-learn: " + re.escape(install("train"))):
        digits_source()
