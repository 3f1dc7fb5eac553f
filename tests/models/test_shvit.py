"""SHViT: one head over part of the channels. Each test is a claim of its page."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cumulant
from cumulant.models.shvit import ConvNorm, Residual, SingleHead

COUNTS = {"shvit_s1": 6_330_808, "shvit_s2": 11_483_072, "shvit_s3": 14_245_273, "shvit_s4": 16_588_484}


def nano(**kw):
    torch.manual_seed(0)
    return cumulant.create_model("shvit_nano", **{"num_classes": 10, **kw})


def drawn(model):
    """With norms that are not as they are made: what they hide at first is there."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def images(side=32, count=4):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_of_the_released_code(name):
    model = cumulant.create_model(name, device="meta")
    assert sum(weight.numel() for weight in model.parameters()) == COUNTS[name]


def test_the_small_one_has_the_count_of_the_page():
    assert sum(weight.numel() for weight in nano().parameters()) == 186_186


@pytest.mark.parametrize("training", [True, False])
def test_every_block_starts_as_the_identity_and_halving_does_not(training):
    model = nano().train(training)
    x = torch.randn(4, 48, 8, 8)
    torch.testing.assert_close(model.stages[1].blocks(x), x)
    x = torch.randn(4, 32, 8, 8)
    residual = model.stages[1].downsample[0]
    assert not torch.allclose(residual(x), x)


def test_fused_norms_are_fewer_parameters_and_the_same_answers():
    model, x = drawn(nano()).eval(), images()
    fused = copy.deepcopy(model).fuse()
    torch.testing.assert_close(fused(x), model(x), atol=1e-4, rtol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d) for module in fused.modules())
    assert sum(weight.numel() for weight in fused.parameters()) < sum(weight.numel() for weight in model.parameters())


def test_channels_that_pass_by_act_on_their_pixel_alone_and_those_in_attention_on_all():
    head = drawn(nano()).eval().stages[1].blocks[0].mixer.m
    x = torch.randn(1, 48, 4, 4)
    passing, asking = x.clone(), x.clone()
    passing[:, 12:, 1, 2] += 1
    asking[:, :12, 1, 2] += 1
    said = head(x)
    moved = (head(passing) - said).abs().amax(1)[0] > 0
    assert moved[1, 2]
    assert moved.sum() == 1
    assert ((head(asking) - said).abs().amax(1) > 0).all()


def test_one_head_is_scaled_dot_product_attention():
    head: SingleHead = drawn(nano()).eval().stages[1].blocks[0].mixer.m
    x = torch.randn(2, 12, 4, 4)
    query, key, value = head.qkv(x).flatten(2).mT.split([8, 8, 12], -1)
    expected = F.scaled_dot_product_attention(query, key, value).mT.unflatten(-1, (4, 4))
    torch.testing.assert_close(head.attend(x), expected)
    norm = nn.functional.layer_norm(x, x.shape[1:]) * head.pre_norm.weight[:, None, None]
    torch.testing.assert_close(head.pre_norm(x), norm + head.pre_norm.bias[:, None, None])


@pytest.mark.parametrize(("side", "maps"), [(224, (14, 7, 4)), (256, (16, 8, 4)), (96, (6, 3, 2)), (64, (4, 2, 1))])
def test_maps_of_the_stages(side, maps):
    model = cumulant.create_model("shvit_s1", depth=(1, 1, 1), num_classes=3).eval()
    with torch.no_grad():
        _, found = model.forward_intermediates(torch.randn(1, 3, side, side))
    assert [tuple(one.shape) for one in found] == [
        (1, width, size, size) for width, size in zip((128, 224, 320), maps, strict=True)
    ]


def test_zero_norms_hold_gradients_back_for_one_step():
    model, labels = nano(), torch.arange(8)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    dead = []
    for _ in range(2):
        optimiser.zero_grad()
        F.cross_entropy(model(images(count=8)), labels).backward()
        dead.append([name for name, weight in model.named_parameters() if weight.grad.abs().max() == 0])
        optimiser.step()
    assert "stages.0.blocks.0.conv.m.c.weight" in dead[0]
    assert not any(name.endswith("bn.weight") and ".pw2." in name for name in dead[0])
    assert dead[1] == []


def test_queries_of_another_width_are_refused_where_a_mechanism_cannot_have_them():
    with pytest.raises(ValueError, match=r"queries of 8 and values of 12 channels.*qk_dim=None"):
        nano(attention="agent")
    assert nano(attention="agent", qk_dim=None)(images()).shape == (4, 10)
    with pytest.raises(ValueError, match="num_heads must divide qk_dim=8 and partial_dim=12, got 3"):
        nano(num_heads=3)
    assert nano(num_heads=4, layer="moh")(images()).shape == (4, 10)


def test_stages_that_do_not_fit_each_other_are_named():
    with pytest.raises(ValueError, match="depth must have one entry for each stage"):
        nano(depth=(1, 2))
    with pytest.raises(ValueError, match="partial_dim must be at most embed_dim, got 64 of 48"):
        nano(partial_dim=(8, 64, 16))
    with pytest.raises(ValueError, match="types must be one of 'i', 's', got 'x'"):
        nano(types=("i", "x", "s"))
    assert isinstance(nano(types=("i", "i", "i")).stages[2].blocks[0].mixer, nn.Identity)
    assert isinstance(nano().stages[1].blocks[0].conv, Residual)
    assert isinstance(nano().stages[1].blocks[0].conv.m, ConvNorm)
