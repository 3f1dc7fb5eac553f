"""`AxialAttention`: the first half of the heads looks along time, the second within a frame."""

import pytest
import torch

from cumulant import zoo
from cumulant.nn import AxialAttention, MultiheadAttention

GRID = (3, 2, 4)  # 3 frames of 8 places
NAMES = [name for name in zoo.names() if zoo.get(name).noncausal]


def layer(kind=AxialAttention, **kw):
    torch.manual_seed(0)
    return kind(**({"dim": 32, "num_heads": 4, "grid_size": GRID, "dtype": torch.float64} | kw))


def tokens(seed=1):
    return torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(module, x):
    return module.mix_tokens(module.call(x, grid=GRID), x)


@pytest.mark.parametrize("attention", NAMES)
def test_heads_over_time_do_not_see_other_places_nor_heads_over_space_other_frames(attention):
    module, x = layer(attention=attention), tokens()
    frame, place = torch.arange(24) // 8, torch.arange(24) % 8
    out = mixed(module, x)
    other_places, other_frames = x.clone(), x.clone()
    other_places[:, place != 5] += 1
    other_frames[:, frame != 1] += 1
    torch.testing.assert_close(mixed(module, other_places)[:, :2, place == 5], out[:, :2, place == 5])
    torch.testing.assert_close(mixed(module, other_frames)[:, 2:, frame == 1], out[:, 2:, frame == 1])
    assert not torch.allclose(mixed(module, other_frames)[:, :2, frame == 1], out[:, :2, frame == 1])
    assert not torch.allclose(mixed(module, other_places)[:, 2:, place == 5], out[:, 2:, place == 5])


def test_each_half_is_the_mechanism_along_its_axis():
    module, x = layer(attention="cumulant3"), tokens()
    query, key, value = (z.unflatten(-2, (3, 8)) for z in module.project(x))
    out = mixed(module, x).unflatten(-2, (3, 8))
    at_place = zoo.get("cumulant3")(*(z[:, :2, :, 6] for z in (query, key, value)))
    in_frame = zoo.get("cumulant3")(*(z[:, 2:, 1] for z in (query, key, value)))
    torch.testing.assert_close(out[:, :2, :, 6], at_place)
    torch.testing.assert_close(out[:, 2:, 1], in_frame)


def test_weights_move_between_joint_and_axial_layers():
    kw = {"attention": "softmax", "qk_norm": True, "gate": True, "v_conv": (3, 3, 3), "temperature": "head"}
    joint, axial = layer(MultiheadAttention, **kw), layer(**kw)
    assert {k: v.shape for k, v in joint.state_dict().items()} == {k: v.shape for k, v in axial.state_dict().items()}


@pytest.mark.parametrize("temperature", [None, "head", "order"])
def test_scores_are_the_weights_that_mix_the_values(temperature):
    module, x = layer(attention="cumulant3", temperature=temperature), tokens()
    for factor in [] if temperature is None else module.temperature.parameters():
        torch.nn.init.normal_(factor)
    mask = torch.rand(2, 24) > 0.3
    out = module.scores(x, key_mask=mask) @ module.project(x)[2]
    torch.testing.assert_close(module.proj(out.transpose(1, 2).flatten(2)), module(x, key_mask=mask))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer(num_heads=1), "num_heads must be even, .* got 1"),
        (lambda: layer(prefix=1), "no place for tokens outside the grid, got prefix=1"),
        (lambda: layer()(tokens(), is_causal=True), "is_causal=False"),
        (lambda: layer()(tokens(), grid=(4, 6)), r"grid of \(frames, rows, cols\), got 24 tokens, .* grid=\(4, 6\)"),
        (lambda: layer(grid_size=None)(tokens()), "grid=None"),
    ],
)
def test_what_has_no_two_axes_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_masks_broadcast_as_in_other_layers_and_those_that_do_not_fit_are_named():
    module, x = layer(attention="rala"), tokens()
    mask = torch.arange(24) % 5 != 0
    out = module(x, key_mask=mask.expand(2, 24))
    for narrow in (mask, mask[None]):
        torch.testing.assert_close(module(x, key_mask=narrow), out)
    with pytest.raises(ValueError, match=r"key_mask must have shape \(2, 24\).* got \(2, 23\)"):
        module(x, key_mask=mask[1:].expand(2, 23))
