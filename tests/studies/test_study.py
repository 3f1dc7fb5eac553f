"""`cumulant reproduce` as a function: what it writes, what it keeps, what it merges, what it refuses."""

import io
import json
import re
import shutil
from dataclasses import replace

import pytest
from small_studies import SMALL, quickly

from cumulant.studies import cumulant_vit as room
from cumulant.studies import measured
from cumulant.studies import study as flow
from cumulant.studies.command import Reproduce
from cumulant.studies.cumulant_vit import planned, recipe_name
from cumulant.studies.plan import CONTROL_SEED, Budget
from cumulant.studies.report import terminal_summary
from cumulant.studies.runs import TimeOverError


@pytest.fixture
def no_training(monkeypatch):
    """Fails the test if anything is trained."""

    def refuse(missing, *_arguments, **_options):
        assert not missing, "something was trained"
        return []

    monkeypatch.setattr(flow, "train_all", refuse)


@pytest.fixture
def wanted(monkeypatch):
    """The runs that would be trained."""
    asked = []

    def ask(missing, *_arguments, **_options):
        asked.extend((run.configuration, run.seed) for run in missing)
        raise InterruptedError

    monkeypatch.setattr(flow, "train_all", ask)
    return asked


def test_the_results_file_holds_what_was_returned(study):
    settings, results = study
    assert json.loads((settings.out / "results.json").read_text()) == results


def test_every_configuration_and_the_control_have_their_own_seeds(study):
    _, results = study
    seen = [(run["configuration"], run["role"], run["seed"]) for run in results["runs"]]
    assert sorted(seen) == [
        ("cumulant3", "compared", 0),
        ("cumulant3", "compared", 1),
        ("softmax", "compared", 0),
        ("softmax", "compared", 1),
        ("softmax", "control", CONTROL_SEED),
        ("softmax", "control", CONTROL_SEED + 1),
    ]
    assert results["missing"] == []


def test_classes_and_confusions_are_those_of_all_seeds(study):
    _, results = study
    for name in ("softmax", "cumulant3"):
        matrix = results["confusion"][name]
        assert sum(map(sum, matrix)) == 2 * 450
        for row, share in zip(matrix, results["per_class"][name], strict=True):
            assert share == pytest.approx(row[matrix.index(row)] / sum(row), abs=1e-4)


def test_the_same_command_again_trains_nothing(study, no_training, monkeypatch, tmp_path):
    settings, results = study
    settings = replace(settings, out=shutil.copytree(settings.out, tmp_path / "copy"))
    monkeypatch.setattr(flow, "measured", lambda *_: {key: results[key] for key in ("error", "scaling", "dial")})
    again = room.reproduce(settings)
    assert again["runs"] == results["runs"]


def test_fresh_and_another_recipe_train_again(study, wanted):
    settings, _ = study
    for change in ({"epochs": 2}, {"change": (*SMALL, "lr=0.5")}):
        with pytest.raises(InterruptedError):
            room.reproduce(replace(settings, **change))
        assert len(wanted) == 6
        wanted.clear()
    settings = replace(settings, out=shutil.copytree(settings.out, settings.out.with_name("fresh")), fresh=True)
    with pytest.raises(InterruptedError):
        room.reproduce(settings)
    assert len(wanted) == 6


def test_more_seeds_and_mechanisms_only_add_to_what_is_there(study, wanted):
    settings, _ = study
    with pytest.raises(InterruptedError):
        room.reproduce(replace(settings, seeds=3, attention=("softmax", "linear", "cumulant3")))
    new = [("linear", 0), ("linear", 1), ("softmax", 2), ("linear", 2), ("cumulant3", 2), ("softmax", CONTROL_SEED + 2)]
    assert wanted == new


def test_records_from_elsewhere_are_merged_by_copying_them(study, no_training, tmp_path, monkeypatch):
    settings, results = study
    quickly(monkeypatch)
    (tmp_path / "records").mkdir()
    for path in (settings.out / "records").glob("*.json"):
        shutil.copy(path, tmp_path / "records")
    merged = room.reproduce(replace(settings, out=tmp_path))
    assert merged["runs"] == results["runs"]
    assert merged["maps"] == results["maps"], "maps come with the records, no checkpoint is needed"


