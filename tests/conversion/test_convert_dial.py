"""Clusters by an error target, in `convert` and `diagnose`, for models of transformers, timm and this library."""

import io
import json

import pytest
import torch
import torch.nn.functional as F
from small_models import TIMM, WORDS, bert, llama, loud, padded, transformers, vit

import cumulant
from cumulant import zoo
from cumulant.conversion import choose_layers, convert, diagnose, diagnosis, load, restore, save
from cumulant.inspect.batches import answers

EVERYTHING = 1e9  # a target that every candidate meets in every head
CANDIDATE = "cluster16+near=2+response=0"
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def long_texts(lengths=(256, 150)):
    """Texts of so many tokens, padded with token 0."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, WORDS, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


def encoder():
    torch.manual_seed(0)
    return bert()


def images_model():
    torch.manual_seed(0)
    return loud(vit(img_size=64, patch_size=4))


def ours():
    torch.manual_seed(0)
    return cumulant.create_model("vit_nano_patch4_32", num_classes=5, img_size=64, init_std=0.1).eval()


def heads_of(x):
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def layer_input(model, name, batch):
    """What the layer of this name is called with."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["transformers", TIMM])
@torch.no_grad()
def test_the_error_said_for_a_layer_is_that_of_its_queries_keys_and_values(kind):
    if kind == "transformers":
        model, batch, name = encoder(), long_texts(), "encoder.layer.1.attention.self"
        layer, x = model.get_submodule(name), layer_input(model, name, batch)
        query, key, value = (heads_of(part(x)) for part in (layer.query, layer.key, layer.value))
        mask = batch["attention_mask"].bool()
    else:
        model, batch, name = images_model(), IMAGES, "blocks.1.attn"
        query, key, value = map(heads_of, model.blocks[1].attn.qkv(layer_input(model, name, batch)).chunk(3, -1))
        mask = torch.ones(2, 257, dtype=torch.bool)
    found = choose_layers(model, batch, target=EVERYTHING, candidates=[CANDIDATE], samples=999).layers[name]
    there = mask[:, None, :, None]
    exact = F.scaled_dot_product_attention(query, key, value, mask[:, None, None])
    out = zoo.get("cluster16")(query, key, value, near=2, response=0, key_mask=mask)
    mean = (there * value).sum(-2, keepdim=True) / mask.sum(-1)[:, None, None, None]
    error = ((out - exact) * there).norm() / ((exact - mean) * there).norm()
    assert found.error == pytest.approx(error.item(), rel=1e-3)
    assert found.heads == (0, 1, 2, 3)


def test_a_padded_text_errs_as_it_does_alone():
    model, batch = encoder(), long_texts((256, 150))
    alone = {name: x[1:, :150] for name, x in batch.items()}
    batch = {name: x[1:] for name, x in batch.items()}
    how = {"target": EVERYTHING, "candidates": [CANDIDATE], "samples": 999}
    for name, found in choose_layers(model, batch, **how).layers.items():
        assert found.error == pytest.approx(choose_layers(model, alone, **how).layers[name].error, rel=1e-3)


def test_a_bar_says_how_far_the_dial_is():
    screen = io.StringIO()
    convert(ours(), layers="dial", target=0.4, data=IMAGES, progress=screen)
    assert "dial, errors:   0%" in screen.getvalue()  # how often it is drawn after that is the clock's
    assert "dial, times:   0%" in screen.getvalue()


@pytest.mark.parametrize(
    ("make", "batch"),
    [(encoder, long_texts()), pytest.param(images_model, IMAGES, marks=pytest.mark.timm), (ours, IMAGES)],
    ids=["transformers", "timm", "this library"],
)
def test_convert_sets_the_dial_and_reports_each_layer(make, batch, tmp_path):
    model = make()
    dial = choose_layers(model, batch, target=0.4, batches=1)
    report = convert(model, layers="dial", target=0.4, data=batch)
    assert report.dial == dial
    assert report.replaced
    said = str(report)
    for name, choice in report.replaced.items():
        found = dial.layers[name]
        assert choice.name == found.attention
        assert choice.heads == (None if len(found.heads) == 4 else found.heads)
        assert f"error {found.error:.3f}, {found.cost:.0%} of the multiply-adds at {found.tokens} tokens" in said
        assert found.error <= 0.4
        assert found.cost < 1
    assert report.calls == dict.fromkeys(report.replaced, 1)
    stored = json.loads(json.dumps(report.to_json()))["dial"]
    assert stored["target"] == 0.4
    assert {name: x["cost"] for name, x in stored["layers"].items()} == {n: x.cost for n, x in dial.layers.items()}


