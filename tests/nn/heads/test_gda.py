"""GDA: what its page lets one check without trained weights."""

import math
import warnings

import pytest
import torch

import cumulant
from cumulant import create_model
from cumulant.nn import create_layer
from cumulant.nn.heads.gda import GroupedDifferentialAttention
from cumulant.nn.probes import draw


def made(ratio=3, heads=8, **options):
    torch.manual_seed(0)
    return create_layer("gda", 32, heads, ratio=ratio, dtype=torch.float64, **options)


def differential(layer, x, is_causal=False):
    """Differential attention as its authors write it, head pairs (2 i, 2 i + 1) and values of twice the width."""
    B, L, C = x.shape
    heads, D = layer.noise, layer.head_dim
    q, k, v = (x @ part.mT for part in layer.qkv.weight.split(layer.widths))
    q, k = (z.view(B, L, 2 * heads, D).transpose(1, 2) * scale for z, scale in ((q, D**-0.5), (k, 1.0)))
    v = v.view(B, L, heads, 2 * D).transpose(1, 2)
    logits = q @ k.mT
    if is_causal:
        logits = logits + torch.full((L, L), -math.inf, dtype=x.dtype).triu(1)
    a1, b1, a2, b2 = layer.lambdas
    start = 0.8 - 0.6 * math.exp(0)
    factor = (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + start
    A = logits.softmax(-1).view(B, heads, 2, L, L)
    out = (A[:, :, 0] - factor * A[:, :, 1]) @ v
    out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.subln.weight
    return (out * (1 - start)).transpose(1, 2).reshape(B, L, C) @ layer.proj.weight.mT


@pytest.mark.parametrize("is_causal", [False, True])
def test_ratio_one_is_differential_attention(is_causal):
    layer, x = made(ratio=1), draw(2, 9, 32)
    with torch.no_grad():
        layer.subln.weight.copy_(draw(8))
    torch.testing.assert_close(layer(x, is_causal=is_causal), differential(layer, x, is_causal), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
def test_rows_of_the_weights_sum_to_one_less_lambda(attention):
    layer = made(attention=attention)
    rows = layer.scores(draw(2, 9, 32)).sum(-1)
    torch.testing.assert_close(rows, (1 - layer.factor()).expand_as(rows))


def test_values_that_are_all_alike_come_out_less_lambda_before_the_norm():
    layer = made()
    layer.subln = torch.nn.Identity()
    layer.subln.weight = layer.lambdas
    call = layer.asked(draw(2, 9, 32))
    one = draw(4, 4, seed=1)[:, None]
    out = layer.mix_tokens(call._replace(value=one.expand(2, 4, 9, 4)), draw(2, 9, 32))
    pair = torch.cat((one[0::2], one[1::2]), -1).repeat_interleave(3, 0)  # two pairs, each serving three signal heads
    wanted = ((1 - layer.factor()) * (1 - layer.lambda_start)) * pair.expand(2, 6, 9, 8)
    torch.testing.assert_close(out, wanted)


def test_noise_that_equals_its_signal_gives_nothing_and_gradients_stay_finite():
    layer = made(ratio=1, heads=2)
    with torch.no_grad():
        query, key, _ = layer.qkv.weight.split(layer.widths)
        query[16:], key[16:] = query[:16], key[:16]
        layer.lambda_start.fill_(1.0)
        layer.lambdas.zero_()
    x = draw(1, 5, 32).requires_grad_()
    out = layer(x)
    torch.testing.assert_close(out, torch.zeros_like(out))
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_copying_signal_heads_and_sharing_their_output_changes_nothing():
    small = made(ratio=1, heads=4)
    x, D, n = draw(2, 9, 32), small.head_dim, small.noise
    large = _with_ratio(small, 2)
    query = small.qkv.weight[: 2 * n * D].unflatten(0, (n, 2, D))
    with torch.no_grad():
        signal, noise = query[:, :1], query[:, 1:]
        large.qkv.weight.copy_(
            torch.cat((torch.cat((signal, signal, noise), 1).reshape(-1, 32), small.qkv.weight[2 * n * D :]))
        )
        out = small.proj.weight.unflatten(1, (n, 1, 2 * D)) / 2
        large.proj.weight.copy_(out.expand(-1, n, 2, -1).flatten(1))
        large.lambdas.copy_(small.lambdas)
    torch.testing.assert_close(large(x), small(x))


def _with_ratio(layer, ratio):
    """A layer of the same width, noise heads and keys with more signal heads, each as wide as before."""
    wide = GroupedDifferentialAttention(
        layer.head_dim * (ratio + 1) * layer.noise, (ratio + 1) * layer.noise, ratio=ratio, dtype=torch.float64
    )
    wide.dim = layer.dim
    wide.qkv = torch.nn.Linear(layer.dim, sum(wide.widths), bias=False, dtype=torch.float64)
    wide.proj = torch.nn.Linear(wide.inner_dim, layer.dim, bias=False, dtype=torch.float64)
    return wide


def test_signal_heads_of_a_group_may_change_places_and_noise_heads_may_not():
    layer, x, D = made(), draw(2, 9, 32), 4
    before = layer(x)
    with torch.no_grad():
        query = layer.qkv.weight[:32].unflatten(0, (2, 4, D))  # two groups of three signal heads and a noise head
        query[:, [0, 1]] = query[:, [1, 0]].clone()
        out = layer.proj.weight.unflatten(1, (2, 3, 2 * D))
        out[:, :, [0, 1]] = out[:, :, [1, 0]].clone()
    torch.testing.assert_close(layer(x), before)
    with torch.no_grad():
        query[[0, 1], 3] = query[[1, 0], 3].clone()
    assert not torch.allclose(layer(x), before)


def test_lambda_grows_with_the_number_of_the_layer():
    model = create_model("vit_nano_patch2_8", layer="gda", num_classes=3)
    starts = [float(block.attn.lambda_start) for block in model.blocks]
    assert starts == pytest.approx([0.8 - 0.6 * math.exp(-0.3 * n) for n in range(4)])


def test_the_difference_of_two_second_orders_is_one_second_order_of_twice_the_width():
    """q = [q1, -lambda q2], k = [k1, k2]: (1 - lambda) <v> + S1 q1 - lambda S2 q2."""
    q1, q2, k1, k2, v = (draw(1, 2, 9, 4, seed=s) for s in range(5))
    factor = 0.3
    two = cumulant.attention(q1, k1, v, order=2) - factor * cumulant.attention(q2, k2, v, order=2)
    one = cumulant.attention(torch.cat((q1, -factor * q2), -1), torch.cat((k1, k2), -1), v, order=2, scale=0.5)
    torch.testing.assert_close(two, one - factor * v.mean(-2, keepdim=True))


def test_a_conversion_replaces_both_maps_and_restoring_brings_both_back():
    torch.manual_seed(0)
    model, images = create_model("vit_nano_patch2_8", layer="gda", num_classes=3).eval(), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
        before = model(images)
        made = create_model("vit_nano_patch2_8", layer="gda", attention="cumulant2", num_classes=3).eval()
        made.load_state_dict(model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that so small a model is not quicker
            cumulant.convert(model, "cumulant2+apart=0", example=images)
        torch.testing.assert_close(model(images), made(images))
        assert not torch.allclose(model(images), before)
        cumulant.convert.restore(model)
        torch.testing.assert_close(model(images), before)
