"""Captured q, k, v must be what the mechanism of the layer received."""

import pytest
import torch

from cumulant.bench.pareto import capture, from_checkpoint
from cumulant.models import create_model
from cumulant.nn import CumulantAttention
from cumulant.train import save


def nano(attention="softmax", **options):
    torch.manual_seed(0)
    return create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2, attention=attention, **options)


class Masked(torch.nn.Module):
    """A layer with a mask, as timm passes it."""

    def __init__(self, layer, mask):
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x):
        return self.layer(x, self.mask[:, None, None, :])


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"attention_extras": {"temperature": "head"}}])
def test_the_layer_is_its_mechanism_on_what_was_captured(options):
    model, images = nano(**options), torch.randn(2, 1, 8, 8)
    outputs = []
    hooks = [block.attn.register_forward_hook(lambda *call: outputs.append(call[2])) for block in model.blocks]
    layers = capture(model, images)
    for hook in hooks:
        hook.remove()
    assert list(layers) == [f"blocks.{i}.attn" for i in range(4)]
    for block, layer, output in zip(model.blocks, layers.values(), outputs, strict=True):
        mixed = block.attn.mechanism(layer.query, layer.key, layer.value)
        torch.testing.assert_close(block.attn.proj(mixed.transpose(1, 2).flatten(2)), output)


def test_grid_and_prefix_are_captured():
    first = capture(nano(), torch.randn(1, 1, 8, 8))["blocks.0.attn"]
    assert (first.grid, first.prefix, first.is_causal, first.key_mask) == ((4, 4), 1, False, None)


def test_a_folded_layer_gives_its_queries_keys_values_and_mask_too():
    layer = CumulantAttention(16, 2, order=2, fold=True)
    x, mask = torch.randn(2, 6, 16), torch.arange(6).lt(4).expand(2, 6)
    model = Masked(layer, mask)
    (found,) = capture(model, x).values()
    mixed = layer.mechanism(found.query, found.key, found.value, key_mask=found.key_mask)
    torch.testing.assert_close(layer.proj(mixed.transpose(1, 2).flatten(2)), model(x))


def test_the_model_is_left_as_it_was():
    model = nano().train()
    capture(model, torch.randn(1, 1, 8, 8))
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no attention layer that can be looked into"):
        capture(torch.nn.Linear(2, 2), torch.zeros(1, 2))


def test_layers_over_two_axes_are_refused():
    video = create_model("vivit_nano_patch4x2_16", num_classes=2, variant=4)
    with pytest.raises(ValueError, match="two axes"):
        capture(video, torch.zeros(1, 1, 8, 16, 16))


def test_a_checkpoint_without_recipe_is_shown_the_digits_it_is_made_for(tmp_path):
    save(nano("cumulant3"), tmp_path / "model.safetensors")
    layers, words = from_checkpoint(tmp_path / "model.safetensors", images=5)
    assert layers["blocks.0.attn"].query.shape == (5, 4, 17, 16)
    assert words == "vit_nano_patch2_8 trained with cumulant3, 5 of digits"


def test_a_checkpoint_of_unknown_data_is_refused(tmp_path):
    model = create_model("vit_nano_patch4_32", num_classes=2)
    save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no recipe inside"):
        from_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="no model in the folder"):
        from_checkpoint(tmp_path)
