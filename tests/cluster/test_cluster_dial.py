"""The dial meets its target at the smallest cost among its candidates; costs count what was said."""

import pytest
import torch
from cluster_cases import softmax, tokens
from random_tokens import one as draw

from cumulant.cluster import Choice, KMeans, choose, multiply_adds, softmax_multiply_adds
from cumulant.cluster.dial import cheapest, near_tokens

CANDIDATES = (Choice(1), Choice(4), Choice(4, near=2), Choice(KMeans(16), near=2), Choice(1, near=1))


def inputs(heads=3):
    """Heads of growing logits: the first easy to expand, the last hard."""
    query, key, value = (draw(2, heads, 96, 8, seed=s) for s in range(3))
    return query * torch.linspace(0.2, 4, heads)[:, None, None].double(), key, value


def relative(out, exact, value):
    return ((out - exact).norm() / (exact - value.mean(-2, keepdim=True)).norm()).item()


@pytest.mark.parametrize("target", [0.6, 0.2, 0.01])
def test_the_error_of_the_layer_is_within_the_target(target):
    query, key, value = inputs()
    dial = choose(query, key, value, target=target, candidates=CANDIDATES, samples=96)
    assert dial.error <= target
    measured = relative(dial(query, key, value), softmax(query, key, value), value)
    assert measured == pytest.approx(dial.error, rel=1e-6)


def test_a_looser_target_costs_no_more():
    costs = [choose(*inputs(), target=t, candidates=CANDIDATES).cost for t in (0.01, 0.1, 0.3, 0.9)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_hard_heads_get_more_than_easy_ones():
    dial = choose(*inputs(), target=0.2, candidates=CANDIDATES)
    assert dial.choices[0].cost < dial.choices[-1].cost


def test_a_target_that_nothing_meets_is_said():
    with pytest.raises(ValueError, match=r"no candidate meets the target; add Choice\(1, near=1\)"):
        choose(*inputs(), target=1e-6, candidates=CANDIDATES[:2])


def test_bad_arguments_of_the_dial_are_named():
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"target must be a positive relative error, got 0"):
        choose(query, key, value, target=0)
    with pytest.raises(ValueError, match=r"query has 2 heads, but the dial was set for 3"):
        choose(query, key, value, candidates=CANDIDATES)(*(x[:, :2] for x in (query, key, value)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "small"}, r"target must be a positive relative error, got 'small'"),
        ({"samples": 0}, r"samples must be a whole number, 1 or more, got 0"),
        ({"length": 0}, r"length must be a whole number, 1 or more, got 0"),
        ({"candidates": ()}, r"candidates must be a sequence of Choice, at least one, got \(\)"),
        ({"candidates": [4]}, r"candidates must be a sequence of Choice, at least one, got \[4\]"),
    ],
)
def test_what_the_dial_cannot_measure_with_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        choose(*inputs(), **options)


def test_the_dial_refuses_tokens_that_are_no_numbers_and_grouped_heads():
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"must be finite"):
        choose(query * float("nan"), key, value)
    dial = choose(query, key, value, target=0.5)
    with pytest.raises(ValueError, match=r"query has 3 heads and key 1"):
        dial(query, key[:, :1], value[:, :1])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"clusters": 0}, ValueError, r"clusters must be at least 1"),
        ({"clusters": (2, 2)}, TypeError, r"clusters of a Choice must be an int or KMeans, got tuple"),
        ({"clusters": 4, "near": -1}, ValueError, r"near must be a number"),
        ({"clusters": 4, "near": "neighbours"}, ValueError, r"near of a Choice must be a number"),
        ({"clusters": 4, "rank": "size"}, ValueError, r"rank must be one of"),
        ({"clusters": 4, "closure": "cosh"}, ValueError, r"closure must be one of"),
        ({"clusters": 4, "response": "all"}, ValueError, r"response must be None"),
    ],
    ids=str,
)
def test_a_choice_that_attention_would_refuse_is_refused_when_it_is_made(options, kind, message):
    with pytest.raises(kind, match=message):
        Choice(**options)


def test_values_that_are_all_alike_have_no_error():
    query, key, value = inputs()
    assert choose(query, key, torch.ones_like(value)).error == 0


def test_near_tokens_are_counted():
    query, key, value = tokens(24, 24)
    assert near_tokens(query, key, value, clusters=4, near=2).tolist() == pytest.approx([12, 12])
    assert near_tokens(query, key, value, clusters=4, near=9).tolist() == [24, 24]
    ids = torch.tensor([0] * 20 + [1] * 4)
    heavy = near_tokens(query * 0, key, value, clusters=ids, near=1)  # without logits the larger cluster is heavier
    assert heavy.tolist() == pytest.approx([20, 20])


def test_multiply_adds_are_those_of_the_page():
    L, D, E, K = 1000, 8, 4, 10
    assert softmax_multiply_adds(L, D, E) == L * L * (D + E)
    far = K * D + K * D + K * E + K * D * E
    assert multiply_adds(L, D, E, K) == L * (far + D + D * E)
    assert multiply_adds(L, D, E, K, near_tokens=50) - multiply_adds(L, D, E, K) == L * 50 * (D + E)
    assert multiply_adds(L, D, E, K, response=0) == L * (K * (2 * D + E) + D)
    search = KMeans(K, iterations=4, sample=2)
    assert multiply_adds(L, D, E, K, kmeans=search) - multiply_adds(L, D, E, K) == L * D * D + 3 * L * K * D


def test_what_the_target_leaves_over_is_spent():
    # By price per error both heads take the exact candidate; one of them can do without.
    error = torch.tensor([[4.0, 4.0], [3.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
    cost = torch.tensor([[0.1, 0.1], [0.9, 0.8], [1.0, 1.0]], dtype=torch.float64)
    which = cheapest(error, cost, torch.tensor(3.5, dtype=torch.float64))
    assert sorted(which.tolist()) == [1, 2]
    assert cost.gather(0, which[None]).sum() == 1.8


@pytest.mark.parametrize("seed", range(5))
def test_choices_stay_within_the_target_and_none_could_be_cheaper_alone(seed):
    generator = torch.Generator().manual_seed(seed)
    error, cost = torch.rand(2, 9, 6, generator=generator, dtype=torch.float64)
    allowed = error.min(0).values.sum() + 0.7
    which, heads = cheapest(error, cost, allowed), torch.arange(6)
    left = allowed - error[which, heads].sum()
    assert left >= 0
    assert not ((cost < cost[which, heads]) & (error - error[which, heads] <= left)).any()
