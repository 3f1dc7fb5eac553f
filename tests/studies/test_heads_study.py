"""The study of the layers: every ordering can be trained, and is judged by its seeds and its control."""

import pytest

from cumulant import cli
from cumulant.studies import heads
from cumulant.train import read_recipe
from cumulant.train.build import build_model, open_recipe_source


@pytest.mark.parametrize("name", heads.ORDERINGS)
def test_every_model_of_an_ordering_can_be_built_and_every_link_names_one(name):
    one = heads.ORDERINGS[name]
    assert {label for above, below, _ in one.links for label in (above, below)} <= set(one.names)
    source = open_recipe_source(read_recipe(one.recipe))
    runs = heads.planned(name, seeds=1, controls=1)
    assert [run.role for run in runs] == ["compared"] * len(one.names) + ["control"]
    for run in runs:
        build_model(run.recipe, source)


@pytest.mark.parametrize(("half", "word"), [((0.80, 0.81, 0.79), "reproduces"), ((0.97, 0.98, 0.99), "does not")])
def test_an_ordering_is_judged_by_all_its_runs(half, word):
    runs = heads.planned("moh")
    plain, most, less, none = heads.ORDERINGS["moh"].names.values()
    reached = {plain: (0.90, 0.91, 0.89), most: (0.91, 0.92, 0.90), less: half, none: (0.70, 0.71, 0.69)}
    records = {
        run: {"accuracy": reached[run.configuration][run.seed % 1000], "parameters": 1, "seconds": 1.0} for run in runs
    }
    found = heads.judged("moh", runs, records)
    assert word in found["verdict"]["claim_text"]
    assert found["rows"][0]["mean"] == pytest.approx(0.90)
    assert found["missing"] == []


def test_a_study_trains_what_is_missing_and_reads_the_rest(tmp_path, capsys):
    words = ["study", "heads", "--layers", "lama", "--seeds", "1", "--control", "1", "--epochs", "2", "--device", "cpu"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr()
    assert "lama, learned" in first.out
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "[1/" not in again.err


def test_a_layer_without_an_ordering_is_named(capsys):
    assert cli.main(["study", "heads", "--layers", "mho"]) == 2
    assert "layer 'mho' has no ordering to try; did you mean 'moh'?" in capsys.readouterr().err
