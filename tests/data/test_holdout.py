"""Items set apart from a training part: a share of every class, the same in every run, groups of clips together."""

import re

import numpy as np
import pytest
import torch

from cumulant.data import ClipPart, ClipSampling, TensorImages, TensorVideos
from cumulant.data.holdout import split_off
from cumulant.data.source import digits_source


def test_every_class_gives_its_share_and_no_item_is_on_both_sides():
    whole = digits_source().train
    kept, held = split_off(whole, 0.1)
    counts = torch.bincount(whole.labels)
    assert (torch.bincount(held.labels) - counts * 0.1).abs().max() <= 0.5
    assert torch.equal(torch.bincount(kept.labels) + torch.bincount(held.labels), counts)
    both = torch.cat([kept.images, held.images]).flatten(1).unique(dim=0)
    assert len(both) == len(whole.images.flatten(1).unique(dim=0))
    assert torch.equal(split_off(whole, 0.1)[1].images, held.images)


def test_clips_of_one_group_stay_together_and_are_seen_from_their_middle():
    class Named(TensorVideos):
        def name(self, index):
            return f"v_Class{index % 2}_g{index // 6:02d}_c{index:02d}.avi"

    videos = Named([torch.full((9, 3, 4, 4), i, dtype=torch.uint8) for i in range(36)], torch.arange(36) % 2)
    kept, held = split_off(ClipPart(videos, ClipSampling(2, 1), jitter=True), 0.3)
    groups = [{(int(p.labels[i]), re.search(r"_g(\d+)_", p.name(i))[1]) for i in range(len(p))} for p in (kept, held)]
    assert groups[1]
    assert not groups[0] & groups[1]
    assert (kept.jitter, held.jitter) == (True, False)
    assert torch.equal(held.decode(0, 4, seed=1), held.decode(0, 4, seed=2))


def test_a_class_of_one_item_keeps_it_for_training():
    labels = torch.tensor([0, 1, 1, 1, 1])
    kept, held = split_off(TensorImages(torch.zeros(5, 3, 2, 2, dtype=torch.uint8), labels), 0.5)
    assert 0 in kept.labels
    assert held.labels.tolist() == [1, 1]


def test_a_hold_out_that_leaves_nothing_is_refused():
    part = TensorImages(torch.zeros(2, 3, 2, 2, dtype=torch.uint8), torch.arange(2))
    with pytest.raises(ValueError, match=r"holdout=0.5 leaves nothing .*no class has two items"):
        split_off(part, 0.5)


def test_a_part_of_ones_own_is_split_too():
    class Own:
        labels, views = torch.arange(20) % 2, 1

        def __len__(self):
            return 20

        def name(self, index):
            return str(index)

        def decode(self, index, size, seed=None):
            return torch.full((3, size, size), index, dtype=torch.uint8)

    kept, held = split_off(Own(), 0.2)
    seen = [int(part.decode(i, 2)[0, 0, 0]) for part in (kept, held) for i in range(len(part))]
    assert sorted(seen) == list(np.arange(20))
    assert len(held) == 4
