"""Queries sent to the clusters they chose give what their tokens, gathered for each of them, give."""

import pytest
import torch
from random_tokens import draw

from cumulant.cluster import Blocks, KMeans, cluster_attention, fields
from cumulant.cluster.near import fused, groups, near_answers


def by_gathering(q, which, key, value, log_weight):
    """Every block of rows against copies of the tokens of its clusters."""
    B, H, R, n, _ = q.shape
    K, m = key.shape[2:4]
    mass = torch.full((B, H, R, n, which.shape[-1]), -torch.inf, dtype=q.dtype)
    mean = torch.zeros(*mass.shape, value.shape[-1], dtype=q.dtype)
    log_weight = log_weight.expand(B, H, K, m)
    for b, h, r, s in torch.cartesian_prod(*(torch.arange(x) for x in (B, H, R, which.shape[-1]))).tolist():
        c = which[b, h, r, s]
        logits = q[b, h, r] @ key[b, h, c].mT + log_weight[b, h, c]
        if c < 0 or (logits == -torch.inf).all():
            continue
        mass[b, h, r, :, s], mean[b, h, r, :, s] = logits.logsumexp(-1), logits.softmax(-1) @ value[b, h, c]
    return mass, mean


@pytest.mark.parametrize("crowd", [False, True], ids=["spread", "all choose one"])
@pytest.mark.parametrize("n", [1, 3])
def test_log_masses_and_means_equal_those_of_gathered_tokens(n, crowd):
    q, key, value = draw((2, 2, 13, n, 5), (2, 2, 6, 7, 5), (2, 2, 6, 7, 4))
    which = draw((2, 2, 13, 6), seed=1)[0].topk(3, -1).indices
    if crowd:
        which[..., 0], which[..., 1:] = 4, torch.where(which[..., 1:] == 4, -1, which[..., 1:])
    which[0, 1, 5], which[1, 0, :, 2] = -1, -1
    log_weight = torch.where(draw((2, 1, 6, 7), seed=2)[0] > -0.5, 0.3, -torch.inf)
    log_weight[0, 0, 2] = -torch.inf  # a cluster that holds nothing
    found = near_answers(q, which, key, value, log_weight)
    for x, y in zip(found, by_gathering(q, which, key, value, log_weight), strict=True):
        torch.testing.assert_close(x, y)


def test_who_chose_nothing_gets_nothing():
    q, key, value, log_weight = draw((1, 2, 3, 1, 5), (1, 2, 6, 7, 5), (1, 2, 6, 7, 4), (1, 1, 6, 7))
    mass, mean = near_answers(q, torch.full((1, 2, 3, 2), -1), key, value, log_weight)
    assert (mass == -torch.inf).all()
    assert not mean.any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_and_its_gradients_do_not_depend_on_the_way(monkeypatch, is_causal):
    q, k, v = draw((2, 4, 45, 6), (2, 2, 45, 6), (2, 2, 45, 5))
    clusters = Blocks(9) if is_causal else 5
    mask = torch.arange(45).expand(2, 45) < torch.tensor([[45], [31]])
    found = []
    for way in (groups, lambda *_: False):
        monkeypatch.setattr(fields, "groups", way)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"clusters": clusters, "near": 2, "is_causal": is_causal, "key_mask": mask, "enable_gqa": True}
        out = cluster_attention(*leaves, **options)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_it_is_taken_where_rows_choose_for_themselves_and_nothing_is_traced():
    q = torch.randn(1, 1, 8, 1, 4)
    assert groups(q, 1, 16)
    assert not groups(q, 8, 16)
    assert not groups(q.to("meta"), 1, 16)


def test_clusters_of_several_pieces_do_not_depend_on_the_way(monkeypatch):
    q, k, v = draw((1, 2, 600, 6), (1, 2, 600, 6), (1, 2, 600, 5))
    found = []
    for way in (groups, lambda *_: False):
        monkeypatch.setattr(fields, "groups", way)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = cluster_attention(*leaves, clusters=KMeans(40), near=2)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("options", [{}, {"key_mask": torch.arange(1100).expand(2, -1) < 1025}, {"prefix": 3}])
def test_the_fused_near_field_of_a_cpu_gives_what_the_products_give(monkeypatch, options):
    q, k, v = draw(*((2, 2, 1100, 6),) * 3)
    taken = []
    monkeypatch.setattr(fields, "fused", lambda *given: taken.append(fused(*given)) or taken[-1])
    with torch.no_grad():
        found = cluster_attention(q, k, v, clusters=8, near=2, backend="reference", **options)
        assert any(x is not None for x in taken)
        monkeypatch.setattr(fields, "fused", lambda *_: None)
        products = cluster_attention(q, k, v, clusters=8, near=2, backend="reference", **options)
    torch.testing.assert_close(found, products)
