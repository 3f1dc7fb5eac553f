"""The dial for a model: what it chooses is what `convert` then computes, within the target, and the model stays."""

import pytest
import torch
from torch import nn

import cumulant
from cumulant.cluster import choose_layers, model_dial
from cumulant.convert import convert, restore

EVERYTHING = 1e9  # a target that every candidate meets in every head
TOKENS = torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(1))


def layers(sharp=(0.5, 4.0)):
    """Layers of four heads; logits grow from head to head and from layer to layer."""
    torch.manual_seed(0)
    made = [cumulant.nn.MultiheadAttention(32, 4) for _ in sharp]
    with torch.no_grad():
        for layer, factor in zip(made, sharp, strict=True):
            layer.qkv.weight[:32] *= factor * torch.linspace(1, 4, 4).repeat_interleave(8)[:, None]
    return Side(made).eval()


class Side(nn.ModuleList):
    """Layers side by side: all see the same tokens."""

    def forward(self, x):
        return sum(layer(x) for layer in self)


class Told(nn.Module):
    """A layer that is always called with these options."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return self.inner(x, **self.options)


def test_harder_layers_get_more_and_a_tighter_target_costs_more():
    model = layers()
    loose, tight = (choose_layers(model, TOKENS, target=t) for t in (0.3, 0.02))
    assert loose.layers["0"].cost < loose.layers["1"].cost
    assert all(a.cost <= b.cost for a, b in zip(loose.layers.values(), tight.layers.values(), strict=True))
    assert all(x.error <= 0.02 for x in tight.layers.values())


def test_convert_takes_the_plan_and_each_layer_errs_as_was_said():
    model = layers()
    said = model(TOKENS)
    dial = choose_layers(model, TOKENS, target=0.25, samples=256)
    torch.testing.assert_close(model(TOKENS), said)
    assert len(dial.plan) == 2
    for name, found in dial.layers.items():
        query, key, value = model.get_submodule(name).project(TOKENS)
        exact = model.get_submodule(name).mix(query, key, value)
        convert(model, layers={name: dial.plan[name]}, example=TOKENS)
        out = model.get_submodule(name).mix(query, key, value)
        restore(model)
        error = (out - exact).norm() / (exact - value.mean(-2, keepdim=True)).norm()
        assert found.error == pytest.approx(error.item(), rel=1e-3)
        assert found.error <= 0.25


def test_what_padding_holds_does_not_matter():
    mask = torch.arange(256) < torch.tensor([[256], [100]])
    model = Told(layers(sharp=(1.0,))[0], key_mask=mask).eval()
    other = torch.where(mask[..., None], TOKENS, 100.0)
    first, second = (choose_layers(model, x, target=0.2).layers["inner"] for x in (TOKENS, other))
    assert (first.attention, first.heads) == (second.attention, second.heads)
    assert first.error == pytest.approx(second.error, rel=1e-4)


CALLS = {
    "on a grid of its own": {"grid": (8, 32)},
    "on a grid after class tokens": {"grid": (5, 50), "prefix": 6},
    "over other tokens": {"context": torch.randn(2, 200, 32, generator=torch.Generator().manual_seed(2))},
    "with padding": {"key_mask": torch.arange(256) < torch.tensor([[256], [150]])},
}


HEAVIEST, TOUCHING = "cluster16+near=2+response=0", "cluster64+near=neighbours+response=pooled"
ASKED = [(how, HEAVIEST) for how in CALLS] + [(how, TOUCHING) for how in CALLS if "other tokens" not in how]


@pytest.mark.parametrize(("how", "name"), ASKED)
def test_sampled_queries_are_answered_as_the_converted_layer_answers_them(how, name):
    model = Told(layers(sharp=(2.0,))[0], **CALLS[how]).eval()
    found = choose_layers(model, TOKENS, target=EVERYTHING, candidates=[name], samples=16).layers["inner"]
    query, key, value = model.inner.project(TOKENS, CALLS[how].get("context"))
    mask = CALLS[how].get("key_mask", torch.ones(key.shape[0], key.shape[2], dtype=torch.bool))
    exact = nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None, None])
    mean = (mask[:, None, :, None] * value).sum(-2, keepdim=True) / mask.sum(-1)[:, None, None, None]
    convert(model, layers={"inner": name}, example=TOKENS)
    mixed = {key: CALLS[how][key] for key in ("grid", "prefix", "key_mask") if key in CALLS[how]}
    out = model.inner.mix(query, key, value, **mixed)
    at = slice(8, None, 16)
    there = mask[:, None, at, None] if "padding" in how else 1
    error = ((out - exact)[:, :, at] * there).norm() / ((exact - mean)[:, :, at] * there).norm()
    assert found.error == pytest.approx(error.item(), rel=1e-3)


def test_causal_layers_are_left_alone_and_the_result_says_so():
    dial = choose_layers(Told(layers(sharp=(1.0,))[0], is_causal=True).eval(), TOKENS)
    assert not dial.layers
    assert not dial.plan
    assert "it is causal" in dial.reasons["inner"]
    assert "it is causal" in str(dial)


def test_layers_whose_heads_look_along_different_axes_are_left_alone():
    layer = cumulant.nn.AxialAttention(32, 4, grid_size=(4, 8, 8)).eval()
    dial = choose_layers(Told(layer), TOKENS)
    assert not dial.layers
    assert "different axes" in dial.kept["inner"]


def test_a_layer_with_another_mechanism_is_left_alone():
    model = Side([*layers(sharp=(1.0,)), cumulant.nn.MultiheadAttention(32, 4, attention="linear")]).eval()
    dial = choose_layers(model, TOKENS, target=0.3)
    assert list(dial.layers) == ["0"]
    assert dial.kept == {"1": "it is not softmax now"}


def test_what_cannot_be_cheaper_is_not_measured(monkeypatch):
    model = layers(sharp=(1.0,))
    dear = "cluster64"  # 64 covariances of 8 x 8 a query are more than 256 tokens
    assert choose_layers(model, TOKENS, candidates=[dear, "cluster16+response=0"]).layers["0"].tried == 1
    monkeypatch.setattr(model_dial, "cluster_attention", lambda *_, **__: pytest.fail("it was measured"))
    assert choose_layers(model, TOKENS, candidates=[dear]).layers["0"].tried == 0
    assert choose_layers(model, TOKENS[:, :12]).layers["0"].tried == 0


def test_costs_are_counted_over_all_lengths_together():
    how = {"target": EVERYTHING, "candidates": ["cluster16+response=0"]}  # a query: 16 blocks of 2 D + E, a key: D
    found = choose_layers(layers(sharp=(1.0,)), [TOKENS, TOKENS[:, :64]], **how).layers["0"]
    assert found.cost == pytest.approx((256 + 64) * (16 * 24 + 8) / ((256**2 + 64**2) * 16))


def test_few_queries_over_other_tokens_pay_for_the_statistics_of_all_keys():
    model = Told(layers(sharp=(1.0,))[0], context=TOKENS).eval()
    how = {"target": EVERYTHING, "candidates": ["cluster16+response=pooled"]}
    found = choose_layers(model, TOKENS[:, :16], **how).layers["inner"]
    assert found.cost == pytest.approx((16 * (16 * 24 + 64) + 256 * (8 + 64)) / (16 * 256 * 16))


def test_a_short_batch_does_not_keep_long_ones_from_clusters():
    dial = choose_layers(layers(sharp=(0.5,)), [TOKENS[:, :12], TOKENS], target=0.3)
    assert dial.plan
    assert dial.layers["0"].tokens == 256


def test_over_few_tokens_nothing_is_cheaper_than_softmax():
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=3, depth=2)
    dial = choose_layers(model, torch.randn(2, 1, 8, 8))
    assert not dial.plan
    assert "softmax, cheapest at 17 tokens" in str(dial)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0}, r"target must be a positive relative error, got 0"),
        ({"candidates": "cluster4"}, r"candidates must be names of cluster mechanisms.*got 'cluster4'"),
        ({"candidates": ["cumulant3"]}, r"candidates must be cluster mechanisms.*got 'cumulant3'"),
        ({"samples": 0}, r"samples must be a whole number, 1 or more, got 0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        choose_layers(layers(), TOKENS, **options)
