"""One covariance for all clusters: its formula, where it equals all of theirs, gradients, masks, refusals and cost."""

import math

import pytest
import torch
from random_tokens import draw

from cumulant.cluster import Blocks, ClusterStream, KMeans, choose, cluster_attention, cluster_scores, multiply_adds
from cumulant.cluster.dial import Choice, measure


def by_formula(q, k, v, K, near):
    """Blocks of equal size, closure tanh, one head of one sequence, query by query."""
    m = len(k) // K
    keys, values = k.unflatten(0, (K, m)), v.unflatten(0, (K, m))
    k_mean, v_mean = keys.mean(1), values.mean(1)
    away, value_away = keys - k_mean[:, None], values - v_mean[:, None]
    pool = torch.einsum("cmd,cme->de", away, value_away) / len(k)
    rows = []
    for row in q / math.sqrt(q.shape[-1]):
        s = ((row * away).square().mean(1).sum(-1)).sqrt()
        log_Z = math.log(m) + k_mean @ row + torch.log(torch.cosh(s))
        which = log_Z.topk(near).indices
        far = torch.ones(K, dtype=torch.bool).index_fill(0, which, False)
        logits = torch.cat((log_Z[far], (keys[which] @ row).flatten()))
        w = logits.softmax(0)
        w_far, w_near = w[: K - near], w[K - near :]
        gain = (torch.tanh(s) / s)[far]
        rows.append(w_far @ v_mean[far] + (w_far @ gain) * (pool.T @ row) + w_near @ values[which].flatten(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("near", [0, 2])
def test_it_is_its_formula(near):
    q, k, v = draw((9, 4), (20, 4), (20, 3))
    out = cluster_attention(q[None, None], k[None, None], v[None, None], clusters=5, near=near, response="pooled")
    torch.testing.assert_close(out[0, 0], by_formula(q, k, v, 5, near))


def test_clusters_that_are_copies_of_each_other_lose_nothing():
    q, k, v, shift = draw((2, 2, 7, 4), (2, 2, 6, 4), (2, 2, 6, 3), (2, 2, 3, 1, 4))
    k, v = (k.unsqueeze(2) + shift).flatten(2, 3), (v.unsqueeze(2) + shift[..., :3]).flatten(2, 3)
    pooled, all_of_them = (cluster_attention(q, k, v, clusters=3, near=1, response=r) for r in ("pooled", None))
    torch.testing.assert_close(pooled, all_of_them)


@pytest.mark.parametrize("options", [{}, {"near": 1}, {"near": 2, "near_rows": 4}, {"variance": "full"}], ids=str)
def test_gradients_are_those_of_the_formula(options):
    q, k, v = (x.requires_grad_() for x in draw((1, 2, 6, 3), (1, 1, 9, 3), (1, 1, 9, 2)))
    mask = torch.tensor([[1.0, 0.5, 0, 2, 1, 1, 1, 0, 1]], dtype=torch.float64)

    def call(q, k, v):
        return cluster_attention(
            q, k, v, clusters=3, key_mask=mask, response="pooled", closure="langevin", enable_gqa=True, **options
        )

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_an_assignment_with_an_empty_cluster_and_scores_that_sum_to_1():
    q, k, v = draw((1, 2, 5, 4), (1, 2, 12, 4), (1, 2, 12, 3))
    ids = torch.tensor([0, 0, 3, 3, 1, 1, 1, 0, 3, 3, 0, 1]).expand(1, 2, 12)
    weights = cluster_scores(q, k, clusters=ids, response="pooled")
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 5, dtype=torch.float64))
    torch.testing.assert_close(weights @ v, cluster_attention(q, k, v, clusters=ids, response="pooled"))


