"""The error measurement: it must show the power laws of a truncated series."""

import math

import pytest
import torch

from cumulant.bench.error import ORDERS, errors_against_softmax, logit_size, softmax_error


@pytest.fixture(scope="module")
def small():
    return softmax_error((0.02, 0.04), length=64, dim=8, repeats=4)


@pytest.mark.parametrize(("order", "power"), [("order 1", 1), ("order 2", 2), ("order 3, full", 3)])
def test_halving_the_logits_lowers_the_error_by_the_power_of_the_order(small, order, power):
    half, whole = small["relative_error"][order]
    assert whole / half == pytest.approx(2**power, rel=0.1)


def test_the_diagonal_third_order_lies_between_second_and_full(small):
    errors = {name: values[0] for name, values in small["relative_error"].items()}
    assert errors["order 3, full"] < errors["order 3, diagonal"] < errors["order 2"] < errors["order 1"]


def test_the_same_seed_gives_the_same_numbers():
    first, second = (softmax_error((0.5,), length=32, dim=4, repeats=2, seed=3) for _ in range(2))
    assert first == second


def test_logit_size_ignores_what_softmax_ignores():
    query, key = torch.randn(2, 3, 40, 8, dtype=torch.float64)
    assert logit_size(query, key + 5.0) == pytest.approx(logit_size(query, key))
    assert logit_size(2 * query, key) == pytest.approx(2 * logit_size(query, key))


def test_equal_keys_leave_no_error():
    query, value = torch.randn(2, 1, 5, 8)
    errors = errors_against_softmax(query, torch.ones(1, 5, 8), value)
    assert set(errors) == set(ORDERS)
    assert max(errors.values()) < 1e-6


@pytest.mark.parametrize("sizes", [(), (0.5, -1.0), (0.0,), (0.5, math.nan), (math.inf,)])
def test_logit_sizes_that_mean_nothing_are_refused(sizes):
    with pytest.raises(ValueError, match="logit_sizes"):
        softmax_error(sizes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"length": -5}, "length must be at least 2, got -5"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"logit_sizes": (1e300,)}, "a logit size of 1e.300 is too large"),
    ],
)
def test_what_has_no_error_is_refused_and_not_told_as_nan(given, message):
    with pytest.raises(ValueError, match=message):
        softmax_error(**{"logit_sizes": (0.5,), "length": 8, "dim": 4, **given})
