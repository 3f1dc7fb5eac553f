"""Expansion around the mean query in converted models: the same as the mechanism, masks, choice, saving, refusals."""

import json

import pytest
import torch
from small_models import TIMM, bert, llama, loud, padded, timm, vit, whisper
from torch import nn

import cumulant
from cumulant.call import Call
from cumulant.conversion import Choice, convert, diagnose, load, restore, save
from cumulant.conversion.command import Convert, run_convert
from cumulant.conversion.statistics import head_sums
from cumulant.inspect.examples import example_for
from cumulant.nn.swapped.choice import mix

NAME = "cumulant3+around=mean"
IMAGES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def model(**kw):
    torch.manual_seed(0)
    return cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2, **kw).eval().double()


def test_a_converted_model_is_the_one_made_with_it_and_its_class_token_has_a_mean_of_its_own():
    ours, made = model(), model(attention="cumulant3", attention_options={"around": "mean", "apart": 1})
    made.load_state_dict(ours.state_dict())
    report = convert(ours, NAME, example=IMAGES)
    torch.testing.assert_close(ours(IMAGES), made(IMAGES))
    assert list(report.replaced.values()) == 4 * [Choice("cumulant3", None, {"around": "mean", "apart": 1})]


def test_heads_that_are_not_chosen_stay_softmax():
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    choice = Choice.from_json({"attention": NAME, "heads": [1, 2]})
    out = mix(nn.Identity(), choice, Call(q, k, v, mask, query_mask=mask))
    fast = cumulant.zoo.get("cumulant3")(q, k, v, around="mean", key_mask=mask, query_mask=mask)
    exact = cumulant.zoo.get("softmax")(q, k, v, key_mask=mask)
    torch.testing.assert_close(out[:, [1, 2]], fast[:, [1, 2]])
    torch.testing.assert_close(out[:, [0, 3]], exact[:, [0, 3]])


def test_padding_of_a_text_is_in_no_mean():
    encoder, texts = bert().double(), padded()
    convert(encoder, NAME, example=texts)
    long = encoder(**texts).last_hidden_state[1, :6]
    short = encoder(**{name: x[1:, :6] for name, x in texts.items()}).last_hidden_state[0]
    torch.testing.assert_close(long, short)


def test_a_mask_of_our_own_layer_leaves_its_queries_out_of_the_mean():
    layer = cumulant.nn.MultiheadAttention(16, 2, dtype=torch.float64)
    ours, x = nn.Sequential(layer).eval(), 3 * torch.randn(2, 7, 16, dtype=torch.float64)
    convert(ours, NAME, example=x)
    mask = torch.arange(7) < torch.tensor([[5], [5]])
    torch.testing.assert_close(layer(x, key_mask=mask)[:, :5], layer(x[:, :5]))
    torch.testing.assert_close(layer.scores(x, key_mask=mask)[:, :, :5, :5], layer.scores(x[:, :5]))


@pytest.mark.timm
def test_timm_tells_its_class_token_and_masks_reach_the_mean():
    ours, x = loud(vit()).double(), torch.randn(2, 17, 32, dtype=torch.float64)
    plan = convert(ours, NAME).replaced
    assert plan["blocks.0.attn"].options == {"around": "mean", "apart": 1}
    layer, mask = ours.blocks[0].attn, torch.arange(17).lt(12).expand(2, 17)
    torch.testing.assert_close(layer(x, attn_mask=mask)[:, :12], layer(x[:, :12]))


@pytest.mark.timm
def test_class_attention_has_one_query_and_stays_exactly_softmax():
    ours = timm().create_model("cait_xxs24_224", depth=1, img_size=32, embed_dim=32, num_heads=4, num_classes=5).eval()
    report = convert(loud(ours), NAME)
    assert "blocks_token_only.0.attn" in report.replaced
    assert report.measured_error < 1e-5


@pytest.mark.parametrize("kind", ["transformers", TIMM, "ours"])
def test_it_is_saved_and_loaded(kind, tmp_path):
    ours = {"transformers": bert, "timm": lambda: loud(vit()), "ours": model}[kind]()
    batch = {"transformers": padded(), "timm": torch.randn(2, 3, 32, 32), "ours": IMAGES}[kind]
    ask = (lambda m: m(**batch).last_hidden_state) if kind == "transformers" else (lambda m: m(batch))
    convert(ours, layers={0: NAME, 1: {"attention": "cumulant2", "heads": [0], "options": {"around": "mean"}}},
            example=batch)  # fmt: skip
    save(ours, tmp_path)
    fresh = {"timm": lambda: loud(vit()), "ours": model}.get(kind, lambda: None)()
    loaded = load(tmp_path, model=fresh, example=batch).eval()
    torch.testing.assert_close(ask(loaded), ask(ours))
    restore(ours)
    assert (ask(loaded) - ask(ours)).abs().max() > 1e-4
    restore(loaded)
    torch.testing.assert_close(ask(loaded), ask(ours))


def test_causal_layers_refuse_it():
    with pytest.raises(ValueError, match=r"no attention layer can take cumulant3, around=mean: it is causal"):
        convert(llama(), NAME)
    with pytest.raises(ValueError, match=r"layer 1 .* cannot be replaced by cumulant3, around=mean: it is causal"):
        convert(llama(), layers={0: "cumulant2", 1: NAME})


