"""Activator: gates in place of attention, a bag of patches. Each test is a claim of its page."""

import copy

import pytest
import torch

import cumulant
from cumulant.listing import multiply_adds


def count(model):
    return sum(weight.numel() for weight in model.parameters())


def nano(**kw):
    torch.manual_seed(0)
    return cumulant.create_model("activator_nano", **{"num_classes": 10, **kw}).eval()


def images(side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


def patches(x, size=4):
    """(B, N, 3, size, size)."""
    cells = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # B 3 rows h cols w
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def picture(cells, rows):
    return cells.unflatten(1, (rows, -1)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def shuffled(x):
    cells = patches(x)
    return picture(cells[:, torch.randperm(cells.shape[1])], x.shape[-2] // 4)


def test_counts_hold_with_shared_norms():
    whole, gates = (
        cumulant.create_model(name, num_classes=10, device="meta") for name in ("activator", "activator_glu")
    )
    assert (count(whole), count(gates)) == (2_650_890, 1_599_242)
    assert count(whole.blocks[0].unit) == 395_520
    assert count(whole.blocks[0].mlp) == 262_912


def test_it_is_a_bag_of_patches():
    model, x = nano(), images()
    assert torch.equal(picture(patches(x), 8), x)
    torch.testing.assert_close(model(shuffled(x)), model(x))
    placed = nano(positions=True)
    torch.nn.init.normal_(placed.pos_embed)
    assert (placed(shuffled(x)) - placed(x)).abs().max() > 1e-3


def test_tokens_do_not_see_each_other():
    model, x = nano(), images().requires_grad_()
    model.forward_features(x)[:, 9].square().sum().backward()
    reached = patches(x.grad).flatten(2).abs().amax(-1) > 0
    assert reached[:, 9].all()
    assert reached.sum() == 2


def test_the_answer_is_the_mean_over_single_patches():
    model, x = nano(), images()
    single = model(patches(x).flatten(0, 1)).unflatten(0, (2, -1))
    torch.testing.assert_close(model(x), single.mean(1))


def test_work_is_proportional_to_the_tokens():
    model = cumulant.create_model("activator", num_classes=10, device="meta")
    head = 256 * 10
    small, large = (multiply_adds(model, (3, side, side)) - head for side in (32, 64))
    assert large == 4 * small


def test_a_gate_without_values_gives_its_bias():
    unit = nano().blocks[0].unit
    torch.nn.init.zeros_(unit.fc2.weight)
    torch.nn.init.zeros_(unit.fc2.bias)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(unit(x), unit.fc3.bias.expand(2, 5, 64))
    torch.nn.init.ones_(unit.norm.bias)
    torch.testing.assert_close(unit(x), unit.fc3(unit.norm(torch.nn.functional.gelu(unit.fc1(x)))))


def test_the_gradient_of_the_shared_norm_is_the_sum_over_its_uses():
    block = nano().blocks[0]
    x = torch.randn(2, 5, 64)
    block(x, grid=(5, 1)).square().sum().backward()
    one, two = copy.deepcopy(block.norm), copy.deepcopy(block.norm)
    y = x + block.unit(one(x))
    (y + block.mlp(two(y))).square().sum().backward()
    torch.testing.assert_close(block.norm.weight.grad, one.weight.grad + two.weight.grad)


@pytest.mark.parametrize("gate", ["geglu", "swiglu", "reglu"])
def test_gates_differ_in_their_activation_alone(gate):
    model = nano(gate=gate)
    model.load_state_dict(nano().state_dict())
    assert torch.allclose(model(images()), nano()(images())) == (gate == "geglu")


@pytest.mark.parametrize("mixer", ["spatial_glu", "attention", "glu+attention"])
def test_mixers_of_ours_do_mix_tokens(mixer):
    model, x = nano(mixer=mixer), images().requires_grad_()
    for name, weight in model.named_parameters():
        if "spatial.weight" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.forward_features(x)[:, 9].square().sum().backward()
    assert (patches(x.grad).flatten(2).abs().amax(-1) > 0).all()


def test_attention_is_asked_for_where_there_is_none():
    with pytest.raises(ValueError, match=r"attention='cumulant3', but Activator has gates.*mixer='attention'"):
        nano(attention="cumulant3")
    with pytest.raises(ValueError, match="layer='moh', but Activator has gates"):
        nano(layer="moh")
    assert nano(attention="cumulant3", mixer="glu+attention")(images()).shape == (2, 10)
    with pytest.raises(ValueError, match="matrix over 64 tokens: images must be 32 x 32, got 64 x 64"):
        nano(mixer="spatial_glu")(images(64))
