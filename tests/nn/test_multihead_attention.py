"""`MultiheadAttention` is projections around a mechanism of the zoo, with timm's names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cumulant import zoo
from cumulant.nn import MultiheadAttention

# Mechanisms without parameters that have every form of attention; the others have their own tests under tests/zoo.
NAMES = [n for n in zoo.names() if zoo.get(n).module is None and zoo.get(n).causal and zoo.get(n).key_mask]


def layer(**kw):
    torch.manual_seed(0)
    return MultiheadAttention(**({"dim": 12, "num_heads": 3, "dtype": torch.float64} | kw))


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(module, x, context=None, **shared):
    """Three projections cut out of the fused one, heads of width D, the mechanism, the last projection."""
    context = x if context is None else context
    W, b = module.qkv.weight.chunk(3), module.qkv.bias.chunk(3)
    query, key, value = (
        F.linear(z, W[i], b[i]).unflatten(-1, (3, 4)).transpose(-3, -2) for i, z in enumerate((x, context, context))
    )
    query, key = module.q_norm(query), module.k_norm(key)
    mechanism = zoo.get(module.mechanism.name)
    if mechanism.wants_query_mask and context is x:
        shared["query_mask"] = shared.get("key_mask")
    out = mechanism(query, key, value, **shared)
    return module.proj(out.transpose(-3, -2).flatten(-2))


@pytest.mark.parametrize("attention", NAMES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention_follows_the_formula(attention, qk_norm):
    module, x = layer(attention=attention, qk_norm=qk_norm), tokens(2, 5, 12)
    mask = torch.arange(5).lt(torch.tensor([[3], [5]]))
    torch.testing.assert_close(module(x), by_hand(module, x))
    torch.testing.assert_close(module(x, is_causal=True), by_hand(module, x, is_causal=True))
    torch.testing.assert_close(module(x, key_mask=mask), by_hand(module, x, key_mask=mask))


@pytest.mark.parametrize("attention", NAMES)
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_cross_attention_reads_keys_and_values_from_the_context(attention, qkv_bias):
    module, x, context = layer(attention=attention, qkv_bias=qkv_bias), tokens(2, 5, 12), tokens(2, 7, 12, seed=2)
    if qkv_bias:
        torch.testing.assert_close(module(x, context), by_hand(module, x, context))
    assert module(x, context).shape == (2, 5, 12)
    torch.testing.assert_close(module(x, x), module(x))
    assert module.scores(x, context).shape == (2, 3, 5, 7)


def test_any_leading_dimensions_are_a_batch():
    module, x = layer(), tokens(2, 3, 5, 12)
    torch.testing.assert_close(module(x), module(x.flatten(0, 1)).unflatten(0, (2, 3)))
    torch.testing.assert_close(module(x[0, 0]), module(x)[0, 0])


def test_the_state_dict_has_the_names_of_timm():
    assert list(layer().state_dict()) == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    normed = list(layer(qk_norm=True, scale_norm=True, qkv_bias=False, proj_bias=False).state_dict())
    assert normed == [
        "qkv.weight", "q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias",
        "norm.weight", "norm.bias", "proj.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        *((name, {}) for name in NAMES),
        ("cumulant3", {"full": True, "backend": "reference"}),
        ("cumulant2", {"normalization": "sum"}),
        ("linear", {"eps": 0.1, "chunk": 3}),
    ],
)
def test_scores_are_the_weights_that_mix_the_values(attention, options):
    module, x = layer(attention=attention, attention_options=options), tokens(2, 5, 12)
    _, _, value = module.project(x)
    mixed = (module.scores(x) @ value).transpose(-3, -2).flatten(-2)
    torch.testing.assert_close(module.proj(mixed), module(x))


def test_options_of_the_mechanism_reach_it():
    x = tokens(2, 5, 12) * 3
    plain, full = layer(attention="cumulant3"), layer(attention="cumulant3", attention_options={"full": True})
    assert not torch.allclose(plain(x), full(x))
    with pytest.raises(ValueError, match="unknown option 'ful'"):
        layer(attention="cumulant3", attention_options={"ful": True})


def test_attention_dropout_acts_in_training_only_and_is_refused_without_probabilities():
    module, x = layer(attn_drop=0.5), tokens(2, 5, 12)
    torch.testing.assert_close(module.eval()(x), layer()(x))
    assert not torch.allclose(module.train()(x), layer()(x))
    with pytest.raises(ValueError, match=r"attn_drop=0.5, but 'linear' forms no probabilities"):
        layer(attention="linear", attn_drop=0.5)


def test_another_norm_layer_can_be_given():
    module = layer(qk_norm=True, norm_layer=nn.RMSNorm)
    assert isinstance(module.q_norm, nn.RMSNorm)
    assert module.q_norm.weight.dtype == torch.float64


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("attention", NAMES)
def test_autocast_to_bfloat16_stays_close(attention, qk_norm):
    module, x = layer(attention=attention, qk_norm=qk_norm, dtype=torch.float32), tokens(2, 5, 12).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 10}, r"multiple of num_heads, got dim=10, num_heads=3"),
        ({"num_heads": 0}, r"num_heads=0"),
        ({"attn_drop": -0.1}, r"attn_drop must be a probability between 0 and 1, got -0.1"),
        ({"attention": "sofmax"}, r"'sofmax'; did you mean 'softmax'\?"),
    ],
)
def test_bad_arguments_name_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**arguments)


def test_tokens_of_the_wrong_width_are_refused():
    with pytest.raises(ValueError, match=r"x must have shape \(..., tokens, 12\), got \(2, 5, 11\)"):
        layer()(tokens(2, 5, 11))
    with pytest.raises(ValueError, match=r"context must have shape \(..., tokens, 12\)"):
        layer()(tokens(2, 5, 12), tokens(2, 5, 11))
