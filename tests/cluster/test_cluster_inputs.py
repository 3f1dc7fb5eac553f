"""Bad input gives an error that names it; empty and uneven clusters give a defined result."""

from typing import get_args, get_type_hints

import pytest
import torch
from cluster_cases import softmax, tokens

from cumulant.cluster import (
    Blocks,
    ClusterStream,
    KMeans,
    Tree,
    backend,
    cluster_attention,
    cluster_scores,
    kmeans_assignment,
)
from cumulant.cluster.layout import divide
from cumulant.zoo.probes import LargestTensor

BAD = {
    "a grid that does not match": (
        {"clusters": 4, "grid": (4, 5)},
        ValueError,
        r"grid \(4, 5\) holds 20 tokens.*24 keys",
    ),
    "a grid that is a number": ({"clusters": 4, "grid": 24}, ValueError, r"grid must be \(rows, cols\).*got 24"),
    "a grid in halves": ({"clusters": 4, "grid": (2.5, 9.6)}, ValueError, r"in whole numbers, got \(2.5, 9.6\)"),
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
    "clusters that are none, though every token is prefix": (
        {"clusters": "4", "prefix": 24},
        TypeError,
        r"clusters must be an int.*got str",
    ),
    "an assignment without data": (
        {"clusters": torch.zeros(24, dtype=torch.long, device="meta")},
        ValueError,
        r"must be on the device of the key, cpu, got meta",
    ),
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
    "blocks of no token": ({"clusters": 4, "least": 0}, ValueError, r"least must be a number of tokens.*got 0"),
    "blocks of half a token": ({"clusters": 4, "least": 0.5}, ValueError, r"least must be a number.*got 0.5"),
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


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda q, k, v: (q, k, v.double()), TypeError, r"share dtype and device, got torch.float32 on cpu"),
        (lambda q, k, v: (q, k.long(), v), TypeError, r"key must be floating point.*got torch.int64"),
        (lambda q, k, v: (q, k, v.tolist()), TypeError, r"value must be a torch.Tensor, got list"),
        (
            lambda q, k, v: (q, k[..., :5], v),
            ValueError,
            r"query and key must have the same batch and width.* 6\).* 5\)",
        ),
        (
            lambda q, k, v: (q, k.double(), v.double()),
            TypeError,
            r"must share a dtype, got query torch.float32, key torch.float64",
        ),
        (
            lambda q, k, v: (q[..., :5], k, v),
            ValueError,
            r"same batch and width, got \(2, 2, 1, 5\) and \(2, 2, tokens, 6\)",
        ),
        (lambda q, k, v: (q[:, :1].repeat(1, 3, 1, 1), k, v), ValueError, r"query heads \(3\) must be a multiple"),
        (
            lambda q, k, v: (q.repeat(1, 1, 2, 1), k, v),
            ValueError,
            r"query must have shape .* one token, got \(2, 2, 2, 6\)",
        ),
    ],
    ids=["types", "integers", "a list", "width", "another type", "query width", "heads", "two queries"],
)
def test_a_step_that_does_not_fit_the_stream_is_named_and_leaves_no_token(change, kind, message):
    stream = ClusterStream(Blocks(4))
    token = tokens(1, 1, dtype=torch.float32)
    stream.step(*token)
    with pytest.raises(kind, match=message):
        stream.step(*change(*token))
    assert stream.length == 1


def test_weights_and_assignments_name_what_they_were_given():
    query, key, _ = tokens()
    with pytest.raises(TypeError, match=r"key must be a torch.Tensor, got list"):
        cluster_scores(query, key.tolist(), clusters=4)
    with pytest.raises(ValueError, match=r"key must have shape \(..., heads, length, width\), got \(6,\)"):
        cluster_scores(query, key[0, 0, 0], clusters=4)
    with pytest.raises(TypeError, match=r"options must be KMeans.*got int"):
        kmeans_assignment(query, key, 4)
    with pytest.raises(TypeError, match=r"scale must be a number, got 'large'"):
        ClusterStream(Blocks(4), scale="large")


@pytest.mark.parametrize("options", [{"near": 1}, {"clusters": KMeans(3)}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("empty", ["queries", "keys", "values", "batch", "heads"])
def test_what_is_empty_gives_zeros_and_gradients_that_are_zero(empty, options):
    shape = {"queries": 5, "keys": 5, "batch": 2, "heads": 2, "value_dim": 3}
    shape |= {"values": {"value_dim": 0}, "heads": {"heads": 0, "key_heads": 0}}.get(empty, {empty: 0})
    inputs = [x.requires_grad_() for x in tokens(**shape)]
    out = cluster_attention(*inputs, **{"clusters": 3, **options})
    assert out.shape == (*inputs[0].shape[:-1], shape["value_dim"])
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), inputs))


