"""A record belongs to a recipe and a seed, whatever machine made it; a damaged one belongs to nothing."""

import json
from dataclasses import replace

import pytest
import torch
from small_studies import small_run

from cumulant.studies.records import FORMAT, dense, epoch_losses, read_records, sparse
from cumulant.studies.training import deciding, fingerprint
from cumulant.train import read_recipe

RECIPE = read_recipe("tiny-imagenet-100")


def test_seed_place_and_manner_are_no_part_of_the_fingerprint():
    elsewhere = replace(RECIPE, data="some/where/tiny-imagenet-100", seed=7, compile=False, workers=3, eval_epochs=1)
    assert fingerprint(elsewhere) == fingerprint(RECIPE)


def test_whatever_decides_the_outcome_changes_the_fingerprint():
    changes = (
        {"data": "cifar10"},
        {"epochs": 40},
        {"lr": 1e-3},
        {"attention": "linear"},
        {"attention_extras": {"gate": True}},
        {"model_options": {"patch_size": 4}},
        {"augmentation": replace(RECIPE.augmentation, mixup=0.123)},
        {"precision": "fp32"},
    )
    marks = {fingerprint(replace(RECIPE, **change)) for change in changes}
    assert len(marks | {fingerprint(RECIPE)}) == len(changes) + 1


def test_a_value_that_a_later_version_adds_leaves_old_fingerprints_as_they_are():
    values = deciding(RECIPE)
    assert "beta2" not in values, "at its default"
    assert values["model"] == "vit_tiny_patch16_224", "the page shows it, though it is the default"


def test_a_record_names_no_place_of_the_machine():
    assert deciding(replace(RECIPE, data="/home/me/tiny-imagenet-100"))["data"] == "tiny-imagenet-100"
    assert "/home" not in small_run("softmax").name


def test_file_names_have_no_character_that_a_transfer_would_refuse():
    run = small_run("cumulant3+temperature=order+v_conv=[3,3]")
    name = replace(run, recipe=replace(run.recipe, data="some/where/Größe [1] tiny-imagenet")).name
    assert name.isascii()
    assert name.replace("-", "").replace("_", "").replace(".", "").isalnum()


def test_counts_survive_being_written_sparsely():
    counts = torch.tensor([[3, 0, 1], [0, 0, 0], [0, 2, 5]])
    assert dense(sparse(counts), 3) == counts.tolist()


def record(mark, seed, **more):
    return {"format": FORMAT, "fingerprint": mark, "seed": seed, **more}


def test_records_are_merged_from_single_files_lists_and_whole_results(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(record("x", 0, accuracy=0.1)))
    (tmp_path / "b.json").write_text(json.dumps([record("x", 1), record("y", 0)]))
    (tmp_path / "c.json").write_text(json.dumps({"format": FORMAT, "runs": [record("z", 5), record("x", 0)]}))
    (tmp_path / "a.maps.json").write_text("{}")
    found, unreadable = read_records(tmp_path)
    assert sorted(found) == [("x", 0), ("x", 1), ("y", 0), ("z", 5)]
    assert found["x", 0]["accuracy"] == 0.1, "the first file counts"
    assert unreadable == []


def test_damaged_files_and_other_formats_are_named_and_left_out(tmp_path):
    (tmp_path / "cut.json").write_text('{"format": 2, "finger')
    (tmp_path / "old.json").write_text(json.dumps({**record("x", 0), "format": 1}))
    (tmp_path / "number.json").write_text("3")
    (tmp_path / "of what.json").write_text(json.dumps({"format": FORMAT, "seed": 0}))
    assert read_records(tmp_path) == ({}, ["cut.json", "number.json", "of what.json", "old.json"])


def test_a_record_in_the_file_of_its_run_counts_before_one_that_was_merged(tmp_path):
    (tmp_path / "a list.json").write_text(json.dumps([record("0123456789", 7, accuracy=0.1)]))
    (tmp_path / "digits-softmax-7-01234567.json").write_text(json.dumps(record("0123456789", 7, accuracy=0.2)))
    assert read_records(tmp_path)[0]["0123456789", 7]["accuracy"] == 0.2, "trained anew with --fresh, say"


def test_the_loss_of_an_epoch_does_not_depend_on_how_often_it_was_logged():
    def line(step, loss):
        return {"kind": "train", "step": step, "epoch": step / 5, "loss": loss}

    often = [line(2, 1.0), line(4, 2.0), line(5, 6.0), {"kind": "test", "step": 5}, line(7, 3.0), line(10, 8.0)]
    seldom = [line(5, 2.4), line(10, 6.0)]
    assert epoch_losses(often) == pytest.approx([2.4, 6.0])
    assert epoch_losses(seldom) == pytest.approx([2.4, 6.0])
