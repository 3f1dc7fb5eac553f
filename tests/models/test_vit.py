"""The Vision Transformer: counts, shapes, initialisation, positions, stochastic depth, and any mechanism inside."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cumulant import zoo
from cumulant.models import VisionTransformer, create_model
from cumulant.models.parts import DropPath, PatchEmbed, resize_positions
from cumulant.models.registry import VIT_CONFIGS
from cumulant.zoo.mixing import Bound

PARAMETERS = {
    "vit_tiny_patch16_224": (1000, 5_717_416),
    "vit_small_patch16_224": (1000, 22_050_664),
    "vit_base_patch16_224": (1000, 86_567_656),
    "vit_base_patch32_224": (1000, 88_224_232),
    "vit_large_patch16_224": (1000, 304_326_632),
    "deit_tiny_distilled_patch16_224": (1000, 5_910_800),
    "vit_smalldata_patch4_32": (100, 2_714_980),
    "vit_nano_patch2_8": (10, 136_138),
    "vit_nano_patch4_32": (10, 142_026),
}


def nano(**kw):
    torch.manual_seed(0)
    return create_model("vit_nano_patch2_8", **({"num_classes": 10, "init_std": 0.1} | kw))


def images(count=3, size=8, seed=1):
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(seed))


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", VIT_CONFIGS)
def test_parameter_counts_are_those_of_the_papers(name):
    classes, expected = PARAMETERS[name]
    assert count(create_model(name, num_classes=classes, device="meta")) == expected


def test_counts_follow_the_options():
    small = create_model("vit_smalldata_patch4_32", num_classes=100, qkv_bias=False, device="meta")
    assert count(small) == 2_709_796
    tiny = create_model("vit_tiny_patch16_224", device="meta")
    assert count(tiny.blocks[0]) == 12 * 192**2 + 13 * 192 == 444_864
    assert count(nano(pool="gap")) == 136_138 - 2 * 64  # neither the class token nor its position


@pytest.mark.parametrize("name", [name for name in zoo.names() if zoo.get(name).module is None])
def test_mechanisms_without_parameters_leave_the_count_alone(name):
    assert count(nano(attention=name)) == 136_138


def test_the_state_dict_has_the_names_of_timm():
    block = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    layers = ["patch_embed.proj", *(f"blocks.{i}.{part}" for i in range(4) for part in block), "norm", "head"]
    expected = ["cls_token", "pos_embed", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))]
    assert list(nano().state_dict()) == expected
    distilled = create_model("deit_tiny_distilled_patch16_224", device="meta").state_dict()
    assert {"dist_token", "head_dist.weight", "head_dist.bias"} <= set(distilled)


def test_a_224_pixel_image_makes_197_tokens_and_384_pixels_577():
    model = create_model("vit_tiny_patch16_224", depth=1).eval()
    with torch.no_grad():
        assert model.forward_features(torch.zeros(1, 3, 224, 224)).shape == (1, 197, 192)
        assert model.forward_features(torch.zeros(1, 3, 384, 384)).shape == (1, 577, 192)
        assert model(torch.zeros(2, 3, 384, 384)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("pool", "kw", "prefix"),
    [("cls", {}, 1), ("gap", {}, 0), ("gap", {"class_token": True}, 1), ("cls", {"distilled": True}, 2)],
)
def test_pooling_reads_the_tokens_it_names(pool, kw, prefix):
    model, x = nano(pool=pool, **kw).eval(), images()
    features = model.forward_features(x)
    assert features.shape == (3, 16 + prefix, 64)
    if pool == "gap":
        expected = model.head(features[:, prefix:].mean(1))
    elif prefix == 2:
        expected = (model.head(features[:, 0]) + model.head_dist(features[:, 1])) / 2
    else:
        expected = model.head(features[:, 0])
    torch.testing.assert_close(model(x), expected)


def test_without_classes_the_model_gives_features():
    model, x = nano(num_classes=0).eval(), images()
    torch.testing.assert_close(model(x), model.forward_features(x)[:, 0])


def test_the_distilled_model_gives_both_answers_only_when_asked_while_training():
    model = nano(distilled=True, distilled_training=True)
    assert [y.shape for y in model.train()(images())] == [(3, 10), (3, 10)]
    assert model.eval()(images()).shape == (3, 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nano()(images(size=9)), r"multiple of the patch size 2, got 9 x 9"),
        (lambda: nano(img_size=7), r"multiple of the patch size 2, got 7 x 7"),
        (lambda: nano()(torch.zeros(2, 3, 8, 8)), r"images must have shape \(batch, 1, .*got \(2, 3, 8, 8\)"),
        (lambda: nano()(torch.zeros(1, 8, 8)), r"got \(1, 8, 8\)"),
        (lambda: nano(pool="mean"), "pool must be one of 'cls', 'gap', 'last', got 'mean'"),
        (lambda: nano(class_token=False), 'pool="cls" reads the class token'),
        (lambda: nano(pool="gap", distilled=True), 'distilled=True needs pool="cls"'),
        (lambda: nano(drop_path=1.0), "drop_path must be at least 0 and below 1, got 1.0"),
        (lambda: nano(num_classes=-1), "num_classes must be 0 .* got -1"),
        (lambda: nano(depth=0), "depth must be at least 1, got 0"),
        (lambda: nano(attention="cumulant9"), "unknown attention mechanism 'cumulant9'"),
        (lambda: create_model("vit_nano_patch2_8", dept=3), "unknown argument 'dept' of .*did you mean 'depth'"),
        (lambda: create_model("vit_tiny_patch16_225"), "did you mean 'vit_tiny_patch16_224'"),
    ],
)
def test_bad_input_is_answered_with_what_is_accepted(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_initialisation_is_that_of_deit():
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", depth=2)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.02)
            assert (module.bias == 0).all()
        elif isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-6
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.2)
    # PyTorch's default for a convolution: uniform within 1/sqrt(fan in).
    weight, bound = model.patch_embed.proj.weight, (3 * 16 * 16) ** -0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def permute_patches(x, order):
    """Images of 8 x 8 with their sixteen 2 x 2 patches in another order."""
    patches = F.unfold(x, 2, stride=2)[..., order]
    return F.fold(patches, (8, 8), 2, stride=2)


@pytest.mark.parametrize(
    "attention", [name for name in zoo.names() if zoo.get(name).order_free and not zoo.get(name).wants_grid]
)
def test_patches_that_move_with_their_positions_leave_the_answer(attention):
    model, x = nano(attention=attention).eval(), images()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    answer, moved = model(x), permute_patches(x, order)
    assert not torch.allclose(model(moved), answer, atol=1e-3)
    with torch.no_grad():
        model.pos_embed.copy_(torch.cat([model.pos_embed[:, :1], model.pos_embed[:, 1:][:, order]], 1))
    torch.testing.assert_close(model(moved), answer, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_patch_embedding_is_a_convolution(channels_last):
    embed = PatchEmbed(3, 2, 5).double()
    images = torch.randn(4, 2, 6, 9, dtype=torch.float64)
    images = (images.to(memory_format=torch.channels_last) if channels_last else images).requires_grad_()
    ours, conv = embed(images), embed.proj(images).flatten(2).mT
    assert ours.shape == (4, 6, 5)
    torch.testing.assert_close(ours, conv, rtol=0, atol=1e-12)
    places = (images, embed.proj.weight, embed.proj.bias)
    up = torch.randn_like(ours)
    for got, expected in zip(torch.autograd.grad(ours, places, up), torch.autograd.grad(conv, places, up), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_softmax_written_out_reproduces_the_fused_kernel():
    model, x = nano().eval(), images()
    fused = model(x)

    def written_out(call):
        return (call.query @ call.key.mT * call.query.shape[-1] ** -0.5).softmax(-1) @ call.value

    for block in model.blocks:
        block.attn.mix = Bound(dataclasses.replace(zoo.get("softmax"), function=written_out), {})
    torch.testing.assert_close(model(x), fused, rtol=1e-5, atol=1e-5)


def test_with_silent_branches_the_encoder_is_the_norm_of_the_embedding():
    model, x = nano().eval(), images()
    for block in model.blocks:
        for last in (block.attn.proj, block.mlp.fc2):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
    torch.testing.assert_close(model.forward_features(x), model.norm(model.embed(x)))


FORMS = ({"pool": "gap"}, {"distilled": True}, {"qk_norm": True})


@pytest.mark.parametrize(
    ("attention", "kw"),
    [*((name, {}) for name in zoo.names() if zoo.get(name).noncausal), *(("cumulant3", kw) for kw in FORMS)],
)
def test_every_parameter_gets_a_gradient(attention, kw):
    model = nano(attention=attention, **kw)
    F.cross_entropy(model(images()), torch.tensor([1, 2, 3])).backward()
    without = {name for name, p in model.named_parameters() if p.numel() and (p.grad is None or not p.grad.any())}
    if model.pool == "cls":  # after the last block nothing reads the patches, which a convolution on the grid changes
        without = {name for name in without if not name.startswith("blocks.3.attn.mix.")}
    assert not without


def test_with_a_zero_head_only_the_head_learns_at_first():
    model = nano()
    nn.init.zeros_(model.head.weight)
    F.cross_entropy(model(images()), torch.tensor([1, 2, 3])).backward()
    learning = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learning == {"head.weight", "head.bias"}


def test_stochastic_depth_grows_linearly():
    model = nano(drop_path=0.3, depth=7)
    rates = [block.drop_path.rate for block in model.blocks]
    np.testing.assert_allclose(rates, np.linspace(0, 0.3, 7))
    model.set_drop_path(0.1)
    assert model.blocks[-1].drop_path.rate == 0.1
    assert nano(drop_path=0.3, depth=1).blocks[0].drop_path.rate == 0.0


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    dropped = DropPath(0.25)(torch.ones(4000, 3, 2))
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (dropped.flatten(1).amax(1) == dropped.flatten(1).amin(1)).all()
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.03)


def test_resizing_positions_keeps_the_prefix_and_follows_the_grid():
    rows = torch.linspace(0, 1, 6)[:, None].expand(6, 4)
    table = torch.cat([torch.full((1, 1, 1), 7.0), rows.reshape(1, 24, 1)], 1)
    resized = resize_positions(table, (6, 4), (12, 8))
    assert resized.shape == (1, 97, 1)
    assert resized[0, 0, 0] == 7.0
    grid = resized[0, 1:, 0].reshape(12, 8)
    torch.testing.assert_close(grid[3:-3], torch.linspace(-0.05, 1.05, 12)[3:-3, None].expand(6, 8))
    assert resize_positions(table, (6, 4), (6, 4)) is table


def test_an_image_of_another_size_uses_the_resized_table():
    model, larger = nano().eval(), nano(img_size=12).eval()
    larger.load_state_dict(model.state_dict())
    assert larger.pos_embed.shape == (1, 37, 64)
    x = images(size=12)
    torch.testing.assert_close(model(x), larger(x))
    torch.testing.assert_close(larger.pos_embed[:, :1], model.pos_embed[:, :1])


def test_images_need_not_be_square():
    model = nano(img_size=(8, 12)).eval()
    assert model.grid_size == (4, 6)
    assert model(torch.zeros(2, 1, 8, 12)).shape == (2, 10)


def test_loading_leaves_the_checkpoint_as_it_was_and_refuses_what_is_no_square():
    state = nano().state_dict()
    nano(img_size=12).load_state_dict(state)
    assert state["pos_embed"].shape == (1, 17, 64)
    with pytest.raises(ValueError, match=r"17 rows, which is not 0 prefix tokens and a square grid"):
        nano(img_size=12, pool="gap").load_state_dict(state)


def test_create_model_remembers_what_it_was_asked_for():
    model = create_model("vit_nano_patch2_8", attention="cumulant2", num_classes=10, pool="gap", dtype=torch.float64)
    assert model.config == {"name": "vit_nano_patch2_8", "attention": "cumulant2", "num_classes": 10, "pool": "gap"}
    assert model.pos_embed.dtype == torch.float64
    assert isinstance(model, VisionTransformer)
