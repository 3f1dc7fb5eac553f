"""A converted model later: copies, pickles, modes, moves and the way back; and wrong ways to ask for one."""

import copy
import pickle

import pytest
import torch
from small_models import TIMM, bert, loud, padded, timm, vit

import cumulant
from cumulant.conversion import convert, restore
from cumulant.inspect.batches import relative_error


def ours(**kw):
    return cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2, **kw).eval()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


MODELS = {
    "ours": (ours, lambda: torch.randn(2, 1, 8, 8)),
    "timm": (lambda: loud(vit()), lambda: torch.randn(2, 3, 32, 32)),
    "transformers": (bert, padded),
}


def said(model, batch):
    return model(**batch).last_hidden_state if isinstance(batch, dict) else model(batch)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", ["ours", TIMM, "transformers"])
def test_a_copy_is_restored_alone(kind, copied):
    make, batch = MODELS[kind][0], MODELS[kind][1]()
    model = make()
    before = said(model, batch)
    convert(model, layers=[0])
    converted = said(model, batch)
    twin = copied(model)
    assert torch.equal(said(twin, batch), converted)
    restore(twin)
    assert torch.equal(said(twin, batch), before)
    assert torch.equal(said(model, batch), converted)
    restore(model)
    assert torch.equal(said(model, batch), before)


@pytest.mark.timm
def test_a_layer_of_timm_is_converted_in_the_mode_that_the_model_is_in():
    model = vit(depth=1, attn_drop_rate=0.5).train()
    report = convert(model, layers={0: {"attention": "cumulant3", "heads": [0]}})
    assert model.blocks[0].attn.training
    images = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(images), model(images))  # the softmax heads still drop
    assert report.key_dropout == {}


def test_softmax_heads_of_our_own_layer_keep_their_dropout():
    model = ours(attn_drop=0.5)
    report = convert(model, layers={"*": "cumulant3", 0: {"attention": "cumulant3", "heads": [0]}})
    assert list(report.key_dropout) == ["blocks.1.attn", "blocks.2.attn", "blocks.3.attn"]
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


@pytest.mark.timm
def test_a_restored_layer_of_timm_has_the_mode_and_the_precision_that_the_model_has_by_then():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4, "depth": 1, "num_classes": 3}
    model = timm().models.eva.Eva(**sizes, qkv_fused=True).eval()
    convert(model)
    model.double().train()
    restore(model)
    attention = model.blocks[0].attn
    assert attention.training
    assert {x.dtype for x in (*attention.parameters(), *attention.buffers())} == {torch.float64}
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).dtype == torch.float64


def test_a_layer_that_is_refused_leaves_those_before_it_as_they_were():
    model = cumulant.create_model("vivit_nano_patch4x1_16", num_classes=5, variant=4, zero_head=False).eval()
    clips = torch.randn(1, 1, 8, 16, 16)
    before = model(clips)
    with pytest.raises(ValueError, match="heads of AxialAttention differ already"):
        convert(model, layers={0: "cumulant2", 1: {"heads": [0]}}, example=clips)
    assert torch.equal(model(clips), before)


def test_modules_keep_their_own_modes():
    model = ours().train()
    model.blocks[1].eval()
    convert(model)
    assert model.training
    assert all(module.training for module in model.blocks[0].modules())
    assert not any(module.training for module in model.blocks[1].modules())


WRONG = {
    "nothing": ({"layers": []}, r"no layer of VisionTransformer is to be replaced by layers=\[\]"),
    "softmax": ({"layers": {0: "softmax"}}, "is to be replaced by layers"),
    "a misspelt key": ({"layers": {0: {"attn": "cumulant2"}}}, "attention, heads and options, got 'attn'"),
    "no heads": ({"layers": {0: {"heads": []}}}, r"has heads 0 to 3, got \[\]"),
    "heads by name": ({"layers": {0: {"heads": ["first"]}}}, "heads must be numbers"),
    "a truth value": ({"layers": [True]}, "by number or by pattern, got True"),
    "a fraction": ({"layers": [1.0]}, r"by number or by pattern, got 1\.0"),
    "a negative budget": ({"layers": "auto", "budget": -1.0}, "0 or more, got -1"),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_what_names_no_layer_head_or_choice_is_told(wrong):
    how, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        convert(ours(), **how, data=torch.randn(2, 1, 8, 8))


@pytest.mark.parametrize("layers", [None, "auto"], ids=["all", "auto"])
def test_a_model_that_answers_nan_is_told_so(layers):
    model = ours()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="gives NaN before anything is replaced"):
        convert(model, layers=layers, data=torch.randn(2, 1, 8, 8))


def test_a_change_from_nothing_or_to_nan_is_infinite():
    nothing, something = torch.zeros(2), torch.ones(2)
    assert relative_error([nothing], [nothing]) == 0
    assert relative_error([something], [nothing]) == torch.inf
    assert relative_error([torch.full((2,), torch.nan)], [something]) == torch.inf
