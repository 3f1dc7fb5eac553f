"""Queries of a block that ask once, with their mean: what they get, with prefix, grid, masks; refusals and cost."""

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant.cluster import Blocks, KMeans, cluster_attention, cluster_scores, multiply_adds


def test_every_token_of_a_block_gets_softmax_at_the_mean_query():
    q, k, v = draw((2, 4, 12, 4), (2, 2, 12, 4), (2, 2, 12, 3))
    out = cluster_attention(q, k, v, clusters=3, near=3, queries="mean", enable_gqa=True)
    means = q.unflatten(-2, (3, 4)).mean(-2)
    exact = F.scaled_dot_product_attention(means, k, v, enable_gqa=True)
    torch.testing.assert_close(out, exact.repeat_interleave(4, -2))


@pytest.mark.parametrize("options", [{}, {"near": 1}, {"near": 2, "response": "pooled"}, {"response": 0}], ids=str)
def test_it_is_attention_of_the_means_for_any_near_field_and_response(options):
    q, k, v = draw((1, 2, 12, 4), (1, 2, 12, 4), (1, 2, 12, 3))
    out = cluster_attention(q, k, v, clusters=3, queries="mean", **options)
    means = cluster_attention(q.unflatten(-2, (3, 4)).mean(-2), k, v, clusters=3, **options)
    torch.testing.assert_close(out, means.repeat_interleave(4, -2))


def test_on_a_grid_blocks_are_squares_and_prefix_tokens_ask_for_themselves():
    q, k, v = draw((1, 2, 17, 4), (1, 2, 17, 4), (1, 2, 17, 3))
    out = cluster_attention(q, k, v, clusters=(2, 2), grid=(4, 4), prefix=1, near=4, queries="mean")
    torch.testing.assert_close(out[..., :1, :], F.scaled_dot_product_attention(q[..., :1, :], k, v))
    square = [1, 2, 5, 6]  # the first two patches of the first two rows, after the prefix
    exact = F.scaled_dot_product_attention(q[..., square, :].mean(-2, keepdim=True), k, v)
    torch.testing.assert_close(out[..., square, :], exact.expand(-1, -1, 4, -1))


def test_absent_tokens_do_not_ask_and_padding_changes_nothing():
    q, k, v = draw((1, 2, 11, 4), (1, 2, 11, 4), (1, 2, 11, 3))
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1]]).bool()
    taking = mask[0].nonzero().squeeze(-1)
    shared = {"clusters": 3, "near": 1, "queries": "mean"}
    out = cluster_attention(q, k, v, key_mask=mask, **shared)
    alone = cluster_attention(q[..., taking, :], k[..., taking, :], v[..., taking, :], **shared)
    torch.testing.assert_close(out[..., taking, :], alone)


def test_gradients_and_weights_that_sum_to_1():
    q, k, v = (x.requires_grad_() for x in draw((1, 1, 7, 3), (1, 1, 7, 3), (1, 1, 7, 2)))
    shared = {"clusters": 3, "near": 1, "queries": "mean"}
    assert torch.autograd.gradcheck(lambda *x: cluster_attention(*x, **shared), (q, k, v))
    weights = cluster_scores(q, k, **shared)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 7, dtype=torch.float64))


def test_blocks_of_one_token_are_each_query_for_itself():
    q, k, v = draw((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 3))
    out = cluster_attention(q, k, v, clusters=6, near=6, queries="mean")
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


def test_what_it_cannot_do_is_named():
    q, k = draw((1, 1, 8, 4), (1, 1, 6, 4))
    with pytest.raises(ValueError, match="as many queries as keys, got 8 and 6"):
        cluster_attention(q, k, k, clusters=2, queries="mean")
    with pytest.raises(ValueError, match="needs blocks of a sequence or a grid"):
        cluster_attention(k, k, k, clusters=KMeans(2), queries="mean")
    with pytest.raises(ValueError, match="pass near as a number"):
        cluster_attention(k, k, k, clusters=2, near="neighbours", queries="mean")
    with pytest.raises(ValueError, match=r'queries="mean" has no causal form'):
        cluster_attention(k, k, k, clusters=Blocks(2), is_causal=True, queries="mean")
    with pytest.raises(ValueError, match="queries must be one of 'each', 'mean', got 'all'"):
        cluster_attention(k, k, k, clusters=2, queries="all")


def test_it_costs_as_much_as_so_many_queries():
    whole, few = (multiply_adds(64, 8, 8, 4, asking=share) for share in (1.0, 1 / 16))
    statistics = multiply_adds(64, 8, 8, 4, asking=0.0)
    assert (whole - statistics) == 16 * (few - statistics)
