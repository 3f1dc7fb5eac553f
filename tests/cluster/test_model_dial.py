"""The dial for a model: what it chooses is what `convert` then computes, within the target, and the model stays."""

import pytest
import torch
from torch import nn

import cumulant
from cumulant.cluster import choose_layers
from cumulant.convert import convert, restore

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


def test_causal_layers_are_left_alone():
    with pytest.raises(ValueError, match=r"Told has no softmax layer that is not causal"):
        choose_layers(Told(layers(sharp=(1.0,))[0], is_causal=True).eval(), TOKENS)


def test_over_few_tokens_nothing_is_cheaper_than_softmax():
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=3, depth=2)
    dial = choose_layers(model, torch.randn(2, 1, 8, 8))
    assert not dial.plan
    assert "softmax" in str(dial)


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
