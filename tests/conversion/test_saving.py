import json
import os
from pathlib import Path

import pytest
import torch
from small_models import bert, padded, transformers, vit

import cumulant
from cumulant.conversion import Choice, convert, load, register_transformers, restore, save, saving
from cumulant.inspect.batches import answers, relative_error
from cumulant.inspect.examples import example_for
from cumulant.nn.swapped.choice import KEPT
from cumulant.nn.swapped.plan import apply, attention_layers, remember
from cumulant.train import checkpoint
from tools.tiny_models import tiny_model

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


def test_a_hybrid_whose_layers_are_not_found_fails_and_never_answers_with_softmax(tmp_path):
    model = bert()
    convert(model, layers=PLAN, force=True)
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("encoder.layer.0", "encoder.layer.7"))
    loaded = transformers().AutoModel.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"loaded with cumulant\.convert\.load"):
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


def test_a_stop_while_a_model_is_written_leaves_the_one_that_was_saved_before(tmp_path, monkeypatch):
    model, before = twice_converted(tmp_path)
    monkeypatch.setattr(saving, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moves", [0, 1])
def test_a_kill_while_files_move_leaves_no_mixture_of_two_models(tmp_path, monkeypatch, moves):
    model, _ = twice_converted(tmp_path)
    replace, done = os.replace, []

    def killed_after(source, target):
        if Path(target).parent == tmp_path:
            if len(done) == moves:
                raise KeyboardInterrupt
            done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed_after)
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path)
    with pytest.raises(ValueError, match=r"holds neither cumulant.json nor a config.json"):
        load(tmp_path)


def twice_converted(folder):
    """A model that was saved as it was converted first, converted otherwise; and the files that were saved."""
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=3, depth=2)
    convert(model, "cumulant2")
    save(model, folder)
    restore(model)
    convert(model, "cumulant3")
    return model, contents(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed(*_):
    raise KeyboardInterrupt


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


@pytest.mark.timm
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


def test_a_model_converted_to_our_own_softmax_comes_back(tmp_path):
    model, batch = bert(), padded()
    plan = {name: KEPT for name in attention_layers(model) if name.endswith("self")}
    remember(model, plan, apply(model, plan), whole=True)
    save(model, tmp_path)
    torch.testing.assert_close(load(tmp_path).eval()(**batch).last_hidden_state, model(**batch).last_hidden_state)


@pytest.mark.parametrize("make", [bert, pytest.param(vit, marks=pytest.mark.timm)], ids=["transformers", "timm"])
def test_a_file_in_the_place_of_the_folder_is_an_error(make, tmp_path):
    model = make()
    convert(model)
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileExistsError, match="taken"):
        save(model, tmp_path / "taken")


@pytest.mark.parametrize("file", ["model.safetensors", "{plan}"], ids=["weights", "plan"])
@pytest.mark.parametrize("make", [bert, pytest.param(vit, marks=pytest.mark.timm)], ids=["transformers", "timm"])
def test_a_damaged_file_is_named(make, file, tmp_path):
    model = make()
    convert(model)
    save(model, tmp_path)
    path = tmp_path / file.format(plan="config.json" if make is bert else "cumulant.json")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=path.name):
        load(tmp_path, model=make())


@pytest.mark.timm
def test_a_converted_model_is_not_loaded_into(tmp_path):
    model, other = vit(), vit()
    convert(model)
    save(model, tmp_path)
    convert(other, "cumulant2")
    with pytest.raises(ValueError, match="model is converted already"):
        load(tmp_path, model=other)


