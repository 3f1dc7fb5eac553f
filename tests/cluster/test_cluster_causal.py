"""Causal rows see no later token, equal softmax in their limits, and a stream gives the same rows in little memory."""

import pytest
import torch
from cluster_cases import softmax, tokens
from torch.utils._pytree import tree_leaves

from cumulant import zoo
from cumulant.cluster import Blocks, ClusterStream, cluster_attention, cluster_scores

RULES = [Blocks(5), Blocks(4, recent=2), Blocks(3, keep=0), Blocks(2, keep=1, recent=1), Blocks(1, keep=3), Blocks(64)]
rules = pytest.mark.parametrize("blocks", RULES, ids=str)


@rules
@pytest.mark.parametrize("near", [0, 1])
def test_later_tokens_leave_earlier_rows_alone(blocks, near):
    near = near if blocks.keep is None else 0
    inputs = tokens()
    before = cluster_attention(*inputs, clusters=blocks, near=near, is_causal=True)
    for cut in (1, 7, 8, 23):
        changed = [torch.cat((x[..., :cut, :], 9 * x[..., cut:, :] + 5), -2) for x in inputs]
        after = cluster_attention(*changed, clusters=blocks, near=near, is_causal=True)
        torch.testing.assert_close(after[..., :cut, :], before[..., :cut, :], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(after[..., cut, :], before[..., cut, :])
        short = cluster_attention(*(x[..., :cut, :] for x in inputs), clusters=blocks, near=near, is_causal=True)
        torch.testing.assert_close(short, before[..., :cut, :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"clusters": Blocks(24)},
        {"clusters": Blocks(1, keep=24)},
        {"clusters": 24},
        {"clusters": Blocks(5, recent=4)},
        {"clusters": Blocks(5), "near": 5},
        {"clusters": 1},
    ],
    ids=str,
)
def test_causal_limits_are_softmax(options):
    inputs = tokens()
    torch.testing.assert_close(cluster_attention(*inputs, is_causal=True, **options), softmax(*inputs, is_causal=True))


