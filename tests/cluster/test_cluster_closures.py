"""The closures: what they are exact for, that they agree to second order, and that their series join smoothly."""

import math

import pytest
import torch

from cumulant.closures import gain, log_mass
from cumulant.cluster import CLOSURES, cluster_attention

SMOOTH = ("tanh", "langevin")


def direct(x, closure):
    """phi and f as the page prints them, in float64, for x away from 0."""
    s = x.sqrt()
    if closure == "tanh":
        return s.cosh().log(), s.tanh() / s
    y = math.sqrt(3) * s
    return (y.sinh() / y).log(), 3 * (1 / y.tanh() - 1 / y) / y


@pytest.mark.parametrize("closure", SMOOTH)
def test_they_are_the_printed_functions_on_both_sides_of_the_series(closure):
    x = torch.tensor([2e-4, 9e-4, 1.1e-3, 0.02, 0.5, 3.0, 100.0], dtype=torch.float64)
    phi, f = direct(x, closure)
    torch.testing.assert_close(log_mass(x, closure), phi, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gain(x, closure), f, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("closure", SMOOTH)
def test_float32_keeps_its_digits_everywhere(closure):
    x = torch.logspace(-8, 4, 200, dtype=torch.float64)
    for function in (log_mass, gain):
        rounded = function(x.float(), closure).double()
        torch.testing.assert_close(rounded, function(x.float().double(), closure), rtol=3e-5, atol=3e-7)


@pytest.mark.parametrize("closure", CLOSURES)
def test_all_agree_to_second_order(closure):
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_mass(x, closure), x)
    assert log_mass(x, closure) == 0
    assert slope == 0.5
    assert gain(x, closure) == 1


@pytest.mark.parametrize("closure", SMOOTH)
def test_they_are_smooth_at_zero_and_where_the_series_ends(closure):
    x = torch.tensor([0.0, 1e-5, 0.01, 2.0], dtype=torch.float64, requires_grad=True)
    for function in (log_mass, gain):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x.abs(), closure), (x[1:].detach().requires_grad_(),))
        assert torch.autograd.grad(function(x, closure).sum(), x)[0].isfinite().all()
    edge = torch.tensor([1e-3 - 1e-9, 1e-3 + 1e-9], dtype=torch.float64)
    for function in (log_mass, gain):
        assert function(edge, closure).diff().abs() < 1e-8


@pytest.mark.parametrize("closure", SMOOTH)
def test_the_response_is_bounded(closure):
    s = torch.logspace(0, 6, 20, dtype=torch.float64)
    assert (gain(s * s, closure) * s).max() <= math.sqrt(3) + 1e-9


def one_dimensional(logits):
    """A query 1 and keys with those logits, in one cluster: query (1, 1, 1, 1), key (1, 1, L, 1)."""
    return torch.ones(1, 1, 1, 1, dtype=torch.float64), logits.double()[None, None, :, None]


def test_tanh_is_exact_for_keys_of_two_kinds():
    query, key = one_dimensional(torch.tensor([-2.0, 3.0, -2.0, 3.0]))
    value = torch.where(key > 0, 5.0, -1.0) + 0.1 * key
    expected = (key.softmax(-2) * value).sum()
    out = cluster_attention(query, key, value, clusters=1, closure="tanh")
    torch.testing.assert_close(out.squeeze(), expected)


def test_the_mass_of_tanh_is_exact_for_keys_of_two_kinds():
    """Two clusters of two kinds each: their weights in the output need both masses to be right."""
    query, key = one_dimensional(torch.tensor([-2.0, 3.0, 0.5, 1.5]))
    value = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)[None, None, :, None]
    out = cluster_attention(query, key, value, clusters=2, closure="tanh")
    torch.testing.assert_close(out.squeeze(), (key.softmax(-2) * value).sum())


def test_langevin_is_exact_for_evenly_spread_keys():
    query, key = one_dimensional(torch.linspace(-3, 3, 100_001))
    out = cluster_attention(query, key, key, clusters=1, closure="langevin")
    torch.testing.assert_close(out.squeeze(), (key.softmax(-2) * key).sum(), rtol=1e-3, atol=1e-3)


def test_an_unknown_closure_is_named_with_those_that_exist():
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match=r"closure must be one of 'gauss', 'tanh', 'langevin', got 'sinh'"):
        cluster_attention(x, x, x, clusters=1, closure="sinh")
