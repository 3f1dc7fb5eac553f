"""MaxViT: exact counts, windows and dilated grids, the relative bias, timm's weights."""

import pytest
import torch

import cumulant
from cumulant.models.maxvit import MAXVIT_CONFIGS, MaxViT, RelativeAttention, joined, parted

COUNTS = {
    "maxvit_t": 30_916_528,
    "maxvit_s": 68_927_956,
    "maxvit_b": 119_467_708,
    "maxvit_l": 211_785_560,
    "maxvit_xl": 474_951_952,
}


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def nano(**kw):
    torch.manual_seed(0)
    made = cumulant.create_model("maxvit_nano", **{"num_classes": 10, "dtype": torch.float64, "init_std": 0.1, **kw})
    return made.eval()


def images(side=32, count=2):
    return torch.randn(count, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_parameters_are_as_many_as_published():
    assert {name: parameters(cumulant.create_model(name, device="meta")) for name in COUNTS} == COUNTS
    assert parameters(cumulant.create_model("maxvit_t", img_size=384, device="meta")) == 30_977_008
    assert parameters(cumulant.create_model("maxvit_nano", num_classes=10, device="meta")) == 182_910
    assert cumulant.create_model("maxvit_tiny_tf_224", device="meta").config["name"] == "maxvit_t"  # timm's name
    first = cumulant.create_model("maxvit_t", device="meta").stages[0].blocks[0]
    assert [parameters(part) for part in (first.conv, first.attn_block, first.attn_grid)] == [44_752, 50_322, 50_322]


@pytest.mark.parametrize("kind", ["block", "grid"])
def test_parts_joined_again_are_the_map(kind):
    x = torch.randn(2, 8, 12, 3)
    assert torch.equal(joined(parted(x, 4, kind), 4, kind, (8, 12)), x)
    assert torch.equal(parted(x[:, :4, :4], 4, kind), x[:, :4, :4].flatten(1, 2))  # a map of one window


@pytest.mark.parametrize("kind", ["block", "grid"])
def test_windows_see_neighbours_and_grids_see_places_apart(kind):
    part = getattr(nano().stages[0].blocks[0], f"attn_{kind}")
    x = torch.randn(1, 8, 8, 32, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(part(x, torch.nn.Identity())[0, 1, 6].sum(), x)
    seen = g[0].abs().sum(-1) > 0
    expected = torch.zeros(8, 8, dtype=torch.bool)
    if kind == "block":
        expected[:4, 4:] = True
    else:
        expected[1::2, ::2] = True
    assert torch.equal(seen, expected)


def test_one_block_without_convolution_reaches_the_whole_map():
    block = nano().stages[0].blocks[0]
    x = torch.randn(1, 8, 8, 32, dtype=torch.float64, requires_grad=True)
    same = torch.nn.Identity()
    (g,) = torch.autograd.grad(block.attn_grid(block.attn_block(x, same), same)[0, 0, 0].sum(), x)
    assert (g.abs().sum(-1) > 0).all()


def test_the_bias_is_that_of_the_distance_and_zero_is_plain_attention():
    layer = RelativeAttention(8, 2, 3, dtype=torch.float64)
    table = torch.randn_like(layer.rel_pos.relative_position_bias_table)
    layer.rel_pos.relative_position_bias_table.data = table
    bias = layer.rel_pos()
    for i in range(9):
        for j in range(9):
            apart = table[:, j // 3 - i // 3 + 2, j % 3 - i % 3 + 2]
            assert torch.equal(bias[:, i, j], apart)
    x = torch.randn(4, 9, 8, dtype=torch.float64)
    call = layer.call(x)
    expected = (layer.scores(x) @ call.value).transpose(-3, -2).flatten(-2)
    torch.testing.assert_close(layer(x), layer.proj(expected))
    plain = cumulant.nn.MultiheadAttention(8, 2, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.nn.init.zeros_(layer.rel_pos.relative_position_bias_table)
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("attention", ["softmax", "cumulant3", "linear"])
def test_padding_is_as_if_it_were_not_there(attention):
    model = nano(pad=True, attention=attention)
    part = model.stages[0].blocks[0].attn_block
    x = torch.randn(1, 6, 7, 32, dtype=torch.float64)
    out = part(x, torch.nn.Identity())
    first = part(x[:, :4, :4], torch.nn.Identity())  # a window without padding
    torch.testing.assert_close(out[:, :4, :4], first)
    x[:, 4:, 4:] += 1  # another window, cut by the border
    torch.testing.assert_close(part(x, torch.nn.Identity())[:, :4, :4], first)
    assert model(images(28)).isfinite().all()


def test_a_size_that_windows_do_not_fill_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="got 40 x 40; the nearest is 32 x 32"):
        nano()(images(40))
    assert nano()(images(64)).shape == (2, 10)
    with pytest.raises(ValueError, match="224 x 224"):
        cumulant.create_model("maxvit_t", img_size=256, device="meta")(torch.empty(1, 3, 224, 224, device="meta"))


def test_sizes_that_do_not_go_together_are_named():
    with pytest.raises(ValueError, match=r"depths must have one entry for each stage, as widths=\(32,\), got \(1, 1\)"):
        nano(widths=(32,))
    with pytest.raises(ValueError, match=r"head_dim must divide every width of \(32, 64\), got 24"):
        nano(head_dim=24)


def test_one_attention_over_the_whole_map_takes_the_place_of_both():
    model = nano(partition="global", attention="cumulant2")
    tables = 2 * 49 * (2 + 4)  # relative biases of 2 and 4 heads
    assert parameters(model) == 182_910 - tables
    x = torch.randn(1, 8, 8, 32, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(model.stages[0].blocks[0].attn_block(x, torch.nn.Identity())[0, 0, 0].sum(), x)
    assert (g.abs().sum(-1) > 0).all()
    assert model(images(40)).shape == (2, 10)


def test_a_checkpoint_of_other_windows_is_fitted():
    small, large = nano(), nano(img_size=64)
    large.load_state_dict(small.state_dict())
    assert large.state_dict()["stages.0.blocks.0.attn_grid.attn.rel_pos.relative_position_bias_table"].shape[1] == 15
    with pytest.raises(RuntimeError, match="size mismatch"):
        nano(widths=(32, 96)).load_state_dict(small.state_dict())


def test_work_grows_with_the_pixels():
    from cumulant.listing import multiply_adds

    model = cumulant.create_model("maxvit_nano", device="meta")
    assert multiply_adds(model, (3, 64, 64)) / multiply_adds(model, (3, 32, 32)) < 4.01
    assert abs(multiply_adds(cumulant.create_model("maxvit_t", device="meta"), (3, 224, 224)) / 5.6e9 - 1) < 0.02


@pytest.mark.timm
def test_timms_weights_give_timms_answer():
    timm = pytest.importorskip("timm")
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg, _tf_cfg

    how = _tf_cfg()
    how["transformer_cfg"].dim_head = 16
    how |= {"embed_dim": (32, 64), "depths": (1, 1), "block_type": ("M", "M"), "stem_width": 16, "stem_bias": True}
    how["transformer_cfg"].window_size = how["transformer_cfg"].grid_size = (4, 4)
    torch.manual_seed(0)
    theirs = MaxxVit(MaxxVitCfg(**how, head_hidden_size=64), img_size=32, num_classes=10).double().eval()
    for parameter in theirs.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model = nano()
    model.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(model(images()), theirs(images()))
    torch.testing.assert_close(model(images(64)), theirs(images(64)))
    theirs.load_state_dict(model.state_dict())
    assert [dict(one) for one in theirs.feature_info] == list(model.feature_info)
    full = timm.create_model("maxvit_tiny_tf_224", device="meta")
    ours = MaxViT(device="meta", **MAXVIT_CONFIGS["maxvit_t"])
    assert {k: v.shape for k, v in full.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
