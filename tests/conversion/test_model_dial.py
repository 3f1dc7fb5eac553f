"""The dial for a model: what it chooses is what `convert` then computes, within the target, and the model stays."""

import pytest
import torch
from torch import nn

import cumulant
from cumulant.cluster.causal import merged_lists
from cumulant.cluster.statistics import moments_of
from cumulant.conversion import choose_layers, convert, restore
from cumulant.conversion import dial as model_dial

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
    at = model_dial.places(256, 16)
    there = mask[:, None, at, None] if "padding" in how else 1
    error = ((out - exact)[:, :, at] * there).norm() / ((exact - mean)[:, :, at] * there).norm()
    assert found.error == pytest.approx(error.item(), rel=1e-3)


CAUSAL = [
    "cluster4+block=16+response=0",
    "cluster4+block=8+recent=2+response=2",
    "cluster4+block=8+closure=langevin+response=0",
]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_in_causal_layers_a_token_is_compared_with_softmax_over_its_own_past(name, padding):
    mask = torch.ones(2, 256, dtype=torch.bool)
    if padding != "none":
        mask[1, slice(0, 40) if padding == "left" else slice(216, None)] = False
    options = {"is_causal": True} | ({} if padding == "none" else {"key_mask": mask})
    model = Told(layers(sharp=(1.0,))[0], **options).eval()
    found = choose_layers(model, TOKENS, target=EVERYTHING, candidates=[name]).layers["inner"]
    assert found.heads == (0, 1, 2, 3)
    query, key, value = model.inner.project(TOKENS)
    seen = torch.ones(256, 256, dtype=torch.bool).tril() & mask[:, None, None]
    exact = nn.functional.scaled_dot_product_attention(query, key, value, seen)
    mean = seen.double() @ value.double() / seen.sum(-1, keepdim=True).clamp(min=1)
    convert(model, layers={"inner": name}, example=TOKENS)
    out = model.inner.mix(query, key, value, **options)
    at = model_dial.places(256, 64)
    there = mask[:, None, at, None]
    size = torch.where(there, (exact - mean)[:, :, at], 0).norm()
    assert found.error == pytest.approx((torch.where(there, (out - exact)[:, :, at], 0).norm() / size).item(), rel=1e-3)


def test_a_causal_layer_gets_blocks_of_its_past_and_is_converted_within_the_target():
    model = Told(layers(sharp=(0.5,))[0], is_causal=True).eval()
    dial = choose_layers(model, TOKENS, target=0.25, samples=256)
    (found,) = dial.layers.values()
    assert found.heads
    assert found.cost < 1
    query, key, value = model.inner.project(TOKENS)
    exact = model.inner.mix(query, key, value, is_causal=True)
    seen = torch.ones(256, 256).tril()
    mean = seen @ value / seen.sum(-1, keepdim=True)
    convert(model, layers=dial.plan, example=TOKENS)
    out = model.inner.mix(query, key, value, is_causal=True)
    assert ((out - exact).norm() / (exact - mean).norm()).item() == pytest.approx(found.error, rel=1e-3)
    assert found.error <= 0.25


@pytest.mark.parametrize("block", [4, 16, 32, 64])
def test_sampled_queries_stand_at_all_places_of_a_block(block):
    """Evenly spaced ones would stand at the same place of every block, and miss the first of each, which errs most."""
    at = model_dial.places(1024, 64)
    assert len(at) == 64
    assert at.diff().min() > 0
    assert at.max() < 1024
    share = torch.bincount(at % block // (block // 4), minlength=4) / 64
    assert (share - 0.25).abs().max() < 0.07
    assert torch.equal(model_dial.places(10, 64), torch.arange(10))


def test_the_cost_of_a_causal_layer_is_what_its_rows_go_through():
    """Counted row by row, by the clusters and tokens that `causal_clusters` gives them."""
    L, C, keep, recent, D = 256, 8, 4, 2, 8
    model = Told(layers(sharp=(1.0,))[0], is_causal=True).eval()
    how = {"target": EVERYTHING, "candidates": ["cluster4+block=8+recent=2+response=0"]}
    found = choose_layers(model, TOKENS, **how).layers["inner"]
    moments = moments_of(*torch.zeros(2, 1, 1, L // C, C, D), torch.ones(1, 1, L // C, C), full=False, response=False)
    _, table = merged_lists(moments, L // C, keep, recent)
    clusters = (table >= 0).sum(-1).repeat_interleave(C)
    block = torch.arange(L // C)
    exact = ((block.clamp(max=recent) + 1) * C + 4 * (block > recent)).repeat_interleave(C)  # with 4 sinks
    work = (clusters * 3 * D + exact * 2 * D).sum().item() + L * D
    assert found.cost == pytest.approx(work / (L * (L + 1) / 2 * 2 * D))


def test_candidates_are_for_layers_whose_pattern_they_have():
    forms = [
        "cluster16+near=2+response=0",
        "cluster16+response=pooled",
        "cluster4+block=16+response=0",
        "cluster4+response=0",
    ]
    layer = layers(sharp=(1.0,))[0]
    how = {"target": EVERYTHING, "candidates": forms}
    assert choose_layers(Told(layer).eval(), TOKENS, **how).layers["inner"].tried == 3
    found = choose_layers(Told(layer, is_causal=True).eval(), TOKENS, **how).layers["inner"]
    assert found.tried == 2
    assert found.attention == "cluster4+block=16+response=0"
    assert (
        choose_layers(Told(layer, is_causal=True).eval(), TOKENS, target=1.0, candidates=forms[:2])
        .layers["inner"]
        .tried
        == 0
    )


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


def test_the_dial_answers_to_its_old_name_with_a_warning() -> None:
    from cumulant import cluster

    with pytest.warns(DeprecationWarning, match=r"cumulant\.conversion"):
        found = cluster.choose_layers(layers(sharp=(0.5,)), TOKENS[:, :12])  # type: ignore[attr-defined]
    assert found == choose_layers(layers(sharp=(0.5,)), TOKENS[:, :12])