def test_a_decoder_keeps_softmax_where_it_looks_at_an_encoder_of_the_same_length():
    batch = {
        "input_features": torch.randn(2, 8, 32),
        "decoder_input_ids": torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0)),
    }
    report = convert(whisper(), NAME, example=batch)
    assert list(report.replaced) == ["encoder.layers.0.self_attn"]
    assert "attends to another sequence" in report.kept["decoder.layers.1.encoder_attn"]
    assert "it is causal" in report.kept["decoder.layers.1.self_attn"]


def layer_with(bias):
    """One softmax layer whose queries have this mean in every coordinate."""
    torch.manual_seed(0)
    layer = cumulant.nn.MultiheadAttention(16, 2)
    with torch.no_grad():
        layer.qkv.bias.zero_()
        layer.qkv.bias[:16] = bias
    return nn.Sequential(layer).eval()


def test_the_choice_prefers_it_where_the_queries_are_far_from_0():
    ours, x = layer_with(4.0), torch.randn(2, 12, 16)
    found = diagnose(ours, x)
    assert found.layers[0].best() in ("cumulant2+around=mean", NAME)
    assert found.layers[0].mean_error[3][0] < 0.5 * found.layers[0].error[3][0]
    report = convert(ours, layers="auto", budget=1.0, data=x, diagnosis=found)
    assert report.replaced["0"].around_mean


def test_the_choice_is_the_cheaper_one_where_the_mean_query_is_0():
    half = 3 * torch.randn(2, 6, 16)
    found = diagnose(layer_with(0.0), torch.cat((half, -half), 1))
    effect = found.layers[0].effect
    assert effect[NAME] == pytest.approx(effect["cumulant3"], rel=1e-3)
    assert not Choice.named(found.layers[0].best()).around_mean


def test_auto_expands_around_0_where_that_is_asked_for():
    ours, x = layer_with(4.0), torch.randn(2, 12, 16)
    report = convert(ours, layers="auto", budget=9.0, data=x, options={"around": "zero"})
    assert not report.replaced["0"].options
    restore(ours)
    assert convert(ours, layers="auto", budget=9.0, data=x, options={"around": "mean"}).replaced["0"].around_mean


@pytest.mark.parametrize("how", ["plain", "masked", "grouped", "prefix"])
def test_the_error_in_the_diagnosis_is_that_of_the_mechanism(how):
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64)
    mask = torch.arange(12) < torch.tensor([[12], [7]]) if how == "masked" else None
    if how == "grouped":
        k, v = k[:, :2], v[:, :2]
    found = head_sums(Call(q, k, v, mask, False, None), 12, torch.Generator(), prefix=int(how == "prefix"))
    shared = {"key_mask": mask, "enable_gqa": how == "grouped"}
    exact = cumulant.zoo.get("softmax")(q, k, v, **shared)
    shared |= {"around": "mean", "query_mask": mask, "apart": int(how == "prefix")}
    valid = torch.ones(2, 12) if mask is None else mask

    def size(x):
        return (x * valid[:, None, :, None]).square().sum((0, 2, 3)).sqrt()

    for order in (1, 2, 3):
        expected = size(cumulant.zoo.get(f"cumulant{order}")(q, k, v, **shared) - exact) / size(exact)
        torch.testing.assert_close(torch.tensor(found.relative(found.mean_error[order])), expected.float())


def test_a_causal_layer_is_diagnosed_around_0_alone():
    found = diagnose(llama(), padded("left"))
    assert list(found.layers[0].effect) == ["cumulant2", "cumulant3"]
    assert not found.layers[0].mean_error
    assert "mean3" in found.table()


def test_a_layer_that_can_take_none_of_the_candidates_is_named_and_left_out():
    found = diagnose(whisper(), attention=(NAME,))
    assert [layer.name for layer in found.layers] == ["encoder.layers.0.self_attn"]
    assert "it is causal" in found.kept["decoder.layers.0.self_attn"]
    ours = whisper()
    report = convert(ours, layers="auto", budget=9.0, data=example_for(ours), options={"around": "mean"},
                     diagnosis=diagnose(ours))  # fmt: skip
    assert list(report.replaced) == ["encoder.layers.0.self_attn"]
    with pytest.raises(ValueError, match=r"no attention layer can take cumulant3\+around=mean: it is causal"):
        diagnose(llama(), attention=(NAME,))


def test_the_command_line_takes_it(tmp_path):
    from cumulant.train import save as save_weights

    weights = str(save_weights(cumulant.create_model("vit_nano_patch2_8", num_classes=10), tmp_path / "w.safetensors"))
    run_convert(Convert(weights, around="mean", layers=("1",), out=tmp_path / "out"))
    stored = json.loads((tmp_path / "out" / "conversion.json").read_text())["replaced"]["blocks.1.attn"]
    assert stored == {"attention": "cumulant3", "heads": None, "options": {"around": "mean", "apart": 1}}
    with pytest.raises(ValueError, match="unknown option 'around' of mechanism 'linear'"):
        run_convert(Convert(weights, attention="linear", around="mean", out=tmp_path / "out"))


def test_a_choice_is_written_as_one_word():
    choice = Choice.named("cumulant3+around=mean+apart=2+full")
    assert choice == Choice("cumulant3", None, {"around": "mean", "apart": 2, "full": True})
    assert Choice.named(choice.name) == choice
    with pytest.raises(ValueError, match="around must be one of 'zero', 'mean', got 'median'"):
        Choice.named("cumulant3+around=median")
    with pytest.raises(ValueError, match=r"options are written \+name or \+name=value, got 'around='"):
        Choice.named("cumulant3+around=")
