"""Bad input gives an error that names it; empty and uneven clusters give a defined result."""

import pytest
import torch
from cluster_cases import softmax, tokens

from cumulant.cluster import Blocks, ClusterStream, KMeans, cluster_attention, kmeans_assignment
from cumulant.cluster.layout import divide
from cumulant.zoo.probes import LargestTensor

BAD = {
    "a grid that does not match": (
        {"clusters": 4, "grid": (4, 5)},
        ValueError,
        r"grid \(4, 5\) holds 20 tokens.*24 keys",
    ),
    "a grid of one side": ({"clusters": 4, "grid": (24,)}, ValueError, r"grid must be \(rows, cols\)"),
    "a prefix beyond the tokens": ({"clusters": 4, "prefix": 25}, ValueError, r"prefix must lie between 0 and the 24"),
    "blocks without a grid": ({"clusters": (2, 2)}, ValueError, r"clusters=\(2, 2\) are blocks of a grid: pass grid"),
    "more blocks than rows": (
        {"clusters": (5, 2), "grid": (4, 6)},
        ValueError,
        r"\(5, 2\) must cut each side of grid=\(4, 6\)",
    ),
    "blocks of other sides": ({"clusters": (2, 2, 2), "grid": (4, 6)}, ValueError, r"must cut each side"),
    "no clusters": ({"clusters": 0}, ValueError, r"clusters must be at least 1, got 0"),
    "half a cluster": ({"clusters": 2.5}, TypeError, r"clusters must be an int.*got float"),
    "a negative number": ({"clusters": torch.arange(24) - 1}, ValueError, r"must hold numbers from 0 on, got -1"),
    "a wild number": ({"clusters": torch.arange(24) * 10**6}, ValueError, r"names cluster 23000000"),
    "too few numbers": ({"clusters": torch.arange(23)}, ValueError, r"shape \(2, 2, 24\).*got \(23,\)"),
    "numbers that are none": ({"clusters": torch.rand(24)}, TypeError, r"must hold integers, got torch.float32"),
    "a negative near": ({"clusters": 4, "near": -1}, ValueError, r'near must be a number.*"neighbours", got -1'),
    "an unknown near": ({"clusters": 4, "near": "far"}, ValueError, r"near must be.*got 'far'"),
    "neighbours of k-means": ({"clusters": KMeans(4), "near": "neighbours"}, ValueError, r"have no neighbours"),
    "an unknown rank": (
        {"clusters": 4, "rank": "size"},
        ValueError,
        r"rank must be one of 'mass', 'error', 'mean', got 'size'",
    ),
    "an unknown variance": ({"clusters": 4, "variance": "none"}, ValueError, r"variance must be one of"),
    "a negative response": ({"clusters": 4, "response": -2}, ValueError, r"response must be None.*got -2"),
    "no rows": ({"clusters": 4, "near": 1, "near_rows": 0}, ValueError, r"near_rows must be at least 1, got 0"),
    "an unknown backend": ({"clusters": 4, "backend": "magic"}, ValueError, r"backend must be one of.*'magic'"),
    "merged blocks without order": ({"clusters": Blocks(4, keep=1)}, ValueError, r"belong to is_causal=True"),
    "k-means of the future": ({"clusters": KMeans(4), "is_causal": True}, TypeError, r"int or Blocks.*got KMeans"),
    "a causal grid": ({"clusters": 4, "grid": (4, 6), "is_causal": True}, ValueError, r"takes blocks of a sequence"),
    "causal neighbours": ({"clusters": 4, "near": "neighbours", "is_causal": True}, ValueError, r"recent=1"),
    "tokens that are gone": (
        {"clusters": Blocks(4, keep=0), "near": 1, "is_causal": True},
        ValueError,
        r"merges; use recent",
    ),
    "a row that chooses for others": (
        {"clusters": 4, "near": 1, "near_rows": 2, "is_causal": True},
        ValueError,
        r"near_rows=2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_with_what_is_accepted(case):
    options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        cluster_attention(*tokens(), **options)


def test_neighbours_need_as_many_queries_as_keys():
    with pytest.raises(ValueError, match=r"as many queries as keys, got 5 and 24"):
        cluster_attention(*tokens(5, 24), clusters=4, near="neighbours")


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 4, "iterations": -1}, {"count": 4, "metric": "cosine"}])
def test_k_means_checks_its_options(options):
    with pytest.raises(ValueError, match=r"of KMeans must be"):
        KMeans(**options)


