import json

import pytest
import torch
from small_models import bert, llama, loud, padded, transformers, vit

import cumulant
from cumulant.call import Call
from cumulant.conversion import Choice, convert, diagnose, restore
from cumulant.conversion.statistics import head_sums

IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(3))
AROUND_ZERO = ("cumulant2", "cumulant3")


def model(**kw):
    torch.manual_seed(0)
    return cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2, **kw).eval()


def sums(q, k, v, **kw):
    call = Call(q, k, v, kw.get("key_mask"), kw.get("is_causal", False), kw.get("scale"))
    return head_sums(call, q.shape[-2], torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["plain", "masked", "causal", "grouped"])
def test_the_error_is_that_of_the_attention_functions(how):
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64)
    shared = {"key_mask": torch.arange(12) < torch.tensor([[12], [7]])} if how == "masked" else {}
    shared |= {"is_causal": True} if how == "causal" else {}
    shared |= {"enable_gqa": True} if how == "grouped" else {}
    if how == "grouped":
        k, v = k[:, :2], v[:, :2]
    found = sums(q, k, v, **shared)
    exact = cumulant.zoo.get("softmax")(q, k, v, **shared)
    valid = shared.get("key_mask", torch.ones(2, 12, dtype=torch.bool))[:, None, :, None]

    def size(x):
        return (x * valid).square().sum((0, 2, 3)).sqrt()

    for order in (1, 2, 3):
        approximate = cumulant.attention(q, k, v, order=order, **shared)
        expected = size(approximate - exact) / size(exact)
        torch.testing.assert_close(torch.tensor(found.relative(found.error[order])), expected.float())


def test_what_an_order_leaves_out_is_its_error_for_small_logits():
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    found = sums(0.05 * q, k, v)
    for order in (1, 2, 3):
        ratio = (found.left_out[order] / found.error[order]).sqrt()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=0.1, rtol=0)


def test_spread_is_the_deviation_of_the_logits():
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64)
    expected = (q @ k.mT * 8**-0.5).var(-1, correction=0).mean((0, 2)).sqrt()
    torch.testing.assert_close(torch.tensor(sums(q, k, v).spread()), expected.float())


def test_order_one_has_no_negative_weight_and_large_logits_give_some():
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64)
    found = sums(4 * q, k, v)
    assert float(found.negative[1].max()) == 0
    assert float(found.negative[2].min()) > 0


def test_the_effect_of_a_layer_is_what_converting_it_alone_changes():
    ours = model()
    found = diagnose(ours, IMAGES, heads=True)
    for layer in found.layers:
        report = convert(ours, layers={layer.name: "cumulant2"}, data=IMAGES)
        assert report.measured_error == pytest.approx(layer.effect["cumulant2"], rel=1e-4)
        restore(ours)
    one = convert(ours, layers={0: {"attention": "cumulant3", "heads": [2]}}, data=IMAGES)
    assert one.measured_error == pytest.approx(found.layers[0].head_effect["cumulant3"][2], rel=1e-4)


def test_the_class_token_need_not_be_among_the_sampled_queries():
    found = diagnose(model(), IMAGES, attention=("cumulant2",), queries=1)
    assert all(0 < error < 2 for layer in found.layers for error in layer.mean_error[2])


def test_diagnosis_leaves_the_model_alone():
    ours, encoder = model(), bert()
    said = ours(IMAGES), encoder(**padded()).last_hidden_state
    diagnose(ours, IMAGES)
    diagnose(encoder, padded())
    torch.testing.assert_close((ours(IMAGES), encoder(**padded()).last_hidden_state), said)
    assert encoder.config._attn_implementation == "sdpa"


def test_layers_are_ranked_by_their_effect_and_printed_so():
    found = diagnose(model(), IMAGES)
    effects = [layer.effect[layer.best()] for layer in found.ranked()]
    assert effects == sorted(effects)
    lines = found.table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [layer.name for layer in found.ranked()]
    assert list(found.best(2)) == [layer.name for layer in found.ranked()[:2]]


def test_a_layer_with_sharper_logits_is_found_less_safe():
    ours = model(pool="gap")
    with torch.no_grad():
        ours.blocks[2].attn.qkv.weight[:64].mul_(6)  # its queries
    found = diagnose(ours, IMAGES, attention=AROUND_ZERO)
    assert found.ranked()[-1].name == "blocks.2.attn"
    assert sum(found.layers[2].spread) > 3 * sum(found.layers[1].spread)


def test_auto_stays_within_the_budget_and_replaces_what_fits():
    ours = model(pool="gap")
    with torch.no_grad():
        ours.blocks[2].attn.qkv.weight[:64].mul_(6)
    found = diagnose(ours, IMAGES, attention=AROUND_ZERO)
    budget = 1.2 * max(layer.effect[layer.best()] for layer in found.layers if layer.name != "blocks.2.attn")
    report = convert(ours, layers="auto", budget=budget, data=IMAGES, options={"around": "zero"})
    assert report.measured_error <= budget
    assert report.replaced
    assert "blocks.2.attn" not in report.replaced
    assert report.predicted_error == pytest.approx(report.measured_error, rel=1.0)


