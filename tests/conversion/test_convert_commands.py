import json

import pytest
import torch
from small_models import bert, transformers

import cumulant
from cumulant.cli import main
from cumulant.conversion import DistillRecipe, load
from cumulant.conversion.command import Convert, Diagnose, run_convert, run_diagnose
from cumulant.conversion.distill_data import Images, open_training
from cumulant.data import open_source
from cumulant.inspect.items import open_batches
from cumulant.inspect.opening import Pixels, open_model
from cumulant.train import TrainRecipe, save
from cumulant.train.recipe_files import to_json


@pytest.fixture
def weights(tmp_path):
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2)
    return str(save(model, tmp_path / "last.safetensors"))


def test_diagnose_writes_a_table_and_a_figure(weights, tmp_path):
    pytest.importorskip("sklearn", reason="needs the digits: pip install 'cumulant[train]'")
    out = tmp_path / "diagnosis"
    found = run_diagnose(Diagnose(weights, "digits", batches=1, batch_size=4, out=out))
    assert len(found.layers) == 4
    assert json.loads((out / "diagnosis.json").read_text())["layers"][0]["name"] == "blocks.0.attn"
    assert (out / "diagnosis.svg").is_file()


def test_a_run_is_diagnosed_on_its_own_data_and_other_weights_on_noise_which_is_said(tmp_path):
    pytest.importorskip("sklearn", reason="needs the digits: pip install 'cumulant[train]'")
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, in_chans=3, init_std=0.2)
    save(model, tmp_path / "last.safetensors", notes={"recipe": to_json(TrainRecipe(data="digits", image_size=8))})
    few = {"batches": 1, "batch_size": 4, "out": tmp_path / "out"}
    own, named = (run_diagnose(Diagnose(str(tmp_path), data, **few)) for data in (None, "digits"))
    assert own.to_json() == named.to_json()
    assert "noise" not in own.table()
    bare = run_diagnose(Diagnose(str(save(model, tmp_path / "bare.safetensors")), **few))
    assert bare.to_json()["measured_on"] == "noise"
    assert bare.table().endswith("measured on noise, for want of data: a trained model may answer it quite otherwise")


def test_convert_saves_a_model_that_loads(weights, tmp_path):
    out = tmp_path / "converted"
    report = run_convert(Convert(weights, layers=("1", "blocks.2.*"), out=out))
    assert list(report.replaced) == ["blocks.1.attn", "blocks.2.attn"]
    assert load(out)(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert json.loads((out / "conversion.json").read_text())["attention"] == "cumulant3"


def encoder_of_few_words(place):
    """A BERT with a tokenizer of four words, saved."""
    folder = place / "encoder"
    bert(vocab_size=9).save_pretrained(folder)
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "film", "bad"])
    )
    transformers().BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def test_texts_are_tokenised_for_a_model_of_transformers(tmp_path):
    folder = encoder_of_few_words(tmp_path)
    (tmp_path / "texts.txt").write_text("a good film\n\na bad film\ngood\n")
    settings = Convert(str(folder), str(tmp_path / "texts.txt"), layers=("auto",), budget=10.0, out=tmp_path / "out")
    report = run_convert(settings)
    assert report.measured_on == "data"
    assert len(report.replaced) == 2
    assert load(tmp_path / "out")(torch.tensor([[2, 5, 3]])).last_hidden_state.isfinite().all()


def test_a_converted_folder_has_the_tokenizer_and_the_preprocessing_of_the_model(tmp_path):
    folder, out = encoder_of_few_words(tmp_path), tmp_path / "out"
    (folder / "preprocessor_config.json").write_text("{}")
    run_convert(Convert(str(folder), layers=("0",), out=out))
    words = transformers().AutoTokenizer.from_pretrained(out)
    assert words("a good film")["input_ids"] == [2, 5, 6, 7, 3]
    assert (out / "preprocessor_config.json").is_file()


