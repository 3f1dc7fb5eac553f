"""CAB's figures, held to the published ones."""

import dataclasses

import pytest

from cumulant.bench.cab import (
    LENGTHS,
    NS_CONSTANTS,
    compositional_index,
    constants_of,
    efficiency_length,
    measured_crossing,
    task_scores,
)

METRICS = [metric for task in NS_CONSTANTS.values() for metric in task]
VANILLA = dict(
    zip(METRICS, (3.4748, 1.9735, 4.0953, 2.1985, 34.61, 6.35, 31.66, 23.18, 0.675, 3.42), strict=True)
)  # fmt: skip
MEMORY = (81, 265, 952, 3604, 14020, 55300), (42, 80, 156, 308, 612, 1220)
TIME = (0.472, 0.628, 0.721, 0.981, 3.67, 18.437), (0.648, 0.59, 0.602, 0.91, 1.006, 1.509)


def test_the_memory_efficiency_length_of_abc_is_the_published_one():
    assert efficiency_length(LENGTHS, *MEMORY).length == pytest.approx(69.5, rel=5e-3)


def test_the_time_efficiency_length_of_abc_is_the_published_one():
    assert efficiency_length(LENGTHS, *TIME, drop_first=True).length == pytest.approx(1877.3, rel=5e-3)


@pytest.mark.parametrize(("task", "score"), [("TTS", -0.3007), ("Sum", -0.2491), ("SR", -0.0766), ("MLM", 0.5276)])
def test_the_task_scores_of_vanilla_attention_are_the_published_ones(task, score):
    assert task_scores(VANILLA)[task] == pytest.approx(score, abs=1e-3)


def test_the_compositional_index_of_vanilla_attention_is_the_published_one():
    assert compositional_index(VANILLA) == pytest.approx(-0.0247, abs=1e-3)


def test_the_unit_of_a_metric_does_not_matter():
    thousandfold = {
        task: {m: (sign, 1000 * mu, 1000 * sigma) for m, (sign, mu, sigma) in metrics.items()}
        for task, metrics in NS_CONSTANTS.items()
    }
    scores = {metric: 1000 * value for metric, value in VANILLA.items()}
    assert compositional_index(scores, thousandfold) == pytest.approx(compositional_index(VANILLA))


def test_a_missing_metric_is_named():
    with pytest.raises(ValueError, match=r"exactly the metrics FS2-MCD.*got R1"):
        task_scores({"R1": 34.6})


def test_constants_of_own_runs_give_the_set_a_mean_index_of_zero():
    table = {"a": {"up": 1.0, "down": 5.0}, "b": {"up": 2.0, "down": 3.0}, "c": {"up": 6.0, "down": 1.0}}
    constants = constants_of(table, {"task": {"up": 1, "down": -1}})
    each = {name: compositional_index(scores, constants) for name, scores in table.items()}
    assert sum(each.values()) == pytest.approx(0)
    assert each["a"] < each["b"] < each["c"]


def test_exact_costs_cross_exactly_where_they_are_equal():
    crossing = efficiency_length(LENGTHS, [3e-6 * n**2 for n in LENGTHS], [9e-4 * n for n in LENGTHS])
    assert crossing.length == pytest.approx(300)
    assert crossing.r2_linear == pytest.approx(1)
    assert crossing.r2_quadratic == pytest.approx(1)


def test_a_crossing_beyond_the_measured_lengths_says_so():
    crossing = efficiency_length(LENGTHS, [n**2 for n in LENGTHS], [20_000 * n for n in LENGTHS])
    assert crossing.length == pytest.approx(20_000)
    assert "beyond" in crossing.why


def test_what_is_always_cheaper_has_length_zero():
    assert efficiency_length(LENGTHS, [n**2 + 1e6 for n in LENGTHS], list(LENGTHS)).length == 0


@pytest.mark.parametrize(("slope", "word"), [(1, "slower"), (3, "faster")])
def test_against_a_linear_opponent_there_is_no_crossing_but_growth_is_compared(slope, word):
    crossing = efficiency_length(LENGTHS, [2 * n for n in LENGTHS], [slope * n for n in LENGTHS])
    assert crossing.length is None
    assert word in crossing.why


def test_costs_at_other_lengths_are_fitted_where_they_were_measured():
    whole = efficiency_length(LENGTHS, *MEMORY)
    part = efficiency_length(LENGTHS, MEMORY[0], MEMORY[1][:3], mechanism_lengths=LENGTHS[:3])
    assert dataclasses.asdict(part)["length"] == pytest.approx(whole.length, rel=1e-6)


def test_too_few_lengths_are_refused():
    with pytest.raises(ValueError, match="a parabola needs 3 lengths and a line 2, got 2 and 2"):
        efficiency_length((256, 512), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("own", "crossing"), [((1, 1, 1), 10), ((5, 1, 1), 20), ((1, 5, 1), 40), ((5, 5, 5), None)]
)  # fmt: skip
def test_the_measured_crossing_holds_from_there_on(own, crossing):
    assert measured_crossing((10, 20, 40), (2, 2, 2), own) == crossing


def test_the_order_in_which_lengths_are_given_does_not_matter():
    lengths, softmax, own = [256, 512, 1024, 2048], [1.0, 2.0, 6.0, 20.0], [9.0, 3.5, 4.6, 7.0]
    there = efficiency_length(lengths, softmax, own, drop_first=True)
    back = efficiency_length(lengths[::-1], softmax[::-1], own[::-1], drop_first=True)
    assert back.length == pytest.approx(there.length)
    assert back.linear == pytest.approx(there.linear)
    assert back.why == there.why == ""


def test_a_metric_without_a_spread_is_named():
    with pytest.raises(ValueError, match="BLEU must differ between mechanisms"):
        constants_of({"a": {"BLEU": 1.0}, "b": {"BLEU": 1.0}}, {"task": {"BLEU": 1}})
