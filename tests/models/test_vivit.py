"""ViViT: counts, shapes, what each variant sees, how variants reduce to one another and to an image model."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cumulant import zoo
from cumulant.models import ViViT, create_model
from cumulant.models.registry import VIVIT_CONFIGS
from cumulant.train import load, save

VARIANTS = (1, 2, 3, 4, "average")
BASE = {1: 88_954_000, 2: 115_062_928, 3: 117_319_312, 4: 88_952_464, "average": 86_696_080}
NAMES = [name for name in zoo.names() if zoo.get(name).noncausal]


def nano(variant=1, **kw):
    """8 frames of 16 x 16, tubelets of 2 x 4 x 4: a grid of 4 x 4 x 4."""
    torch.manual_seed(0)
    given = {"num_classes": 5, "zero_head": False} | kw
    return create_model("vivit_nano_patch4x2_16", variant=variant, **given).eval()


def clips(count=2, frames=8, size=16, seed=1):
    return torch.randn(count, 1, frames, size, size, generator=torch.Generator().manual_seed(seed))


def count(model):
    return sum(p.numel() for p in model.parameters())


def shapes(model):
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_counts_are_those_of_the_paper(variant):
    assert (
        count(create_model("vivit_base_patch16x2_224", variant=variant, num_classes=400, device="meta"))
        == (BASE[variant])
    )


@pytest.mark.parametrize(("variant", "expected"), [(1, 109_954), (2, 136_898), ("average", 102_786)])
def test_nano_counts_are_those_of_the_specification(variant, expected):
    assert count(create_model("vivit_nano_patch4x1_16", variant=variant, num_classes=2, pool="gap")) == expected


@pytest.mark.parametrize("name", VIVIT_CONFIGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_name_comes_in_every_variant(name, variant):
    model = create_model(name, variant=variant, num_classes=101, device="meta")
    assert isinstance(model, ViViT)
    assert model.variant == variant
    blocks = [*model.blocks, *(model.temporal_blocks if variant == 2 else ())]
    assert sum(count(block) for block in blocks) > 0.8 * count(model.blocks)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sixteen_frames_of_112_pixels_make_392_tokens(variant):
    model = create_model("vivit_tiny_patch16x2_112", variant=variant, num_classes=101, depth=1, temporal_depth=1)
    assert model.grid_size == (8, 7, 7)
    tokens = model.forward_features(torch.zeros(2, 3, 16, 112, 112))
    assert tokens.shape == (2, {1: 393, 2: 9, 3: 392, 4: 392, "average": 8}[variant], 192)
    assert model.forward_head(tokens).shape == (2, 101)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", NAMES)
def test_every_mechanism_works_in_every_variant_and_all_parameters_learn(variant, attention):
    model = nano(variant, attention=attention, pool="gap", depth=2)
    F.cross_entropy(model(clips()), torch.tensor([1, 2])).backward()
    without = {name for name, p in model.named_parameters() if p.numel() and (p.grad is None or not p.grad.any())}
    assert not without


@pytest.mark.parametrize("variant", [1, 2, "average"])
def test_class_tokens_learn_too(variant):
    model = nano(variant)
    F.cross_entropy(model(clips()), torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_as_released_the_first_step_trains_the_head_alone():
    model = nano(zero_head=True)
    assert not model(clips()).any()
    F.cross_entropy(model(clips()), torch.tensor([1, 2])).backward()
    learning = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learning == {"head.weight", "head.bias"}


@pytest.mark.parametrize("time_first", [False, True])
def test_with_one_frame_and_silent_time_variant_3_is_variant_1(time_first):
    order = "time-space" if time_first else "space-time"
    kw = {"frames": 2, "pool": "gap"}
    joint, factorised = nano(1, **kw), nano(3, axis_order=order, **kw)
    factorised.load_state_dict(joint.state_dict(), strict=False)
    for block in factorised.blocks:
        nn.init.zeros_(block.temporal_attn.proj.weight)
        nn.init.zeros_(block.temporal_attn.proj.bias)
    x = clips(frames=2)
    torch.testing.assert_close(factorised(x), joint(x), rtol=1e-5, atol=1e-6)


def test_the_order_of_the_axes_in_variant_3_is_what_it_says():
    space_time, time_space = nano(3), nano(3, axis_order="time-space")
    assert shapes(space_time) == shapes(time_space)
    assert not torch.allclose(space_time(clips()), time_space(clips()), atol=1e-3)


def image_model(**kw):
    torch.manual_seed(3)
    given = {"img_size": 16, "in_chans": 1, "depth": 3, "num_classes": 5, "init_std": 0.1} | kw
    return create_model("vit_nano_patch4_32", **given).eval()


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
@pytest.mark.parametrize("variant", [1, 2, 3, "average"])
def test_a_clip_of_one_tubelet_starts_as_the_image_model(variant, attention, pool):
    if variant == 3 and pool == "cls":
        pool = "gap"
    image = image_model(attention=attention, pool=pool)
    video = nano(variant, attention=attention, pool=pool, frames=2, gelu="erf")
    video.load_image_weights(image)
    x = clips(frames=2)
    expected = image.forward_features(x[:, :, 1])  # the central frame
    if variant == 2:  # up to where the second encoder begins
        torch.testing.assert_close(video.norm(_spatial(video, x)), expected, rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(video(x), image(x[:, :, 1]), rtol=1e-5, atol=1e-5)


def _spatial(video, x):
    tokens = video.embed(x)
    for block in video.blocks:
        tokens = block(tokens, grid=(4, 4), prefix=video.num_prefix_tokens)
    return tokens


@pytest.mark.parametrize("method", ["central", "inflate"])
def test_from_an_image_model_a_still_clip_looks_alike_in_every_frame(method):
    image, video = image_model(pool="gap"), nano(3, gelu="erf")
    left = video.load_image_weights(image, method)
    still = clips(frames=1).expand(-1, -1, 8, -1, -1)
    torch.testing.assert_close(video(still), image(still[:, :, 0]), rtol=1e-5, atol=1e-5)
    assert all("temporal" in name for name in left)


def test_weights_of_an_image_model_of_another_size_are_fitted():
    image, video = image_model(img_size=32, num_classes=7), nano(1)
    fresh = video.head.weight.clone()
    left = video.load_image_weights(image, "random")
    assert left == ["patch_embed.proj.weight", "head.weight", "head.bias"]
    assert torch.equal(video.head.weight, fresh)
    assert torch.equal(video.cls_token, image.cls_token)
    frames = video.pos_embed[:, 1:].unflatten(1, (4, 16))
    assert torch.equal(frames, frames[:, :1].expand_as(frames))
    assert torch.equal(video.pos_embed[:, :1], image.pos_embed[:, :1])


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"depth": 2}, "depth of the image model must be that of the video model, 3, got 2"),
        ({"num_heads": 2}, "num_heads of the image model must be that of the video model, 4, got 2"),
        ({"in_chans": 3}, "in_chans of the image model"),
        ({"patch_size": 2}, r"patch size of the image model .* \(4, 4\), got \(2, 2\)"),
        ({"qk_norm": True}, r"blocks.0.attn.q_norm.weight of the image model .* it is missing"),
    ],
)
def test_an_image_model_that_does_not_fit_is_refused(kw, message):
    with pytest.raises(ValueError, match=message):
        nano(1).load_image_weights(image_model(**kw))


def permuted(model, x, order):
    """Clips with their tubelets in another order over time."""
    frames = x.unflatten(2, (4, 2))[:, :, order].flatten(2, 3)
    return model(frames)


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_variant_2_knows_time_by_its_temporal_positions_only(pool):
    model, x, order = nano(2, pool=pool), clips(), torch.tensor([2, 0, 3, 1])
    answer = model(x)
    assert not torch.allclose(permuted(model, x, order), answer, atol=1e-3)
    table = model.temporal_pos_embed.data
    first, times = table.tensor_split([model.num_prefix_tokens], dim=1)
    model.temporal_pos_embed.data = torch.cat([first, times[:, order]], 1)
    torch.testing.assert_close(permuted(model, x, order), answer, rtol=1e-5, atol=1e-5)
    model.temporal_pos_embed.data = torch.zeros_like(table)
    torch.testing.assert_close(permuted(model, x, order), model(x), rtol=1e-5, atol=1e-5)


def test_the_frame_average_sees_no_order_in_time_and_the_others_do():
    x, order = clips(), torch.tensor([2, 0, 3, 1])
    for variant in VARIANTS:
        model = nano(variant, init_std=0.2)
        alike = torch.allclose(permuted(model, x, order), model(x), rtol=1e-4, atol=1e-5)
        assert alike == (variant == "average")


def test_variant_4_has_the_weights_of_variant_1():
    assert shapes(nano(4)) == shapes(nano(1, pool="gap"))
    nano(4).load_state_dict(nano(1, pool="gap").state_dict())
    assert not torch.allclose(nano(4)(clips()), nano(1, pool="gap")(clips()), atol=1e-3)


def test_pixels_elsewhere_do_not_reach_the_half_of_the_heads_that_looks_along_the_other_axis():
    model, x = nano(4, depth=1), clips()
    block = model.blocks[0]

    def heads(x):  # (B, H, frames, rows, cols, D), before the output projection
        tokens = block.norm1(model.embed(x))
        call = block.attn.call(tokens, grid=(4, 4, 4))
        return block.attn.mix_tokens(call, tokens).unflatten(2, (4, 4, 4))

    elsewhere, other_frames = x.clone(), x.clone()
    elsewhere[..., 4:, :] += 1  # all rows of tubelets but the first
    other_frames[:, :, 2:] += 1  # all tubelets but the first
    torch.testing.assert_close(heads(elsewhere)[:, :2, :, 0], heads(x)[:, :2, :, 0])
    torch.testing.assert_close(heads(other_frames)[:, 2:, 0], heads(x)[:, 2:, 0])
    assert not torch.allclose(heads(other_frames)[:, :2, 0], heads(x)[:, :2, 0], atol=1e-3)
    assert not torch.allclose(heads(elsewhere)[:, 2:, :, 0], heads(x)[:, 2:, :, 0], atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_clips_of_other_sizes_use_resized_positions(variant):
    model, other = nano(variant), nano(variant, frames=12, img_size=16)
    other.load_state_dict(model.state_dict())
    longer = clips(frames=12)
    torch.testing.assert_close(model(longer), other(longer))
    larger = nano(variant, img_size=24)
    larger.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(clips(size=24)), larger(clips(size=24)))
    assert model(torch.zeros(1, 1, 4, 8, 20)).shape == (1, 5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_model_comes_back_the_same(variant, tmp_path):
    extras = {"v_conv": (3, 3, 3), "gate": "silu", "temperature": "order"}
    model = nano(
        variant, attention="cumulant3", attention_extras=extras, tubelet=(2, 8, 8), attention_options={"full": True}
    )
    again = load(save(model, tmp_path / "model.safetensors")).eval()
    assert torch.equal(again(clips()), model(clips()))
    assert shapes(again) == shapes(model)


def test_the_kernel_of_a_convolution_is_divided_among_the_axes():
    extras = {"v_conv": (5, 3, 3)}
    joint, encoder, block, axial = (nano(variant, attention_extras=extras) for variant in (1, 2, 3, 4))
    kernels = {
        "joint": joint.blocks[0].attn, "axial": axial.blocks[0].attn,
        "frames": encoder.blocks[0].attn, "times": encoder.temporal_blocks[0].attn,
        "space": block.blocks[0].attn, "time": block.blocks[0].temporal_attn,
    }  # fmt: skip
    assert {name: tuple(layer.v_conv.weight.shape[2:]) for name, layer in kernels.items()} == {
        "joint": (5, 3, 3), "axial": (5, 3, 3), "frames": (3, 3), "times": (5, 1), "space": (3, 3), "time": (5, 1),
    }  # fmt: skip
    flat = nano(3, attention_extras={"v_conv": 3}).blocks[0]
    assert flat.attn.v_conv is not None
    assert flat.temporal_attn.v_conv is None


def test_uniform_frame_sampling_embeds_sampled_frames():
    sampled = nano(1, tubelet=(1, 4, 4), sample_frames=4)
    assert sampled.grid_size == (4, 4, 4)
    tubes = nano(1, tubelet_init="central")
    state = tubes.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"][:, :, 1:]  # of the central frames
    sampled.load_state_dict(state)
    torch.testing.assert_close(sampled(clips()), tubes(clips()), rtol=1e-5, atol=1e-5)


def test_initialisation_is_that_of_the_released_code():
    torch.manual_seed(0)
    model = create_model("vivit_tiny_patch8x2_64", variant=2, num_classes=6)
    block = model.blocks[0]
    for part in block.attn.qkv.weight.chunk(3):  # Xavier: each of query, key and value by itself
        assert part.abs().max().item() == pytest.approx((6 / (192 + 192)) ** 0.5, rel=1e-3)
    assert block.mlp.fc1.weight.abs().max().item() == pytest.approx((6 / (192 + 768)) ** 0.5, rel=1e-3)
    assert 0 < block.mlp.fc1.bias.abs().max() < 1e-5
    assert not block.attn.qkv.bias.any()
    assert model.temporal_pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.cls_token.any()
    assert not model.head.weight.any()
    assert all(module.eps == 1e-6 for module in model.modules() if isinstance(module, nn.LayerNorm))
    deit = create_model("vivit_tiny_patch8x2_64", init_std=0.02, zero_head=False, num_classes=6)
    assert deit.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert deit.cls_token.any()


def test_stochastic_depth_grows_in_each_encoder():
    model = nano(2, drop_path=0.2, depth=3, temporal_depth=3)
    for blocks in (model.blocks, model.temporal_blocks):
        np.testing.assert_allclose([block.drop_path.rate for block in blocks], np.linspace(0, 0.2, 3))
    model.set_drop_path(0.0)
    assert torch.equal(model.train()(clips()), model(clips()))


def test_stochastic_depth_as_released_neither_rescales_nor_touches_variant_3():
    torch.manual_seed(0)
    released = nano(1, drop_path=0.5, drop_path_style="released").blocks[-1].drop_path.train()
    assert released(torch.ones(200, 1)).unique().tolist() == [0.0, 1.0]
    scaled = nano(1, drop_path=0.5).blocks[-1].drop_path.train()
    assert scaled(torch.ones(200, 1)).unique().tolist() == [0.0, 2.0]
    assert all(b.drop_path.rate == 0 for b in nano(3, drop_path=0.5, drop_path_style="released").blocks)
    assert nano(3, drop_path=0.5).blocks[-1].drop_path.rate == 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_as_one_graph_it_gives_the_same_answer(variant):
    torch.compiler.reset()
    model = nano(variant, attention="cumulant3", depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(clips()), model(clips()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_to_bfloat16_stays_close(variant):
    model = nano(variant, attention="cumulant3", depth=2)
    exact = model(clips())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(clips())
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nano()(clips(frames=7)), r"multiple of the tubelet \(2, 4, 4\), got \(7, 16, 16\)"),
        (lambda: nano()(torch.zeros(2, 8, 16, 16, 1)), r"clips must have shape \(batch, 1, .* got \(2, 8, 16, 16, 1\)"),
        (lambda: nano(5), "variant must be one of 1, 2, 3, 4, 'average', got 5"),
        (lambda: nano(3, pool="cls"), 'pool="cls", but variant 3 has no class token'),
        (lambda: nano(4, num_heads=1), "num_heads must be even"),
        (lambda: nano(pool="mean"), "pool must be one of 'cls', 'gap', got 'mean'"),
        (lambda: nano(axis_order="spacetime"), "axis_order must be one of .* got 'spacetime'"),
        (lambda: nano(drop_path_style="timm"), "drop_path_style must be one of .* got 'timm'"),
        (lambda: nano(tubelet_init="centre"), "tubelet_init must be one of .* got 'centre'"),
        (lambda: nano(temporal_depth=0), "temporal_depth must be at least 1, got 0"),
        (lambda: nano(gelu="fast"), 'gelu must be "erf" or "tanh", got \'fast\''),
        (lambda: nano(attention_extras={"vconv": 3}), "unknown attention extra 'vconv'; did you mean 'v_conv'"),
        (lambda: create_model("vivit_base_16x2"), "did you mean 'vivit_base_patch16x2_224'"),
    ],
)
def test_bad_input_is_answered_with_what_is_accepted(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_variants_may_come_as_text_and_features_without_classes():
    assert nano("2").variant == 2
    model = nano(2, num_classes=0)
    torch.testing.assert_close(model(clips()), model.forward_features(clips())[:, 0])
