"""Tiles of queries over clusters that are no runs of tokens: alike queries share near clusters, not those in a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.cluster import KMeans, attention, cluster_attention, kmeans_assignment
from cumulant.cluster.alike import as_before, in_order, order_by_content

TILES: dict[str, Any] = {"near": 2, "near_rows": 16, "rank": "error", "response": "pooled"}


def mixed(L: int = 256, H: int = 2, D: int = 8, kinds: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a dozen kinds in any order."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centres = 2 * draw(H, kinds, D)
    q, k = (centres[:, torch.randint(kinds, (L,), generator=generator)] + 0.3 * draw(H, L, D) for _ in range(2))
    return q[None], k[None] + 3, (k + 0.3 * draw(H, L, D))[None]


@pytest.mark.parametrize("clusters", ["k-means", "an assignment"])
def test_queries_in_another_order_have_the_same_outputs(clusters: str) -> None:
    q, k, v = mixed()
    found: Any = KMeans(8) if clusters == "k-means" else kmeans_assignment(q, k, KMeans(8))
    moved = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(1))
    out, again = (cluster_attention(x, k, v, clusters=found, **TILES) for x in (q, q[:, :, moved]))
    torch.testing.assert_close(again, out[:, :, moved])


def test_they_are_nearer_to_softmax_than_those_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = mixed()
    exact, errors = F.scaled_dot_product_attention(q, k, v), []
    for as_they_stand in (False, True):
        if as_they_stand:
            monkeypatch.setattr(attention, "shares_by_content", lambda case: False)
        out = cluster_attention(q, k, v, clusters=KMeans(12), **TILES)
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors[0] < errors[1] / 2


def test_orders_are_undone_and_query_heads_of_one_key_head_have_their_own() -> None:
    q, k, _ = mixed(L=100, H=4)
    order = order_by_content(q, k[:, ::2], None, 16)
    assert torch.equal(order.sort(-1).values, torch.arange(100).expand(4, -1))
    assert torch.equal(as_before(in_order(q, order), order), q)
    assert not torch.equal(order[0], order[1])


def test_keys_that_take_no_part_change_nothing_whatever_they_hold() -> None:
    q, k, v = mixed()
    there = torch.rand(1, k.shape[2], generator=torch.Generator().manual_seed(1)) < 0.7
    outs = []
    for junk in (0.0, 50.0, float("nan")):
        keys, values = (x.masked_fill(~there[:, None, :, None], junk) for x in (k, v))
        outs.append(cluster_attention(q, keys, values, clusters=KMeans(8), key_mask=there, **TILES))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in mixed(L=24, H=1, D=3, kinds=4))
    ids = kmeans_assignment(q, k, KMeans(4)).detach()
    assert torch.autograd.gradcheck(
        lambda *x: cluster_attention(*x, clusters=ids, **TILES | {"near": 1, "near_rows": 8}), (q, k, v)
    )