def test_one_results_file_is_enough_to_merge_its_runs(study, no_training, tmp_path, monkeypatch):
    settings, results = study
    quickly(monkeypatch)
    (tmp_path / "records").mkdir()
    shutil.copy(settings.out / "results.json", tmp_path / "records" / "visit-1.json")
    assert room.reproduce(replace(settings, out=tmp_path))["summary"] == results["summary"]


def test_a_budget_that_is_used_up_leaves_runs_for_another_time(study, tmp_path, monkeypatch):
    settings, _ = study
    budgets = []

    def nothing_but_what_is_there(missing, *_arguments, budget, **_options):
        budgets.append(budget)
        return missing

    monkeypatch.setattr(flow, "train_all", nothing_but_what_is_there)
    (tmp_path / "records").mkdir()
    for path in (settings.out / "records").glob("*-0-*.json"):
        shutil.copy(path, tmp_path / "records")
    part = room.reproduce(replace(settings, out=tmp_path, minutes=0.5))
    assert isinstance(budgets[0], Budget)
    assert budgets[0].seconds == 30
    assert set(budgets[0].per_epoch) == {"softmax", "cumulant3"}, "it knows how long the finished runs took"
    assert [(one["configuration"], one["seed"]) for one in part["missing"]] == [
        ("softmax", 1),
        ("cumulant3", 1),
        ("softmax", CONTROL_SEED),
        ("softmax", CONTROL_SEED + 1),
    ]
    assert part["scaling"] is None, "there was no time to measure"
    assert "1 of cumulant3" in (tmp_path / "report.html").read_text()
    assert "not finished: 1 of softmax" in terminal_summary(part)
    assert "No control was run" in part["verdict"]["control_text"]
    with pytest.raises(TimeOverError, match=r"no run was finished within the 0\.5 minutes"):
        room.reproduce(replace(settings, out=tmp_path / "empty", minutes=0.5))


def test_the_time_of_other_recipes_in_the_folder_says_nothing_about_a_run(study, tmp_path, monkeypatch):
    settings, _ = study
    budgets = []
    monkeypatch.setattr(flow, "train_all", lambda *_, budget, **__: budgets.append(budget) or [])
    shutil.copytree(settings.out / "records", tmp_path / "records")
    other = replace(settings, out=tmp_path, minutes=0.5, change=(*SMALL, "lr=0.5"))
    with pytest.raises(TimeOverError):
        room.reproduce(other)
    assert budgets[0].per_epoch == {}


def test_a_run_that_failed_is_told_and_left_out(study, tmp_path, no_training):
    settings, _ = study
    shutil.copytree(settings.out / "records", tmp_path / "records")
    path = next((tmp_path / "records").glob("*cumulant3-1-*.json"))
    head = {key: json.loads(path.read_text())[key] for key in ("format", "fingerprint", "seed", "configuration")}
    path.write_text(json.dumps({**head, "failed": "the loss became nan", "device": "x"}))
    part = room.remake_report(replace(settings, out=tmp_path))
    assert part["failed"][0]["seed"] == 1
    assert part["missing"] == []
    assert [row["seeds"] for row in part["summary"] if row["configuration"] == "cumulant3"] == [[0]]
    assert "failed: cumulant3, seed 1: the loss became nan" in terminal_summary(part)
    assert "cumulant3, seed 1: the loss became nan" in (tmp_path / "report.html").read_text()


def test_a_busy_machine_is_measured_again_on_one_thread(study, monkeypatch):
    _, results = study
    asked = []

    def busy(*_arguments, num_threads=None, **_options):
        asked.append(num_threads)
        return {**results["scaling"], "disturbed": True, "threads": num_threads or 2}

    monkeypatch.setattr(measured, "scaling", busy)
    found = measured.measured(results, lambda what, total, unit: flow.bar_of(what, total, unit, None))
    assert asked == [None, 1]
    assert found["scaling"]["disturbed_on"] == 2


def test_one_line_counts_down_through_training_and_measuring():
    said = io.StringIO()
    line = flow.Line(said, measures=True)
    for begin, steps in (
        (lambda: line.training(6, shown=True), 6),
        (lambda: line.measuring("measuring", 3, "step"), 3),
    ):
        with begin() as bar:
            for _ in range(steps):
                bar.update()
                bar.refresh()
    shares = [int(share) for share in re.findall(r"(\d+)%", said.getvalue())]
    assert shares == sorted(shares)
    assert {12, 75, 83, 100} <= set(shares)
    assert "training  100%" not in said.getvalue()
    assert re.search(r"\d\d:\d\d to go", said.getvalue())


