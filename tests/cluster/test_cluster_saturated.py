"""The saturated second order is one cluster, on every path of `attention`, and cannot run away."""

import pytest
import torch
from cluster_cases import softmax, tokens

import cumulant
from cumulant.cluster import cluster_attention


def saturated(query, key, value, *, closure="tanh", **call):
    return cumulant.attention(query, key, value, order=2, closure=closure, **call)


MASK = torch.arange(24).lt(torch.tensor([[15], [24]]))


@pytest.mark.parametrize("closure", ["tanh", "langevin", "gauss"])
@pytest.mark.parametrize("mask", [None, MASK, MASK * 0.5], ids=["all", "mask", "weights"])
def test_it_is_one_cluster(closure, mask):
    query, key, value = tokens(heads=4)
    out = saturated(query, key, value, closure=closure, key_mask=mask, enable_gqa=True)
    one = cluster_attention(query, key, value, clusters=1, closure=closure, key_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, one)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
def test_a_causal_row_is_one_cluster_of_its_past(mask):
    query, key, value = tokens()
    out = saturated(query, key, value, is_causal=True, key_mask=mask)
    for t in (0, 1, 9, 23):
        seen = key[..., : t + 1, :], value[..., : t + 1, :]
        part = None if mask is None else mask[:, : t + 1]
        one = saturated(query[..., t : t + 1, :], *seen, key_mask=part)
        torch.testing.assert_close(out[..., t : t + 1, :], one, rtol=1e-9, atol=1e-9)


def test_gauss_is_the_second_order_itself():
    inputs = tokens()
    torch.testing.assert_close(saturated(*inputs, closure="gauss"), cumulant.attention(*inputs, order=2))


def test_it_cannot_run_away_where_the_second_order_does():
    query, key, value = tokens()
    sharp = 100 * query
    exact = softmax(sharp, key, value)
    second = (cumulant.attention(sharp, key, value, order=2) - exact).norm() / exact.norm()
    for closure in ("tanh", "langevin"):
        assert (saturated(sharp, key, value, closure=closure) - exact).norm() / exact.norm() < 2 < second / 10


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_agree_with_differences(is_causal):
    inputs = tuple(x.requires_grad_() for x in tokens(6, 6, 1, 1, 3, 2, batch=1))
    assert torch.autograd.gradcheck(lambda *x: saturated(*x, is_causal=is_causal), inputs, fast_mode=True)


def test_nan_in_masked_tokens_goes_nowhere():
    query, key, value = tokens()
    absent = ~MASK[:, None, :, None]
    poisoned = [x.masked_fill(absent, float("nan")).requires_grad_() for x in (key, value)]
    for is_causal in (False, True):
        out = saturated(query, *poisoned, key_mask=MASK, is_causal=is_causal)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), poisoned))