def test_auto_may_replace_single_heads():
    ours = model()
    found = diagnose(ours, IMAGES, attention=AROUND_ZERO, heads=True)
    budget = 0.9 * min(layer.effect[layer.best()] for layer in found.layers)
    with pytest.raises(ValueError, match="fits the budget"):
        convert(ours, layers="auto", budget=budget, data=IMAGES, diagnosis=found)
    report = convert(ours, layers="auto", budget=budget, data=IMAGES, heads=True, diagnosis=found)
    assert all(choice.heads for choice in report.replaced.values())
    assert report.measured_error <= budget


def test_the_safest_heads_are_those_with_the_smallest_effect():
    ours = model()
    found = diagnose(ours, IMAGES, attention=AROUND_ZERO, heads=True)
    plan = found.best_heads(5)
    effects = sorted(e for layer in found.layers for e in layer.head_effect[layer.best()])
    layers = {layer.name: layer for layer in found.layers}
    chosen = [layers[n].head_effect[c.attention][h] for n, c in plan.items() for h in c.heads or range(4)]
    assert sorted(chosen) == effects[:5]
    assert all(choice.heads is None for choice in found.best_heads(16).values())
    assert convert(ours, layers=plan, data=IMAGES).replaced == plan
    with pytest.raises(ValueError, match="diagnosis of single heads"):
        diagnose(restored(ours), IMAGES).best_heads(1)


def restored(ours):
    restore(ours)
    return ours


def test_heads_need_a_diagnosis_of_heads():
    ours = model()
    with pytest.raises(ValueError, match="diagnosis of single heads"):
        convert(ours, layers="auto", data=IMAGES, heads=True, diagnosis=diagnose(ours, IMAGES))


@pytest.mark.timm
def test_transformers_and_timm_are_diagnosed():
    for ours, data in ((llama(), padded("left")), (loud(vit()), torch.randn(2, 3, 32, 32))):
        found = diagnose(ours, data)
        assert len(found.layers) == 2
        assert all(0 < layer.error[2][0] < 1 for layer in found.layers)


def test_a_proposal_names_layers_and_what_they_save():
    found = diagnose(model(), IMAGES)
    assert "replace 4 of 4 layers" in found.proposal(10.0)
    assert "no layer can be replaced" in found.proposal(1e-9)
    assert found.speedup(16384) > found.speedup(256) > 1


def test_the_diagnosis_is_written_as_json_and_as_a_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'cumulant[train]'")
    found = diagnose(model(), IMAGES)
    assert json.loads(json.dumps(found.to_json()))["layers"][0]["heads"] == 4
    figure = found.figure(tmp_path / "map.svg")
    assert figure.read_text().startswith("<?xml")


def test_noise_serves_where_there_is_no_data():
    assert len(diagnose(model()).layers) == 4


def test_a_converted_layer_is_not_diagnosed_as_softmax():
    ours = model(attention="cumulant2")
    with pytest.raises(ValueError, match="no softmax layer left"):
        diagnose(ours, IMAGES)
    assert Choice("cumulant2").order == 2


def test_linear_layers_of_gpt2_are_counted():
    t = transformers()
    model = t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=60, n_positions=16)).eval()
    assert diagnose(model, attention=["cumulant2"]).linear == 12 * 32 * 32 + 60 * 32  # a block, and the answers


def test_heads_over_time_and_over_space_are_told_apart():
    """An axial layer runs its halves one after the other; the spread of each head is that of its own logits."""
    model = cumulant.create_model("vivit_nano_patch4x1_16", num_classes=5, variant=4, init_std=0.2, depth=1).eval()
    torch.nn.init.normal_(model.head.weight)
    clips, inputs = torch.randn(2, 1, 8, 16, 16), []
    layer = model.blocks[0].attn
    with layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        model(clips)
    query, key, _ = layer.project(inputs[0])
    frames = [z.unflatten(2, (8, 16)) for z in (query, key)]
    places = [z.transpose(2, 3) for z in frames]

    def spread(q, k):
        return (q @ k.mT * layer.head_dim**-0.5).var(-1, correction=0).mean((0, 2, 3)).sqrt()

    half = layer.num_heads // 2
    expected = torch.cat((spread(*places)[:half], spread(*frames)[half:]))
    (found,) = diagnose(model, clips).layers
    torch.testing.assert_close(torch.tensor(found.spread), expected)
    assert len(found.error[3]) == len(found.mean_error[3]) == found.heads


def test_a_diagnosis_of_another_model_is_refused_by_its_layers():
    small, large = (cumulant.create_model("vit_nano_patch2_8", num_classes=10, depth=n) for n in (1, 2))
    images = torch.randn(2, 1, 8, 8)
    with pytest.raises(ValueError, match=r"of another model: VisionTransformer has no layer blocks\.1\.attn"):
        convert(small, layers="auto", data=images, diagnosis=diagnose(large, images))


@pytest.mark.parametrize("wrong", [{"attention": "cumulant3"}, {"attention": []}, {"queries": 0}], ids=str)
def test_what_nothing_can_be_measured_with_is_told(wrong):
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        diagnose(model, torch.randn(2, 1, 8, 8), **wrong)


def test_a_mechanism_that_overflows_is_never_the_best():
    model = bert().half()
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.mul_(3000)
            layer.attention.self.key.weight.mul_(3000)
    for layer in diagnose(model, padded()).layers:
        assert layer.effect["cumulant3"] == torch.inf  # its answer is NaN
        assert layer.best() == "cumulant2+around=mean"