@rules
def test_a_row_is_the_noncausal_row_over_its_past(blocks):
    """The last row: whole blocks of the past as clusters, the rest token by token."""
    if blocks.keep is not None:
        blocks = Blocks(blocks.size, recent=blocks.recent)
    query, key, value = tokens(23, 23)
    out = cluster_attention(query, key, value, clusters=blocks, is_causal=True)[..., -1:, :]
    past = max(0, 22 // blocks.size - blocks.recent)
    ids = torch.arange(23)
    ids = torch.where(ids < past * blocks.size, ids // blocks.size, ids + 100)
    torch.testing.assert_close(out, cluster_attention(query[..., -1:, :], key, value, clusters=ids))


def test_blocks_merge_as_a_binary_counter():
    """After 7 whole blocks a counter holds 4 + 2 + 1 of them: the row is that over these three clusters."""
    query, key, value = tokens(22, 22)
    out = cluster_attention(query, key, value, clusters=Blocks(3, keep=0), is_causal=True)[..., -1:, :]
    ids = torch.tensor([0] * 12 + [1] * 6 + [2] * 3 + [3])
    torch.testing.assert_close(out, cluster_attention(query[..., -1:, :], key, value, clusters=ids))


@rules
def test_a_stream_gives_the_rows_of_the_batch(blocks):
    query, key, value = tokens(41, 41, heads=4)
    expected = cluster_attention(query, key, value, clusters=blocks, is_causal=True, enable_gqa=True)
    stream = ClusterStream(blocks)
    rows = [stream.step(*(x[..., t : t + 1, :] for x in (query, key, value))) for t in range(41)]
    torch.testing.assert_close(torch.cat(rows, -2), expected)


@rules
@pytest.mark.parametrize("sinks", [1, 3, 7, 50])
def test_a_stream_with_sinks_gives_the_rows_of_the_batch_with_them(blocks, sinks):
    query, key, value = tokens(41, 41, heads=4)
    expected = cluster_attention(query, key, value, clusters=blocks, is_causal=True, enable_gqa=True, prefix=sinks)
    stream = ClusterStream(blocks, prefix=sinks)
    stream.append(key[..., :9, :], value[..., :9, :])
    rows = [stream.apply(query[..., 8:9, :])]
    rows += [stream.step(*(x[..., t : t + 1, :] for x in (query, key, value))) for t in range(9, 41)]
    torch.testing.assert_close(torch.cat(rows, -2), expected[..., 8:, :])
    stream.each(lambda x: x[:1])
    torch.testing.assert_close(stream.apply(query[:1, ..., -1:, :]), expected[:1, ..., -1:, :])


@rules
def test_a_first_token_that_all_look_at_is_exact_as_a_sink_and_nowhere_else(blocks):
    """Its weight is nearly all of every row's: what a cluster says of it is wrong for every later row."""
    query, key, value = tokens(41, 41)
    way = torch.nn.functional.normalize(key[0, 0, 0], dim=-1)
    query, key = query + 4 * way, 0.5 * key
    key[..., 0, :] = 6 * way
    exact = softmax(query, key, value, is_causal=True)

    def error(**kw):
        out = cluster_attention(query, key, value, clusters=blocks, is_causal=True, **kw)
        return ((out - exact).norm() / exact.norm()).item()

    clustered = blocks.size > 1 and blocks.size * (blocks.recent + 1) < 41
    assert error(prefix=41) < 1e-12
    if clustered:
        assert error(prefix=1) < 0.2 * error()
    if blocks.keep is None:  # and near clusters do not see it twice
        near = cluster_attention(query, key, value, clusters=blocks, is_causal=True, near=50, prefix=3)
        torch.testing.assert_close(near, exact)


def test_sinks_of_a_padded_text_are_its_own_first_tokens():
    query, key, value = tokens(24, 24)
    mask = torch.ones(len(query), 24, dtype=torch.bool)
    mask[:, :8] = False
    options = {"clusters": Blocks(4), "is_causal": True, "prefix": 2}
    padded = cluster_attention(query, key, value, key_mask=mask, **options)
    alone = cluster_attention(*(x[..., 8:, :] for x in (query, key, value)), **options)
    torch.testing.assert_close(padded[..., 8:, :], alone)


def test_sinks_by_name_are_those_of_the_call():
    query, key, value = tokens(40, 40)
    named = zoo.get("cluster4")(query, key, value, is_causal=True, block=4, recent=1, sinks=3)
    blocks = Blocks(4, keep=4, recent=1)
    torch.testing.assert_close(named, cluster_attention(query, key, value, clusters=blocks, is_causal=True, prefix=3))
    stream = zoo.get("cluster4").stream(block=4, recent=1, sinks=3)
    stream.append(key, value)
    torch.testing.assert_close(stream.apply(query[..., -1:, :]), named[..., -1:, :])
    with pytest.raises(ValueError, match="prefix must be a number of tokens, 0 or more, got -1"):
        cluster_attention(query, key, value, clusters=blocks, is_causal=True, prefix=-1)


@rules
@pytest.mark.parametrize("first", [1, 12, 30])
def test_a_prompt_and_then_steps_are_the_same_stream(blocks, first):
    query, key, value = tokens(41, 41)
    expected = cluster_attention(query, key, value, clusters=blocks, is_causal=True, variance="full")
    stream = ClusterStream(blocks, variance="full")
    stream.append(key[..., :first, :], value[..., :first, :])
    torch.testing.assert_close(stream.apply(query[..., first - 1 : first, :]), expected[..., first - 1 : first, :])
    for t in range(first, 41):
        row = stream.step(*(x[..., t : t + 1, :] for x in (query, key, value)))
    torch.testing.assert_close(row, expected[..., -1:, :])


def test_memory_of_a_long_stream_grows_with_the_logarithm():
    sizes, clusters = [], []
    stream = ClusterStream(Blocks(16, keep=2, recent=1))
    for _ in range(6):
        for _ in range(max(1, stream.length // 1024)):
            stream.append(*(torch.randn(1, 1, 1024, 4) for _ in range(2)))
        sizes.append(sum(x.numel() for x in tree_leaves(stream.state)))
        clusters.append(stream.clusters)
    assert stream.length == 32 * 1024
    assert clusters[-1] <= 3 * 12
    steps = torch.tensor(sizes).diff()
    assert (steps <= 3 * (4 * 4 + 3 * 4 + 1)).all()  # twice the tokens, one more size of clusters


def test_a_long_stream_stays_close_to_softmax_and_closer_with_more_clusters():
    generator = torch.Generator().manual_seed(0)
    topic = torch.randn(1, 1, 20, 8, generator=generator).repeat_interleave(1000, -2)
    key, value = (topic + 0.5 * torch.randn(topic.shape, generator=generator) for _ in range(2))
    query = 2 * key[..., ::1250, :]
    exact = softmax(query, key, value)
    errors = []
    for keep in (0, 4, 64):
        stream = ClusterStream(Blocks(64, keep=keep))
        stream.append(key, value)
        errors.append(((stream.apply(query) - exact).norm() / (exact - value.mean(-2, keepdim=True)).norm()).item())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.15


def test_more_rows_than_keys_and_fewer_are_aligned_at_the_first():
    for queries, keys in ((5, 13), (17, 11)):
        query, key, value = tokens(queries, keys)
        for blocks in (Blocks(4), Blocks(2, keep=0)):
            out = cluster_attention(query, key, value, clusters=blocks, is_causal=True)
            n = min(queries, keys)
            same = cluster_attention(*(x[..., :n, :] for x in (query, key, value)), clusters=blocks, is_causal=True)
            torch.testing.assert_close(out[..., :n, :], same)
        exact = cluster_attention(query, key, value, clusters=Blocks(32), is_causal=True)
        torch.testing.assert_close(exact, softmax(query, key, value, is_causal=True))


@rules
def test_causal_weights_sum_to_one_and_end_at_the_diagonal(blocks):
    query, key, value = tokens()
    weights = cluster_scores(query, key, clusters=blocks, is_causal=True)
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 24, dtype=torch.float64))
    torch.testing.assert_close(weights @ value, cluster_attention(query, key, value, clusters=blocks, is_causal=True))


def test_a_causal_block_rule_compiles_into_one_graph():
    torch._dynamo.reset()
    inputs = tokens(dtype=torch.float32)

    def function(*x):
        return cluster_attention(*x, clusters=Blocks(4, keep=1, recent=1), is_causal=True)

    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="eager")(*inputs), function(*inputs))


