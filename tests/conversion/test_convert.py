import pytest
import torch
from small_models import bert, padded
from torch import nn

import cumulant
from cumulant.call import Call
from cumulant.conversion import Choice, convert, count_calls, restore
from cumulant.nn.fold import folds
from cumulant.nn.swapped.choice import mix

IMAGES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def model(**kw):
    torch.manual_seed(0)
    return cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.3, **kw).eval()


def test_a_converted_model_is_the_model_made_with_that_mechanism():
    ours, made = model(), model(attention="cumulant3", attention_options={"apart": 1})
    made.load_state_dict(ours.state_dict())
    report = convert(ours, "cumulant3")
    torch.testing.assert_close(ours(IMAGES), made(IMAGES))
    assert len(report.replaced) == 4
    assert not report.kept
    assert report.measured_error > 0.01


def test_class_tokens_stay_softmax_unless_told_otherwise():
    """All that this model reads is the class token, and its layer sees what softmax would."""
    said = model(depth=1)(IMAGES)
    for name in ("cumulant2", "cumulant3", "cumulant2+around=mean"):
        ours = model(depth=1)
        convert(ours, name)
        torch.testing.assert_close(ours(IMAGES), said)
        other = model(depth=1)
        report = convert(other, f"{name}+apart=0")
        assert (other(IMAGES) - said).norm() > 0.01 * said.norm()
        assert "apart" not in str(*report.replaced.values()) or "around" in name
    mean = model(depth=1, pool="gap")
    assert convert(mean, "cumulant2").replaced == {"blocks.0.attn": Choice("cumulant2")}


def test_a_second_order_layer_of_ours_is_folded_and_says_the_same():
    layer = cumulant.nn.MultiheadAttention(32, 4)
    ours, x = nn.Sequential(layer).eval(), 4 * torch.randn(2, 300, 32)
    said = ours(x)
    convert(ours, "cumulant2", example=x)
    assert folds(layer.fold, x, 4)
    folded = ours(x)
    layer.fold = False
    torch.testing.assert_close(ours(x), folded, atol=1e-5, rtol=1e-4)
    assert (folded - said).abs().max() > 1e-3
    restore(ours)
    assert layer.fold is False
    torch.testing.assert_close(ours(x), said)


def test_cluster_attention_is_told_the_grid_where_the_model_knows_it():
    ours, made = model(), model(attention="cluster4")
    made.load_state_dict(ours.state_dict())
    convert(ours, "cluster4")
    torch.testing.assert_close(ours(IMAGES), made(IMAGES))
    layer = ours.blocks[0].attn
    x = torch.randn(2, 17, 64)
    torch.testing.assert_close(layer.scores(x).sum(-1), torch.ones(2, 4, 17))
    without = mix(layer, Choice("cluster4"), Call(*layer.project(x)))
    assert (layer.mix(*layer.project(x), grid=(4, 4), prefix=1) - without).abs().max() > 1e-4


def test_single_heads_may_take_cluster_attention():
    ours = model()
    said = ours(IMAGES)
    convert(ours, layers={1: {"attention": "cluster16", "heads": [0, 2]}})
    assert 0 < (ours(IMAGES) - said).abs().max() < 1


def test_cluster_attention_without_a_grid_honours_padding():
    encoder, texts = bert(), padded()
    convert(encoder, "cluster4")
    said = encoder(**texts).last_hidden_state
    texts["input_ids"] = texts["input_ids"].masked_fill(texts["attention_mask"] == 0, 7)
    torch.testing.assert_close(encoder(**texts).last_hidden_state[1, :6], said[1, :6], atol=1e-5, rtol=1e-4)


def test_options_reach_the_mechanism():
    ours, made = model(), model(attention="cumulant3", attention_options={"full": True, "apart": 1})
    made.load_state_dict(ours.state_dict())
    convert(ours, "cumulant3", options={"full": True})
    torch.testing.assert_close(ours(IMAGES), made(IMAGES))


def test_conversion_can_be_taken_back():
    ours = model()
    said = ours(IMAGES)
    convert(ours)
    assert (ours(IMAGES) - said).abs().max() > 1e-3
    restore(ours)
    torch.testing.assert_close(ours(IMAGES), said)
    with pytest.raises(ValueError, match="was not converted"):
        restore(ours)


def test_converting_twice_is_an_error():
    ours = model()
    convert(ours)
    with pytest.raises(ValueError, match="converted already"):
        convert(ours)


@pytest.mark.parametrize("layers", [[1, -1], ["blocks.1.*", "blocks.3.attn"]])
def test_layers_are_chosen_by_index_or_pattern(layers):
    report = convert(model(), layers=layers)
    assert list(report.replaced) == ["blocks.1.attn", "blocks.3.attn"]
    assert report.kept == {"blocks.0.attn": "not chosen", "blocks.2.attn": "not chosen"}


