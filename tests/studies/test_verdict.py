"""The words of the summary follow from the numbers, and only from them."""

import re

import pytest
from scipy.stats import ttest_ind

from cumulant.studies.cumulant_vit import CLAIM
from cumulant.studies.verdict import Claim, compare, describe, judge, ordering, pairs, summarise, verdict

FAR_APART = {
    "softmax": [0.990, 0.991, 0.989, 0.990],
    "cumulant3": [0.970, 0.971, 0.969, 0.970],
    "cumulant2": [0.969, 0.970, 0.970, 0.969],
    "linear": [0.900, 0.901, 0.902, 0.899],
}


def changed(**accuracies):
    return {**FAR_APART, **accuracies}


def test_the_interval_is_that_of_welchs_test():
    a, b = [0.97, 0.98, 0.96, 0.975], [0.95, 0.97, 0.96]
    result = compare("a", "b", {"a": a, "b": b})
    expected = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (result.low, result.high) == pytest.approx((100 * expected.low, 100 * expected.high))


def test_a_clear_ordering_reproduces_the_claim_with_a_tie_in_the_middle():
    assert judge(CLAIM, FAR_APART, 0.0)[0] == "reproduced"
    assert ordering(FAR_APART, 0.0) == "softmax > cumulant3 ≈ cumulant2 > linear"


def test_ties_alone_do_not_reproduce_a_claim():
    ties = Claim((("cumulant3", "cumulant2", True), ("cumulant2", "linear", True)))
    same = {name: [0.97, 0.98, 0.96] for name in ("cumulant3", "cumulant2", "linear")}
    assert judge(ties, same, 0.0)[0] == "undecided"
    keyword, sentence, _ = judge(ties, FAR_APART, 0.0)
    assert keyword == "partly"
    assert "cumulant2 >= linear is seen, cumulant3 >= cumulant2 is not" in sentence


def test_a_pair_that_differs_across_neighbours_that_do_not_is_named():
    steps = {"a": [0.98, 0.99, 1.0], "b": [0.96, 0.98, 0.97], "c": [0.94, 0.95, 0.96]}
    assert ordering(steps, 0.0) == "a ≈ b ≈ c, yet a > c"
    assert ordering({**steps, "c": [0.90, 0.91, 0.90]}, 0.0) == "a ≈ b > c"


def test_of_many_pairs_that_differ_across_neighbours_the_first_are_named():
    found = ordering({f"a{i}": [0.9 - 0.004 * i, 0.91 - 0.004 * i, 0.92 - 0.004 * i] for i in range(9)}, 0.0)
    assert found.startswith("a0 ≈ a1 ≈ a2")
    assert found.count(" > ") == 3
    assert re.search(r" and so in \d+ more pairs$", found)


def test_linear_above_cumulant_contradicts_the_claim():
    keyword, sentence, _ = judge(CLAIM, changed(linear=[0.980, 0.981, 0.979, 0.980]), 0.0)
    assert keyword == "contradicted"
    assert "linear came out above cumulant2" in sentence


def test_the_second_order_above_the_third_contradicts_the_claim():
    assert judge(CLAIM, changed(cumulant2=[0.985, 0.985, 0.986, 0.985]), 0.0)[0] == "contradicted"


def test_one_link_in_the_noise_reproduces_only_in_part():
    keyword, sentence, _ = judge(CLAIM, changed(softmax=[0.97, 0.972, 0.968, 0.97]), 0.0)
    assert keyword == "partly"
    assert "cumulant2 > linear is seen" in sentence
    assert "softmax > cumulant3 is not" in sentence


def test_the_same_numbers_everywhere_decide_nothing():
    noise = [0.97, 0.98, 0.96]
    assert judge(CLAIM, dict.fromkeys(FAR_APART, noise), 0.0)[0] == "undecided"
    assert ">" not in ordering(dict.fromkeys(FAR_APART, noise), 0.0)


def test_ends_that_differ_while_no_neighbours_do_are_not_said_to_be_within_chance():
    steps = {"softmax": 0.98, "cumulant3": 0.97, "cumulant2": 0.96, "linear": 0.95}
    accuracies = {name: [mean - 0.01, mean, mean + 0.01] for name, mean in steps.items()}
    keyword, sentence, _ = judge(CLAIM, accuracies, 0.0)
    assert keyword == "undecided"
    assert "softmax > linear" in ordering(accuracies, 0.0)
    assert "from one mechanism to the next the differences are within chance" in sentence


