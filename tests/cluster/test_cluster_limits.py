"""The limits of the page: where cluster attention is softmax, where it is second order, and what it is in between."""

from itertools import pairwise

import pytest
import torch
from cluster_cases import by_definition, softmax, tokens
from random_tokens import one as draw

import cumulant
from cumulant.closures import gain, log_mass
from cumulant.cluster import CLOSURES, Blocks, KMeans, cluster_attention, cluster_scores
from cumulant.cluster.statistics import merge, merge_pieces, moments_of
from cumulant.moments import Moments

GRID = {"grid": (4, 5), "prefix": 4}
KINDS = {
    "blocks": {"clusters": 5},
    "blocks of a size": {"clusters": Blocks(7)},
    "even blocks": {"clusters": 4},
    "grid": {"clusters": (2, 2), **GRID},
    "grid by number": {"clusters": 6, **GRID},
    "clip": {"clusters": (2, 1, 3), "grid": (2, 3, 4)},
    "k-means": {"clusters": KMeans(5)},
    "assignment": {"clusters": torch.randint(0, 6, (2, 2, 24), generator=torch.Generator().manual_seed(7))},
}
CUTS = (slice(0, 5), slice(5, 6), slice(6, 24))
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("closure", CLOSURES)
@pytest.mark.parametrize(
    "own",
    [24, 1000, Blocks(1), torch.arange(24), torch.arange(24) * 2, torch.arange(24) * 7 % 24],
    ids=["24", "1000", "blocks of 1", "in order", "every other number", "mixed"],
)
def test_every_token_its_own_cluster_is_softmax(own, closure):
    query, key, value = tokens()
    out = cluster_attention(query, key, value, clusters=own, closure=closure)
    torch.testing.assert_close(out, softmax(query, key, value))


@kinds
def test_all_clusters_near_is_softmax(kind):
    query, key, value = tokens()
    out = cluster_attention(query, key, value, near=24, **KINDS[kind])
    torch.testing.assert_close(out, softmax(query, key, value))


@kinds
def test_one_cluster_fewer_than_all_near_is_no_longer_softmax(kind):
    query, key, value = tokens()
    out = cluster_attention(query, key, value, near=2, **KINDS[kind])
    assert not torch.allclose(out, softmax(query, key, value), rtol=1e-3)


def test_one_near_cluster_that_is_the_only_one_is_softmax():
    query, key, value = tokens()
    torch.testing.assert_close(cluster_attention(query, key, value, clusters=1, near=1), softmax(query, key, value))


def test_blocks_that_all_touch_make_neighbours_softmax():
    query, key, value = tokens()
    for clusters in ({"clusters": 2}, {"clusters": (2, 2), **GRID}):
        out = cluster_attention(query, key, value, near="neighbours", **clusters)
        rows = slice(clusters.get("prefix", 0), None)  # prefix tokens stand nowhere and have no neighbours
        torch.testing.assert_close(out[..., rows, :], softmax(query, key, value)[..., rows, :])


def test_one_cluster_with_gauss_is_second_order_cumulant_attention():
    query, key, value = tokens()
    out = cluster_attention(query, key, value, clusters=1, closure="gauss")
    torch.testing.assert_close(out, cumulant.attention(query, key, value, order=2))


@pytest.mark.parametrize("near", [0, 1, 3])
@pytest.mark.parametrize("closure", CLOSURES)
def test_it_is_the_formula_for_any_assignment(near, closure):
    query, key, value = tokens()
    ids = KINDS["assignment"]["clusters"]
    out = cluster_attention(query, key, value, clusters=ids, near=near, closure=closure)
    for b, h, i in ((0, 0, 0), (0, 1, 5), (1, 0, 23)):
        expected = by_definition(query[b, h, i], key[b, h], value[b, h], ids[b, h], near, closure)
        torch.testing.assert_close(out[b, h, i], expected)


@pytest.mark.parametrize("count", [4, 5, 7])
def test_blocks_are_the_assignment_to_blocks(count):
    query, key, value = tokens()
    ids = torch.arange(24) * count // 24
    for near in (0, 2):
        out = cluster_attention(query, key, value, clusters=count, near=near)
        torch.testing.assert_close(out, cluster_attention(query, key, value, clusters=ids, near=near))