def test_keys_without_width_are_all_alike():
    query, key, value = tokens(dim=0)
    for near in (0, 1, 4):
        out = cluster_attention(query, key, value, clusters=4, near=near)
        torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand(-1, -1, 24, -1))


@pytest.mark.parametrize("clusters", [4, KMeans(4)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_no_number_hurts_neither_other_queries_nor_other_sequences(clusters, bad):
    query, key, value = tokens()
    query[0, 0, 3] = bad
    out = cluster_attention(query, key, value, clusters=clusters, near=1)
    finite = out.isfinite().all(-1)
    assert not finite[0, 0, 3]
    assert finite.sum() == finite.numel() - 1
    torch.testing.assert_close(out[1], cluster_attention(query[1], key[1], value[1], clusters=clusters, near=1))


def test_more_queries_in_a_row_than_there_are_is_all_of_them():
    inputs = tokens()
    options = {"clusters": 6, "near": 2, "response": 2}
    all_of_them = cluster_attention(*inputs, near_rows=24, **options)
    torch.testing.assert_close(cluster_attention(*inputs, near_rows=10**12, **options), all_of_them)


def test_tensors_without_data_have_the_shape_of_the_answer():
    inputs = [x.to("meta") for x in tokens(5)]
    for options in ({"clusters": 4, "near": 1}, {"clusters": KMeans(3), "near": 1}, {"clusters": 4, "is_causal": True}):
        assert cluster_attention(*inputs, **options).shape == (2, 2, 5, 5)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # of a batch that vmap keeps in an order of its own
def test_k_means_and_its_near_field_may_be_mapped_over():
    query, key, value = (x.unsqueeze(1) for x in tokens())
    options = {"clusters": KMeans(4), "near": 1}
    mapped = torch.func.vmap(lambda *x: cluster_attention(*x, **options))(query, key, value)
    torch.testing.assert_close(mapped, cluster_attention(query, key, value, **options))


def test_grids_of_changing_size_compile_into_one_graph():
    def function(x, grid):
        return cluster_attention(x, x, x, clusters=4, grid=grid)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for grid in ((4, 4), (6, 4), (5, 7)):
        x = torch.randn(1, 2, grid[0] * grid[1], 8)
        torch.testing.assert_close(compiled(x, grid), function(x, grid))


def test_what_compile_makes_constants_of_are_numbers():
    """To torch.compile of torch 2.11 a dataclass is no constant: clusters=Tree(64) ended in an error of its own."""

    def plain(kind):
        return kind in (int, type(None)) or kind is ... or (bool(get_args(kind)) and all(map(plain, get_args(kind))))

    constants = [x for x in vars(backend).values() if getattr(x, "_dynamo_marked_constant", False)]
    kinds = [kind for x in constants for name, kind in get_type_hints(x).items() if name != "return"]
    assert len(constants) >= 3
    assert all(map(plain, kinds)), kinds


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
        ((2, 3), 64, (2, 3)),
        ((4, 9), 36, (4, 9)),
        ((4, 9), 10**18 + 9, (4, 9)),
        ((4, 4), 7, (2, 3)),
        ((8, 8), 61, (6, 5)),
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


@pytest.mark.parametrize(
    ("length", "options"),
    [(1100, {"clusters": 8, "near": 2}), (1100, {"clusters": 8, "near": 2, "near_rows": 1}),
     (12, {"clusters": Tree(4), "near": 1}), (12, {"clusters": KMeans(4), "near": 1})],
    ids=str,
)  # fmt: skip
def test_channels_that_do_not_lie_side_by_side_are_the_same_channels(length, options):
    inputs = [x.float() for x in tokens(length, length, 2, 2, 8, 8, batch=1)]
    wanted = cluster_attention(*inputs, **options)
    turned = [x.mT.contiguous().mT for x in inputs]
    torch.testing.assert_close(cluster_attention(*turned, **options), wanted)
    sliced = [torch.stack((x, torch.full_like(x, 7)), -1).flatten(-2)[..., ::2] for x in inputs]
    torch.testing.assert_close(cluster_attention(*sliced, **options), wanted)
