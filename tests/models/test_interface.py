"""All vision networks answer the same calls, under timm's names: maps of levels, other classifiers, less memory."""

import pytest
import torch

import cumulant
from cumulant.models import Backbone

IMAGES = ["vit_nano_patch2_8", "ia_red2_nano_patch2_8"]
CLIPS = [1, 2, 3, 4, "average"]


def image_model(name="vit_nano_patch2_8", **kw):
    torch.manual_seed(0)
    return cumulant.create_model(name, **{"num_classes": 10, "depth": 3, **kw})


def images(count=2, side=8):
    return torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", IMAGES)
def test_maps_have_the_channels_and_strides_that_are_told(name):
    model = image_model(name).eval()
    last, maps = model.forward_intermediates(images(side=12))
    assert len(maps) == len(model.feature_info)
    for one, info in zip(maps, model.feature_info, strict=True):
        assert one.shape == (2, info["num_chs"], 12 // info["reduction"], 12 // info["reduction"])
        model.get_submodule(info["module"])
    torch.testing.assert_close(last, model.forward_features(images(side=12)))
    torch.testing.assert_close(model.forward_head(last), model(images(side=12)))


@pytest.mark.parametrize("variant", CLIPS)
def test_maps_of_a_clip_are_laid_out_in_time_and_space(variant):
    model = cumulant.create_model("vivit_nano_patch4x2_16", variant=variant, num_classes=3, depth=2).eval()
    clips = torch.randn(2, 1, 8, 16, 16)
    last, maps = model.forward_intermediates(clips, norm=True)
    assert [one.shape for one in maps] == [(2, 64, 4, 4, 4)] * 2
    if variant in (1, 3, 4):
        torch.testing.assert_close(maps[-1].flatten(2).mT, last[:, model.num_prefix_tokens :])


def test_the_last_map_is_that_of_the_tokens():
    model = image_model().eval()
    last, (own,) = model.forward_intermediates(images(), [-1], norm=True)
    torch.testing.assert_close(own.flatten(2).mT, last[:, 1:])
    (tokens,) = model.forward_intermediates(images(), 1, norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(tokens, last[:, 1:])


def test_levels_after_the_last_one_wanted_are_not_run():
    model = image_model().eval()
    model.blocks[2].register_forward_hook(lambda *_: pytest.fail("the third block ran"))
    assert len(model.forward_intermediates(images(), [0, 1], intermediates_only=True)) == 2


@pytest.mark.parametrize("indices", [0, 4, [3], [-4], [], "all", True, [0.5]])
def test_levels_that_there_are_not_are_named(indices):
    with pytest.raises(ValueError, match="from 1 to 3"):
        image_model().forward_intermediates(images(), indices)


def test_features_only_is_the_same_network_as_a_list_of_maps():
    model = image_model().eval()
    features = image_model(features_only=True, out_indices=[0, -1]).eval()
    features.model.load_state_dict(model.state_dict(), strict=False)
    wanted = model.forward_intermediates(images(), [0, 2], intermediates_only=True)
    torch.testing.assert_close(features(images()), wanted)
    assert features.feature_info.channels() == [64, 64]
    assert features.feature_info.reduction() == [2, 2]
    assert features.feature_info.module_name() == ["blocks.0", "blocks.2"]
    again = cumulant.create_model(**features.config)
    assert again.feature_info == features.feature_info


def test_out_indices_without_features_is_an_error():
    with pytest.raises(ValueError, match="features_only=True"):
        image_model(out_indices=[0])
    with pytest.raises(ValueError, match="takes texts"):
        cumulant.create_model("lm_nano", features_only=True)


@pytest.mark.parametrize("name", [*IMAGES, "vivit_nano_patch4x2_16"])
def test_a_new_classifier_is_told_to_checkpoints(name):
    model = cumulant.create_model(name, num_classes=10)
    body = model.state_dict()["blocks.0.attn.qkv.weight"].clone()
    model.reset_classifier(7)
    assert model.get_classifier().out_features == model.num_classes == model.config["num_classes"] == 7
    again = cumulant.create_model(**model.config)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.state_dict()["blocks.0.attn.qkv.weight"], body)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), torch.nn.Identity)


def test_both_heads_of_a_distilled_model_are_made_anew():
    model = cumulant.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1)
    model.reset_classifier(3)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_another_pooling_comes_with_the_classifier_or_is_refused():
    model = image_model().eval()
    model.reset_classifier(4, global_pool="gap")
    last = model.forward_features(images())
    torch.testing.assert_close(model.forward_head(last, pre_logits=True), last[:, 1:].mean(1))
    cumulant.create_model(**model.config).load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="class_token"):
        image_model(pool="gap").reset_classifier(4, global_pool="cls")
    with pytest.raises(ValueError, match="pools in one way"):
        cumulant.create_model("vivit_nano_patch4x2_16").reset_classifier(4, global_pool="gap")


@pytest.mark.parametrize("name", ["vit_nano_patch2_8", "vivit_nano_patch4x2_16"])
def test_checkpointed_blocks_have_the_same_gradients_and_keep_less(name):
    model = cumulant.create_model(name, num_classes=3, depth=2, attention="cumulant2", drop_path=0.5, init_std=0.1)
    x = torch.randn(2, *((1, 8, 8) if "vit_" in name[:4] else (1, 8, 16, 16)))

    def step():
        kept = []
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = model(x).square().mean()
        return torch.autograd.grad(loss, list(model.parameters())), sum(kept)

    plain, much = step()
    model.set_grad_checkpointing()
    again, little = step()
    torch.testing.assert_close(again, plain)
    assert little < 0.7 * much


def test_checkpointed_blocks_compile_as_one_graph():
    model = image_model(depth=2)
    expected = model(images())
    model.set_grad_checkpointing()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images()), expected, rtol=1e-4, atol=1e-5)


def test_an_image_that_patches_do_not_fill_is_answered_with_the_nearest_size():
    with pytest.raises(ValueError, match="got 9 x 6; the nearest is 8 x 6"):
        image_model()(torch.randn(1, 1, 9, 6))


def test_all_networks_of_images_and_clips_are_of_this_kind():
    from cumulant.models.registry import _MODELS, input_kind

    for name, entry in _MODELS.items():
        if input_kind(name) in ("image", "video"):
            assert issubclass(entry.kind, Backbone), name