@pytest.mark.parametrize(("make", "batch"), [(encoder, long_texts()), (ours, IMAGES)], ids=["encoder", "ours"])
def test_what_the_dial_chose_survives_saving(make, batch, tmp_path):
    model = make()
    convert(model, layers="dial", target=0.4, data=batch)
    save(model, tmp_path / "model")
    found, wanted = (answers(m.eval(), [batch]) for m in (load(tmp_path / "model"), model))
    torch.testing.assert_close(found, wanted)


def test_over_few_tokens_nothing_is_converted_and_the_report_says_why():
    model, images = cumulant.create_model("vit_nano_patch2_8", num_classes=10).eval(), torch.randn(2, 1, 8, 8)
    before = model(images)
    report = convert(model, layers="dial", data=images)
    assert not report.replaced
    assert "0 of 4 attention layers replaced" in str(report)
    assert "blocks.0.attn: softmax, cheapest at 17 tokens" in str(report)
    torch.testing.assert_close(model(images), before)
    with pytest.raises(ValueError, match="was not converted"):
        restore(model)


def test_a_target_that_no_head_meets_converts_nothing():
    report = convert(encoder(), layers="dial", target=1e-9, data=long_texts())
    assert not report.replaced
    assert "softmax, no head meets the target with clusters at 256 tokens" in str(report)


def test_a_decoder_gets_blocks_of_the_past_and_generates_as_it_answers():
    model = llama(max_position_embeddings=512, initializer_range=0.2)
    ids = torch.randint(3, 60, (1, 256), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    report = convert(model, layers="dial", target=0.2, data={"input_ids": ids})
    assert report.replaced
    assert all(
        "+block=" in layer.attention and layer.error <= 0.2 for layer in report.dial.layers.values() if layer.heads
    )
    whole = model(ids).logits
    assert 0 < (whole - before).norm() < 0.5 * before.norm()
    cache = transformers().DynamicCache()
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :250], *ids[:, 250:].split(1, 1))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"target": 0.1}, r'target=0.1 goes with layers="dial", got layers=None'),
        ({"target": 0.1, "layers": "auto"}, r"""target=0.1 goes with layers="dial", got layers='auto'"""),
        ({"layers": "dial", "attention": "cumulant3"}, r"by target=\.\.\. alone, got attention='cumulant3' too"),
        ({"layers": "dial", "budget": 0.1}, r"by target=\.\.\. alone, got budget=0.1 too"),
        ({"layers": "dial", "heads": True}, r"by target=\.\.\. alone, got heads=True too"),
        ({"layers": "dial", "options": {"near": 2}}, r"alone, got options=\{'near': 2\} too"),
        ({"layers": "dial", "target": -1}, r"target must be a positive relative error, got -1"),
        ({"layers": "dial", "data": None}, r'layers="dial" needs data'),
    ],
    ids=["target alone", "target with auto", "attention", "budget", "heads", "options", "negative", "no data"],
)
def test_what_does_not_go_with_the_dial_is_named(how, message):
    with pytest.raises(ValueError, match=message):
        convert(ours(), **{"data": IMAGES, **how})


def test_diagnose_shows_the_choice_of_the_dial_by_layer():
    model, batch = encoder(), long_texts()
    found = diagnose(model, batch, attention=("cumulant2",), dial=0.4)
    dial = choose_layers(model, batch, target=0.4)
    assert found.dial == dial
    head, *rows = found.table().splitlines()
    assert head.endswith("clusters and heads, error at most 0.4")
    for row in rows:
        layer = dial.layers[row.split()[0]]
        assert row.endswith(f"  {layer.error:.3f}  {layer.cost:4.0%}  {layer.what}")
    assert json.loads(json.dumps(found.to_json()))["dial"] == dial.to_json()
    assert convert(model, layers=found.dial.plan, data=batch).replaced


def test_diagnose_says_that_short_causal_layers_stay_softmax():
    found = diagnose(llama(), padded("left"), attention=("cumulant2",), dial=0.4)
    assert not found.dial.plan
    assert found.table().count("softmax, cheapest at 9 tokens") == 2


def test_without_a_dial_nothing_more_is_measured_or_shown(monkeypatch):
    monkeypatch.setattr(diagnosis, "choose_layers", lambda *_, **__: pytest.fail("the dial was set"))
    found = diagnose(encoder(), padded(), attention=("cumulant2",))
    assert found.dial is None
    assert "dial" not in found.to_json()
    assert found.table().splitlines()[0].endswith("cumulant2")


def test_a_dial_that_is_no_error_is_named():
    with pytest.raises(ValueError, match="dial must be a positive relative error, got 0"):
        diagnose(encoder(), padded(), dial=0)
