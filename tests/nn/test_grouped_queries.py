"""A layer with fewer key heads is the layer with each of them written down for every query head that it serves."""

import pytest
import torch

import cumulant
from cumulant import zoo
from cumulant.nn import AxialAttention, CumulantAttention, MultiheadAttention

GROUPED = [name for name in zoo.names() if zoo.get(name).grouped_queries]
DIM, HEADS, KV = 16, 4, 2


def pair(kind=MultiheadAttention, kv_heads=KV, **options):
    """A layer with `kv_heads` key heads, and one with as many as query heads and the same weights, repeated."""
    torch.manual_seed(0)
    options["dtype"] = torch.float64
    grouped, whole = kind(DIM, HEADS, num_kv_heads=kv_heads, **options), kind(DIM, HEADS, **options)
    state = grouped.state_dict()
    for name in ("qkv.weight", "qkv.bias"):
        query, *rest = state[name].split(grouped.widths)
        state[name] = torch.cat([query, *(repeated(z, kv_heads) for z in rest)])
    whole.load_state_dict(state)
    return grouped, whole


def repeated(rows, kv_heads):
    return rows.unflatten(0, (kv_heads, -1)).repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1)


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("attention", GROUPED)
def test_every_mechanism_that_groups_queries_does_so_in_a_layer(attention, kv_heads):
    mechanism = zoo.get(attention)
    grouped, whole = pair(kv_heads=kv_heads, attention=attention, grid_size=(3, 3))
    x, mask = tokens(2, 9, DIM), torch.arange(9).lt(torch.tensor([[9], [6]]))
    for arguments in ({}, {"key_mask": mask}):
        torch.testing.assert_close(grouped(x, **arguments), whole(x, **arguments))
    torch.testing.assert_close(grouped.scores(x), whole.scores(x))
    options = mechanism.pattern_options.get("causal", {})
    if mechanism.causal:
        grouped, whole = pair(kv_heads=kv_heads, attention=attention, attention_options=dict(options))
        torch.testing.assert_close(grouped(x, is_causal=True), whole(x, is_causal=True))


@pytest.mark.parametrize("attention", ["softmax", "cumulant2", "agent"])
def test_a_key_head_gathers_the_gradients_of_all_its_queries(attention):
    grouped, whole = pair(attention=attention, grid_size=(3, 3))
    x, up = tokens(2, 9, DIM), tokens(2, 9, DIM, seed=2)
    for layer in (grouped, whole):
        (layer(x) * up).sum().backward()
    query, *rest = whole.qkv.weight.grad.split(whole.widths)
    summed = [z.unflatten(0, (KV, HEADS // KV, -1)).sum(1).flatten(0, 1) for z in rest]
    torch.testing.assert_close(grouped.qkv.weight.grad, torch.cat([query, *summed]))


def test_cross_attention_and_the_extras_know_fewer_key_heads():
    extras = {"v_conv": 3, "gate": True, "temperature": "order", "qk_norm": True, "scale_norm": True}
    grouped, whole = pair(attention="cumulant3", grid_size=(3, 3), **extras)
    x, context = tokens(2, 9, DIM), tokens(2, 5, DIM, seed=2)
    for layer in (grouped, whole):
        layer.temperature.second.data.copy_(tokens(HEADS, seed=3))
        layer.temperature.third.data.copy_(tokens(HEADS, seed=4))
    torch.testing.assert_close(grouped(x), whole(x))
    torch.testing.assert_close(grouped.scores(x), whole.scores(x))
    plain, copied = pair(attention="linear")
    torch.testing.assert_close(plain(x, context), copied(x, context))


@pytest.mark.parametrize("bias", [False, True])
def test_a_folded_layer_is_the_plain_one(bias):
    torch.manual_seed(0)
    made = {"order": 2, "num_kv_heads": 2, "qkv_bias": bias, "dtype": torch.float64}
    folded, plain = CumulantAttention(DIM, HEADS, fold=True, **made), CumulantAttention(DIM, HEADS, fold=False, **made)
    plain.load_state_dict(folded.state_dict())
    x, mask = tokens(3, 9, DIM), torch.rand(3, 9, dtype=torch.float64)
    for layer in (folded, plain):
        (layer(x) * tokens(3, 9, DIM, seed=2)).sum().backward()
    torch.testing.assert_close(folded(x), plain(x))
    torch.testing.assert_close(folded(x, mask), plain(x, mask))
    torch.testing.assert_close(folded.qkv.weight.grad, plain.qkv.weight.grad)
    packed, at = x.flatten(0, 1), torch.tensor([0, 4, 20, 27])
    torch.testing.assert_close(folded.forward_packed(packed, at), plain.forward_packed(packed, at))


def test_half_of_the_key_heads_look_along_time():
    grouped, whole = pair(AxialAttention, attention="softmax", grid_size=(2, 3, 3))
    x = tokens(2, 18, DIM)
    torch.testing.assert_close(grouped(x), whole(x))
    torch.testing.assert_close(grouped.scores(x), whole.scores(x))


def test_a_model_takes_the_number_of_key_heads_and_is_opened_and_converted_like_any_other():
    made = {"num_classes": 10, "attention_extras": {"num_kv_heads": 2}}
    model = cumulant.create_model("vit_nano_patch2_8", attention="cumulant2", **made)
    assert model.blocks[0].attn.qkv.weight.shape == (64 + 2 * 32, 64)
    images = torch.randn(2, 1, 8, 8)
    with cumulant.explain.capture(model, images) as captured:
        assert captured.maps(0).shape[1] == 4
    cumulant.convert(model, "cumulant3")
    assert model(images).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must be a whole number that divides num_heads=4, got 3"),
        ({"num_kv_heads": 0}, "divides num_heads=4, got 0"),
        ({"num_kv_heads": 2.0}, "divides num_heads=4, got 2.0"),
        ({"num_kv_heads": 8}, "divides num_heads=4, got 8"),
        ({"num_kv_heads": 2, "attention": "flow"}, "num_kv_heads=2 with num_heads=4, but 'flow' does not have grouped"),
    ],
)
def test_what_cannot_be_grouped_is_said(options, said):
    with pytest.raises(ValueError, match=said):
        MultiheadAttention(DIM, HEADS, **options)
