"""The dial beside the mechanisms: who is better at the same cost, told from measured points."""

import pytest
import torch
import torch.nn.functional as F
from dials import Point, compare, dial_points, mechanism_points, name_of, settings, shared_points, verdicts

from cumulant import zoo
from cumulant.call import Call
from cumulant.cluster import Choice, KMeans


def layers(tokens=32, dim=8, grid=None, prefix=0):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, tokens, dim, generator=generator)
    return [Call(2 * q, k, v, grid=grid, prefix=prefix), Call(q, k, v, grid=grid, prefix=prefix)]


def test_a_mechanism_is_held_against_the_best_setting_that_costs_no_more():
    points = [
        Point("cheap", "dial", 0.1, 0.6), Point("dear", "dial", 0.5, 0.2),
        Point("a", "mechanism", 0.3, 0.5), Point("b", "mechanism", 0.3, 0.7), Point("c", "mechanism", 0.05, 0.9),
        Point("d", "mechanism", 0.05, 1.2),
    ]  # fmt: skip
    found = {row["mechanism"]: row for row in verdicts(points)}
    assert [found[name]["better_than_dial"] for name in "abcd"] == [True, False, True, False]
    assert found["a"]["dial"] == "cheap"
    assert found["c"]["dial"] is None


def test_no_setting_has_blocks_of_one_token_or_all_blocks_near():
    for choice in settings(16):
        count = choice.clusters.count if isinstance(choice.clusters, KMeans) else choice.clusters
        assert 2 * count <= 16
        assert choice.near < count or choice.near == 0
    assert name_of(Choice(KMeans(8, 3, 4), 2, 0)) == "8 k-means, 2 near, means"


def test_more_near_blocks_are_closer_and_dearer():
    far, near = dial_points(layers(), 1, [Choice(8, 0), Choice(8, 4)])
    assert near.error < far.error
    assert near.cost > far.cost


def test_every_subquadratic_mechanism_takes_part_and_clusters_are_the_dial():
    names = {point.label.split("+")[0] for point in mechanism_points(layers(16)[:1], 1)}
    others = {n for n in zoo.names() if zoo.get(n).subquadratic and not n.startswith("cluster")}
    assert names == others


def test_images_are_cut_into_blocks_of_their_grid():
    result = compare(layers(17, grid=(4, 4), prefix=1)[:1], 1)
    labels = [point["label"] for point in result["points"]]
    assert "2 x 2 blocks, 1 near" in labels
    assert "2 x 2 blocks, 1 near, pooled" in labels
    assert "4 mean queries, exact" in labels
    assert result["tokens"] == 17


def test_mean_queries_cost_as_many_rows_of_softmax_and_one_of_them_is_the_mean_query():
    (layer,) = layers(16)[:1]
    one = shared_points([layer], 1)[0]
    mean = layer.query.mean(-2, keepdim=True)
    exact, constant = (F.scaled_dot_product_attention(q, layer.key, layer.value) for q in (layer.query, mean))
    away = (exact - layer.value.mean(-2, keepdim=True)).norm()
    assert one.cost == 1 / 16
    assert one.error == pytest.approx(((constant - exact).norm() / away).item(), rel=1e-4)
