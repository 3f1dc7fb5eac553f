"""Deconstructing and attention sinks: what holds without trained weights."""

import math

import pytest
import torch

import cumulant
from cumulant.studies import attention_sink, deconstructing
from cumulant.studies.mixers import SIDE, Mixer, off_by_one, sigmoid, taylor

SMALL = deconstructing.Settings(width=24, heads=2, depth=2, patch=5)


def built(configuration, seed=0):
    return deconstructing.build(SMALL, configuration, seed)


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def test_all_variants_have_as_many_parameters_and_answer_alike(images):
    counts = {}
    for configuration in deconstructing.plan(SMALL):
        model = built(configuration)
        counts[configuration] = sum(x.numel() for x in model.parameters())
        assert model(images).shape == (3, 10)
    assert max(counts.values()) / min(counts.values()) < 1.01


@pytest.mark.parametrize("name", [*deconstructing.VARIANTS, "linear", "cumulant2"])
def test_only_the_mlp_does_not_see_other_tokens(name):
    kind, source = deconstructing.VARIANTS.get(name, (name, "own"))
    torch.manual_seed(0)
    mixer, x = Mixer(kind, 12, 2, source=source), torch.randn(2, 6, 12)
    mixer.embedded = x
    before = mixer(x)[0, 0]
    x = x.clone()
    x[0, 1:] = torch.randn(5, 12)
    mixer.embedded = x
    assert torch.equal(before, mixer(x)[0, 0]) == (name == "MLP")


@pytest.mark.parametrize(("name", "fixed"), [("RndEmbQK", True), ("FixedSeqQK", True), ("StaticEmbQK", False),
                                             ("cumulant2", False)])  # fmt: skip
def test_maps_are_the_same_for_all_inputs_only_where_queries_come_from_a_fixed_one(name, fixed, images):
    model = built(f"{name}, uniform")
    maps = [mixer.weights(x) for mixer, x in zip(model.mixers, model.layers(images), strict=False)]
    assert all(torch.equal(one[0], one[1]) == fixed for one in maps)


def test_static_maps_do_not_depend_on_earlier_layers(images):
    model = built("StaticEmbQK, uniform")

    def last_map():
        return model.mixers[1].weights(model.layers(images)[1])

    before = last_map()
    torch.nn.init.normal_(model.mixers[0].qkv.weight)
    torch.testing.assert_close(last_map(), before)


def test_the_polynomial_is_a_distribution_and_comes_to_softmax_with_the_third_power():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (taylor(30 * logits) > 0).all()
    errors = [(taylor(t * logits) - (t * logits).softmax(-1)).norm() for t in (0.01, 0.005)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(3, abs=0.05)


def test_skipping_what_adds_nothing_changes_nothing(images):
    model = built("Mean, hybrid")
    torch.nn.init.zeros_(model.mixers[0].proj.weight)
    before = model(images)
    model.mixers[0].bypassed = True
    torch.testing.assert_close(model(images), before)


def test_indicators_of_known_maps():
    n = 8
    even = deconstructing.indicators(torch.full((1, 1, n, n), 1 / n))
    own = deconstructing.indicators(torch.eye(n)[None, None])
    assert float(even["entropy"]) == pytest.approx(n * math.log(n))
    assert float(even["concentration"]) == pytest.approx(1)
    assert float(own["entropy"]) == 0
    assert float(own["concentration"]) == pytest.approx(math.sqrt(n))
    assert float(own["focus 0"]) == 1


def test_received_attention_of_known_maps():
    assert attention_sink.received(torch.full((5, 5), 0.2)).tolist() == pytest.approx([0.2] * 5)
    signed = torch.tensor([[0.5, -0.5], [1.5, -0.5]])
    assert attention_sink.received(signed).tolist() == pytest.approx([0.625, 0.375])


def test_off_by_one_is_one_more_key_of_zeros():
    query, key, value = torch.randn(3, 2, 7, 4, dtype=torch.float64).unbind(0)
    ours = off_by_one(query @ key.mT / 2) @ value
    more = [torch.cat([x, torch.zeros(2, 1, 4, dtype=x.dtype)], 1) for x in (key, value)]
    torch.testing.assert_close(ours, torch.nn.functional.scaled_dot_product_attention(query, *more))
    assert off_by_one(torch.full((1, 4), -1e4)).sum() == 0


def test_a_sigmoid_of_zero_logits_sums_to_almost_one():
    assert float(sigmoid(torch.zeros(1, 9)).sum()) == pytest.approx(9 / 10)


@pytest.mark.parametrize("kind", ["cumulant2", "cumulant3"])
def test_a_phantom_is_a_token_of_zeros_in_the_statistics(kind):
    """n -> n + 1 with raw sums unchanged: the same as a zero token with weight 1."""
    torch.manual_seed(0)
    mixer, x = Mixer(kind, 8, 2, phantom=1).double(), torch.randn(1, 6, 8, dtype=torch.float64)
    query, key, value = Mixer.split(mixer, x)
    order = int(kind[-1])
    moments = cumulant.Moments.of(key[..., :-1, :], value[..., :-1, :], order=order)
    zeros = torch.zeros(1, 2, 1, 4, dtype=torch.float64)
    merged = moments.merge(cumulant.Moments.of(zeros, zeros, order=order)).apply(query)
    expected = mixer.proj(merged.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(mixer(x), expected, rtol=0, atol=1e-10)


def test_the_second_order_has_no_sink_below_its_bound_and_receives_by_the_mean_query():
    """Weights are (1 + s q.dk_j) / n: above eps only where a centred logit is above eps n - 1; linear in the query."""
    query, key = torch.randn(2, 1, 1, 40, 8, dtype=torch.float64).unbind(0)
    weights = cumulant.scores(3 * query, key, order=2)
    centred = 3 * query @ (key - key.mean(-2, keepdim=True)).mT * 8**-0.5
    torch.testing.assert_close(weights, (1 + centred) / 40)
    got = weights.mean(-2)
    torch.testing.assert_close(got, cumulant.scores(3 * query.mean(-2, keepdim=True), key, order=2).squeeze(-2))


def test_registers_leave_the_number_of_answers_and_a_gate_of_ones_leaves_the_layer(images):
    settings = attention_sink.Settings(width=24, heads=2, depth=1, patch=4)
    assert attention_sink.build(settings, "softmax, 4 registers", 0)(images).shape == (3, 10)
    x = torch.randn(1, 5, 24)
    mixer = Mixer("softmax", 24, 2, gate=True)
    torch.nn.init.zeros_(mixer.gate.weight)
    torch.nn.init.constant_(mixer.gate.bias, 50.0)
    plain = Mixer("softmax", 24, 2)
    plain.load_state_dict({key: value for key, value in mixer.state_dict().items() if "gate" not in key})
    torch.testing.assert_close(mixer(x), plain(x))
    torch.nn.init.constant_(mixer.gate.bias, -200.0)
    assert float(mixer(x).detach().abs().max()) == 0


@pytest.mark.parametrize("configuration", ["softmax, 1 registers", "cumulant2, phantom", "cumulant3, capacity"])
def test_what_is_measured_of_sinks_are_numbers(configuration):
    settings = attention_sink.Settings(width=24, heads=2, depth=1, patch=4, steps=1, batch=2)
    found = attention_sink.measure(settings, configuration, 0, "cpu")
    assert all(math.isfinite(value) for value in found.values() if not isinstance(value, list))
