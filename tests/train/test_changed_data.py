"""A run goes on with the data it was begun with, however that is spelled, and with no other."""

import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from small_runs import FULL, few_digits, outcome, train_until

from cumulant.data import Source, TensorImages
from cumulant.train import RecipeError, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The few digits as files: 96 for training, 50 for testing."""
    root, source = tmp_path_factory.mktemp("digits"), few_digits()
    for name, part in (("train", source.train), ("test", source.test)):
        for i, (image, label) in enumerate(zip(part.images, part.labels, strict=True)):
            place = root / name / f"digit-{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{i:03}.png")
    return root


def test_images_deleted_between_kill_and_resume_are_told_by_class_and_nothing_is_lost(folder, tmp_path):
    data = shutil.copytree(folder, tmp_path / "data")
    recipe = replace(FULL, data=str(data))
    train_until(tmp_path / "run", 9, recipe)
    gone = sorted((data / "train").glob("*/*.png"))[::2]
    kept = {file: file.read_bytes() for file in gone}
    for file in gone:
        file.unlink()
    told = r"train items: 112 -> 56 \(digit-0 \d+ -> \d+, .* and 5 more.*Put the data back.*--fresh"
    with pytest.raises(RecipeError, match=told):
        train(recipe, tmp_path / "run")
    for file, content in kept.items():
        file.write_bytes(content)
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "calm")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")


def test_other_pixels_in_memory_are_refused_too(tmp_path):
    train_until(tmp_path, 9, FULL, few_digits())
    known = few_digits()
    other = TensorImages(known.train.images.flip(0), known.train.labels.flip(0))
    with pytest.raises(RecipeError, match="as many items of every class as before, but other names, sizes or contents"):
        train(FULL, tmp_path, source=Source("few digits", "image", other, known.test, known.classes))


def test_another_spelling_of_the_folder_goes_on(folder, tmp_path, monkeypatch):
    recipe = replace(FULL, data=str(folder))
    train_until(tmp_path / "run", 9, recipe)
    monkeypatch.chdir(folder.parent)
    train(replace(recipe, data=f"./{folder.name}/"), tmp_path / "run")
    train(recipe, tmp_path / "calm")
    run, calm = outcome(tmp_path / "run"), outcome(tmp_path / "calm")
    assert run["log"] == calm["log"]
    assert run["last.safetensors"][0] == calm["last.safetensors"][0]


def test_a_finished_run_is_read_where_its_data_is_gone_but_not_for_other_data(folder, tmp_path):
    data = shutil.copytree(folder, tmp_path / "data")
    recipe = replace(FULL, data=str(data), epochs=1, warmup_epochs=0.0)
    first = train(recipe, tmp_path / "run")
    shutil.rmtree(data)
    assert train(recipe, tmp_path / "run") == first
    assert train(replace(recipe, data=str(folder)), tmp_path / "run") == first
    other = shutil.copytree(folder, tmp_path / "other")
    next(other.glob("test/*/*.png")).unlink()
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(RecipeError, match=r"test items: 50 -> 49"):
            train(replace(recipe, data=str(other)), tmp_path / "run")


def test_data_of_another_name_is_refused_in_a_folder_that_does_not_know_what_it_held(folder, tmp_path):
    recipe = replace(FULL, data=str(folder))
    train_until(tmp_path / "run", 9, recipe)
    (tmp_path / "run" / "data.json").unlink()
    with pytest.raises(RecipeError, match=r"another recipe \(data: "):
        train(replace(recipe, data=f"{folder}/"), tmp_path / "run")


@pytest.mark.parametrize("left", ["", "[]", "{}"])
def test_a_run_that_cannot_say_what_data_it_was_begun_with_goes_on_and_tells_so(tmp_path, left):
    train_until(tmp_path, 9, FULL, few_digits())
    (tmp_path / "data.json").write_text(left)
    with pytest.warns(UserWarning, match="goes on with few digits, but its data.json is missing or damaged"):
        train(FULL, tmp_path, source=few_digits())


@pytest.mark.parametrize("change", [{"accumulate": 1}, {"log_steps": 3}, {"eval_epochs": 3}], ids=str)
def test_how_a_step_is_cut_and_what_is_told_of_it_may_change(tmp_path, change):
    train_until(tmp_path / "run", 9, FULL, few_digits())
    changed = train(replace(FULL, **change), tmp_path / "run", source=few_digits())
    calm = train(FULL, tmp_path / "calm", source=few_digits())
    if "accumulate" not in change:  # which draws its dropout otherwise
        probabilities = [run.predictions.probabilities for run in (changed, calm)]
        assert torch.equal(*probabilities)
    assert changed.steps == calm.steps
