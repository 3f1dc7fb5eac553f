"""`CumulantAttention` stands in for timm's `Attention`: same arguments, same state dict, masks never ignored."""

import pytest
import torch

from cumulant.attention import attention
from cumulant.nn import CumulantAttention, MultiheadAttention


def layer(**kw):
    torch.manual_seed(0)
    return CumulantAttention(**({"dim": 12, "num_heads": 3, "dtype": torch.float64} | kw))


def tokens(seed=1):
    return torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_it_is_the_multihead_layer_with_the_mechanism_of_its_order(order):
    ours, x = layer(order=order), tokens()
    other = MultiheadAttention(12, 3, attention=f"cumulant{order}", dtype=torch.float64)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), other(x))
    assert torch.equal(ours(x, is_causal=True), other(x, is_causal=True))


@pytest.mark.parametrize("options", [{"full": True}, {"normalization": "sum"}])
def test_full_and_normalization_reach_the_function(options):
    module, x = layer(**options), tokens()
    out = attention(*module.project(x), order=3, **options).transpose(-3, -2).flatten(-2)
    torch.testing.assert_close(module(x), module.proj(out))


def test_timm_can_call_it_the_way_it_calls_its_own_layer():
    module = CumulantAttention(
        12, num_heads=3, qkv_bias=True, qk_norm=True, scale_norm=False, proj_bias=True, attn_drop=0.0,
        proj_drop=0.1, norm_layer=torch.nn.LayerNorm, device=None, dtype=None,
    )  # fmt: skip
    assert module.eval()(torch.randn(2, 5, 12), attn_mask=None, is_causal=False).shape == (2, 5, 12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_key_masks_of_both_layouts_remove_keys(is_causal):
    module, x = layer(), tokens()
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])
    out = module(x, attn_mask=mask, is_causal=is_causal)
    assert torch.equal(module(x, attn_mask=mask[:, None, None, :], is_causal=is_causal), out)
    assert torch.equal(module(x, attn_mask=mask.double(), is_causal=is_causal), out)
    torch.testing.assert_close(out[:1, :3], module(x[:1, :3], is_causal=is_causal))
    assert not torch.allclose(out[0], module(x, is_causal=is_causal)[0])


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(5, 5, dtype=torch.bool).tril(),
        torch.ones(2, 1, 5, 5, dtype=torch.bool),
        torch.ones(2, 3, 1, 5, dtype=torch.bool),
        torch.zeros(2, 1, 1, 5),
        torch.ones(2, 4, dtype=torch.bool),
        torch.ones(5, dtype=torch.bool),
    ],
    ids=lambda mask: f"{tuple(mask.shape)}-{mask.dtype}",
)
def test_a_mask_that_cannot_be_honoured_is_an_error(mask):
    with pytest.raises(ValueError, match=r"attn_mask of shape .* cannot be honoured.*is_causal=True"):
        layer()(tokens(), attn_mask=mask)


def test_an_additive_mask_is_refused_for_its_negative_weights():
    with pytest.raises(ValueError, match="attn_mask weights must be finite"):
        layer()(tokens(), attn_mask=torch.full((2, 5), float("-inf"), dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": 4}, "order must be 1, 2 or 3, got 4"),
        ({"order": 2, "full": True}, "full=True takes the whole third cumulant and needs order=3, got order=2"),
        ({"normalization": "max"}, 'normalization must be "mean" or "sum", got \'max\''),
        ({"fold": "always"}, "fold must be \"auto\", True or False, got 'always'"),
        ({"attn_drop": 0.1}, "attn_drop=0.1"),
    ],
)
def test_bad_arguments_name_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**arguments)


@pytest.mark.parametrize("fold", ["auto", False])
def test_folding_never_changes_the_answer(fold):
    torch.testing.assert_close(layer(order=2, fold=fold)(tokens()), layer(order=2)(tokens()))


@pytest.mark.parametrize("mask", [torch.tensor([0.0, 0, -torch.inf, 0, 0]), torch.tensor([1, 1, 0, 1, 1])])
def test_a_folded_layer_checks_its_mask_like_a_plain_one(mask):
    refused = (ValueError, TypeError)
    for fold in (False, True):
        with pytest.raises(refused, match=r"attn_mask .*must be"):
            layer(order=2, fold=fold)(tokens(), attn_mask=mask.expand(2, 5))
