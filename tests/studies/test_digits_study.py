"""`cumulant reproduce` as a function: what it writes, what it keeps, what it refuses."""

import json

import pytest

from cumulant.studies import digits
from cumulant.studies.settings import Reproduce


@pytest.fixture
def no_training(monkeypatch):
    """Fails the test if anything is trained."""

    def refuse(*_arguments, **_options):
        raise AssertionError("something was trained")

    monkeypatch.setattr(digits, "train_all", refuse)


def test_the_results_file_holds_what_was_returned(study):
    settings, results = study
    assert json.loads((settings.out / "results.json").read_text()) == results


def test_every_mechanism_and_the_control_have_their_own_seeds(study):
    _, results = study
    seen = [(run["mechanism"], run["role"], run["seed"]) for run in results["runs"]]
    assert sorted(seen) == [
        ("cumulant3", "compared", 0),
        ("cumulant3", "compared", 1),
        ("softmax", "compared", 0),
        ("softmax", "compared", 1),
        ("softmax", "control", 2),
        ("softmax", "control", 3),
    ]


def test_the_accuracy_is_that_of_the_last_epoch(study):
    for run in study[1]["runs"]:
        assert run["accuracy"] == run["test_accuracy"][-1]
        assert len(run["loss"]) == 1


def test_the_same_command_again_trains_nothing(study, no_training, monkeypatch):
    settings, results = study
    monkeypatch.setattr(digits, "_measured", lambda *_: {k: results[k] for k in ("maps", "error", "scaling")})
    again = digits.reproduce(settings)
    assert [run["accuracy"] for run in again["runs"]] == [run["accuracy"] for run in results["runs"]]


def test_fresh_and_another_recipe_train_again(study, no_training):
    settings, _ = study
    for change in ({"fresh": True}, {"epochs": 2}):
        with pytest.raises(AssertionError, match="was trained"):
            digits.reproduce(Reproduce(**{**vars(settings), **change}))


def test_more_seeds_only_add_to_what_is_there(study, monkeypatch):
    settings, _ = study
    wanted = []
    monkeypatch.setattr(digits, "train_all", lambda missing, *_, **__: wanted.extend(missing) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        digits.reproduce(Reproduce(**{**vars(settings), "seeds": 3}))
    assert sorted((run.mechanism, run.seed) for run in wanted) == [("cumulant3", 2), ("softmax", 4), ("softmax", 5)]


def test_a_busy_machine_is_measured_again_on_one_thread(study, monkeypatch):
    settings, results = study
    asked = []

    def busy(*_arguments, num_threads=None, **_options):
        asked.append(num_threads)
        return {**results["scaling"], "disturbed": True, "threads": num_threads or 2}

    monkeypatch.setattr("cumulant.bench.scaling", busy)
    measured = digits._measured(settings, settings.out / "runs", None)
    assert asked == [None, 1]
    assert measured["scaling"]["disturbed_on"] == 2


def test_an_unknown_mechanism_is_refused_before_anything_is_trained_or_written(tmp_path, no_training):
    with pytest.raises(ValueError, match=r"'sofmax'.*cumulant3"):
        digits.reproduce(Reproduce(attention=("sofmax",), out=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(tmp_path, no_training):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="cannot write into --out"):
            digits.reproduce(Reproduce(out=out))


def test_the_report_can_be_made_again_from_the_results(study):
    settings, results = study
    report = settings.out / "report.html"
    first = report.read_text()
    report.unlink()
    assert digits.remake_report(settings.out) == results
    assert report.read_text() == first


def test_a_missing_or_foreign_results_file_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no results\.json"):
        digits.remake_report(tmp_path)
    (tmp_path / "results.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        digits.remake_report(tmp_path)


def test_the_terminal_table_has_a_row_for_every_mechanism_and_the_control(study):
    text = digits.terminal_summary(study[1])
    for word in ("softmax (control)", "cumulant3", "±", "136,138", study[1]["verdict"]["ordering"]):
        assert word in text


def test_the_recorded_command_leaves_out_where_things_were_written(tmp_path):
    assert Reproduce(out=tmp_path, json=True).command() == "cumulant reproduce"
    settings = Reproduce(attention=("linear", "cumulant2"), seeds=3, out=tmp_path)
    assert settings.command() == "cumulant reproduce --attention linear cumulant2 --seeds 3"


@pytest.mark.parametrize(
    "wrong", [{"seeds": 0}, {"epochs": -1}, {"workers": 0}, {"attention": ()}, {"attention": ("linear", "linear")}]
)
def test_settings_that_mean_nothing_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Reproduce(**wrong)


def test_the_control_repeats_softmax_or_else_the_first_mechanism():
    assert Reproduce(attention=("linear", "softmax")).baseline == "softmax"
    assert Reproduce(attention=("linear", "cumulant2")).baseline == "linear"
