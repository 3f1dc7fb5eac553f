"""rank="mean": a block of queries chooses its near clusters by two cumulants of these queries."""

import pytest
import torch
from cluster_cases import tokens

from cumulant.closures import log_mass
from cumulant.cluster import KMeans, cluster_attention


def two_cumulants(q, k, sizes, closure):
    """log of the mean mass of each cluster over queries q (n, D), up to a number: (K,)."""
    mean, variance = q.mean(0), q.var(0, correction=0)
    scores = []
    for part in k.split(sizes):
        spread = part.var(0, correction=0)
        away = part.mean(0) - k.mean(0)
        s2 = ((mean**2 + variance) * spread).sum()
        z = torch.tensor(float(len(part))).log() + (mean * away).sum() + (variance * away**2).sum() / 2
        scores.append(z + log_mass(s2, closure))
    return torch.stack(scores)


@pytest.mark.parametrize("closure", ["gauss", "tanh", "langevin"])
def test_near_is_the_cluster_of_largest_mean_mass_to_second_order(closure):
    query, key, value = (x[:1, :1] for x in tokens(queries=22))
    sizes, rows = [6, 6, 6, 6], 8  # the last block of queries is shorter
    out = cluster_attention(query, key, value, clusters=4, near=1, near_rows=rows, rank="mean", closure=closure)
    for q, o in zip(query[0, 0].split(rows), out[0, 0].split(rows), strict=True):
        best = int(two_cumulants(q * q.shape[-1] ** -0.5, key[0, 0], sizes, closure).argmax())
        ids = torch.arange(4).repeat_interleave(6)
        ids[6 * best : 6 * best + 6] = 4 + torch.arange(6)  # tokens of the near cluster one by one: exact
        ids = ids.unique(return_inverse=True)[1]
        exact = cluster_attention(q[None, None], key, value, clusters=ids, closure=closure)
        torch.testing.assert_close(o, exact[0, 0])


@pytest.mark.parametrize("variance", ["diagonal", "full"])
@pytest.mark.parametrize("clusters", [4, KMeans(4)], ids=str)
def test_equal_queries_choose_by_mass(clusters, variance):
    query, key, value = tokens()
    query = query[:, :, ::8].repeat_interleave(8, 2)
    options = {"clusters": clusters, "near": 2, "near_rows": 8, "variance": variance}
    by_mean, by_mass = (cluster_attention(query, key, value, rank=rank, **options) for rank in ("mean", "mass"))
    torch.testing.assert_close(by_mean, by_mass)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_query_alone_chooses_by_mass(is_causal):
    query, key, value = tokens()
    by_mean, by_mass = (
        cluster_attention(query, key, value, clusters=6, near=1, rank=rank, is_causal=is_causal)
        for rank in ("mean", "mass")
    )
    torch.testing.assert_close(by_mean, by_mass)


def test_queries_that_cancel_choose_where_each_of_them_looks():
    """Half of the queries look one way, half the other: their mean alone would find all clusters alike."""
    query, key, value = tokens(queries=8)
    side = torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    query = 0.1 * query + 4 * side * torch.eye(query.shape[-1])[0]
    key[..., 12:18, 0] += 5
    by_mean, by_mass, far = (
        cluster_attention(query, key, value, clusters=4, near=near, near_rows=8, rank=rank)
        for near, rank in ((1, "mean"), (1, "mass"), (0, "mass"))
    )
    torch.testing.assert_close(by_mean, by_mass)
    assert not torch.allclose(by_mean, far)


def test_gradients_hold_while_the_choice_does():
    query, key, value = (x[:1, :1].clone().requires_grad_() for x in tokens(queries=9))

    def function(*x):
        return cluster_attention(*x, clusters=4, near=1, near_rows=4, rank="mean", response="pooled")

    assert torch.autograd.gradcheck(function, (query, key, value))
