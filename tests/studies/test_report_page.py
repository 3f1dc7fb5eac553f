"""The report: one file, no network, every number from the results."""

import copy
import html
import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest

from cumulant.studies import figures, report
from cumulant.studies.cumulant_vit import CLAIM
from cumulant.studies.outcome import confused, origins, outcome
from cumulant.studies.plan import Run
from cumulant.studies.report import render


@pytest.fixture(scope="module")
def page(study):
    return render(study[1])


def without_plotly(page):
    scripts = re.findall(r"<script>.*?</script>", page, flags=re.DOTALL)
    return page.replace(max(scripts, key=len), "")


def test_the_page_is_one_file_that_fetches_nothing(page):
    own = without_plotly(page)
    assert len(re.findall(r"plotly\.js v\d", page)) == 1
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)""", own)
    assert "@import" not in own
    assert "fetch(" not in own


def test_the_page_shows_the_accuracies_of_the_results(study, page):
    for row in study[1]["summary"]:
        assert f"<td>{100 * row['mean']:.2f}</td>" in page


def test_the_page_says_what_the_verdict_says(study, page):
    words = study[1]["verdict"]
    text = html.unescape(page)
    for sentence in (words["claim_text"], words["ordering"], words["control_text"]):
        assert sentence in text


def test_command_versions_machine_and_recipe_are_on_the_page(study, page):
    results = study[1]
    text = html.unescape(page.replace("<span>", "").replace("</span>", ""))
    (origin,) = results["origins"]
    assert html.unescape(results["provenance"]["command"]) in text
    assert f"torch {results['provenance']['versions']['torch']}" in text
    assert f"batch_size {results['recipe']['batch_size']}" in text
    for word in (origin["source"], origin["device"], "6 runs from"):
        assert word in text


def test_the_recipe_is_written_for_reading():
    recipe = {"lr": 0.002, "mean": [0.3, 0.4, 0.5], "augmentation": {"crop_scale": [0.5, 1.0], "flip": 0.5}}
    assert report.listed(recipe) == "lr 0.002, mean 0.3 0.4 0.5, augmentation (crop_scale 0.5 to 1.0, flip 0.5)"


def test_every_figure_is_one_that_plotly_accepts(study, page):
    found = figures.figures(study[1])
    assert {"loss-curves", "accuracy-curves", "class-accuracy", "confusion"} <= set(found)
    for place, figure in found.items():
        go.Figure(figure)
        assert f'id="{place}"' in page


def test_training_speed_and_every_class_are_on_the_page(study, page):
    results = study[1]
    for row in results["summary"]:
        assert f"<td>{row['items_per_second']:,.0f}</td>" in page
    for share in results["per_class"]["cumulant3"]:
        assert f"<td>{100 * share:.1f}</td>" in page


def test_seconds_an_epoch_are_shown_with_the_quickest_and_the_slowest_run(study, page):
    """Softmax and its own control differ by what else the machine does: without the range that reads as a result."""
    for row in study[1]["summary"]:
        low, high = row["epoch_range"]
        assert low <= row["epoch_seconds"] <= high
        assert f"<td>{row['epoch_seconds']:.2f} ({low:.2f} .. {high:.2f})</td>" in page


def test_every_order_has_one_error_ring_and_none_lies_on_another(study):
    figure = figures.error_by_order(study[1])
    rings = [one for one in figure["data"] if one.get("marker", {}).get("symbol") == "circle-open"]
    assert len(rings) == len(study[1]["error"]["relative_error"])
    assert all(len(ring["x"]) == 1 for ring in rings)
    assert len({ring["x"][0] for ring in rings}) == len(rings)


def test_the_page_carries_maps_of_several_layers_and_heads(study, page):
    maps = json.loads(re.search(r"const page = (.*?);</script>", page, re.DOTALL)[1])["maps"]["models"]
    assert set(maps) == {"softmax", "cumulant3"}
    one = maps["cumulant3"]
    assert len(one["items"]) == 6
    assert np.array(one["scores"]).shape == (6, len(one["layers"]), 2, 17)


@pytest.mark.parametrize(
    ("prefixes", "words"),
    [
        ((1, 1), ["no place in the image, is not drawn", "One extra, the class token, collects"]),
        ((1, 0), ["not all of these models have", "from the mean of the others"]),
        ((0, 0), ["The answer is read from their mean"]),
        ((None, None), ["share of the class token"]),
    ],
    ids=["all", "some", "none", "older record"],
)
def test_the_page_speaks_of_a_class_token_where_the_models_have_one(study, prefixes, words):
    results = copy.deepcopy(study[1])
    for model, prefix in zip(results["maps"]["models"].values(), prefixes, strict=True):
        model.update(prefix=prefix, layers=[1, 2], depth=2)
        if prefix is None:
            del model["prefix"]
    own = " ".join(re.sub(r"<script>.*?</script>", "", render(results), flags=re.DOTALL).split())
    assert all(word in own for word in words)
    assert ("class token" in own) == (prefixes != (0, 0))


def test_text_in_the_results_cannot_become_markup(study):
    results = copy.deepcopy(study[1])
    results["provenance"]["command"] = "<img src=x onerror=alert(1)>"
    results["classes"][3] = "</script><script>alert(2)</script>"
    own = render(results)
    assert "<img src=x" not in own
    assert "<script>alert(2)" not in own


def test_class_names_in_figures_are_shown_as_they_are(study):
    results = copy.deepcopy(study[1])
    results["classes"][:2] = ["<unk>, unknown", ", none"]
    ticks = figures.figures(results)["class-accuracy"]["layout"]["xaxis"]["ticktext"]
    assert ticks[:2] == ["&lt;unk&gt;", ", none"], "plotly would take <unk> for a tag and leave it out"


def test_records_of_other_data_of_the_same_name_are_refused(study):
    runs = copy.deepcopy(study[1]["runs"])
    runs[1]["data"]["classes"][3] = "another"
    plan = [Run(run["configuration"], run["seed"], run["role"], run["fingerprint"]) for run in runs]
    with pytest.raises(ValueError, match=r"different data named digits: softmax, seed 0 has 10 classes, .*not all"):
        outcome(CLAIM, runs, plan, study[1]["attention"], "softmax", {})


def test_a_study_without_softmax_with_one_seed_and_nothing_measured_still_has_a_page(study):
    results = copy.deepcopy(study[1])
    only = [
        {**run, "trained": []} for run in results["runs"] if run["configuration"] == "cumulant3" and run["seed"] == 0
    ]
    plan = [Run(run["configuration"], run["seed"], run["role"], run["fingerprint"]) for run in only]
    results |= outcome(CLAIM, only, plan, ["cumulant3"], "cumulant3", {})
    results |= {"error": None, "scaling": None}
    own = without_plotly(render(results))
    assert "cumulant3" in own
    assert 'id="cost"' not in own
    assert 'id="map-grid"' not in own


def test_runs_from_different_places_are_told_apart(study):
    runs = copy.deepcopy(study[1]["runs"])
    runs[0]["device"] = "another machine"
    runs[1]["source"] = "0123456789ab"
    assert sorted(one["runs"] for one in origins(runs)) == [1, 1, 4]


def test_the_most_frequent_confusions_come_first():
    matrix = [[8, 2, 0], [0, 5, 5], [1, 0, 9]]
    found = [(one["label"], one["predicted"], one["share"]) for one in confused(matrix, ["a", "b", "c"])]
    assert found == [("b", "c", 0.5), ("a", "b", 0.2), ("c", "a", 0.1)]


def test_many_classes_are_ordered_by_accuracy_and_named_briefly(study):
    results = copy.deepcopy(study[1])
    count = 30
    results["classes"] = [f"class {i}, a synonym" for i in range(count)]
    shares = [i / count for i in range(count)]
    matrix = [[1 if i == j else 0 for j in range(count)] for i in range(count)]
    for name in results["attention"]:
        results["per_class"][name], results["confusion"][name] = shares, matrix
    drawn = figures.figures(results)
    assert drawn["class-accuracy"]["data"][0]["text"][0] == "class 29"
    assert "text" not in drawn["confusion"]["data"][0]
    go.Figure(drawn["confusion"])


def test_results_are_plain_json_without_nan(study):
    json.dumps(study[1], allow_nan=False)


def spread(low, high):
    use = {"mean": (low + high) / 2, "low": low, "high": high}
    return {"tokens_used": use, "negative_mass": {"mean": 0.0, "low": 0.0, "high": 0.0}, "tokens": 17}


@pytest.mark.parametrize(
    ("cumulant", "words"), [((5, 6), "seen here"), ((14, 16), "the opposite"), ((8, 11), "not clear")]
)
def test_what_is_said_of_local_maps_follows_from_the_numbers(cumulant, words):
    locality = {"linear": spread(10, 12), "cumulant2": spread(*cumulant)}
    assert words in " ".join(report.about_maps({"maps": {"locality": locality, "tokens": 17}}))


@pytest.mark.parametrize("disturbed", [False, True])
def test_ratios_of_cost_are_taken_at_the_longest_common_length(disturbed):
    def row(name, length, seconds):
        return {"name": name, "length": length, "seconds": seconds, "seconds_low": seconds / 2}

    measured = [
        row("softmax", 64, 1.0),
        row("softmax", 128, 4.0),
        row("cumulant2", 64, 2.0),
        row("cumulant2", 128, 2.0),
    ]
    measured.append(row("cumulant2", 256, 4.0))
    cost = {"measurements": measured, "given_up": {"softmax": "slow"}, "disturbed": disturbed, "time_shown": "seconds"}
    text = " ".join(report.about_cost({"scaling": cost}))
    assert "At L = 128 softmax takes 2 times as long as cumulant2" in text
    assert "Up to L = 64 softmax is the quicker one" in text
    assert "softmax (slow)" in text
    assert ("quickest calls" in text) == disturbed


def test_one_slow_call_far_out_does_not_move_the_length_up_to_which_softmax_is_quicker():
    times = {"softmax": (1.0, 2.0, 4.0, 8.0), "cumulant3": (2.0, 1.0, 9.0, 2.0)}
    measured = [
        {"name": name, "length": length, "seconds": seconds}
        for name, each in times.items()
        for length, seconds in zip((64, 128, 256, 512), each, strict=True)
    ]
    cost = {"measurements": measured, "given_up": {}, "disturbed": False, "time_shown": "seconds"}
    assert "Up to L = 64 softmax is the quicker one against cumulant3." in report.about_cost({"scaling": cost})


def test_few_epochs_have_no_marks_between_them(study):
    axes = [figures.figures(study[1])[name]["layout"]["xaxis"] for name in ("loss-curves", "accuracy-curves")]
    assert [axis["dtick"] for axis in axes] == [1, 1]
    many = copy.deepcopy(study[1])
    many["runs"][0]["loss"] *= 40
    assert "dtick" not in figures.curves(many, "loss", "loss")["layout"]["xaxis"]


def test_a_mechanism_given_up_early_on_a_busy_machine_is_compared_as_far_as_it_was_measured():
    measured = [{"name": name, "length": 64, "seconds": 1.0, "seconds_low": 1.0} for name in ("softmax", "cumulant3")]
    measured.append({"name": "softmax", "length": 128, "seconds": 4.0, "seconds_low": 4.0})
    cost = {"measurements": measured, "given_up": {"cumulant3": "slow"}, "disturbed": False, "time_shown": "seconds"}
    assert "At L = 64 softmax takes 1 times as long as cumulant3" in " ".join(report.about_cost({"scaling": cost}))