def test_measuring_alone_begins_at_the_beginning():
    said = io.StringIO()
    with flow.Line(said, measures=True).measuring("measuring", 4, "step") as bar:
        bar.update()
        bar.refresh()
    assert " 25%" in said.getvalue()


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (("sofmax",), "'sofmax'.*cumulant3"),
        (("softmax", "cumulant3+v_cnv"), "did you mean 'v_conv'"),
        (("softmax+pool=mean",), r"softmax\+pool=mean: pool must be one of"),
        (("softmax+gate+qk_norm", "softmax+qk_norm+gate"), "are the same model"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_is_trained_or_written(
    tmp_path, no_training, attention, words
):
    with pytest.raises(ValueError, match=words):
        room.reproduce(Reproduce(attention=attention, out=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(tmp_path, no_training):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"cannot write files into .*choose another folder"):
            room.reproduce(Reproduce(out=out))


def test_data_without_a_recipe_asks_for_one(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe is named like the data 'mine'; choose one with --recipe: cifar10"):
        planned(Reproduce(data=str(tmp_path / "mine")))
    assert recipe_name("ucf101-6") == "ucf101"


@pytest.mark.parametrize("data", ["cifar100", "imagenet-1000", "ucf101-60", "tiny-imagenet"])
def test_a_recipe_is_not_taken_for_data_whose_name_begins_alike(data):
    with pytest.raises(ValueError, match=f"no recipe is named like the data '{data}'; choose one with --recipe"):
        recipe_name(data)


def test_a_recipe_alone_brings_its_own_data():
    assert planned(Reproduce(recipe="cifar10"))[0].recipe.data == "cifar10"
    assert planned(Reproduce(recipe="cifar10", data="some/folder"))[0].recipe.data == "some/folder"


def test_the_report_can_be_made_again_from_the_records(study, no_training, tmp_path):
    settings, results = study
    out = shutil.copytree(settings.out, tmp_path / "copy")
    first = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert room.remake_report(Reproduce(out=out, report_only=True)) == results
    assert (out / "report.html").read_text() == first
    (out / "results.json").unlink()
    again = room.remake_report(replace(settings, out=out, report_only=True))
    assert again["summary"] == results["summary"]
    assert again["scaling"] is None, "what was only in results.json is gone"


def test_a_folder_without_records_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match="no records"):
        room.remake_report(Reproduce(out=tmp_path))
    (tmp_path / "records").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no record .* belongs to a run of this study"):
        room.remake_report(Reproduce(out=tmp_path))


def test_the_terminal_table_has_a_row_for_every_configuration_and_the_control(study):
    text = terminal_summary(study[1])
    for word in ("softmax (control)", "cumulant3", "±", study[1]["verdict"]["ordering"]):
        assert word in text


def test_the_demo_is_the_digits_with_the_model_of_four_layers():
    runs = planned(Reproduce())
    assert len(runs) == 25
    assert {run.recipe.epochs for run in runs} == {20}
    assert {run.recipe.model for run in runs} == {"vit_nano_patch2_8"}


def test_the_recorded_command_leaves_out_where_things_lie(tmp_path):
    assert Reproduce(out=tmp_path, json=True).command() == "cumulant reproduce"
    settings = Reproduce(data=str(tmp_path / "cifar10"), attention=("linear", "cumulant3+gate"), seeds=3, out=tmp_path)
    assert settings.command() == "cumulant reproduce --data cifar10 --attention linear cumulant3+gate --seeds 3"


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeds": 0},
        {"epochs": -1},
        {"workers": 0},
        {"control": -1},
        {"minutes": 0.0},
        {"attention": ()},
        {"attention": ("linear", "linear")},
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Reproduce(**wrong)


def test_the_control_repeats_softmax_or_else_the_first():
    assert Reproduce(attention=("linear", "softmax")).baseline == "softmax"
    assert Reproduce(attention=("linear", "cumulant2")).baseline == "linear"