class Sentence(torch.nn.Module):
    """A module of a user's own around an encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = bert()

    def forward(self, **batch):
        return self.encoder(**batch).last_hidden_state[:, 0]


def test_a_module_around_a_model_of_transformers_is_converted_saved_and_taken_back(tmp_path):
    model, batch = Sentence().eval(), padded()
    before = model(**batch)
    convert(model, layers=PLAN, example=batch)
    converted = model(**batch)
    save(model, tmp_path)
    torch.testing.assert_close(load(tmp_path, model=Sentence().eval(), example=batch)(**batch), converted)
    with pytest.raises(ValueError, match="pass the model as model="):
        load(tmp_path)
    restore(model)
    assert torch.equal(model(**batch), before)
    assert not torch.equal(converted, before)


def test_a_model_inside_of_a_converted_module_carries_its_own_part_of_the_plan(tmp_path):
    """Saved and loaded without the module around it, it is not softmax again."""
    from transformers import BertModel

    model, batch = Sentence().eval(), padded()
    convert(model, layers=PLAN, example=batch)
    said = model.encoder(**batch).last_hidden_state
    model.encoder.save_pretrained(tmp_path / "inner")
    alone = BertModel.from_pretrained(tmp_path / "inner").eval()
    torch.testing.assert_close(alone(**batch).last_hidden_state, said)
    restore(model)
    model.encoder.save_pretrained(tmp_path / "restored")
    assert BertModel.from_pretrained(tmp_path / "restored").config._attn_implementation == "sdpa"


def test_what_is_converted_inside_or_around_is_not_converted_again():
    model, batch = Sentence().eval(), padded()
    convert(model, layers=PLAN, example=batch)
    around = torch.nn.ModuleDict({"part": model})
    for other in (model.encoder, around):
        with pytest.raises(ValueError, match="is converted already"):
            convert(other, example=batch)


def test_the_precision_of_the_weights_comes_back(tmp_path):
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10).bfloat16()
    convert(model)
    save(model, tmp_path)
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.bfloat16}


def hybrid(folder, make=bert):
    """A saved hybrid, and what it says."""
    model, batch = make(), padded()
    convert(model, layers=PLAN, force=True)
    with torch.no_grad():
        said = model(**batch)[0]
    save(model, folder)
    return said, batch


def test_a_hybrid_loads_with_plain_from_pretrained(tmp_path):
    said, batch = hybrid(tmp_path)
    register_transformers()
    loaded = transformers().AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**batch)[0], said)
    save(loaded, tmp_path / "again")
    torch.testing.assert_close(load(tmp_path / "again").eval()(**batch)[0], said)
    restore(loaded)
    assert not torch.allclose(loaded(**batch)[0], said)


def test_a_hybrid_takes_a_new_head_and_gives_it_up(tmp_path):
    said, batch = hybrid(tmp_path)
    register_transformers()
    headed = transformers().BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    torch.testing.assert_close(headed.bert(**batch)[0], said)
    save(headed, tmp_path / "headed")
    alone = transformers().BertModel.from_pretrained(tmp_path / "headed").eval()
    torch.testing.assert_close(alone(**batch)[0], said)
    restore(headed)
    assert not torch.allclose(headed.bert(**batch)[0], said)


def test_a_config_of_two_models_is_not_changed_for_the_other():
    t = transformers()
    config = bert().config
    student, teacher = (t.BertModel(config).eval() for _ in range(2))
    before = teacher(**padded())[0]
    convert(student, layers=PLAN, force=True)
    torch.testing.assert_close(teacher(**padded())[0], before)
    assert not hasattr(teacher.config, "cumulant")
    other = t.BertModel(config).eval()  # one that is made later is not converted either
    other(**padded())


class Adapted(torch.nn.Module):
    """A PeftModel as far as saving sees it: attributes of the base are its own, and it writes adapters only."""

    def __init__(self, base):
        super().__init__()
        self.base_model, self.peft_config = torch.nn.ModuleDict({"model": base}), {"default": None}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["base_model"]["model"], name)

    def get_base_model(self):
        return self.base_model["model"]

    def merge_and_unload(self):
        return self.base_model["model"]

    def forward(self, **batch):
        return self.base_model["model"](**batch)

    def save_pretrained(self, folder):
        (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize("after", [True, False], ids=["base converted", "whole converted"])
def test_a_model_with_adapters_is_saved_with_plan_and_weights(after, tmp_path):
    model, batch = bert(), padded()
    if after:
        convert(model, layers=PLAN, force=True)
        adapted = Adapted(model).eval()
    else:
        adapted = Adapted(model).eval()
        convert(adapted, layers=PLAN, example=batch, force=True)
    said = adapted(**batch)[0]
    save(adapted, tmp_path)
    torch.testing.assert_close(load(tmp_path).eval()(**batch)[0], said)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    torch.testing.assert_close(adapted(**batch)[0], said)


@pytest.mark.parametrize("name", ["SamModel", "SamHQModel", "DeepseekOcr2Model"])
def test_a_model_that_chooses_its_classes_by_the_name_of_its_attention_comes_back(name, tmp_path):
    model = tiny_model(getattr(transformers(), name))
    batch = example_for(model)
    convert(model, example=batch, force=True)
    said = answers(model, [batch])
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert relative_error(answers(loaded.eval(), [batch]), said) < 1e-5
    restore(loaded)
    assert loaded.config._attn_implementation in ("sdpa", "eager")
