"""docs/results.md and docs/lab/results.md say what the records say, and nothing where there are none."""

import json
import shutil
import sys
from dataclasses import replace

import pytest

from cumulant.studies.command import Reproduce
from cumulant.studies.cumulant_vit import planned
from cumulant.studies.records import by_name, read_records
from tools import experiments
from tools.experiment_figures import draw
from tools.tables import fill, overview, study_block


def test_a_study_without_records_is_said_to_be_not_run():
    block = study_block(Reproduce(data="cifar10", seeds=1, control=0), {})
    assert "Not run yet: none of 4 runs." in block
    assert "cumulant reproduce --data cifar10 --seeds 1 --control 0" in block
    assert "|" not in block


def test_the_table_holds_mean_spread_verdict_and_origin(study):
    settings, results = study
    block = study_block(settings, by_name(read_records(settings.out / "records")[0]))
    for row in results["summary"]:
        assert f"| {100 * row['mean']:.2f}\u00a0±\u00a0{100 * row['std']:.2f} |" in block
    assert results["verdict"]["ordering"] in block
    assert results["origins"][0]["device"] in block
    assert "Seeds 0, 1; control 1000, 1001." in block
    assert "Not finished" not in block


def test_missing_runs_are_named(study):
    settings, _ = study
    records = by_name(read_records(settings.out / "records")[0])
    gone = planned(settings)[3].key
    block = study_block(settings, {key: value for key, value in records.items() if key != gone})
    assert "Not finished: 5 of 6 runs; missing are 1 of cumulant3." in block


def test_a_run_that_fell_apart_is_said_to_have_diverged(study):
    settings, _ = study
    records = by_name(read_records(settings.out / "records")[0])
    assert "Diverged" not in study_block(settings, records)
    key = planned(settings)[3].key
    fallen = {**records[key], "best_accuracy": 0.6, "accuracy": 0.25}
    block = study_block(settings, records | {key: fallen})
    assert "Diverged: cumulant3, seed 1 reached 60.0 % and fell to 25.0 %:" in block


def test_the_overview_names_the_baseline_and_the_best_of_the_others(study):
    settings, results = study
    means = {row["configuration"]: row for row in results["summary"] if row["role"] != "control"}
    best = max((name for name in means if name != "softmax"), key=lambda name: means[name]["mean"])
    records = by_name(read_records(settings.out / "records")[0])
    *_, done, none = overview({"digits": settings, "not run": Reproduce(data="cifar10")}, records).splitlines()
    shown = [
        f"{100 * means[name]['mean']:.2f}\u00a0±\u00a0{100 * means[name]['std']:.2f}" for name in ("softmax", best)
    ]
    assert done == f"| digits | 6 of 6 | softmax | {shown[0]} | {best} | {shown[1]} |"
    assert none.startswith("| not run | 0 of ")
    assert none.endswith(" |  |  |  |  |")


def test_one_configuration_alone_has_no_verdict(study):
    settings, _ = study
    records = by_name(read_records(settings.out / "records")[0])
    alone = replace(settings, attention=("softmax",), control=0)
    assert "| softmax | 2 |" in study_block(alone, records)
    assert "Found" not in study_block(alone, records)
    controlled = study_block(replace(alone, control=None), records)
    assert "Found" not in controlled
    assert "Two sets of softmax runs" in controlled


def test_the_papers_claim_is_left_alone_where_its_mechanisms_did_not_take_part(study):
    settings, results = study
    assert results["verdict"]["claim"] == "untested"
    block = study_block(settings, by_name(read_records(settings.out / "records")[0]))
    assert "Found" in block
    assert "paper" not in block


def test_filling_a_page_leaves_the_words_around_the_blocks_alone():
    page = "before\n<!-- results: a -->\nold | table\n<!-- end -->\nafter\n"
    assert fill(page, {"a": "new\n"}) == "before\n<!-- results: a -->\nnew\n<!-- end -->\nafter\n"
    assert fill(fill(page, {"a": "x"}), {"a": "new"}) == fill(page, {"a": "new"})
    with pytest.raises(ValueError, match=r"places for \['a'\], got blocks \['b'\]"):
        fill(page, {"b": ""})


def test_the_results_page_is_what_the_records_say():
    for page, text in experiments.pages().items():
        assert page.read_text() == text, f"{page.name}: run python -m tools.experiments"


def test_the_figure_shows_every_run_of_a_study_and_nothing_of_one_configuration_alone(study, tmp_path):
    settings, results = study
    records = by_name(read_records(settings.out / "records")[0])
    place = tmp_path / "figure.svg"
    assert draw(settings, records, place)
    drawn = place.read_text()
    for row in results["summary"]:
        assert row["configuration"] in drawn
    assert f"{settings.baseline} again" in drawn
    alone = {key: value for key, value in records.items() if value["mechanism"] == settings.baseline}
    assert not draw(settings, alone, tmp_path / "other.svg")
    assert not (tmp_path / "other.svg").exists()


def test_every_experiment_can_be_planned():
    for name, settings in experiments.EXPERIMENTS.items():
        assert planned(settings), name


def test_records_are_taken_over_into_one_file_per_experiment(study, tmp_path, monkeypatch, capsys):
    settings, results = study
    monkeypatch.setattr(experiments, "RECORDS", tmp_path / "kept")
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"small": settings})
    shutil.copytree(settings.out / "records", tmp_path / "elsewhere")
    experiments.add([tmp_path / "elsewhere", settings.out / "results.json"])
    kept = json.loads((tmp_path / "kept" / "small.json").read_text())
    assert [run["accuracy"] for run in kept] == [run["accuracy"] for run in results["runs"]]
    assert "6 runs taken over" in capsys.readouterr().out
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"other": Reproduce()})
    experiments.add([settings.out])
    assert "not part of any experiment, left out: cumulant3 seed 0" in capsys.readouterr().out


def test_what_a_program_may_not_find_is_not_in_the_records(study):
    settings, _ = study
    for path in (settings.out / "records").glob("*.json"):
        assert str(settings.out) not in path.read_text()
        assert sys.prefix not in path.read_text()
