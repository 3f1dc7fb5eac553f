"""The report: one file, no network, every number from the results."""

import copy
import html
import json
import re

import plotly.graph_objects as go
import pytest

from cumulant.studies import figures, wording
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


def test_command_versions_and_recipe_are_on_the_page(study, page):
    results = study[1]
    assert results["provenance"]["command"] in page
    assert f"torch {results['provenance']['versions']['torch']}" in page
    assert f"batch_size {results['recipe']['batch_size']}" in page


def test_every_figure_is_one_that_plotly_accepts(study, page):
    for place, figure in figures.figures(study[1]).items():
        go.Figure(figure)
        assert f'id="{place}"' in page


def test_text_in_the_results_cannot_become_markup(study):
    results = copy.deepcopy(study[1])
    results["provenance"]["command"] = "<img src=x onerror=alert(1)>"
    results["maps"]["examples"][0]["label"] = "</script><script>alert(2)</script>"
    own = render(results)
    assert "<img src=x" not in own
    assert "<script>alert(2)" not in own


def test_a_study_without_softmax_or_with_one_seed_still_has_a_page(study):
    results = copy.deepcopy(study[1])
    results["attention"] = ["cumulant3"]
    results["baseline"] = "cumulant3"
    results["runs"] = [run for run in results["runs"] if run["mechanism"] == "cumulant3" and run["seed"] == 0]
    results["runs"].append({**results["runs"][0], "role": "control", "seed": 1})
    results["summary"] = [{**row, "std": None} for row in results["summary"] if row["mechanism"] == "cumulant3"]
    results["verdict"] = {**results["verdict"], "comparisons": [], "claim": "untested"}
    results["maps"]["locality"] = {"cumulant3": results["maps"]["locality"]["cumulant3"]}
    results["error"]["trained"] = []
    results["scaling"]["measurements"] = [m for m in results["scaling"]["measurements"] if m["name"] == "cumulant3"]
    assert "cumulant3" in without_plotly(render(results))


def test_results_are_plain_json_without_nan(study):
    json.dumps(study[1], allow_nan=False)


def spread(low, high):
    use = {"mean": (low + high) / 2, "low": low, "high": high}
    return {"tokens_used": use, "negative_mass": {"mean": 0.0, "low": 0.0, "high": 0.0}}


@pytest.mark.parametrize(
    ("cumulant", "words"), [((5, 6), "seen here"), ((14, 16), "the opposite"), ((8, 11), "not clear")]
)
def test_what_is_said_of_local_maps_follows_from_the_numbers(cumulant, words):
    locality = {"linear": spread(10, 12), "cumulant2": spread(*cumulant)}
    assert words in " ".join(wording.about_maps({"maps": {"locality": locality, "tokens": 17}}))


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
    text = " ".join(wording.about_cost({"scaling": cost}))
    assert "At L = 128 softmax takes 2 times as long as cumulant2" in text
    assert "Up to L = 64 softmax is the quicker one" in text
    assert "softmax (slow)" in text
    assert ("quickest calls" in text) == disturbed
