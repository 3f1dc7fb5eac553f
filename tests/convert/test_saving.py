import json

import pytest
import torch
from small_models import bert, padded, transformers, vit

import cumulant
from cumulant.convert import Choice, convert, load, register_transformers, restore, save
from cumulant.train import checkpoint

PLAN = {0: "cumulant2", 1: {"attention": "cumulant3", "heads": [0, 3]}}


def test_a_hybrid_of_transformers_comes_back_as_it_was(tmp_path):
    model, batch = bert(), padded()
    convert(model, layers=PLAN)
    said = model(**batch).last_hidden_state
    save(model, tmp_path)
    loaded = load(tmp_path)
    torch.testing.assert_close(loaded.eval()(**batch).last_hidden_state, said)
    save(loaded, tmp_path / "again")
    torch.testing.assert_close(load(tmp_path / "again").eval()(**batch).last_hidden_state, said)


def test_loading_a_hybrid_without_us_fails_and_never_answers_with_softmax(tmp_path):
    model = bert()
    convert(model, layers=PLAN)
    model.save_pretrained(tmp_path)
    loaded = transformers().AutoModel.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"loaded with load"):
        loaded(**padded())


def test_a_model_replaced_as_a_whole_loads_with_from_pretrained(tmp_path):
    model, batch = bert(), padded()
    convert(model, "cumulant2")
    said = model(**batch).last_hidden_state
    model.save_pretrained(tmp_path)
    register_transformers()
    loaded = transformers().AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**batch).last_hidden_state, said)
    torch.testing.assert_close(load(tmp_path).eval()(**batch).last_hidden_state, said)


def test_the_config_says_what_was_replaced(tmp_path):
    model = bert()
    convert(model, layers=[1])
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["cumulant"]["layers"]
    assert stored == {"encoder.layer.1.attention.self": Choice("cumulant3").to_json()}


def test_a_folder_that_was_not_converted_is_refused(tmp_path):
    bert().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was not converted before saving"):
        load(tmp_path)


def test_a_plan_for_another_model_is_refused(tmp_path):
    model = bert()
    convert(model)
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["cumulant"]["layers"]
    layers["encoder.layer.7.attention.self"] = next(iter(layers.values()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not have: encoder\.layer\.7"):
        load(tmp_path)


def test_a_converted_model_of_ours_comes_back(tmp_path):
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2).eval()
    convert(model, layers=PLAN)
    images = torch.randn(2, 1, 8, 8)
    save(model, tmp_path)
    torch.testing.assert_close(load(tmp_path).eval()(images), model(images))


def test_the_trainers_checkpoint_never_forgets_a_conversion(tmp_path):
    """Its header says how to make the model: as it is now where that can be said, and else not at all."""
    images = torch.randn(2, 1, 8, 8)
    for layers in (None, [0]):
        model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2).eval()
        convert(model, "cumulant2", layers=layers)
        path = checkpoint.save(model, tmp_path / "model.safetensors")
        if layers is None:
            torch.testing.assert_close(checkpoint.load(path).eval()(images), model(images))
        else:
            with pytest.raises(ValueError, match="does not say which model it holds"):
                checkpoint.load(path)
        save(model, tmp_path)
        torch.testing.assert_close(load(tmp_path).eval()(images), model(images))
        restore(model)
        assert model.config["name"] == "vit_nano_patch2_8"


def test_a_converted_timm_model_comes_back_into_a_fresh_one(tmp_path):
    model = vit()
    convert(model, layers=PLAN)
    images = torch.randn(2, 3, 32, 32)
    save(model, tmp_path)
    torch.testing.assert_close(load(tmp_path, model=vit()).eval()(images), model(images))
    with pytest.raises(ValueError, match="does not name a timm architecture"):
        load(tmp_path)


def test_what_is_not_converted_is_not_saved_as_such(tmp_path):
    with pytest.raises(ValueError, match="is not converted"):
        save(cumulant.create_model("vit_nano_patch2_8", num_classes=10), tmp_path)
