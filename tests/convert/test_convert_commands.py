import json

import pytest
import torch
from small_models import bert, transformers

import cumulant
from cumulant.convert import load
from cumulant.convert.command import run_convert, run_diagnose
from cumulant.convert.settings import Convert, Diagnose
from cumulant.train import save


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


def test_convert_saves_a_model_that_loads(weights, tmp_path):
    out = tmp_path / "converted"
    report = run_convert(Convert(weights, layers=("1", "blocks.2.*"), out=out))
    assert list(report.replaced) == ["blocks.1.attn", "blocks.2.attn"]
    assert load(out)(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert json.loads((out / "conversion.json").read_text())["attention"] == "cumulant3"


def test_texts_are_tokenised_for_a_model_of_transformers(tmp_path):
    t = transformers()
    folder = tmp_path / "encoder"
    bert(vocab_size=9).save_pretrained(folder)
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "film", "bad"])
    )
    t.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (tmp_path / "texts.txt").write_text("a good film\n\na bad film\ngood\n")
    settings = Convert(str(folder), str(tmp_path / "texts.txt"), layers=("auto",), budget=10.0, out=tmp_path / "out")
    report = run_convert(settings)
    assert report.measured_on == "data"
    assert len(report.replaced) == 2
    assert load(tmp_path / "out")(torch.tensor([[2, 5, 3]])).last_hidden_state.isfinite().all()


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="no model 'nowhere'"):
        run_convert(Convert("nowhere"))
