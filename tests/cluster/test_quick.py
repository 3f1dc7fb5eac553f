"""Blocks with a pooled response on a CPU, without gradients: another way to the same numbers."""

import pytest
import torch

from cumulant import cluster_attention
from cumulant.cluster import quick, shares
from cumulant.cluster.layout import Blocks
from cumulant.kernels import workers

CASES = {
    "equal blocks": (1024, 1024, 2, 2, 8, dict(clusters=16, near=2)),
    "uneven blocks, rows left over": (1030, 1100, 2, 2, 8, dict(clusters=16, near=3)),
    "heads share keys, other width of values": (1040, 1024, 4, 2, 5, dict(clusters=16, near=2, enable_gqa=True)),
    "blocks of a size": (1100, 1024, 2, 2, 8, dict(clusters=Blocks(60), near=2)),
    "blocks of a grid": (1024, 1024, 2, 2, 8, dict(clusters=16, near=2, grid=(32, 32))),
    "blocks that do not divide a grid": (1056, 1056, 1, 1, 8, dict(clusters=(5, 4), near=2, grid=(32, 33))),
    "none near": (300, 200, 2, 2, 8, dict(clusters=16, near=0, response="pooled")),
}


def tokens(Lk, Lq, H, Hk, E, dtype=torch.float64):
    torch.manual_seed(Lk)
    return (
        torch.randn(2, H, Lq, 8, dtype=dtype),
        torch.randn(2, Hk, Lk, 8, dtype=dtype) + 2,
        torch.randn(2, Hk, Lk, E, dtype=dtype) + 3,
    )


@pytest.fixture
def taken(monkeypatch):
    """Shares of heads that went the quick way."""
    seen, attend = [], quick.attend
    monkeypatch.setattr(quick, "attend", lambda case: seen.append(case.call.query.shape) or attend(case))
    return seen


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [None, 3.0])
def test_without_gradients_the_numbers_are_those_with_them(taken, name, scale):
    *shape, options = CASES[name]
    q, k, v = tokens(*shape)
    with torch.no_grad():
        found = cluster_attention(q, k, v, scale=scale, **options)
    assert taken
    expected = cluster_attention(q.requires_grad_(), k, v, scale=scale, **options)
    assert expected.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)


def test_rows_of_one_cluster_far_above_the_others_stay_finite(taken):
    """Logits of hundreds: exponentials are taken from the largest, near or far."""
    q, k, v = tokens(1024, 1024, 2, 2, 8)
    k[..., :64, :] += 40 * torch.sign(k[..., :1, :])
    with torch.no_grad():
        found = cluster_attention(10 * q, k, v, clusters=16, near=2)
    expected = cluster_attention((10 * q).requires_grad_(), k, v, clusters=16, near=2).detach()
    assert taken
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_of_heads_side_by_side_change_nothing(monkeypatch, taken, dtype):
    q, k, v = tokens(1024, 1024, 6, 6, 8, dtype)
    with torch.no_grad():
        alone = cluster_attention(q, k, v, clusters=16, near=2)
        assert alone.dtype == dtype
        monkeypatch.setattr(workers, "_POOLS", {})
        monkeypatch.setattr(shares.PACE, "until", float("inf"))
        monkeypatch.setattr(workers.torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 3)
        taken.clear()
        beside = cluster_attention(q, k, v, clusters=16, near=2)
    assert len(taken) > 2
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "other",
    [dict(prefix=1), dict(closure="gauss"), dict(response=None), dict(rank="mass"), dict(variance="full")],
    ids=lambda x: next(iter(x)),
)
def test_what_it_does_not_know_goes_the_common_way(taken, other):
    q, k, v = tokens(1024, 1024, 1, 1, 8)
    with torch.no_grad():
        cluster_attention(q, k, v, clusters=16, near=2, **other)
    assert not taken