def test_blocks_and_streams_check_their_options():
    with pytest.raises(ValueError, match=r"size of Blocks must be an integer of at least 1, got 0"):
        Blocks(0)
    with pytest.raises(TypeError, match=r"blocks must be Blocks"):
        ClusterStream(64)
    with pytest.raises(ValueError, match=r"seen no token yet"):
        ClusterStream(Blocks(4)).apply(torch.zeros(1, 1, 1, 2))


def test_k_means_under_compile_says_what_to_do():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: cluster_attention(*x, clusters=KMeans(2)), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"cannot be traced by torch.compile"):
        compiled(*tokens(dtype=torch.float32))


def test_empty_and_single_token_clusters_are_exact():
    """Clusters 0 to 3 hold one token each, 5 and 9 none; the last holds equal tokens, which have no spread."""
    query, key, value = tokens(6, 10)
    key[..., 4:, :], value[..., 4:, :] = key[..., 4:5, :], value[..., 4:5, :]
    ids = torch.tensor([0, 1, 2, 3, 12, 12, 12, 12, 12, 12])
    for near in (0, 2):
        out = cluster_attention(query, key, value, clusters=ids, near=near)
        torch.testing.assert_close(out, softmax(query, key, value))


def test_the_clusters_of_k_means_are_those_of_its_assignment():
    query, key, value = tokens(30, 40)
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) > 0.3
    ids = kmeans_assignment(query, key, KMeans(5), key_mask=mask)
    options = {"near": 1, "key_mask": mask}
    out = cluster_attention(query, key, value, clusters=KMeans(5), **options)
    torch.testing.assert_close(out, cluster_attention(query, key, value, clusters=ids, **options))


def test_k_means_finds_keys_that_stand_apart_as_the_queries_see_them():
    """Four groups along the first axis; spread along the second, larger, that no query looks at."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randperm(80, generator=generator) % 4
    key = torch.randn(1, 1, 80, 2, generator=generator) * torch.tensor([0.1, 100.0]) + group[:, None] * torch.tensor(
        [5.0, 0]
    )
    query = torch.randn(1, 1, 50, 2, generator=generator) * torch.tensor([1.0, 0])
    ids = kmeans_assignment(query, key, KMeans(4, start="even"))[0, 0]
    assert all(len(ids[group == g].unique()) == 1 for g in range(4))


@pytest.mark.parametrize(
    ("grid", "count", "blocks"),
    [
        ((8, 8), 16, (4, 4)),
        ((14, 14), 4, (2, 2)),
        ((2, 8, 8), 16, (1, 4, 4)),
        ((16, 4), 4, (4, 1)),
        ((2, 3), 64, (2, 2)),
        ((1, 12), 4, (1, 4)),
    ],
)
def test_a_number_of_blocks_is_divided_over_a_grid(grid, count, blocks):
    assert divide(grid, count) == blocks


@pytest.mark.parametrize(
    "options",
    [
        {"clusters": 64, "near": 2},
        {"clusters": 64, "near": "neighbours"},
        {"clusters": KMeans(32, 1), "near": 1, "response": 2},
    ],
    ids=str,
)
def test_nothing_as_large_as_rows_times_clusters_times_width_is_held(options):
    L, D = 16_384, 8
    inputs = [x.requires_grad_() for x in tokens(L, L, 1, 1, D, D, batch=1, dtype=torch.float32)]
    with LargestTensor() as largest:
        cluster_attention(*inputs, **options).sum().backward()
    assert largest.elements < L * 64 * D, largest.operation
