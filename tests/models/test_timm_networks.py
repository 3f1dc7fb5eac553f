"""Networks that timm has too: its weights load and give its answers, and ours go back under its names."""

import pytest
import torch

import cumulant

pytestmark = pytest.mark.timm

SMALL_TNT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "inner_dim": 8, "depth": 2, "num_classes": 5}
SMALL_CROSS = {"img_size": 48, "embed_dim": (16, 32), "num_heads": (2, 4), "num_classes": 5}
SMALL_SH = {"embed_dim": (16, 24, 32), "depth": (1, 1, 2), "partial_dim": (8, 12, 16), "num_classes": 5}


def tnt(**kw):
    from timm.models.tnt import TNT

    return TNT(**SMALL_TNT, first_stride=2, num_heads_outer=4, num_heads_inner=2, **kw)


def our_tnt(**kw):
    return cumulant.create_model("tnt_s", **SMALL_TNT, inner_stride=2, num_heads=4, inner_heads=2, **kw)


def crossvit(**kw):
    from timm.models.crossvit import CrossVit

    sizes = {"patch_size": (12, 16), "depth": ((1, 2, 0),) * 2, "mlp_ratio": (3, 3, 1), "img_scale": (1.0, 2 / 3)}
    return CrossVit(**SMALL_CROSS, **sizes, **kw)


def our_crossvit(**kw):
    sizes = {"depth": (1, 2), "stages": 2, "img_scale": (1.0, 2 / 3)}
    return cumulant.create_model("crossvit_9", **SMALL_CROSS, **sizes, **kw)


def shvit():
    from timm.models.shvit import SHViT

    return SHViT(**SMALL_SH, types=("i", "s", "s"))


NETWORKS = {
    "tnt": (tnt, our_tnt, 32),
    "tnt, legacy": (lambda: tnt(legacy=True), lambda: our_tnt(legacy=True), 32),
    "crossvit": (crossvit, our_crossvit, 48),
    "crossvit, dagger": (lambda: crossvit(multi_conv=True), lambda: our_crossvit(conv_stem=True), 48),
    "shvit": (shvit, lambda: cumulant.create_model("shvit_s1", **SMALL_SH), 96),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_of_timm_give_its_answers_and_go_back_under_its_names(name):
    theirs, ours, side = NETWORKS[name]
    torch.manual_seed(0)
    theirs, ours = theirs().double().eval(), ours().double().eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))
    again = ours.timm_state_dict()
    assert set(again) == set(theirs.state_dict())
    for key, weight in theirs.state_dict().items():
        assert torch.equal(again[key], weight), key


def test_another_size_in_crossvit_is_resized_as_timm_does_it_where_asked():
    torch.manual_seed(0)
    theirs, ours = crossvit().double().eval(), our_crossvit(other_sizes="image").double().eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 60, 44, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("tnt_s", "tnt_s_patch16_224"),
        ("tnt_b", "tnt_b_patch16_224"),
        ("tnt_s_legacy", "tnt_s_legacy_patch16_224"),
        ("crossvit_ti", "crossvit_tiny_240"),
        ("crossvit_15_dagger_408", "crossvit_15_dagger_408"),
        ("shvit_s4", "shvit_s4"),
    ],
)
def test_published_variants_are_those_of_timm(ours, theirs):
    import timm

    shapes = {key: weight.shape for key, weight in timm.create_model(theirs).state_dict().items()}
    with torch.device("meta"):
        own = cumulant.create_model(ours, device="meta").timm_state_dict()
    assert {key: weight.shape for key, weight in own.items()} == shapes
