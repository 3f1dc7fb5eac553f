"""What people who come from transformers meet first: our names are there, and no model takes one in silence."""

import fresh
import pytest
import torch
from small_models import transformers

from cumulant.conversion import convert, load, register_transformers, save
from cumulant.inspect.opening import open_model
from tools.tiny_models import tiny_model

SIZES = {"hidden_size": 32, "vocab_size": 60}


def gptj(name="GPTJModel"):
    t = transformers()
    torch.manual_seed(0)
    config = t.GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, vocab_size=60, initializer_range=0.3)
    return getattr(t, name)(config).eval()


@pytest.mark.parametrize(
    ("first", "run"), [("cumulant, transformers", fresh.forked), ("transformers, cumulant", fresh.python)]
)
def test_our_names_are_registered_whichever_is_imported_first(first, run, tmp_path):
    transformers()
    code = f"import {first}; import transformers.modeling_utils; from transformers import AttentionInterface as a; "
    code += "print('cumulant3' in a._global_mapping)"
    assert run("-c", code, folder=tmp_path).strip() == "True"


@pytest.mark.parametrize(
    ("name", "sizes"), [("Bloom", {"n_layer": 1, "n_head": 4}), ("Deberta", {"num_hidden_layers": 1}), ("GPTJ", None)]
)
def test_a_model_that_would_keep_softmax_under_our_name_refuses_it(name, sizes):
    t = transformers()
    register_transformers()
    kind = getattr(t, f"{name}Model")
    heads = {} if name == "Bloom" else {"num_attention_heads": 4}
    config = gptj().config if sizes is None else getattr(t, f"{name}Config")(**SIZES, **sizes, **heads)
    model = kind(config)
    with pytest.raises(ValueError, match="would go on with softmax"):
        model.set_attn_implementation("cumulant3")
    with pytest.raises(ValueError, match=r"cumulant\.convert"):
        kind._from_config(config, attn_implementation="cumulant2")
    model.set_attn_implementation("eager")  # other names are none of our business


@pytest.mark.parametrize("name", ["SamVisionModel", "Gemma3nAudioEncoder"])
def test_so_does_one_whose_file_has_classes_that_ask_beside_its_own(name):
    kind = getattr(transformers(), name)
    register_transformers()
    with pytest.raises(ValueError, match="would go on with softmax"):
        tiny_model(kind).set_attn_implementation("cumulant3")


@pytest.mark.parametrize("name", ["SamModel", "SamVisionModel", "GitModel"])
def test_one_that_looks_for_its_classes_under_our_name_is_refused_and_loads_under_its_own(name, tmp_path):
    t = transformers()
    tiny_model(getattr(t, name)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attn_implementation='cumulant3'.*_ATTENTION_CLASSES.*cumulant\.convert"):
        t.AutoModel.from_pretrained(tmp_path, attn_implementation="cumulant3")
    assert isinstance(t.AutoModel.from_pretrained(tmp_path), getattr(t, name))


def test_a_part_of_it_that_asks_the_registry_takes_our_name():
    kind = transformers().DeepseekOcr2TextModel  # beside a table of classes in its file
    model = tiny_model(kind)
    model.set_attn_implementation("cumulant3")
    assert kind._from_config(model.config, attn_implementation="cumulant3").config._attn_implementation == "cumulant3"


def test_a_converted_model_that_never_asks_is_loaded_and_stays_causal(tmp_path):
    model, ids = gptj(), torch.arange(3, 12)[None]
    convert(model, "cumulant3")
    said = model(ids).last_hidden_state
    save(model, tmp_path)
    loaded = load(tmp_path).eval()
    torch.testing.assert_close(loaded(ids).last_hidden_state, said)
    torch.testing.assert_close(loaded(ids[:, :5]).last_hidden_state, said[:, :5])
    with pytest.raises(ValueError, match="would go on with softmax"):
        type(model).from_pretrained(tmp_path)


def test_weights_of_a_module_that_never_asks_are_signed_maps():
    model, ids = gptj(), torch.arange(3, 12)[None]
    convert(model, "cumulant3")
    A = model(ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(A.sum(-1), torch.ones(1, 4, 9))
    assert A.triu(1).abs().max() == 0
    assert (A < 0).any()


def test_a_name_of_the_hub_is_asked_for_there_and_an_error_says_what_was_looked_for(monkeypatch):
    t = transformers()
    asked = []

    def nothing(name, **_):
        asked.append(name)
        raise OSError("We couldn't connect to the hub. Check your connection")

    monkeypatch.setattr(t.AutoConfig, "from_pretrained", nothing)
    with pytest.raises(
        FileNotFoundError, match=r"no model 'somebody/a-model': .*couldn't connect.*OWNER/MODEL.*name its folder"
    ):
        open_model("somebody/a-model")
    assert asked == ["somebody/a-model"]
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        open_model("runs/mine/last")
    assert len(asked) == 1