def test_blocks_of_a_grid_are_the_assignment_to_its_blocks():
    query, key, value = tokens(27, 27)
    row, col = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    ids = ((row * 2 // 4) * 3 + col * 3 // 6).flatten()
    grid = {"grid": (4, 6), "prefix": 3}
    for near in (0, 2):
        out = cluster_attention(query, key, value, clusters=(2, 3), near=near, **grid)
        torch.testing.assert_close(out, cluster_attention(query, key, value, clusters=ids, prefix=3, near=near))


def test_neighbours_on_a_grid_are_the_touching_blocks():
    """Of 3 x 3 blocks a token of the first sees four exactly, softmax up to one factor, and the others as moments."""
    query, key, _ = tokens(36, 36)
    scores = cluster_scores(query, key, clusters=(3, 3), grid=(6, 6), near="neighbours")
    exact = (query @ key.mT * 6**-0.5).exp()
    ratio = (scores / exact)[..., 0, :].unflatten(-1, (6, 6))
    near = ratio[..., :4, :4]
    torch.testing.assert_close(near, near[..., :1, :1].expand_as(near))
    assert not torch.allclose(ratio[..., 4:, :], near[..., :1, :1].expand(2, 2, 2, 6), rtol=1e-3)


@kinds
@pytest.mark.parametrize("near", [0, 2])
def test_shifting_the_keys_changes_nothing_and_shifting_the_values_shifts(kind, near):
    query, key, value = tokens()
    out = cluster_attention(query, key, value, near=near, **KINDS[kind])
    shifted = cluster_attention(query, key + 100, value - 3, near=near, **KINDS[kind])
    torch.testing.assert_close(shifted, out - 3, rtol=1e-9, atol=1e-9)


def test_float32_keeps_its_digits_for_keys_far_from_the_origin():
    query, key, value = tokens(dtype=torch.float32)
    far = key + 1000
    exact = cluster_attention(query.double(), far.double(), value.double(), clusters=4, near=1)
    assert (cluster_attention(query, far, value, clusters=4, near=1) - exact).abs().max() < 1e-4


@kinds
@pytest.mark.parametrize("near", [0, 1, 24])
def test_weights_sum_to_one_and_reproduce_the_output(kind, near):
    query, key, value = tokens()
    weights = cluster_scores(query, key, near=near, **KINDS[kind])
    assert weights.shape == (2, 2, 24, 24)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 24, dtype=torch.float64))
    torch.testing.assert_close(weights @ value, cluster_attention(query, key, value, near=near, **KINDS[kind]))


@kinds
def test_a_response_of_all_clusters_is_the_whole_response_and_of_none_the_means(kind):
    query, key, value = tokens()
    whole = cluster_attention(query, key, value, **KINDS[kind])
    torch.testing.assert_close(cluster_attention(query, key, value, response=23, **KINDS[kind]), whole)
    means = cluster_attention(query, key, value, response=0, **KINDS[kind])
    few = cluster_attention(query, key, value, response=2, **KINDS[kind])
    error = [(x - whole).norm() for x in (means, few)]
    assert error[0] > error[1] > 0


def test_full_variance_is_exact_for_two_kinds_of_keys_in_any_direction():
    query, _, value = tokens()
    key = draw(2, 2, 2, 6, seed=4)[..., torch.arange(24) % 2, :]
    value = value[..., torch.arange(24) % 2, :]  # what answers to a key depends on its kind alone
    out, diagonal = (
        cluster_attention(query, key, value, clusters=2, closure="tanh", variance=v) for v in ("full", "diagonal")
    )
    torch.testing.assert_close(out, softmax(query, key, value))
    assert not torch.allclose(diagonal, out, rtol=1e-3)


@pytest.mark.parametrize("clusters", [4, KMeans(4)], ids=str)
def test_the_error_falls_with_the_near_field(clusters):
    query, key, value = tokens(64, 64)
    exact = softmax(query, key, value)
    errors = [(cluster_attention(query, key, value, clusters=clusters, near=t) - exact).norm() for t in range(5)]
    assert all(a > b for a, b in pairwise(errors))
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("rows", [3, 5, 24, 100])
def test_rows_that_share_one_near_cluster_which_is_all_there_is_choose_it(rows):
    """With one block of weight far above the others every row wants the same near block."""
    query, key, value = tokens()
    query = query.abs()
    key[..., 6:12, :] += 8
    alone = cluster_attention(query, key, value, clusters=4, near=1)
    torch.testing.assert_close(cluster_attention(query, key, value, clusters=4, near=1, near_rows=rows), alone)


