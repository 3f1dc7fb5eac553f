"""Permutations, shifts and weights behave as declared, and what is not claimed is really not so."""

import pytest
import torch
from cases import NAMES, calls, having, tokens

from cumulant import zoo

ORDER = torch.randperm(13, generator=torch.Generator().manual_seed(5))
NONCAUSAL = [name for name in NAMES if zoo.get(name).noncausal]


def close(a, b):
    """Up to the published epsilons of 1e-6 in denominators."""
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NONCAUSAL)
def test_permuting_keys_and_values_changes_nothing_exactly_where_declared(name):
    query, key, value = tokens()
    out = zoo.get(name)(query, key, value)
    permuted = zoo.get(name)(query, key[..., ORDER, :], value[..., ORDER, :])
    assert close(permuted, out) == zoo.get(name).order_free


@having("noncausal", "order_free", "independent_rows")
def test_permuting_the_queries_permutes_the_rows(name):
    query, key, value = tokens()
    out = zoo.get(name)(query, key, value)
    torch.testing.assert_close(zoo.get(name)(query[..., ORDER, :], key, value), out[..., ORDER, :])


@pytest.mark.parametrize("name", NAMES)
def test_shifting_the_keys_changes_nothing_exactly_where_declared(name):
    mechanism = zoo.get(name)
    query, key, value = tokens()
    shift = torch.linspace(-1, 1, 8, dtype=torch.float64)
    out, shifted = (mechanism(query, k, value, is_causal=not mechanism.noncausal) for k in (key, key + shift))
    assert close(shifted, out) == mechanism.key_shift


@calls()
def test_shifting_the_values_shifts_the_output_exactly_where_declared(name, is_causal):
    # Positive queries and keys: a ReLU leaves no row whose denominator is only its epsilon.
    query, key, value = (x if x.shape[-1] == 6 else x.abs() for x in tokens())
    shift = torch.linspace(-1, 1, 6, dtype=torch.float64)
    out, shifted = (zoo.get(name)(query, key, v, is_causal=is_causal) for v in (value, value + shift))
    assert close(shifted, out + shift) == zoo.get(name).value_shift


@calls()
def test_the_output_is_linear_in_the_values(name, is_causal):
    query, key, value = tokens()
    a, b = value, value.flip(-2)
    parts = [zoo.get(name)(query, key, v, is_causal=is_causal) for v in (a, b, 2 * a - b)]
    torch.testing.assert_close(parts[2], 2 * parts[0] - parts[1])


@calls("weights")
def test_weights_applied_to_the_values_are_the_output(name, is_causal):
    mechanism = zoo.get(name)
    query, key, value = tokens()
    mask = torch.arange(13).lt(torch.tensor([[9], [13]])) if mechanism.key_mask else None
    weights = mechanism.scores(query, key, key_mask=mask, is_causal=is_causal)
    assert weights.shape == (2, 2, 13, 13)
    expected = mechanism(query, key, value, key_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(weights @ value, expected)
    if is_causal:
        assert (weights.triu(1) == 0).all()


@having("weights", "cross", "noncausal")
def test_weights_of_cross_attention_have_a_row_for_each_query(name):
    query, key, value = tokens(5, 13)
    weights = zoo.get(name).scores(query, key)
    assert weights.shape == (2, 2, 5, 13)
    torch.testing.assert_close(weights @ value, zoo.get(name)(query, key, value))


@having("weights", "grouped_queries")
def test_weights_of_grouped_queries_are_those_of_repeated_heads(name):
    mechanism = zoo.get(name)
    query, key, _ = tokens(heads=4)
    shared = {"is_causal": not mechanism.noncausal}
    grouped = mechanism.scores(query, key, enable_gqa=True, **shared)
    torch.testing.assert_close(grouped, mechanism.scores(query, key.repeat_interleave(2, -3), **shared))
