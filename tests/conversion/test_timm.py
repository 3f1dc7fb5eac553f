import pytest
import torch
from small_models import loud, timm, vit

import cumulant
from cumulant.conversion import Choice, convert, restore
from cumulant.nn.swapped.timm_layers import ConvertedAttention

pytestmark = pytest.mark.timm


def eva(**kw):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4, "num_classes": 5, "depth": 2}
    rotary = {"use_rot_pos_emb": True, "use_abs_pos_emb": False}
    return timm().models.eva.Eva(**{**sizes, **rotary, **kw}).eval()


def cait():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4, "num_classes": 5, "depth": 2}
    return timm().models.cait.Cait(**sizes, init_values=1.0).eval()


def beit(**kw):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4, "num_classes": 5, "depth": 2}
    return timm().models.beit.Beit(**{**sizes, **kw}).eval()


FAMILIES = {
    "vit": lambda: vit(),
    "vit with qk norm": lambda: vit(qk_norm=True),
    "eva": lambda: eva(),
    "eva, separate projections": lambda: eva(qkv_fused=False),
    "eva, inner norm": lambda: eva(scale_attn_inner=True),
    "dinov3": lambda: eva(attn_type="rope", rope_rotate_half=True),
    "beit without position bias": lambda: beit(),
}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_between_the_taken_over_projections_is_the_original(family):
    model = loud(FAMILIES[family]())
    said, names = model(IMAGES), list(model.state_dict())
    for name in ("blocks.0.attn", "blocks.1.attn"):
        model.set_submodule(name, ConvertedAttention(model.get_submodule(name), Choice("softmax")))
    torch.testing.assert_close(model(IMAGES), said, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_family_computes_cumulant_attention_of_its_own_queries(family):
    model = loud(FAMILIES[family]())
    said, names = model(IMAGES), list(model.state_dict())
    report = convert(model, "cumulant3")
    assert report.calls == {"blocks.0.attn": 1, "blocks.1.attn": 1}
    assert list(model.state_dict()) == names
    assert report.measured_error > 1e-5
    restore(model)
    torch.testing.assert_close(model(IMAGES), said)


def test_class_attention_of_cait_is_replaced_and_talking_heads_are_kept():
    model = cait()
    report = convert(model)
    assert all("blocks_token_only" in name for name in report.replaced)
    assert "talking heads" in report.kept["blocks.0.attn"]
    assert model(IMAGES).isfinite().all()


def test_class_attention_has_one_query():
    model = cait()
    layer = model.blocks_token_only[0].attn
    x = torch.randn(2, 7, 32)
    said = layer(x)
    from cumulant.nn.swapped.timm_layers import converted

    torch.testing.assert_close(converted(layer, Choice("softmax"))(x), said, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_small_patch16_224"])
def test_a_relative_position_bias_is_refused(name):
    model = timm().create_model(name, depth=1, embed_dim=32, num_heads=4, num_classes=5, img_size=32).eval()
    with pytest.raises(ValueError, match="relative position bias"):
        convert(model)


def caformer():
    rooms = timm().models.metaformer
    mixers = [rooms.SepConv, rooms.SepConv, rooms.Attention, rooms.Attention]
    norms = [rooms.LayerNorm2dNoBias] * 2 + [rooms.LayerNormNoBias] * 2
    sizes = {"depths": (1, 1, 1, 1), "dims": (16, 32, 32, 64), "num_classes": 5}
    return rooms.MetaFormer(token_mixers=mixers, norm_layers=norms, **sizes)


def volo():
    sizes = {"embed_dims": (16, 32, 32, 32), "num_heads": (2, 4, 4, 4), "num_classes": 5}
    return timm().models.volo.VOLO(layers=(1, 1, 1, 1), img_size=64, **sizes)


def pvt_v2():
    sizes = {"embed_dims": (8, 16, 32, 32), "num_heads": (1, 2, 2, 4), "num_classes": 5}
    return timm().create_model("pvt_v2_b0", depths=(1, 1, 1, 1), **sizes)


def fastvit():
    return timm().create_model("fastvit_sa12", layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64), num_classes=5)


@pytest.mark.parametrize(("make", "replaced"), [(caformer, 2), (volo, 3), (pvt_v2, 4), (fastvit, 1)])
def test_families_with_classes_of_their_own(make, replaced):
    """What is not softmax over tokens (outlook attention, convolutions) stays as it is."""
    model, images = make().eval(), torch.randn(2, 3, 64, 64)
    said = model(images)
    report = convert(model, example=images, force=True)
    assert len(report.replaced) == replaced
    assert model(images).isfinite().all()
    restore(model)
    torch.testing.assert_close(model(images), said)


@pytest.mark.parametrize("name", ["resnest14d", "skresnet18"])
def test_weights_of_branches_of_channels_are_no_attention(name):
    with pytest.raises(ValueError, match="ResNet has no attention layer"):
        convert(timm().create_model(name, num_classes=2))


def test_windows_of_swin_are_refused():
    swin = timm().models.swin_transformer.SwinTransformer
    model = swin(img_size=32, patch_size=4, embed_dim=16, depths=(1,), num_heads=(2,), window_size=4).eval()
    with pytest.raises(ValueError, match="no attention layer of SwinTransformer can be replaced"):
        convert(model)


def test_the_folded_layer_says_what_the_plain_one_does():
    model = loud(vit(img_size=128, patch_size=4))  # 1,025 tokens of width 32: folding pays
    convert(model, "cumulant2+apart=0")  # softmax of the class token would need its keys
    images = torch.randn(1, 3, 128, 128)
    folded = model(images)
    for module in model.modules():
        if isinstance(module, ConvertedAttention):
            assert module._folds(torch.zeros(1, 1025, 32), None, False)
            module.fold = False
    torch.testing.assert_close(model(images), folded, atol=1e-4, rtol=1e-4)


def test_a_mask_that_differs_by_query_is_an_error():
    layer = ConvertedAttention(vit().blocks[0].attn, Choice("cumulant3"))
    with pytest.raises(ValueError, match="cannot be honoured"):
        layer(torch.randn(2, 5, 32), attn_mask=torch.zeros(2, 1, 5, 5))


def test_cumulant_attention_is_an_attn_layer_of_timm():
    plain, ours = vit(), vit(attn_layer=cumulant.nn.CumulantAttention)
    ours.load_state_dict(plain.state_dict())
    convert(plain, "cumulant3")
    torch.testing.assert_close(ours(IMAGES), plain(IMAGES), atol=1e-5, rtol=1e-4)


def test_a_whole_layer_takes_the_place_of_timms_and_gives_it_back():
    model = vit()
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    report = cumulant.convert(model, layer="sparsifiner+keep=1.0", example=x, force=True)
    assert report.measured_error < 1e-5
    cumulant.convert.restore(model)
    assert torch.equal(model(x), before)