def test_ranked_by_error_no_single_token_cluster_is_taken():
    query, key, value = tokens(8, 9)
    ids = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3])
    key[..., 0, :] = 5 * query.mean((0, 1, 2))  # heavy, but alone: exact as it is
    out = cluster_attention(query, key, value, clusters=ids, near=3, rank="error")
    torch.testing.assert_close(out, softmax(query, key, value))


def test_queries_in_a_row_share_the_clusters_that_respond():
    """near_rows=n with response=r: of each block of n queries those r clusters whose probability times gain adds up
    to most answer with their covariance; the last block may be shorter."""
    query, key, value = tokens(queries=22)
    rows, chosen = 8, 2
    out = cluster_attention(query, key, value, clusters=6, near_rows=rows, response=chosen)
    q, parts = query * query.shape[-1] ** -0.5, []
    for k, v in zip(key.unflatten(2, (6, 4)).unbind(2), value.unflatten(2, (6, 4)).unbind(2), strict=True):
        k_mean, v_mean = k.mean(-2, keepdim=True), v.mean(-2, keepdim=True)
        variance = (q**2 * ((k - k_mean) ** 2).mean(-2, keepdim=True)).sum(-1)
        mass = (q * k_mean).sum(-1) + log_mass(variance, "tanh")
        parts.append((mass, gain(variance, "tanh"), v_mean, q @ (k - k_mean).mT @ (v - v_mean) / 4))
    w = torch.stack([mass for mass, *_ in parts], -1).softmax(-1)
    g = w * torch.stack([f for _, f, *_ in parts], -1)
    expected = sum(w[..., c, None] * v_mean for c, (_, _, v_mean, _) in enumerate(parts))
    for at in (slice(0, 8), slice(8, 16), slice(16, 22)):
        most = g[:, :, at].sum(-2).topk(chosen).indices
        taken = torch.zeros(*most.shape[:2], 6).scatter(-1, most, 1.0)
        for c, (*_, response) in enumerate(parts):
            expected[:, :, at] += taken[:, :, None, c, None] * g[:, :, at, c, None] * response[:, :, at]
    torch.testing.assert_close(out, expected)


def test_as_many_responses_as_clusters_are_all_of_them():
    query, key, value = tokens()
    full = cluster_attention(query, key, value, clusters=6, near=2, near_rows=8)
    torch.testing.assert_close(cluster_attention(query, key, value, clusters=6, near=2, near_rows=8, response=6), full)
    # Two of the six are near: the other four are all that can respond.
    torch.testing.assert_close(cluster_attention(query, key, value, clusters=6, near=2, near_rows=8, response=4), full)


@pytest.mark.parametrize("near", [0, 2, "neighbours"])
def test_a_prefix_of_all_tokens_is_softmax(near):
    q, k, v = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64)
    mask = torch.tensor([[1] * 7, [1, 1, 0, 1, 0, 1, 1]]).bool()
    out = cluster_attention(q, k, v, clusters=3, prefix=7, near=near, key_mask=mask)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    torch.testing.assert_close(out, exact)


@pytest.mark.parametrize("full", [False, True])
def test_moments_of_clusters_merge_as_moments_do(full):
    """Two pieces one after the other, and any number of pieces by their owners, one of which owns nothing."""
    _, key, value = tokens()
    weights = torch.rand(2, 2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = moments_of(key, value, weights, full=full)
    parts = [moments_of(key[..., at, :], value[..., at, :], weights[..., at], full=full) for at in CUTS]
    side_by_side = Moments._make(None if x[0] is None else torch.stack(x, 2) for x in zip(*parts, strict=True))
    owned = merge_pieces(side_by_side, torch.tensor([2, 0, 2]).expand(2, 2, 3), 3)
    two = merge(parts[0], parts[2])
    assert not owned.weight[..., 1].any()
    for field, expected in enumerate(whole):
        if expected is None:
            continue
        torch.testing.assert_close(merge(two, parts[1])[field], expected)
        torch.testing.assert_close(owned[field][:, :, 2], two[field])
        torch.testing.assert_close(owned[field][:, :, 0], parts[1][field])