def test_a_difference_smaller_than_that_of_the_control_does_not_count():
    assert compare("softmax", "cumulant3", FAR_APART, control_gap=1.0).outcome == "above"
    assert compare("softmax", "cumulant3", FAR_APART, control_gap=3.0).outcome == "level"


def test_of_one_run_the_direction_is_told_and_that_it_may_be_chance():
    result = compare("linear", "softmax", {"linear": [0.5], "softmax": [0.55, 0.56]})
    assert describe(result) == "linear against softmax: −5.50 points, but a single run says nothing about chance"


def test_one_seed_never_decides():
    single = {name: values[:1] for name, values in FAR_APART.items()}
    words = verdict(CLAIM, single, [0.9], "softmax")
    assert words["claim"] == "undecided"
    assert "one seed" in words["control_text"]


def test_a_missing_mechanism_is_named():
    keyword, sentence, _ = judge(CLAIM, {"softmax": [0.9, 0.9], "linear": [0.8, 0.8]}, 0.0)
    assert keyword == "untested"
    assert "cumulant2, cumulant3" in sentence


def test_a_control_that_differs_beyond_chance_is_a_warning():
    fine = verdict(CLAIM, FAR_APART, [0.991, 0.989, 0.990, 0.990], "softmax")
    odd = verdict(CLAIM, FAR_APART, [0.950, 0.951, 0.949, 0.950], "softmax")
    assert "doubt" not in fine["control_text"]
    assert "doubt" in odd["control_text"]
    assert odd["control_gap"] == pytest.approx(4.0)


def test_without_a_control_that_is_said_and_seeds_alone_decide():
    words = verdict(CLAIM, FAR_APART, [], "softmax")
    assert words["control_text"].startswith("No control was run")
    assert words["claim"] == "reproduced"


def test_extras_are_compared_with_the_plain_mechanism_and_with_softmax_with_the_same_extras():
    names = ("softmax", "cumulant3", "cumulant3+v_conv+gate", "softmax+gate+v_conv", "cumulant3+full")
    found = pairs(CLAIM, {name: [0.5, 0.6] for name in names}, 0.0)
    assert [(one.first, one.second) for one in found] == [
        ("cumulant3+v_conv+gate", "cumulant3"),
        ("cumulant3+v_conv+gate", "softmax+gate+v_conv"),
        ("softmax+gate+v_conv", "softmax"),
        ("cumulant3+full", "cumulant3"),
    ]


def test_a_mechanism_that_the_paper_does_not_speak_of_is_compared_with_softmax():
    names = ("softmax", "linear", "cluster4", "cluster4+variance=full")
    found = pairs(CLAIM, {name: [0.5, 0.6] for name in names}, 0.0)
    assert [(one.first, one.second) for one in found] == [
        ("cluster4", "softmax"),
        ("cluster4+variance=full", "cluster4"),
        ("cluster4+variance=full", "softmax"),
    ]


def test_a_summary_row_holds_mean_spread_and_extremes():
    records = [
        {
            "configuration": "softmax",
            "role": "compared",
            "seed": i,
            "accuracy": a,
            "top5": 1.0,
            "loss": [2.0, 1 - a],
            "parameters": 10,
            "seconds": 2.0,
            "epoch_seconds": 0.5,
            "items_per_epoch": 100,
            "device": "a machine",
        }
        for i, a in enumerate((0.9, 1.0))
    ]
    (row,) = summarise(records)
    assert row["mean"] == pytest.approx(0.95)
    assert row["std"] == pytest.approx(0.0707, abs=1e-4)
    assert row["loss"] == pytest.approx(0.05)
    assert (row["low"], row["high"], row["seeds"]) == (0.9, 1.0, [0, 1])
    assert (row["epoch_seconds"], row["items_per_second"]) == (0.5, 200)
    assert summarise(records[:1])[0]["std"] is None


def test_one_run_each_gives_an_order_and_no_verdict_on_chance():
    found = verdict(
        CLAIM, {"softmax": [0.5], "linear": [0.51], "cumulant2": [0.52], "cumulant3": [0.53]}, [], "softmax"
    )
    assert found["ordering"] == "cumulant3, cumulant2, linear, softmax from best to worst in one run each"
    assert found["claim"] == "undecided"
    assert "chance cannot be judged" in found["claim_text"]
