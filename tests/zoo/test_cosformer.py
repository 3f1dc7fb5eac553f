"""cosFormer against its quadratic form with the explicit cosine matrix, and what follows from its page."""

import math

import pytest
import torch
from random_tokens import draw

from cumulant import zoo
from cumulant.zoo.cosformer import CosformerStream

COSFORMER = zoo.get("cosformer")


def quadratic(query, key, value, is_causal=False, max_len=None):
    """w_ij = relu(q_i).relu(k_j) cos(pi (i - j) / 2M), divided by its clamped sum; no code of the fast form."""
    L, S = query.shape[-2], key.shape[-2]
    i, j = torch.arange(1, L + 1)[:, None], torch.arange(1, S + 1)
    distance = torch.cos(math.pi * (i - j).double() / (2 * (max_len or max(L, S))))
    weights = query.relu() @ key.relu().mT * distance
    if is_causal:
        weights = weights.tril()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
    return weights @ value, weights


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (6, 11), (11, 6)])
@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_the_split_form_is_the_quadratic_one(is_causal, queries, keys, chunk):
    query, key, value = draw((2, 3, queries, 5), (2, 3, keys, 5), (2, 3, keys, 4))
    out, weights = quadratic(query, key, value, is_causal)
    torch.testing.assert_close(COSFORMER(query, key, value, is_causal=is_causal, chunk=chunk), out, rtol=1e-10, atol=0)
    torch.testing.assert_close(COSFORMER.scores(query, key, is_causal=is_causal), weights, rtol=1e-10, atol=1e-12)


def test_weights_are_not_negative_and_sum_to_one_or_zero():
    query, key, _ = draw((1, 2, 9, 3), (1, 2, 9, 3), (1, 2, 9, 3))
    query[..., 4, :] = -query[..., 4, :].abs()
    weights = COSFORMER.scores(query, key)
    assert (weights >= -1e-15).all()
    sums = weights.sum(-1)
    assert (sums[..., 4] == 0).all()
    others = torch.cat((sums[..., :4], sums[..., 5:]), -1)
    torch.testing.assert_close(others[others > 0.5], torch.ones_like(others[others > 0.5]))


def test_a_query_without_positive_channel_gives_exactly_zero():
    query, key, value = draw((1, 1, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3))
    assert (COSFORMER(-query.abs(), key, value) == 0).all()


def test_a_very_long_max_len_is_plain_relu_linear_attention():
    query, key, value = draw((1, 2, 7, 16), (1, 2, 7, 16), (1, 2, 7, 4))
    weights = query.relu() @ key.relu().mT
    expected = weights @ value / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(COSFORMER(query, key, value, max_len=10**6), expected, rtol=1e-8, atol=1e-8)


def test_equal_tokens_weigh_less_the_farther_they_are():
    query = key = torch.ones(1, 1, 9, 2, dtype=torch.float64)
    row = COSFORMER.scores(query, key)[0, 0, 4]
    assert (row[5:].diff() < 0).all()
    assert (row[:4].diff() > 0).all()
    assert row.argmax() == 4


@pytest.mark.parametrize("factor", [1e-2, 7.0])
def test_positive_factors_of_query_and_key_cancel(factor):
    query, key, value = draw((1, 2, 7, 16), (1, 2, 7, 16), (1, 2, 7, 4))
    out = COSFORMER(query, key, value)
    torch.testing.assert_close(COSFORMER(factor * query, key, value), out)
    torch.testing.assert_close(COSFORMER(query, factor * key, value), out)


def test_without_a_fixed_length_more_tokens_change_earlier_rows():
    query, key, value = draw((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 4))
    short = [x[..., :10, :] for x in (query, key, value)]
    published = COSFORMER(query, key, value, is_causal=True)[..., :10, :]
    assert not torch.allclose(published, COSFORMER(*short, is_causal=True))
    fixed = COSFORMER(query, key, value, is_causal=True, max_len=20)[..., :10, :]
    torch.testing.assert_close(fixed, COSFORMER(*short, is_causal=True, max_len=20))


def test_only_the_difference_of_positions_matters():
    """Three leading tokens that are masked move all others by three places."""
    query, key, value = draw((1, 2, 6, 16), (1, 2, 6, 16), (1, 2, 6, 4))
    moved = [torch.nn.functional.pad(x, (0, 0, 3, 0)) for x in (query, key, value)]
    mask = torch.arange(9)[None] >= 3
    shifted = COSFORMER(*moved, key_mask=mask, max_len=12)[..., 3:, :]
    torch.testing.assert_close(shifted, COSFORMER(query, key, value, max_len=12))


def test_a_max_len_for_each_sequence_is_that_of_single_calls():
    query, key, value = draw((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 4))
    both = COSFORMER(query, key, value, max_len=torch.tensor([6, 30]))
    for b, length in enumerate((6, 30)):
        torch.testing.assert_close(both[b], COSFORMER(query[b], key[b], value[b], max_len=length))


def test_lengths_beyond_max_len_are_refused():
    query, key, value = draw((1, 1, 6, 8), (1, 1, 6, 8), (1, 1, 6, 4))
    with pytest.raises(ValueError, match="max_len must be at least the number of tokens, 6, got 5"):
        COSFORMER(query, key, value, max_len=5)
    stream = CosformerStream(max_len=1)
    one = [x[..., :1, :] for x in (query, key, value)]
    stream.step(*one)
    with pytest.raises(ValueError, match="made for max_len=1 tokens"):
        stream.step(*one)
