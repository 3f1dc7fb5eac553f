"""MALA: its quadratic form, that the length of a query acts, and the causal prefix form, from its page."""

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant import zoo
from cumulant.zoo.grid import rotary_angles, rotate
from cumulant.zoo.linear import feature_map
from cumulant.zoo.mala import MagnitudeAwareAttention

MALA, LINEAR = zoo.get("mala"), zoo.get("linear")


def weights_of(s):
    """a = beta s - gamma with beta = 1 + 1/S, gamma = S/N, for s (..., N)."""
    S = s.sum(-1, keepdim=True)
    return (1 + 1 / S) * s - S / s.shape[-1]


def quadratic(query, key, scaled=True):
    s = (F.elu(query) + 1) @ (F.elu(key) + 1).mT
    return weights_of(s * query.shape[-1] ** -0.5 / key.shape[-2] if scaled else s)


def inverse(phi):
    """The x whose feature map is phi."""
    return torch.where(phi > 1, phi - 1, phi.clamp(max=1).log())


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9)])
def test_it_is_the_quadratic_form(scaled, queries, keys):
    query, key, value = draw((2, 2, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    weights = quadratic(query, key, scaled)
    out = MALA(query, key, value, scaled=scaled, eps=0.0)
    torch.testing.assert_close(out, weights @ value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(MALA.scores(query, key, scaled=scaled, eps=0.0), weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_the_causal_form_is_the_full_form_of_each_prefix(chunk):
    query, key, value = draw((2, 2, 11, 8), (2, 2, 11, 8), (2, 2, 11, 6))
    out = MALA(query, key, value, is_causal=True, chunk=chunk)
    for t in (1, 5, 11):
        row = MALA(query[..., t - 1 : t, :], key[..., :t, :], value[..., :t, :])
        torch.testing.assert_close(out[..., t - 1 : t, :], row)
    torch.testing.assert_close(
        MALA.scores(query, key, is_causal=True).sum(-1), torch.ones(2, 2, 11).double(), rtol=1e-5, atol=1e-5
    )


def test_doubling_the_features_of_a_query_doubles_the_distance_from_linear_attention():
    query, key, _ = draw((1, 1, 5, 8), (1, 1, 9, 8), (1,))
    twice = inverse(2 * feature_map(query))
    plain = LINEAR.scores(query, key, eps=0.0)
    once, doubled = (MALA.scores(q, key, eps=0.0) - plain for q in (query, twice))
    torch.testing.assert_close(doubled, 2 * once)


def test_the_order_of_the_keys_is_kept_and_longer_queries_prefer_more():
    query, key, _ = draw((1, 1, 5, 8), (1, 1, 2, 8), (1,))
    phi = feature_map(query)
    s = phi @ feature_map(key).mT
    assert torch.equal(MALA.scores(query, key).argmax(-1), s.argmax(-1))
    ratios = []
    for c in (0.1, 0.2, 0.4):
        a = MALA.scores(inverse(c * phi), key)
        assert (a > 0).all()
        ratios.append(a.amax(-1) / a.amin(-1))
    assert (ratios[0] < ratios[1]).all()
    assert (ratios[1] < ratios[2]).all()


def test_short_queries_tend_to_linear_attention():
    query, key, value = draw((1, 1, 5, 8), (1, 1, 9, 8), (1, 1, 9, 4))
    short = inverse(1e-4 * feature_map(query))
    torch.testing.assert_close(MALA(short, key, value, eps=0.0), LINEAR(query, key, value), rtol=1e-3, atol=1e-3)


def test_equal_keys_give_the_mean():
    query, key, value = draw((1, 1, 5, 8), (1, 1, 1, 8), (1, 1, 9, 4))
    out = MALA(query, key.expand(1, 1, 9, 8), value)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand(1, 1, 5, 4), rtol=1e-5, atol=1e-5)


def test_negative_weights_occur_exactly_by_the_criterion():
    """a_ij < 0 iff N p_ij < S_i / (1 + S_i): a long query, one small key among large ones."""
    query, key = torch.full((1, 1, 1, 8), 6.0).double(), torch.full((1, 1, 5, 8), 3.0).double()
    key[..., 0, :] = -5.0
    a = MALA.scores(query, key, eps=0.0)
    s = feature_map(query) @ feature_map(key).mT * 8**-0.5 / 5
    S = s.sum(-1, keepdim=True)
    assert torch.equal(a < 0, 5 * s / S < S / (1 + S))
    assert (a[..., 0] < 0).all()
    assert (a[..., 1:] > 0).all()


def test_about_a_fifth_of_the_weights_is_negative_for_normal_tokens():
    query, key, _ = draw((1, 4, 196, 64), (1, 4, 196, 64), (1,))
    share = (MALA.scores(query, key) < 0).double().mean()
    assert 0.18 < share < 0.24
    assert MALA.scores(query, key, scaled=False).abs().max() > 10  # the printed form, without the factor


def test_rotary_turns_act_on_the_values_but_not_on_the_sums():
    query, key, value = draw((1, 2, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    angles = rotary_angles((3, 4), 0, 8, dtype=torch.float64)
    q, k = feature_map(query), feature_map(key)
    z = 8**-0.5 * q @ k.mean(-2, keepdim=True).mT
    kv = (8**-0.5 / 12) * rotate(k, angles).mT @ value
    expected = (rotate(q, angles) @ kv) * (1 + 1 / (z + 1e-6)) - z * value.mean(-2, keepdim=True)
    torch.testing.assert_close(MALA(query, key, value, use_rope=True, grid=(3, 4)), expected)


def test_a_layer_adds_the_convolution_and_multiplies_by_the_gate():
    module = MagnitudeAwareAttention(16, 2, grid_size=(3, 4), dtype=torch.float64)
    query, key, value = draw((2, 2, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    (x,) = draw((2, 12, 16), seed=1)
    operator = MALA(query, key, value, use_rope=True, grid=(3, 4)) + module.lepe(value, (3, 4))
    gate = module.gate(x).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(module(query, key, value, x=x), operator * gate)


def test_float32_keeps_the_difference_of_its_two_large_terms():
    query, key, value = draw((1, 1, 64, 16), (1, 1, 64, 16), (1, 1, 64, 16))
    exact = MALA(4 * query, 4 * key, value)
    rounded = MALA(*(x.float() for x in (4 * query, 4 * key, value)))
    assert (rounded.double() - exact).norm() / exact.norm() < 1e-5


@pytest.mark.parametrize("mean", [0.0, 3.0], ids=["values around zero", "values far from zero"])
def test_products_in_bfloat16_as_on_a_gpu_lose_no_more_with_more_tokens(monkeypatch, mean):
    """Where the mean of the values is below their last digit, taking it off changes few of them."""
    monkeypatch.setattr("cumulant.zoo.products.multiplies_narrow", lambda x, dtype: dtype == torch.bfloat16)
    q, k, v = (torch.randn(1, 2048, 32).bfloat16() + m for m in (0.0, 0.0, mean))
    grad, results = torch.randn(1, 2048, 32).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = zoo.get("mala")(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype))])
    for x, y in zip(*results, strict=True):
        assert (x - y).norm() < 2e-2 * y.norm()
