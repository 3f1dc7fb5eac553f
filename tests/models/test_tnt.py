"""TNT: words inside patches. Each test is a claim of its page."""

import pytest
import torch

import cumulant

COUNTS = {"tnt_ti": 6_076_408, "tnt_s": 23_768_584, "tnt_b": 65_428_680, "tnt_s_legacy": 23_755_336}


def count(model):
    return sum(weight.numel() for weight in model.parameters())


def nano(**kw):
    torch.manual_seed(0)
    return cumulant.create_model("tnt_nano", **{"num_classes": 10, "init_std": 0.2, **kw}).eval()


def images(side=32, seed=1, count=2):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def words_after_all_blocks(model, x):
    state, grid = model._begin(x)
    for block in model.blocks:
        state = block(*state, grid=grid)
    return state[0].unflatten(0, (x.shape[0], -1))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_of_the_paper(name):
    assert count(cumulant.create_model(name, device="meta")) == COUNTS[name]


def test_parts_of_a_block_have_the_counts_of_the_page():
    model = cumulant.create_model("tnt_s", device="meta")
    block = model.blocks[0]
    assert [count(part) for part in (block.attn_in, block.mlp_in, block.attn_out, block.mlp, block)] == [
        2_328, 4_728, 590_208, 1_181_568, 1_929_456,
    ]  # fmt: skip
    assert count(cumulant.create_model("tnt_nano", num_classes=10, device="meta")) == 189_530
    assert {norm.eps for norm in model.modules() if isinstance(norm, torch.nn.LayerNorm)} == {1e-5}


def test_words_of_a_patch_depend_on_that_patch_alone():
    model, x = nano(), images()
    other = x.clone()
    other[..., 8:16, 16:24] += 1.0  # the patch in row 1, column 2 of 4
    one, two = words_after_all_blocks(model, x), words_after_all_blocks(model, other)
    changed = (one != two).flatten(2).any(-1)
    assert changed[:, 6].all()
    assert not changed[:, [i for i in range(16) if i != 6]].any()
    legacy = nano(legacy=True)  # convolves before it cuts
    changed = (words_after_all_blocks(legacy, x) != words_after_all_blocks(legacy, other)).flatten(2).any(-1)
    assert changed[:, [2, 5, 7, 10]].any()


def test_without_the_merge_the_patches_are_a_plain_vit():
    model, x = nano(), images()
    vit = cumulant.create_model(
        "vit_nano_patch4_32", patch_size=8, depth=3, num_heads=4, mlp_ratio=4, qkv_bias=False, num_classes=10
    ).eval()
    for block, plain in zip(model.blocks, vit.blocks, strict=True):
        torch.nn.init.zeros_(block.proj.weight)
        torch.nn.init.zeros_(block.norm2_proj.bias)
        for theirs, ours in (("norm1", "norm_out"), ("attn", "attn_out"), ("norm2", "norm_mlp"), ("mlp", "mlp")):
            plain.get_submodule(theirs).load_state_dict(block.get_submodule(ours).state_dict())
        plain.norm1.eps = plain.norm2.eps = 1e-5
    (_, tokens), _ = model._begin(x)
    for block in vit.blocks:
        tokens = block(tokens, grid=(4, 4), prefix=1)
    torch.testing.assert_close(model(x), model.head(model.norm(tokens)[:, 0]))


def test_only_the_table_of_patches_is_resized_for_another_size():
    small, large = nano(), nano(img_size=64)
    assert large.pixel_pos.shape == small.pixel_pos.shape
    large.load_state_dict(small.state_dict())
    torch.testing.assert_close(large(images(64)), small(images(64)))
    assert small.forward_features(images(64)).shape == (2, 65, 64)


def test_swapping_two_patches_with_their_places_leaves_the_class_token():
    model, x = nano(), images()
    other = x.clone()
    other[..., :8, :8], other[..., 8:16, 16:24] = x[..., 8:16, 16:24].clone(), x[..., :8, :8].clone()
    said = model(x)
    with torch.no_grad():
        model.patch_pos[:, [1, 7]] = model.patch_pos[:, [7, 1]]
    torch.testing.assert_close(model(other), said)


def test_attention_over_words_is_live_and_has_its_own_switch():
    model, x = nano(), images()
    said, convolution = model(x), model.pixel_embed.proj.weight
    (gradient,) = torch.autograd.grad(said.square().sum(), convolution)
    assert gradient.abs().min() > 0
    linear = nano(inner_attention="linear")
    assert [block.attn_in.mechanism.name for block in linear.blocks] == ["linear"] * 3
    assert [block.attn_out.mechanism.name for block in linear.blocks] == ["softmax"] * 3
    linear.load_state_dict(model.state_dict())
    assert (linear(x) - said).abs().max() > 1e-4


def test_the_mlp_over_words_of_the_last_block_has_a_gradient():
    model = nano()
    model(images()).square().sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in model.blocks[-1].mlp_in.parameters())


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="multiple of the patch size 8, got 36 x 36; the nearest is 32 x 32"):
        nano()(images(36))
    with pytest.raises(ValueError, match="inner_stride must divide patch_size=8, got 3"):
        nano(inner_stride=3)
    with pytest.raises(ValueError, match="word_kernel must be odd, got 4"):
        nano(word_kernel=4)
