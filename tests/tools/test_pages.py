"""The documentation says what the results say, and nothing where there are none."""

from pathlib import Path

import pytest

from tools import pages

ROOT = Path(__file__).parents[2]
ORIGIN = {
    "commit": "abc", "date": "2026-11-15", "versions": {"python": "3", "torch": "2"}, "machine": {"processor": "a CPU"},
}  # fmt: skip


@pytest.mark.parametrize("page", list(pages.PAGES))
def test_the_page_in_the_repository_is_the_one_its_results_give(page):
    """After new results: python -m tools.pages"""
    assert (ROOT / page).read_text(encoding="utf-8") == pages.written(ROOT)[page]


def test_what_has_no_results_is_said_to_be_not_run(tmp_path):
    for page, names in pages.PAGES.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("\n".join(f"<!-- results: {name} -->\n<!-- end -->" for name in names))
    written = pages.written(tmp_path)
    assert written["docs/lab/benchmarks.md"].count("Not run yet.") == len(pages.PAGES["docs/lab/benchmarks.md"])
    assert "not run yet" in written["docs/zoo/orderings.md"]
    assert "confirmed" not in written["docs/zoo/orderings.md"]


def test_a_study_shows_verdicts_tables_and_where_it_was_made():
    from tools import studies_page

    said = {"text": "a | b", "found": "1", "bounds": "> 0", "source": "new", "why": ""}
    result = {
        "statements": [{**said, "verdict": "confirmed"}, {**said, "verdict": "refuted", "why": "of chance"}],
        "tables": [{"title": "T", "head": ["", "x"], "rows": [["softmax", "2"]]}],
        "missing": [], "settings": {"seeds": 3},
        "origins": [{"runs": 6, "commit": "abc", "source": None, "device": "a CPU", "versions": {}, "dates": []}],
    }  # fmt: skip
    block = studies_page.block(result)
    assert "6 runs, 3 seeds; 1 / 1 / 0 statements" in block
    assert "| refuted | 1 | > 0 | a \\| b (of chance) | new |" in block
    assert "| softmax | 2 |" in block
    assert "6 runs: commit abc; a CPU" in block
    overview = studies_page.overview({"study_pavlovian": result})
    assert "[pavlovian](pavlovian.md)" in overview
    assert overview.count("1 / 1 / 0") == 1


def test_rows_of_two_visits_each_have_their_commit():
    rows = [{"case": "linear", "wrong": "off", "commit": "old", "date": "2026-01-01"}, {"case": "mala", "wrong": "off"}]
    first, second = sorted(pages.gpu_block({**ORIGIN, "rows": rows}).split("\n\n")[-2:])
    assert first.startswith("Commit abc")
    assert first.endswith("Measured then: mala.")
    assert second.startswith("Commit old")
    assert second.endswith("Measured then: linear.")


def test_a_case_that_is_wrong_on_the_gpu_shows_no_time():
    times = {"ours": [1.0, 1, 1], "ours, eager": [2.0, 2, 2], "public": [3.0, 3, 3]}
    right = {
        "case": "linear", "wrong": "", "milliseconds": {"forward": times, "both": times},
        "ratio": {"forward": 3.0, "both": 3.0}, "eager_ratio": {"forward": 1.5, "both": 1.5},
        "peak_bytes": {"both": {"ours": 2**20, "public": 2**21}}, "error": {"out": 1e-3}, "public_error": {"out": 2e-3},
    }  # fmt: skip
    block = pages.gpu_block({**ORIGIN, "rows": [right, {"case": "mala", "wrong": "out off by 1"}]})
    assert "| linear | 1.000 / 3.000 | **3.00** (-) |" in block
    assert "| mala | not timed: out off by 1 |" in block
    assert "Commit abc, a CPU" in block


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [([1.0, 1.1], [1.2, 1.3], "confirmed"), ([1.0, 1.25], [1.2, 1.3], "not resolved"), ([2.0], [1.0], "refuted")],
)
def test_an_ordering_is_judged_by_all_runs_of_both_sides(low, high, word):
    judge = pages._apart("language", "a", "b")
    assert judge({"language": {"a": low, "b": high}}).startswith(word)


def test_claims_about_classification_come_from_the_training_runs():
    claim = {"claim": "flow > linear", "outcome": "confirmed", "difference": 2.5}
    trained = {"claims": [claim], "control": {"spread": 0.4}}
    block = pages.orderings_block({"zoo_train_tiny-imagenet-100": trained})
    row = next(line for line in block.splitlines() if "flow > linear in classification" in line)
    assert row.endswith("| not run yet | confirmed (+2.50, A/A 0.40) |")


def test_every_claim_of_the_orderings_is_one_that_training_judges():
    from cumulant.studies.mechanisms import CLAIMS

    known = {f"{above} {'>=' if tie else '>'} {below}" for above, below, tie in CLAIMS}
    assert {judge for *_, judge in pages.ORDERINGS if isinstance(judge, str) and judge} <= known
