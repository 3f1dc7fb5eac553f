"""A Vision Transformer tells its layers where the patches are, and passes extras of the attention on to them."""

import pytest
import torch
import torch.nn.functional as F

from cumulant import zoo
from cumulant.models import create_model
from cumulant.nn import MultiheadAttention
from cumulant.train import load, save

NAMES = [name for name in zoo.names() if zoo.get(name).noncausal]
EXTRAS = {"v_conv": 3, "gate": True, "temperature": "head"}


def nano(**kw):
    torch.manual_seed(0)
    return create_model("vit_nano_patch2_8", **({"num_classes": 10, "init_std": 0.1, "depth": 2} | kw)).eval()


def images(height=8, width=8):
    return torch.randn(3, 1, height, width, generator=torch.Generator().manual_seed(1))


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("kw", "prefix"), [({}, 1), ({"pool": "gap"}, 0), ({"distilled": True}, 2)])
def test_every_layer_is_told_the_grid_of_the_image_it_sees(kw, prefix, monkeypatch):
    model, seen = nano(**kw), []
    forward = MultiheadAttention.forward

    def watched(self, x, **where):
        seen.append(((self.grid_size, self.prefix), (where["grid"], where["prefix"])))
        return forward(self, x, **where)

    monkeypatch.setattr(MultiheadAttention, "forward", watched)
    model(images())
    model(images(12, 6))
    built = ((4, 4), prefix)
    assert seen == [(built, built)] * 2 + [(built, ((6, 3), prefix))] * 2


@pytest.mark.parametrize("attention", NAMES)
def test_every_mechanism_trains_with_all_extras(attention):
    model = nano(attention=attention, attention_extras=EXTRAS, pool="gap")
    F.cross_entropy(model(images()), torch.tensor([1, 2, 3])).backward()
    without = {name for name, p in model.named_parameters() if p.numel() and (p.grad is None or not p.grad.any())}
    if attention in ("cumulant1", "aaren"):  # no query of a token takes part
        without = {name for name in without if "temperature" not in name}
    assert not without


@pytest.mark.parametrize("attention", NAMES)
def test_images_of_another_size_go_through_every_mechanism_and_extra(attention):
    model = nano(attention=attention, attention_extras=EXTRAS)
    assert model(images(12, 6)).shape == (3, 10)


def test_extras_cost_what_they_say():
    plain, width, depth = nano(), 64, 2
    for extra, more in (
        ({"v_conv": 3}, 9 * width),
        ({"gate": True}, width * width + width),
        ({"temperature": "head"}, 4),
    ):
        assert count(nano(attention_extras=extra)) - count(plain) == depth * more


def test_a_model_starts_with_temperature_1_and_the_convolution_as_asked():
    plain = nano()
    model = nano(attention_extras={"temperature": "head", "v_conv": 3, "v_conv_init": "zero"})
    model.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(model(images()), plain(images()))
    drawn = nano(attention_extras={"v_conv": 3}).blocks[0].attn.v_conv.weight
    assert drawn.abs().max() <= 1 / 3
    assert drawn.std().item() == pytest.approx(3**-1.5, rel=0.1)


def test_a_saved_model_comes_back_with_its_extras(tmp_path):
    extras = {"v_conv": (3, 3), "gate": "silu", "temperature": "order"}
    model = nano(attention="cumulant3", attention_extras=extras, gelu="tanh")
    again = load(save(model, tmp_path / "model.safetensors")).eval()
    assert torch.equal(again(images()), model(images()))
    assert again.config["attention_extras"]["temperature"] == "order"


def test_unknown_extras_are_refused():
    with pytest.raises(ValueError, match="unknown attention extra 'gates'; did you mean 'gate'"):
        nano(attention_extras={"gates": True})