@pytest.mark.parametrize("near", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("blocks", [Blocks(4, 2, 1), Blocks(7), Blocks(4, 0, 3), Blocks(64, 1)], ids=str)
def test_rows_from_a_later_place_on_are_those_of_the_whole(blocks, masked, near):
    if near and blocks.keep is not None:
        pytest.skip("merged blocks have no near field")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 50, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    how = {"clusters": blocks, "is_causal": True, "enable_gqa": True, "near": near, "response": 2}
    how["key_mask"] = torch.rand(2, 50, generator=generator) > 0.2 if masked else None
    whole = cluster_attention(q, k, v, **how)
    for first, count in ((0, 5), (1, 1), (4, 8), (27, 23), (49, 1)):
        rows = slice(first, first + count)
        found = cluster_attention(q[:, :, rows], k, v, offset=first, **how)
        torch.testing.assert_close(found, whole[:, :, rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("offset", "is_causal"), [(-1, True), (1.5, True), (True, True), (3, False)])
def test_a_place_that_is_none_is_named(offset, is_causal):
    q = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match="offset must be a place, 0 or more, of causal queries"):
        cluster_attention(q, q, q, clusters=2, is_causal=is_causal, offset=offset)


@pytest.mark.parametrize("blocks", [Blocks(8), Blocks(8, keep=1), Blocks(8, keep=1, recent=1)], ids=str)
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_token_without_numbers_reaches_no_row_before_it(blocks, which):
    q, k, v = (torch.randn(1, 2, 40, 4) for _ in range(3))
    clean = cluster_attention(q, k, v, clusters=blocks, is_causal=True)
    for place in (3, 20):
        broken = {"key": k.clone(), "value": v.clone()}
        broken[which][:, 0, place] = float("nan")
        out = cluster_attention(q, **broken, clusters=blocks, is_causal=True)
        assert torch.equal(out[:, :, :place], clean[:, :, :place])
        assert torch.equal(out[:, 1], clean[:, 1])
        assert out[:, 0, place:].isnan().all()


def test_inductor_compiles_blocks_that_merge():
    q, k, v = (torch.randn(1, 1, 24, 4) for _ in range(3))

    def attend(q, k, v):
        return cluster_attention(q, k, v, clusters=Blocks(4, keep=1), is_causal=True)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(attend, fullgraph=True)(q, k, v), attend(q, k, v))


@pytest.mark.parametrize("blocks", [Blocks(4, keep=1), Blocks(4), Blocks(4, recent=1)], ids=str)
def test_a_graph_for_any_length_has_no_size_that_inductor_cannot_bound(blocks):
    """A minimum with the length, or a quotient of what is below 0: "Exponent must be non-negative", backward."""
    sizes = []

    def compiler(graph, _):
        sizes.extend(str(tuple(getattr(n.meta.get("example_value"), "shape", ()))) for n in graph.graph.nodes)
        return graph.forward

    def attend(q, k, v):
        return cluster_attention(q, k, v, clusters=blocks, is_causal=True)

    torch.compiler.reset()
    given = (torch.randn(1, 1, 24, 4) for _ in range(3))
    torch.compile(attend, fullgraph=True, dynamic=True, backend=compiler)(*given)
    assert len(sizes) > 20
    assert not [size for size in sizes if "Min" in size or "(-s" in size]
