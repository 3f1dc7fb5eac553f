"""One way to open a model: every word stands for the same weights, wherever it is said."""

import json

import pytest
import torch

import cumulant
from cumulant.inspect import labelled_items, open_model
from cumulant.train import TrainRecipe, evaluate_checkpoint, load, save
from cumulant.train.recipe_files import to_json
from cumulant.web.opening import open_models

RECIPE = TrainRecipe(data="digits", model="vit_nano_patch2_8", image_size=8)
NOTES = {"recipe": to_json(RECIPE), "classes": json.dumps(list("0123456789"))}


def small(seed):
    torch.manual_seed(seed)
    return cumulant.create_model("vit_nano_patch2_8", num_classes=10, in_chans=3, init_std=0.2, depth=2).eval()


@pytest.fixture
def run(tmp_path):
    """A folder of a run whose best weights are not its last."""
    for seed, name in enumerate(("best", "last")):
        save(small(seed), tmp_path / f"{name}.safetensors", notes=NOTES)
    result = {"result": {"best_top1": 0.9, "top1": 0.8}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    return tmp_path


def test_a_run_stands_for_its_last_weights_and_a_file_for_itself(run):
    best, last = (small(seed).head.weight for seed in (0, 1))
    assert torch.equal(open_model(run).model.head.weight, last)
    assert torch.equal(load(run).head.weight, last)
    assert torch.equal(open_models([str(run)])[0]["softmax"].model.head.weight, last)
    assert torch.equal(open_model(run / "best.safetensors").model.head.weight, best)
    assert (open_model(run).accuracy, open_model(run / "best.safetensors").accuracy) == (0.8, 0.9)


def test_a_run_without_last_weights_names_its_best(run):
    (run / "last.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*last\.safetensors; .* best weights so far are"):
        open_model(run)


def test_what_was_converted_is_opened_converted_with_its_recipe_and_classes(run):
    model = load(run).eval()
    cumulant.convert(model, layers={1: "cumulant2"})
    cumulant.convert.save(model, run / "swapped")
    opened, x = open_model(run / "swapped"), torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(opened.model(x), model(x))
    assert [block.attn.mechanism.name for block in opened.model.blocks] == ["softmax", "cumulant2"]
    assert (opened.recipe, opened.classes) == (RECIPE, tuple("0123456789"))
    torch.testing.assert_close(load(run / "swapped").eval()(x), model(x))


def test_the_explorer_names_a_converted_run_by_its_folder_and_claims_no_accuracy_for_it(run):
    model = load(run).eval()
    cumulant.convert(model, "cumulant2")
    cumulant.convert.save(model, run / "swapped")
    models, _ = open_models([str(run), str(run / "swapped"), f"{run}@cumulant3"])
    assert {name: one.accuracy for name, one in models.items()} == {
        "softmax": 0.8, "swapped": None, f"{run.name} cumulant3": None
    }  # fmt: skip


def test_test_items_are_prepared_as_in_evaluation(run):
    pytest.importorskip("sklearn", reason="needs the digits: pip install 'cumulant[train]'")
    opened = open_model(run)
    pixels, labels, source = labelled_items(opened, None, 10**6)
    assert len(labels) == len(source.test)
    whole, _ = evaluate_checkpoint(run, device="cpu")
    assert torch.equal(labels, whole.labels)
    torch.testing.assert_close(opened.model(pixels).softmax(-1), whole.probabilities, atol=1e-5, rtol=0)


def test_test_items_that_cannot_be_decoded_are_left_out_and_named(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("train/a/1", "train/b/1", "val/a/1", "val/a/2", "val/b/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "val" / "a" / "2.png").write_bytes(b"not an image")
    opened = open_model(save(small(0), tmp_path / "bare.safetensors"))
    with pytest.warns(UserWarning, match=r"1 test items cannot be decoded, left out: .*a/2.png"):
        pixels, labels, _ = labelled_items(opened, str(tmp_path))
    assert (len(pixels), labels.tolist()) == (2, [0, 1])


def test_weights_without_a_recipe_do_not_know_their_data(tmp_path):
    opened = open_model(save(small(0), tmp_path / "bare.safetensors"))
    assert (opened.pixels.size, opened.pixels.channels, opened.recipe) == (8, 3, None)
    with pytest.raises(ValueError, match="no recipe inside, so its data is not known"):
        labelled_items(opened)