def test_the_dial_is_set_from_the_command_line(tmp_path, capsys):
    folder, texts, out = encoder_of_few_words(tmp_path), tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("a good bad film " * 63 + "\n" + "good film " * 80 + "\n")  # 254 and 162 tokens with the two ends
    words = [str(folder), "--data", str(texts), "--layers", "dial", "--target", "0.4", "--out", str(out)]
    assert main(["convert", *words]) == 0
    assert "of the multiply-adds at 254 tokens" in capsys.readouterr().out
    stored = json.loads((out / "conversion.json").read_text())
    assert stored["dial"]["target"] == 0.4
    assert stored["replaced"]
    assert load(out)(torch.tensor([[2, 5, 3]])).last_hidden_state.isfinite().all()
    assert main(["diagnose", str(folder), str(texts), "--dial", "0.4", "--out", str(out / "diagnosis")]) == 0
    assert "clusters and heads, error at most 0.4" in capsys.readouterr().out
    assert json.loads((out / "diagnosis" / "diagnosis.json").read_text())["dial"] == stored["dial"]


def test_a_dial_that_replaces_nothing_says_so_and_writes_no_model(tmp_path, capsys):
    folder, texts, out = encoder_of_few_words(tmp_path), tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("a good film\n")
    assert main(["convert", str(folder), "--data", str(texts), "--layers", "dial", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "softmax, cheapest at 5 tokens" in said.out
    assert f"no model was written into {out}" in said.err
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Diagnose("m", batches=0), "batches must be 1 or more, got 0"),
        (lambda: Diagnose("m", queries=0), "queries must be 1 or more, got 0"),
        (lambda: Diagnose("m", budget=-1.0), "budget must be 0 or more, got -1.0"),
        (lambda: Convert("m", layers=("auto",), budget=-1.0), "budget must be 0 or more, got -1.0"),
        (lambda: Convert("m", budget=0.1), "--budget and --heads go with --layers auto, got --layers all"),
        (lambda: Convert("m", heads=True, layers=("1", "2")), "go with --layers auto, got --layers 1 2"),
        (lambda: Convert("m", "d", target=0.1), "--target goes with --layers dial, got --layers all"),
        (lambda: Convert("m", layers=("dial",)), "--layers dial needs --data"),
        (lambda: Convert("m", "d", "cumulant3", layers=("dial",)), "leave --attention and --around out"),
        (lambda: Convert("m", "d", layers=("dial",), budget=0.1), "go with --layers auto, got --layers dial"),
        (lambda: Convert("m", "d", layers=("dial",), target=0.0), "target must be a positive relative error, got 0.0"),
        (lambda: Diagnose("m", dial=-1.0), "dial must be a positive relative error, got -1.0"),
    ],
    ids=[
        "batches",
        "queries",
        "budget",
        "budget of convert",
        "budget alone",
        "heads alone",
        "target alone",
        "dial without data",
        "dial with a mechanism",
        "dial with a budget",
        "target of 0",
        "dial of diagnose",
    ],
)
def test_a_wrong_value_is_told_before_a_model_is_opened(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_folder_that_cannot_be_written_is_told_before_measuring(weights, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cases = ("diagnosis.diagnose", run_diagnose, Diagnose), ("conversion.convert", run_convert, Convert)
    for name, command, settings in cases:
        monkeypatch.setattr(f"cumulant.conversion.{name}", lambda *_, **__: pytest.fail("it was measured"))
        with pytest.raises(OSError, match="cannot write files into"):
            command(settings(weights, out=tmp_path / "file"))


def test_a_device_that_is_none_is_named(weights):
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        run_diagnose(Diagnose(weights, device="tpu"))


@pytest.mark.parametrize("command", ["diagnose", "convert"])
def test_the_model_is_asked_for_by_name(capsys, command):
    with pytest.raises(SystemExit):
        main([command])
    assert "MODEL" in capsys.readouterr().err


def test_an_unknown_model_is_named():
    with pytest.raises(FileNotFoundError, match="no model 'nowhere'"):
        run_convert(Convert("nowhere"))


def test_convert_distils_and_a_second_command_reads_what_the_first_did(tmp_path):
    pytest.importorskip("sklearn", reason="needs the digits: pip install 'cumulant[train]'")
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2)
    weights = str(save(model, tmp_path / "last.safetensors"))
    out = tmp_path / "distilled"
    how = DistillRecipe(epochs=3, layer_share=0.5)
    settings = Convert(weights, "digits", layers=("auto",), budget=9.0, distill=True, distillation=how,
                       items_a_step=256, batches=1, out=out)  # fmt: skip
    report = run_convert(settings)
    found = report.distillation
    assert found.steps > found.layer_steps > 0
    assert found.change[1] < found.change[0]
    images = torch.randn(2, 1, 8, 8)
    first = load(out)
    assert not torch.equal(first.head.weight, model.head.weight)
    stored = json.loads((out / "conversion.json").read_text())
    assert stored["distillation"]["steps"] == found.steps
    assert run_convert(settings).distillation == found
    with torch.no_grad():
        assert torch.equal(load(out)(images), first(images))


def test_distilling_needs_data():
    with pytest.raises(ValueError, match="--distill needs --data"):
        Convert("runs/x", distill=True)


def test_pixels_are_normalised_as_the_recipe_in_the_weights_says(tmp_path):
    pytest.importorskip("sklearn", reason="needs the digits: pip install 'cumulant[train]'")
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, in_chans=3)
    recipe = TrainRecipe(data="digits", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    plain = save(model, tmp_path / "plain.safetensors")
    told = save(model, tmp_path / "told.safetensors", notes={"recipe": to_json(recipe)})
    as_imagenet, as_told = (open_batches(open_model(path), "digits", 1, 8)[0] for path in (plain, told))
    assert as_told.min() == 0
    assert as_told.max() == 1
    assert as_imagenet.min() < -1


def test_texts_to_distil_with_are_batched_by_length(tmp_path):
    folder = encoder_of_few_words(tmp_path)
    (tmp_path / "texts.txt").write_text("a good film\ngood\na bad film\nbad\n")
    made = open_training(open_model(folder), str(tmp_path / "texts.txt"), 2)
    assert [batch["input_ids"].shape for batch in made] == [(2, 3), (2, 5)]
    assert all(bool(batch["attention_mask"].all()) for batch in made)
    out = tmp_path / "distilled"
    how = DistillRecipe(epochs=4, layer_share=0.5)
    report = run_convert(
        Convert(str(folder), str(tmp_path / "texts.txt"), distill=True, distillation=how, items_a_step=2, out=out)
    )
    assert report.distillation.steps == 8
    assert load(out)(torch.tensor([[2, 5, 3]])).last_hidden_state.isfinite().all()


def test_images_of_a_step_depend_on_seed_and_step_alone():
    pytest.importorskip("sklearn", reason="needs the digits: pip install 'cumulant[train]'")
    source = open_source("digits")
    seen = Pixels(8, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), channels=1)
    images = Images(source, 64, seen=seen)
    batches = list(images.epoch(1))
    again = next(Images(source, 64, seen=seen).epoch(1, 3))
    assert torch.equal(again, batches[3])
    assert again.shape == (64, 1, 8, 8)
    assert not torch.equal(next(images.epoch(0, 3)), again)


