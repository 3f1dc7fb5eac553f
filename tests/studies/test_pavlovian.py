"""Associative memories: the laws of their capacity, exactly and as measured."""

import math

import pytest
import torch

from cumulant.studies import memories, pavlovian


def generator():
    return torch.Generator().manual_seed(0)


def test_a_chain_of_votes_succeeds_as_known():
    for (p, heads), known in pavlovian.VOTES.items():
        assert [(1 - memories.vote(p, heads)) ** layers for layers in (6, 12, 24)] == pytest.approx(known, abs=6e-4)


def test_interference_is_n_minus_one_over_d():
    key, value = memories.unit(64, 64, 64, generator=generator()), memories.unit(64, 64, 64, generator=generator())
    value = value[torch.randperm(64, generator=generator())]  # not the keys themselves
    assert memories.mse(memories.hebb(key, value), value) == pytest.approx(63 / 64, rel=0.05)


def test_bits_fail_with_the_tail_of_a_normal():
    assert [memories.tail(math.sqrt(256 / (round(r * 256) - 1))) for r in pavlovian.ERRORS] == pytest.approx(
        list(pavlovian.ERRORS.values()), abs=3e-4
    )


def test_many_passes_of_the_delta_rule_recall_exactly():
    key, value = memories.unit(2, 8, 32, generator=generator()), torch.randn(2, 8, 4, dtype=torch.float64)
    assert memories.mse(memories.delta(key, value, 60), value) < 1e-6
    assert memories.mse(memories.delta(key, value), value) < memories.mse(memories.hebb(key, value), value)


@pytest.mark.parametrize("name", ["cumulant2", "cumulant3", "cumulant3+full"])
def test_an_operator_holds_as_many_pairs_as_it_stores_features(name):
    pairs = round(memories.features(name, 16)) + 2
    noise, _ = memories.filled(name, 16, pairs, max(4, 2000 // pairs), generator())
    assert noise == pytest.approx(1, rel=0.06)


def test_features_are_counted_by_degree():
    assert [memories.features(name, 16) for name in ("cumulant2", "cumulant3", "cumulant3+full")] == [16, 31, 151]
    assert memories.features("softmax", 16) is None


def test_the_best_logit_scale_of_the_full_third_cumulant_is_width_plus_two():
    _, sharp = memories.filled("cumulant3+full", 16, 153, 12, generator())
    assert sharp in (0.85, 1.0, 1.2)


def test_softmax_is_not_followed_beyond_its_limit(monkeypatch):
    monkeypatch.setattr(memories, "MOST", 64)
    assert memories.capacity("softmax", 8, 1, generator())["beyond"] == 1


def test_centring_restores_the_law_for_positive_features():
    settings = pavlovian.Settings(trials=4)
    found = pavlovian.positive(settings, generator())
    assert found["relu 64"] > 5 * found["relu, centred 64"]
    assert found["relu, centred 64"] == pytest.approx(1.01, abs=0.08)