def test_each_layer_may_have_its_own_mechanism():
    report = convert(model(), layers={0: "cumulant2", 1: None, 2: {"heads": [3, 1]}, 3: Choice("linear")})
    assert report.replaced == {
        "blocks.0.attn": Choice("cumulant2", None, {"apart": 1}),
        "blocks.2.attn": Choice("cumulant3", (1, 3), {"apart": 1}),
        "blocks.3.attn": Choice("linear"),
    }


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers": [9]}, "layer 9 does not exist: the model has 4"),
        ({"layers": ["block.*"]}, "no attention layer matches 'block.*'"),
        ({"layers": "some"}, 'layers must be None, "auto", "dial", a list or a mapping'),
        ({"layers": {0: {"heads": [7]}}}, "has heads 0 to 3"),
        ({"layers": "auto"}, "needs data"),
        ({"budget": 0.1}, 'goes with layers="auto"'),
        ({"attention": "cumulant4"}, "unknown attention mechanism"),
        ({"options": {"ful": True}}, "did you mean 'full'"),
    ],
)
def test_wrong_arguments_are_named_and_leave_the_model_alone(how, message):
    ours = model()
    said = ours(IMAGES)
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        convert(ours, **how)
    torch.testing.assert_close(ours(IMAGES), said)


def test_heads_that_are_not_chosen_stay_softmax():
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    out = mix(nn.Identity(), Choice("cumulant3", (1, 2)), Call(q, k, v))
    fast, exact = (cumulant.zoo.get(name)(q, k, v) for name in ("cumulant3", "softmax"))
    torch.testing.assert_close(out[:, [1, 2]], fast[:, [1, 2]])
    torch.testing.assert_close(out[:, [0, 3]], exact[:, [0, 3]])


def test_heads_are_chosen_with_grouped_keys():
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    out = mix(nn.Identity(), Choice("cumulant2", (0, 3)), Call(q, k, v, is_causal=True))
    repeated = [x.repeat_interleave(2, 1) for x in (k, v)]
    fast, exact = (cumulant.zoo.get(name)(q, *repeated, is_causal=True) for name in ("cumulant2", "softmax"))
    torch.testing.assert_close(out[:, [0, 3]], fast[:, [0, 3]])
    torch.testing.assert_close(out[:, [1, 2]], exact[:, [1, 2]])


def test_scores_of_a_hybrid_layer_mix_its_values():
    ours = model()
    convert(ours, layers={0: {"heads": [0, 2]}})
    layer, x = ours.blocks[0].attn, torch.randn(2, 16, 64)
    _, _, value = layer.project(x)
    mixed = (layer.scores(x) @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.proj(mixed), layer(x), atol=1e-5, rtol=1e-4)


def test_a_replaced_layer_that_never_runs_is_an_error():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = cumulant.nn.MultiheadAttention(16, 2)
            self.unused = cumulant.nn.MultiheadAttention(16, 2)

        def forward(self, x):
            return self.used(x)

    ours, x = Skips().eval(), torch.randn(2, 5, 16)
    said = ours(x)
    with pytest.raises(RuntimeError, match="1 of 2 replaced layers of Skips never ran: unused"):
        convert(ours, example=x)
    torch.testing.assert_close(ours(x), said)
    assert convert(ours, example=x, layers=["used"]).calls == {"used": 1}


def test_an_attention_that_does_more_than_softmax_is_found_out():
    class Sharpened(cumulant.nn.MultiheadAttention):
        def mix_tokens(self, call, x, context=None):
            twice = 2.0 if self.mechanism.name == "softmax" and not isinstance(self.mix, nn.Module) else 1.0
            return super().mix_tokens(call._replace(query=twice * call.query), x, context)

    ours = nn.Sequential(Sharpened(16, 2)).eval()
    with pytest.raises(RuntimeError, match="they do more than that"):
        convert(ours, example=4 * torch.randn(2, 5, 16))


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="has no attention that can be converted"):
        convert(nn.Linear(3, 3), example=torch.randn(2, 3))


def test_a_model_that_cannot_be_guessed_asks_for_an_example():
    with pytest.raises(ValueError, match="pass example=batch"):
        convert(nn.Sequential(cumulant.nn.MultiheadAttention(16, 2)))


def test_backbones_of_ours_are_converted_without_an_example_or_say_how_else():
    crossvit = cumulant.create_model("crossvit_nano", num_classes=3).eval()
    assert len(convert(crossvit, "cumulant2").replaced) == 10
    with pytest.raises(ValueError, match=r"learned bias for every distance.*partition=\"global\""):
        convert(cumulant.create_model("maxvit_nano", num_classes=3), "cumulant2")
    with pytest.raises(ValueError, match=r"create_model\('shvit_nano', attention=\.\.\.\)"):
        convert(cumulant.create_model("shvit_nano", num_classes=3), "cumulant2")


def test_video_models_of_ours_are_converted():
    ours = cumulant.create_model("vivit_nano_patch4x2_32", num_classes=5, variant=4).eval()
    report = convert(ours, "cumulant2")
    assert report.replaced
    assert all(times >= 1 for times in report.calls.values())


def test_the_report_reads_as_text_and_as_json():
    import json

    report = convert(model(), layers=[0])
    assert "1 of 4 attention layers replaced" in str(report)
    assert "blocks.0.attn: cumulant3" in str(report)
    assert json.loads(json.dumps(report.to_json()))["replaced"]["blocks.0.attn"]["attention"] == "cumulant3"


def test_layers_of_transformers_differ_after_conversion():
    ours, batch = bert(), padded()
    said = ours(**batch).last_hidden_state
    report = convert(ours, layers={0: "cumulant2", 1: {"heads": [0]}}, data=[batch])
    assert count_calls(ours, batch, report.replaced) == dict.fromkeys(report.replaced, 1)
    hybrid = ours(**batch).last_hidden_state
    restore(ours)
    torch.testing.assert_close(ours(**batch).last_hidden_state, said)
    ours.set_attn_implementation("cumulant2")
    assert (ours(**batch).last_hidden_state - hybrid).abs().max() > 1e-3