def test_a_folder_of_a_converted_encoder_is_told_as_such(tmp_path):
    folder = encoder_of_few_words(tmp_path)
    run_convert(Convert(str(folder), layers=("0",), out=tmp_path / "out"))
    with pytest.raises(ValueError, match="holds a converted model already"):
        run_diagnose(Diagnose(str(tmp_path / "out"), out=tmp_path / "again"))


def test_what_an_encoder_cannot_read_is_told(tmp_path):
    folder, texts = encoder_of_few_words(tmp_path), tmp_path / "texts.txt"
    with pytest.raises(ValueError, match=r"input_ids.* and no pixels: data must be a \.txt or \.parquet file"):
        run_diagnose(Diagnose(str(folder), "digits", out=tmp_path / "out"))
    texts.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"texts\.txt is not UTF-8 text"):
        run_diagnose(Diagnose(str(folder), str(texts), out=tmp_path / "out"))
    texts.write_text("a good film")
    for file in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has no tokenizer"):
        run_diagnose(Diagnose(str(folder), str(texts), out=tmp_path / "out"))


def test_an_architecture_that_transformers_does_not_have_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["FutureModel"]}')
    transformers()
    with pytest.raises(ValueError, match="holds a FutureModel"):
        run_diagnose(Diagnose(str(tmp_path), out=tmp_path / "out"))
