"""Finished runs are kept, found again, and dropped as soon as they no longer belong to the recipe."""

import json
from dataclasses import replace

import pytest
import torch

from cumulant.studies import runs
from cumulant.studies.runs import Run, RunError, fingerprint, finished, train_all
from cumulant.train import Recipe

RECIPE = Recipe(epochs=1, batch_size=256)


def trained(folder, *wanted, workers=1, recipe=RECIPE):
    folder.mkdir(exist_ok=True)
    records, epochs = {}, []

    def report(run, record):
        epochs.append(run) if record is None else records.update({run: record})

    train_all(wanted, recipe, folder, fingerprint(recipe), workers=workers, report=report)
    assert len(epochs) == len(wanted) * recipe.epochs
    return records


def test_two_processes_give_the_same_result_as_one(tmp_path):
    wanted = (Run("softmax", 0), Run("cumulant2", 1))
    alone, side_by_side = trained(tmp_path / "a", *wanted), trained(tmp_path / "b", *wanted, workers=2)
    for run in wanted:
        for key in ("accuracy", "loss", "test_accuracy"):
            assert alone[run][key] == side_by_side[run][key]


def test_a_finished_run_is_found_again(tmp_path):
    run = Run("linear", 3)
    record = trained(tmp_path, run)[run]
    assert finished(run, tmp_path, fingerprint(RECIPE)) == record


def test_another_recipe_or_a_damaged_file_is_not_taken_for_a_finished_run(tmp_path):
    run = Run("softmax", 0)
    mark = fingerprint(RECIPE)
    run.file(tmp_path).write_text(json.dumps({"fingerprint": mark}))
    assert finished(run, tmp_path, mark) is None, "no checkpoint beside it"
    run.checkpoint(tmp_path).write_bytes(b"")
    assert finished(run, tmp_path, mark) is not None
    assert finished(run, tmp_path, fingerprint(replace(RECIPE, lr=0.5))) is None
    run.file(tmp_path).write_text('{"fingerprint": "' + mark[:5])
    assert finished(run, tmp_path, mark) is None


def test_the_seed_is_no_part_of_the_fingerprint_and_the_source_is(tmp_path, monkeypatch):
    assert fingerprint(RECIPE) == fingerprint(replace(RECIPE, seed=9))
    monkeypatch.setattr(runs, "SOURCES", ("moments.py",))
    assert fingerprint(RECIPE) != fingerprint(replace(RECIPE, epochs=2))
    before = fingerprint(RECIPE)
    monkeypatch.setattr(runs, "SOURCES", ("moments.py", "attention.py"))
    assert fingerprint(RECIPE) != before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_run_is_named(tmp_path, workers):
    with pytest.raises(RunError, match="softmax, seed 4: FloatingPointError"):
        trained(tmp_path, Run("softmax", 4), Run("softmax", 5), workers=workers, recipe=replace(RECIPE, lr=1e30))


def test_the_number_of_threads_is_left_as_it_was(tmp_path):
    before = torch.get_num_threads()
    trained(tmp_path, Run("cumulant1", 0))
    assert torch.get_num_threads() == before
