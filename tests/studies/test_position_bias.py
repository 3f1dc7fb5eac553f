"""Rollouts of masks and operators: the known numbers, the laws, and the task that networks are trained on."""

import math
from dataclasses import replace

import pytest
import torch

from cumulant import zoo
from cumulant.studies import position_bias, rollouts

SETTINGS = replace(position_bias.Settings(), steps=2, tests=32, draws=64, classes=8, sizes=(1.0, 8.0))


def test_all_known_masses_to_three_digits():
    found = position_bias.exact(SETTINGS, 0)
    assert max(found[f"{name} deviation"] for name in position_bias.KNOWN) < 6e-4
    assert found["A1 eigenvalues"] < 1e-6
    assert found["A1 ratio"] == pytest.approx(0.5, abs=1e-3)
    assert found["A5 modes"] <= 1
    assert found["bound"] == 0


def test_a_window_reaches_the_first_token_when_it_can_and_not_before():
    A = rollouts.uniform(rollouts.seen(32, window=8))
    reached = math.ceil(31 / 7)
    assert float(rollouts.last_row(A, reached - 1)[0]) == 0 < float(rollouts.last_row(A, reached)[0])


@pytest.mark.parametrize("name", ["cumulant2", "cumulant3", "cumulant3+full"])
def test_two_keys_have_no_third_cumulant_so_the_law_is_that_of_order_two(name):
    q, k = torch.randn(2, 64, 1, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = zoo.get(name).scores(q, k, is_causal=True, scale=1.0)[:, 0, 1, 1]
    x = (q[:, 0, 1] * (k[:, 0, 1] - k[:, 0, 0])).sum(-1)
    assert torch.allclose(A, 0.5 + x / 4)


@pytest.mark.parametrize(("name", "size"), [("softmax", 1.0), ("cumulant2", 1.0), ("cumulant2", 8.0)])
def test_random_maps_are_absorbed_at_the_derived_rate(name, size):
    A = rollouts.random_maps(name, size, 6, 3000, torch.Generator().manual_seed(0))
    assert rollouts.absorbing_rate(A) == pytest.approx(rollouts.predicted_rate(name, size), rel=0.12)


def test_decay_acts_on_every_operator_by_its_own_weights_of_keys():
    for name in ("softmax", "linear", "cumulant2", "cumulant3"):
        A = rollouts.random_maps(name, 1e-3, 12, 2, torch.Generator().manual_seed(0), decay=0.8)
        assert torch.allclose(A.mean(0), rollouts.decayed(12, -math.log(0.8)), atol=1e-2)


def test_a_decoy_is_the_answers_item_with_the_label_of_its_place():
    generator = torch.Generator().manual_seed(0)
    data = position_bias.Prompts.drawn(8, 16, generator)
    tokens, label = data(64, generator, answer=0, decoy=4)
    assert torch.equal(tokens[:, 0], tokens[:, 8])
    assert torch.equal(tokens[:, 1], data.labels[label])
    assert not torch.equal(tokens[:, 1], tokens[:, 9])
    kinds = (tokens[:, 1::2] == data.labels[label][:, None]).all(-1).sum(-1)
    assert bool(((kinds == 4) | (kinds == 8)).all())  # four pairs of each class, whose labels may be the same


@pytest.mark.parametrize("configuration", ["trained softmax, rotary, 2 layers", "trained cumulant3, causal, 2 layers"])
def test_networks_are_trained_and_asked_for_their_preference(configuration):
    found = position_bias.measure(SETTINGS, configuration, 0, "cpu")
    assert {f"gap {a} {b}" for a, b in position_bias.GAPS} < found.keys()
    assert all(-1 <= value <= 1 for value in found.values())
