"""Focused linear attention: its map, its quadratic form, and the parts of the layer, from its page."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant import zoo
from cumulant.zoo.focused_linear import FocusedLinearAttention, focus

FOCUSED = zoo.get("focused_linear")


def direct(x, power):
    """f(x) on tokens (..., N, C), as published."""
    raised = x**power
    return raised * (x.norm(dim=-1, keepdim=True) / raised.norm(dim=-1, keepdim=True))


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


def released(query, key, value, *, position=0.0, gain=None, power=3, conv=None, grid=None):
    """Steps 2 to 9 of the released code on tokens (B, N, C), two heads, with the attention matrix written out."""
    C, n = query.shape[-1], key.shape[-2]
    s = F.softplus(torch.zeros(C, dtype=query.dtype) if gain is None else gain)
    q, k = ((F.relu(x) + 1e-6) / s for x in (query, key + position))
    q, k, v = (heads(x, 2) for x in (direct(q, power), direct(k, power), value))
    z = 1 / (q @ k.mean(-2, keepdim=True).mT + 1e-6)
    out = (q @ k.mT / n @ v) * z
    if conv is not None:
        B, H, N, D = v.shape
        image = v.reshape(B * H, N, D).mT.reshape(B * H, D, *grid)
        out = out + conv(image).reshape(B, H, D, N).mT
    return out


def test_focus_keeps_the_norm_of_a_token_is_homogeneous_and_trivial_for_power_one():
    x = draw((2, 2, 5, 4))[0].abs()
    torch.testing.assert_close(focus(x, 3.0).square().sum((-3, -1)), x.square().sum((-3, -1)))
    torch.testing.assert_close(focus(7 * x, 3.0), 7 * focus(x, 3.0))
    torch.testing.assert_close(focus(x, 1.0), x)


def test_focus_is_the_published_form_over_the_channels_of_all_heads():
    x = draw((3, 5, 8))[0].abs()
    torch.testing.assert_close(focus(heads(x, 2), 3.0), heads(direct(x, 3), 2))


def test_in_two_dimensions_the_tangent_is_cubed():
    angle = torch.linspace(0.1, 1.4, 7, dtype=torch.float64)
    x = torch.stack((angle.cos(), angle.sin()), -1)[None]
    cosine, sine = focus(x, 3.0)[0].unbind(-1)
    torch.testing.assert_close(sine / cosine, angle.tan() ** 3)


def test_focus_moves_tokens_that_share_their_largest_channel_together_and_others_apart():
    a, b = draw((1, 4000, 16), (1, 4000, 16))
    a, b = a.relu() + 1e-6, b.relu() + 1e-6
    rises = F.cosine_similarity(focus(a, 3.0), focus(b, 3.0), -1) > F.cosine_similarity(a, b, -1)
    same = a.argmax(-1) == b.argmax(-1)
    assert rises[same].double().mean() > 0.85
    assert (~rises[~same]).double().mean() > 0.90


def test_a_high_power_of_an_all_negative_token_does_not_underflow():
    x = torch.full((1, 1, 4, 8), 1e-6)
    torch.testing.assert_close(focus(x, 8.0), x)
    module = FocusedLinearAttention(16, 2, grid_size=(2, 2))
    query, key, value = draw((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), dtype=torch.float16)
    key[..., 2, :] = -1
    out = FOCUSED(query, key, value)
    assert out.isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(query.float(), key.float(), value.float()).isfinite().all()


def test_the_operator_is_the_quadratic_form():
    query, key, value = draw((2, 12, 16), (2, 12, 16), (2, 12, 16))
    ones = torch.ones(2, 1, 8, dtype=torch.float64) * math.log(2)
    out = FOCUSED(*(heads(x, 2) for x in (query, key, value)), channel_scale=ones)
    torch.testing.assert_close(out, released(query, key, value))


def test_a_layer_is_the_released_code():
    module = FocusedLinearAttention(16, 2, grid_size=(3, 4), dtype=torch.float64)
    with torch.no_grad():
        module.gain.copy_(draw((16,), seed=1)[0])
        module.position.copy_(draw((1, 12, 16), seed=2)[0])
    query, key, value = draw((2, 12, 16), (2, 12, 16), (2, 12, 16))
    conv = torch.nn.Conv2d(8, 8, 5, padding=2, groups=8, dtype=torch.float64)
    conv.load_state_dict(module.conv.state_dict())
    expected = released(query, key, value, position=module.position, gain=module.gain, conv=conv, grid=(3, 4))
    torch.testing.assert_close(module(*(heads(x, 2) for x in (query, key, value))), expected)


def test_a_fresh_layer_has_no_positions_and_the_scale_ln_two():
    module = FocusedLinearAttention(16, 2, grid_size=(3, 4), prefix=1)
    assert module.position.shape == (1, 13, 16)
    assert (module.position == 0).all()
    torch.testing.assert_close(F.softplus(module.gain), torch.full((16,), math.log(2)))
    count = sum(p.numel() for p in module.parameters())
    assert count == 13 * 16 + 16 + 25 * 8 + 8  # n C + C + 25 D + D


def test_a_scale_that_is_the_same_for_all_channels_cancels():
    query, key, value = draw((1, 2, 7, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    half = FOCUSED(query, key, value, channel_scale=torch.full((2, 1, 8), 0.5, dtype=torch.float64), eps=0.0)
    torch.testing.assert_close(half, FOCUSED(query, key, value, eps=0.0))


def test_power_one_is_relu_linear_attention():
    query, key, value = draw((1, 2, 7, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    weights = (query.relu() + 1e-6) @ (key.relu() + 1e-6).mT
    expected = weights @ value / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(FOCUSED(query, key, value, power=1.0), expected, rtol=1e-4, atol=1e-5)


def test_weights_are_positive_and_of_rank_at_most_the_head_width_until_the_convolution_is_added():
    query, key, _ = draw((1, 1, 30, 4), (1, 1, 30, 4), (1,))
    weights = FOCUSED.scores(query, key)
    assert (weights >= 0).all()
    assert torch.linalg.matrix_rank(weights).item() <= 4
    module = FocusedLinearAttention(4, 1, grid_size=(5, 6), dtype=torch.float64)
    basis = torch.eye(30, dtype=torch.float64)[None, :, :, None].expand(1, 30, 30, 4)
    with torch.no_grad():
        module.conv.bias.zero_()
        local = module.conv(basis, (5, 6))[0, :, :, 0].mT  # the convolution of channel 0 as a matrix
    assert torch.linalg.matrix_rank(weights[0, 0] + local).item() == 30


def test_prefix_tokens_get_attention_but_no_convolution():
    module = FocusedLinearAttention(16, 2, grid_size=(2, 3), prefix=1, dtype=torch.float64)
    plain = FocusedLinearAttention(16, 2, grid_size=(2, 3), prefix=1, use_conv=False, dtype=torch.float64)
    query, key, value = draw((1, 2, 7, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    difference = module(query, key, value) - plain(query, key, value)
    assert (difference[..., :1, :] == 0).all()
    assert (difference[..., 1:, :] != 0).all()


def test_key_positions_are_resized_to_another_grid_and_the_prefix_keeps_its_own():
    module = FocusedLinearAttention(4, 1, grid_size=(2, 2), prefix=1, dtype=torch.float64)
    with torch.no_grad():
        module.position[0, 0], module.position[0, 1:] = 5.0, 2.0
    slots = module._slots((3, 5), 1)
    assert slots.shape == (1, 16, 4)
    assert (slots[:, 0] == 5).all()
    torch.testing.assert_close(slots[:, 1:], torch.full((1, 15, 4), 2.0, dtype=torch.float64))


def test_frames_of_a_clip_are_convolved_one_by_one():
    module = FocusedLinearAttention(16, 2, grid_size=(2, 2, 3), dtype=torch.float64)
    query, key, value = draw((1, 2, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    frame = module.conv(value[..., 6:, :], (2, 3))
    torch.testing.assert_close(module.conv(value, (2, 2, 3))[..., 6:, :], frame)
    assert module(query, key, value).isfinite().all()


@pytest.mark.parametrize("kernel", [0, 4])
def test_an_even_kernel_is_refused(kernel):
    with pytest.raises(ValueError, match=f"odd and positive, got {kernel}"):
        FocusedLinearAttention(16, 2, kernel=kernel)


@pytest.mark.parametrize("power", [0, -2.0])
def test_a_power_that_does_not_focus_is_refused(power):
    with pytest.raises(ValueError, match=f"power must be positive, got {power}"):
        FOCUSED(*draw((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4)), power=power)