@pytest.mark.parametrize("rank", ["mass", "error", "mean"])
def test_as_many_near_as_hold_anything_is_softmax_though_one_holds_a_single_token(rank):
    """Ranked by error, a single token once stayed far away, and answered with the covariance of the others."""
    q, k, v = draw((1, 2, 5, 4), (1, 2, 9, 4), (1, 2, 9, 3))
    ids = torch.tensor([0, 0, 0, 0, 2, 7, 7, 7, 7])
    out = cluster_attention(q, k, v, clusters=ids, near=3, near_rows=2, rank=rank, response="pooled")
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_on_a_grid_only_what_is_far_away_gets_it():
    q, k, v = draw((1, 2, 17, 4), (1, 2, 17, 4), (1, 2, 17, 3))
    shared = {"clusters": (2, 2), "grid": (4, 4), "prefix": 1}
    pooled, means = (cluster_attention(q, k, v, response=r, near="neighbours", **shared) for r in ("pooled", 0))
    torch.testing.assert_close(pooled[..., 1:, :], means[..., 1:, :])  # all four blocks are neighbours
    assert not torch.isclose(pooled[..., :1, :], means[..., :1, :]).any()  # a prefix token is near to none
    far = [cluster_attention(q, k, v, response=r, **shared) for r in ("pooled", 0)]
    assert not torch.isclose(*far).any()


@pytest.mark.parametrize("blocks", [Blocks(3), Blocks(2, recent=1), Blocks(2, keep=1)], ids=str)
def test_causal_rows_take_that_of_the_clusters_they_see(blocks):
    """So a row is that of a call which ends with it, and one that sees a single cluster has its response."""
    q, k, v = draw((1, 2, 17, 4), (1, 2, 17, 4), (1, 2, 17, 3))
    options = {"clusters": blocks, "is_causal": True}
    pooled, each = (cluster_attention(q, k, v, response=r, **options) for r in ("pooled", None))
    for L in (1, 5, 9, 16):
        part = cluster_attention(*(x[..., :L, :] for x in (q, k, v)), response="pooled", **options)
        torch.testing.assert_close(part, pooled[..., :L, :])
    first = (blocks.recent + 2) * blocks.size
    torch.testing.assert_close(pooled[..., :first, :], each[..., :first, :])
    assert not torch.isclose(pooled[..., first:, :], each[..., first:, :]).any()


def test_causal_gradients_are_those_of_the_formula():
    q, k, v = (x.requires_grad_() for x in draw((1, 2, 9, 3), (1, 1, 9, 3), (1, 1, 9, 2)))
    options = {"clusters": Blocks(2, recent=1), "is_causal": True, "enable_gqa": True, "prefix": 1}
    assert torch.autograd.gradcheck(lambda *x: cluster_attention(*x, response="pooled", **options), (q, k, v))


def test_what_it_cannot_do_is_named():
    q, k, v = draw((1, 1, 8, 4), (1, 1, 8, 4), (1, 1, 8, 4))
    with pytest.raises(ValueError, match=r"response must be None .* got 'pool'"):
        cluster_attention(q, k, v, clusters=2, response="pool")
    with pytest.raises(ValueError, match=r"response must be None .* got 'pooled'"):
        ClusterStream(Blocks(2), response="pooled")


def test_it_costs_one_response_whatever_the_number_of_clusters():
    for K in (4, 64):
        one, means = (multiply_adds(1024, 64, 32, K, response=r) for r in ("pooled", 0))
        assert one - means == 1024 * 2 * 64 * 32  # the product with the query, and the statistics


def test_the_dial_measures_what_attention_gives():
    q, k, v = draw((1, 2, 64, 8), (1, 2, 64, 8), (1, 2, 64, 8))
    (found,) = measure(q, q, k, v, [Choice(8, 2, "pooled")])
    out = cluster_attention(q, k, v, **found.options())
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    expected = (out - exact).norm() / (exact - v.mean(-2, keepdim=True)).norm()
    assert found.error == pytest.approx(expected.item())
    dial = choose(q, k, v, target=10.0, candidates=[Choice(KMeans(4), 1, "pooled")])
    assert dial(q, k, v).shape == v.shape
