"""Error beside cost: known errors, a front that deserves the name, groups of a trained model."""

import json

import pytest
import torch

from cumulant.bench.error import logit_size
from cumulant.bench.pareto import error_against_cost, mark_front, random_tokens, table


@pytest.fixture(scope="module")
def everything():
    layers = [random_tokens(size, length=24, dim=8, seed=1) for size in (0.5, 1.5)]
    captured = {f"blocks.{i}.attn": x for i, x in enumerate(layers)}
    return error_against_cost(sizes=(0.1, 1.0), length=24, dim=8, captured=captured, captured_from="a model")


def row(case, name):
    return next(one for one in case["rows"] if one["variant"] == name)


def test_random_tokens_have_the_size_of_logits_that_was_asked_for():
    tokens = random_tokens(1.7, length=40, dim=8)
    assert logit_size(tokens.query, tokens.key) == pytest.approx(1.7)


def test_softmax_has_no_error_and_the_mean_of_the_values_has_one(everything):
    for case in everything["cases"]:
        assert row(case, "softmax")["centred"] == pytest.approx(0, abs=1e-9)
        assert row(case, "cumulant1")["centred"] == pytest.approx(1)
        assert row(case, "softmax")["of_softmax"] == 1


def test_small_logits_are_where_the_orders_are_worth_their_cost(everything):
    small = {name: row(everything["cases"][0], name)["centred"] for name in ("cumulant2", "cumulant3+full")}
    assert small["cumulant3+full"] < 0.1 * small["cumulant2"] < 0.02


def test_nothing_on_the_front_is_beaten_and_everything_off_it_is(everything):
    for group in everything["groups"]:
        rows = [one for one in group["rows"] if one["centred"] < 0.999 and one["of_softmax"] < 1]
        for one in rows:
            beaten = any(o["total"] <= one["total"] and o["centred"] < one["centred"] for o in rows)
            assert one["front"] != beaten


def test_equal_cost_leaves_only_the_closer_one_on_the_front():
    rows = [{"variant": v, "total": 5, "of_softmax": 0.5, "centred": e} for v, e in (("a", 0.3), ("b", 0.2))]
    mark_front(rows)
    assert [one["front"] for one in rows] == [False, True]


def test_layers_of_a_trained_model_are_one_group_by_the_mean_square(everything):
    first, second = (row(case, "cumulant2")["centred"] for case in everything["cases"][2:])
    group = everything["groups"][-1]
    assert group["name"] == "trained model, 2 layers"
    assert row(group, "cumulant2")["centred"] == pytest.approx(((first**2 + second**2) / 2) ** 0.5)


def test_the_table_has_a_line_for_every_variant(everything):
    lines = table(everything).splitlines()[2:]
    assert {line.split()[0] for line in lines} == set(everything["variants"])
    costs = [float(line.split()[2].replace(",", "")) for line in lines]
    assert costs == sorted(costs)


def test_a_mechanism_that_cannot_take_the_tokens_says_why_and_the_others_are_measured():
    result = error_against_cost(("hierarchical+levels=-1", "linear"), sizes=(1.0,), length=12, dim=4)
    broken, sound = result["cases"][0]["rows"]
    assert "levels must not be negative" in broken["note"]
    assert sound["centred"] > 0
    assert "levels must not be negative" in table(result)


def test_causal_rows_are_compared_with_causal_softmax():
    result = error_against_cost(("cumulant1", "cumulant2"), sizes=(0.1,), length=12, dim=4, causal=True)
    assert row(result["cases"][0], "cumulant1")["centred"] == pytest.approx(1)
    assert row(result["cases"][0], "cumulant2")["centred"] < 0.2


def test_masked_keys_take_no_part():
    tokens = random_tokens(0.5, length=10, dim=4)
    masked = tokens._replace(key_mask=torch.arange(10).expand(2, 10) < 6)
    key, value = (x[..., :6, :] for x in (tokens.key, tokens.value))
    result, cut = (
        error_against_cost(("cumulant2",), sizes=(), captured={"layer": call})
        for call in (masked, tokens._replace(key=key, value=value))
    )
    assert row(result["cases"][0], "cumulant2")["centred"] == pytest.approx(
        row(cut["cases"][0], "cumulant2")["centred"]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [({"sizes": (0.0,)}, "sizes must be positive and at most 1e.100, got 0"),
     ({"sizes": (float("inf"),)}, "sizes must be positive and at most 1e.100, got inf"),
     ({"length": 0}, "length must be at least 1, got 0"),
     ({"sizes": ()}, "nothing to measure")],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        error_against_cost(("linear",), **given)


def test_an_error_too_large_for_float64_is_a_note_and_no_number():
    result = error_against_cost(("cumulant3",), sizes=(1e90,), length=8, dim=4)
    assert row(result["cases"][0], "cumulant3")["note"] == "not finite"
    assert row(result["cases"][0], "cumulant3")["centred"] is None
    json.dumps(result, allow_nan=False)


def test_a_word_where_a_number_belongs_is_told_and_the_others_are_measured():
    result = error_against_cost(("focused_linear+power=much", "linear"), sizes=(1.0,), length=8, dim=4)
    wrong, right = result["cases"][0]["rows"]
    assert wrong["note"]
    assert right["centred"] > 0


def test_the_work_of_a_model_is_that_of_all_its_layers():
    """As in a factorised video model, whose second encoder sees other tokens than the first."""
    layers = {f"{length} tokens": random_tokens(1.0, length=length, dim=4) for length in (8, 32)}
    result = error_against_cost(("linear",), sizes=(), captured=layers)
    own = [row(case, "linear")["total"] for case in result["cases"]]
    softmax = [total / row(case, "linear")["of_softmax"] for total, case in zip(own, result["cases"], strict=True)]
    assert row(result["groups"][0], "linear")["total"] == round(sum(own) / 2)
    assert row(result["groups"][0], "linear")["of_softmax"] == pytest.approx(sum(own) / sum(softmax))
