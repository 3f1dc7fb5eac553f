"""timm, transformers and converted models: the same maps as softmax of their own q and k, and nothing changed."""

import pytest
import torch
from torch import Tensor, nn

import cumulant
from cumulant import explain


def timm_vit(**kw) -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7, **kw).eval()


def transformers_vit(implementation: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=64, patch_size=16, num_labels=7)
    config._attn_implementation = implementation
    return transformers.ViTForImageClassification(config).eval()


def logits(model: nn.Module, images: Tensor) -> Tensor:
    out = model(images)
    return out if isinstance(out, Tensor) else out.logits


@pytest.mark.parametrize("make", [pytest.param(timm_vit, marks=pytest.mark.timm), transformers_vit])
def test_fused_softmax_shows_its_maps_and_gives_the_same_output(make) -> None:
    model, images = make(), torch.randn(2, 3, 64, 64)
    before = logits(model, images)
    with explain.capture(model) as captured:
        inside = logits(model, images)
    assert torch.equal(before, inside)
    assert captured.tokens == explain.TokenLayout(1, (4, 4))
    assert captured.layers == [0, 1]
    heads = explain.model_info(model)["heads"]
    assert captured.maps(1).shape == (2, heads, 17, 17)
    torch.testing.assert_close(captured.maps(1).sum(-1), torch.ones(2, heads, 17))
    with explain.capture(model, images, layers=[1], queries=[3]) as row:
        pass
    torch.testing.assert_close(row.maps(1), captured.maps(1)[:, :, 3:4])


@pytest.mark.timm
def test_maps_of_timm_are_those_of_our_model_with_the_same_weights() -> None:
    theirs, images = timm_vit(), torch.randn(2, 3, 64, 64)
    ours = cumulant.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7).eval()
    ours.load_state_dict(theirs.state_dict())
    with explain.capture(theirs, images) as a, explain.capture(ours, images) as b:
        pass
    torch.testing.assert_close(a.maps(1), b.maps(1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        explain.relevance(theirs, images, 2), explain.relevance(ours, images, 2), atol=1e-4, rtol=1e-3
    )


def test_maps_of_transformers_are_those_that_its_eager_form_returns() -> None:
    model, eager, images = transformers_vit(), transformers_vit("eager"), torch.randn(1, 3, 64, 64)
    eager.load_state_dict(model.state_dict())
    with explain.capture(model, images) as captured:
        pass
    for layer, weights in enumerate(eager(images, output_attentions=True).attentions):
        torch.testing.assert_close(captured.maps(layer), weights.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options", "layout"),
    [
        ("Vivit", {"tubelet_size": [2, 16, 16]}, explain.TokenLayout(1, (4, 2, 2))),
        ("VideoMAE", {"tubelet_size": 2, "patch_size": 16}, explain.TokenLayout(0, (4, 2, 2))),
    ],
)
def test_video_models_of_transformers_have_maps_over_time_and_space(kind: str, options: dict, layout) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, image_size=32, num_frames=8, num_labels=5, **options)
    config._attn_implementation = "sdpa"
    model = getattr(transformers, f"{kind}ForVideoClassification")(config).eval()
    with explain.capture(model, torch.randn(1, 8, 3, 32, 32), queries=[3]) as captured:
        pass
    assert captured.tokens == layout
    assert captured.maps(1).shape == (1, 2, 1, layout.count)


def test_attention_that_is_not_fused_is_named_with_the_way_out() -> None:
    with explain.capture(transformers_vit("eager"), torch.randn(1, 3, 64, 64)) as captured:
        pass
    with pytest.raises(RuntimeError, match='attn_implementation="sdpa"'):
        captured.maps(0)


@pytest.mark.parametrize("make", [pytest.param(timm_vit, marks=pytest.mark.timm), transformers_vit])
@pytest.mark.parametrize("attention", ["cumulant2", "cumulant3"])
def test_converted_models_show_signed_maps(make, attention: str) -> None:
    from cumulant.conversion import convert

    model, images = make(), 3 * torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # logits large enough for negative weights
            if name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(8)
    convert(model, attention)
    before = logits(model, images)
    with explain.capture(model) as captured:
        inside = logits(model, images)
    assert torch.equal(before, inside)
    maps = captured.maps(1)
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]), atol=1e-4, rtol=1e-4)
    assert bool((maps < 0).any())
    assert explain.model_info(model)["attention"] == attention
    with explain.head_off(model, [(0, 0)]):
        assert not torch.allclose(logits(model, images), before)
    assert torch.equal(logits(model, images), before)


@pytest.mark.parametrize("make", [pytest.param(timm_vit, marks=pytest.mark.timm), transformers_vit])
def test_heads_of_other_libraries_are_switched_off_and_ranked(make) -> None:
    model, images = make(), torch.randn(3, 3, 64, 64)
    found = explain.head_importance(model, images)
    info = explain.model_info(model)
    assert info["classes"] == 7
    assert found["feature"].shape == (info["layers"], info["heads"])
    assert bool((found["js"] > 0).all())


def test_a_folded_layer_shows_the_maps_of_the_plain_one() -> None:
    """A folded layer never forms query and key; its maps are still those of the same weights unfolded."""
    layer = cumulant.nn.CumulantAttention(16, 2, order=2, fold=True)
    plain = cumulant.nn.CumulantAttention(16, 2, order=2, fold=False)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 30, 16)
    before = layer(x)
    with explain.capture(layer, x) as captured:
        pass
    torch.testing.assert_close(captured.maps(0), plain.scores(x))
    with explain.head_off(layer, [(0, 1)]):
        inside = layer(x)
    with explain.head_off(plain, [(0, 1)]):
        torch.testing.assert_close(inside, plain(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(layer(x), before)


# Projections under their own names, and heads that only the config counts.
DECODERS = {
    "Llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "GPTNeoX": ("GPTNeoXForCausalLM", {}),
    "Phi3": ("Phi3ForCausalLM", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "GPT2": ("GPT2LMHeadModel", {}),
    "DistilBert": ("DistilBertModel", {}),
}


@pytest.mark.parametrize("name", list(DECODERS))
def test_text_models_show_what_their_eager_form_returns(name: str) -> None:
    t = pytest.importorskip("transformers")
    kind, more = DECODERS[name]
    config = getattr(t, f"{name}Config")(vocab_size=60, initializer_range=0.2, **more)
    for key, value in {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}.items():
        setattr(config, key, value)
    for key in ("intermediate_size", "hidden_dim", "max_position_embeddings"):
        if hasattr(config, key):
            setattr(config, key, 64)
    model = getattr(t, kind)(config).eval()
    ids = torch.randint(3, 60, (2, 7))
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    with explain.capture(model, ids) as captured:
        pass
    assert captured.layers == [0, 1]
    for layer in captured.layers:
        torch.testing.assert_close(captured.maps(layer), expected[layer])
    before = model(ids)[0]
    with explain.head_off(model, [(0, 1)]):
        assert not torch.allclose(model(ids)[0], before)


def test_relevance_asks_for_fused_attention_where_it_sees_no_weights() -> None:
    with pytest.raises(RuntimeError, match=r"layer 0 .* has shown no weights.*sdpa"):
        explain.relevance(transformers_vit("eager"), torch.randn(1, 3, 64, 64))
