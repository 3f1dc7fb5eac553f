"""The embedded digits: sizes, levels, a stratified split that depends on its seed alone."""

import re
import sys

import pytest
import torch
from fresh import forked
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

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


@pytest.mark.parametrize("seed", [0, 1, 17])
def test_the_split_is_that_of_scikit_learn(seed):
    labels = load_digits().target
    parts = train_test_split(labels, test_size=450, random_state=seed, stratify=labels)
    source = digits_source(seed)
    assert source.train.labels.tolist() == parts[0].tolist()
    assert source.test.labels.tolist() == parts[1].tolist()


def test_scikit_learn_is_read_not_imported(tmp_path):
    said = forked(
        "-c",
        "from cumulant.data import digits_source; digits_source(); import sys; print('sklearn' in sys.modules)",
        folder=tmp_path,
    )
    assert said.strip() == "False"


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="scikit-learn: " + re.escape(install("train"))):
        digits_source()
