"""Random calls against a slow oracle in float64 that shares no code: outputs, gradients, weights, streams."""

import random

import pytest
import torch
from cluster_oracle import causal, noncausal
from random_cases import cut, example
from random_tokens import one as draw

from cumulant.cluster import Blocks, ClusterStream, cluster_attention, cluster_scores

CLOSE = {torch.float64: 1e-7, torch.float32: 2e-4, torch.bfloat16: 3e-2}
TIE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 2e-3}  # closer scores may be taken either way


def apart(a, b):
    return ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item()


def check(seed):
    """Compares one call with the oracle; False where two clusters are equally heavy and either may be near."""
    case = example(seed)
    given = [x.detach().requires_grad_() for x in case.inputs]
    exact = [x.detach().double().requires_grad_() for x in case.inputs]
    expected, out = case.oracle(*exact), cluster_attention(*given, **case.options)
    assert (out.shape, out.dtype) == (expected.shape, given[0].dtype)
    if case.margin.least < TIE[out.dtype]:
        return False
    slope = draw(*expected.shape, seed=seed)
    wanted = torch.autograd.grad(expected, exact, slope, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(out, given, slope.to(out.dtype))
    for name, a, b in zip(("out", "query", "key", "value"), (out, *found), (expected, *wanted), strict=True):
        assert apart(a.detach(), b.detach()) < CLOSE[out.dtype], (seed, name, case.options)
    weights = cluster_scores(*given[:2], **case.options).detach()
    values = given[2].detach().double().repeat_interleave(weights.shape[1] // given[2].shape[1], 1)
    assert apart(weights.double() @ values, expected.detach()) < 10 * CLOSE[out.dtype], (seed, "scores", case.options)
    total = weights.double().sum(-1)  # a row that sees nothing has no weights
    assert ((total - 1).abs().minimum(total.abs()) < 10 * CLOSE[out.dtype]).all(), (seed, "sum", case.options)
    return True


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_calls_equal_the_oracle(first):
    assert sum(check(seed) for seed in range(first, first + 50)) > 40


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("clusters", [5, 7])
def test_a_query_with_given_neighbours_chooses_alone_who_responds(clusters, masked):
    """Not together with the others of its block, whose last slots may be empty: a mask of ones changes nothing."""
    query, key, value = (draw(1, 2, 13, 4, seed=i) for i in range(3))
    ids = torch.tensor(cut(13, clusters))
    mask = torch.ones(1, 13, dtype=torch.bool) if masked else None
    out = cluster_attention(query, key, value, clusters=clusters, near="neighbours", response=1, key_mask=mask)
    beside = {"near": "neighbours", "touching": lambda c: [c - 1, c, c + 1], "standing": ids[None]}
    torch.testing.assert_close(out, noncausal(query, key, value, ids.expand(1, 2, 13), response=1, **beside))


@pytest.mark.parametrize("seed", range(12))
def test_streams_equal_the_oracle_for_all_their_options(seed):
    r = random.Random(seed)
    B, Hk, G, L = r.choice([1, 2]), r.choice([1, 2]), r.choice([1, 2, 3]), r.choice([5, 17, 23])
    query, key, value = draw(B, Hk * G, L, 4), draw(B, Hk, L, 4, seed=1), draw(B, Hk, L, 3, seed=2)
    blocks = Blocks(r.choice([1, 2, 3, 7]), r.choice([None, 0, 1, 2]), r.choice([0, 1, 3]))
    form = {
        "closure": r.choice(["gauss", "tanh", "langevin"]),
        "variance": r.choice(["diagonal", "full"]),
        "response": [None, 0, 1, 2][seed % 4],
        "scale": r.choice([None, 0.3]),
    }
    stream, first = ClusterStream(blocks, **form), r.randrange(L)
    stream.append(key[..., :first, :], value[..., :first, :])
    rows = [stream.step(*(x[..., t : t + 1, :] for x in (query, key, value))) for t in range(first, L)]
    expected = causal(query, key, value, size=blocks.size, keep=blocks.keep, recent=blocks.recent, **form)
    torch.testing.assert_close(torch.cat(rows, -2), expected[..., first:, :])
