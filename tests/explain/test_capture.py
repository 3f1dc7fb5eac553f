"""Maps are the weights the layer mixes with, the model is left as it was, and only what was asked for is kept."""

import pytest
import torch
from torch import Tensor, nn

import cumulant
from cumulant import explain, zoo
from cumulant.inspect.sites import find_sites
from cumulant.inspect.watching import watching

MAPPED = [name for name in zoo.names() if zoo.get(name).weights]


def vit(attention: str = "cumulant3", **kw) -> nn.Module:
    return cumulant.create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.2, **kw).eval()


def vivit(variant: int | str, attention: str = "cumulant3") -> nn.Module:
    return cumulant.create_model(
        "vivit_nano_patch4x1_16", attention=attention, num_classes=5, variant=variant, init_std=0.2, depth=2
    ).eval()


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called) for m in model.modules()
    )


@pytest.mark.parametrize("attention", MAPPED)
def test_capturing_leaves_the_output_bit_equal(attention: str) -> None:
    model, images = vit(attention), torch.randn(2, 1, 8, 8)
    before = model(images)
    with explain.capture(model) as captured:
        inside = model(images)
    assert torch.equal(inside, before)
    assert captured.maps(3).shape == (2, 4, 17, 17)


@pytest.mark.parametrize("attention", MAPPED)
def test_asked_rows_and_heads_are_those_of_the_whole_map(attention: str) -> None:
    model, images = vit(attention), torch.randn(2, 1, 8, 8)
    with explain.capture(model, images) as whole:
        pass
    with explain.capture(model, images, layers=[1, -1], heads=[2, 0], queries=[5, 0, -1]) as part:
        pass
    assert part.layers == [1, 3]
    for layer in part.layers:
        torch.testing.assert_close(part.maps(layer), whole.maps(layer)[:, [2, 0]][:, :, [5, 0, 16]])


def test_asked_rows_of_an_expansion_around_the_mean_query_know_all_queries() -> None:
    images = torch.randn(2, 1, 8, 8)
    own = vit("cumulant3", attention_options={"around": "mean"})
    converted = vit("softmax")
    cumulant.convert(converted, "cumulant3+around=mean")
    for model in (own, converted):
        with explain.capture(model, images) as whole:
            pass
        with explain.capture(model, images, queries=[5]) as part:
            pass
        for layer in part.layers:
            torch.testing.assert_close(part.maps(layer), whole.maps(layer)[:, :, [5]])


@pytest.mark.parametrize("attention", MAPPED)
def test_maps_times_values_are_what_the_layer_projects(attention: str) -> None:
    """A v is the input of the output projection, taken from the running model.

    What some mechanisms add beside their weights (a convolution of the values, a gate) is switched off.
    """
    beside = {"use_lepe", "use_gate", "use_conv", "conv"} & set(zoo.get(attention).options)
    model, images = vit(attention, attention_options=dict.fromkeys(beside, False)), torch.randn(3, 1, 8, 8)
    mixed: list[Tensor] = []
    values: list[Tensor] = []
    model.blocks[2].attn.proj.register_forward_pre_hook(lambda _, args: mixed.append(args[0]))
    with watching(model, find_sites(model), lambda site, call, layout: values.append(call.value())):
        model(images)
    with explain.capture(model, images) as captured:
        pass
    product = captured.maps(2) @ values[2]
    torch.testing.assert_close(product.transpose(1, 2).flatten(2), mixed[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", [1, 2, 3, 4, "average"])
@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
def test_maps_of_clips_cover_the_whole_clip_in_every_layer(variant: int | str, attention: str) -> None:
    model, clips = vivit(variant, attention), torch.randn(2, 1, 8, 16, 16)
    prefix = model.num_prefix_tokens
    before = model(clips)
    asked = [prefix + 2 * 16 + 5, prefix + 7]
    with explain.capture(model, queries=asked) as some:
        inside = model(clips)
    with explain.capture(model, clips) as whole:
        pass
    assert torch.equal(before, inside)
    assert whole.tokens == explain.TokenLayout(prefix, (8, 4, 4))
    for layer in whole.layers:
        maps = whole.maps(layer)
        assert maps.shape == (2, 4, prefix + 128, prefix + 128)
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(some.maps(layer), maps[:, :, asked])


def test_factorised_layers_look_within_a_frame_or_at_one_place() -> None:
    model = vivit(3)
    with explain.capture(model, torch.randn(1, 1, 8, 16, 16)) as captured:
        pass
    assert explain.model_info(model)["axes"] == ["space", "time"] * 2
    frame, place = torch.arange(128) // 16, torch.arange(128) % 16
    space, time = captured.maps(0), captured.maps(1)
    assert bool((space[..., frame[:, None] != frame] == 0).all())
    assert bool((time[..., place[:, None] != place] == 0).all())
    assert bool((space[..., frame[:, None] == frame] != 0).all())


def test_maps_of_factorised_layers_reproduce_their_output() -> None:
    model, clips = vivit(3), torch.randn(2, 1, 8, 16, 16)
    values: list[Tensor] = []
    mixed: list[Tensor] = []
    block = model.blocks[0]
    hook = block.temporal_attn.proj.register_forward_pre_hook(lambda _, args: mixed.append(args[0]))
    with watching(model, find_sites(model)[1:2], lambda s, call, t: values.append(call.value())):
        model(clips)
    hook.remove()
    with explain.capture(model, clips, layers=[1]) as captured:
        pass
    value = values[0].unflatten(0, (2, 16)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, H, T S, D)
    out = mixed[0].unflatten(0, (2, 16)).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close((captured.maps(1) @ value).transpose(1, 2).flatten(2), out, atol=1e-5, rtol=1e-5)


def test_signed_maps_are_their_positive_less_their_negative_part() -> None:
    with explain.capture(vit("cumulant2", qk_norm=True), torch.randn(2, 1, 8, 8)) as captured:
        pass
    maps = captured.maps(0)
    assert bool((maps < 0).any())
    torch.testing.assert_close(captured.positive(0) - captured.negative(0), maps)
    torch.testing.assert_close(captured.negative_mass(0), captured.positive(0).sum(-1) - 1, atol=1e-5, rtol=1e-5)


def test_softmax_has_no_negative_mass() -> None:
    with explain.capture(vit("softmax"), torch.randn(2, 1, 8, 8)) as captured:
        pass
    assert float(captured.negative_mass(2).max()) == 0


def test_hooks_are_gone_after_the_block_and_after_an_exception() -> None:
    model = vit()
    with explain.capture(model):
        assert hooks(model) > 0
    assert hooks(model) == 0
    with pytest.raises(RuntimeError, match="inside"), explain.capture(model):
        raise RuntimeError("inside")
    assert hooks(model) == 0
    with pytest.raises(ValueError, match="images must have shape"), explain.capture(model, torch.randn(2, 3)):
        pass
    assert hooks(model) == 0
    with pytest.raises(ValueError, match="queries"), explain.capture(model, queries=[99]):
        model(torch.randn(1, 1, 8, 8))
    assert hooks(model) == 0


def test_only_what_was_asked_is_kept() -> None:
    with explain.capture(vit(), torch.randn(2, 1, 8, 8), layers=[2], heads=[1], queries=[3]) as captured:
        pass
    kept = sum(part.numel() for parts in captured._maps.values() for part in parts)
    assert kept == 2 * 17


def test_a_map_that_would_not_fit_is_refused_with_the_way_out() -> None:
    model = vit()
    with pytest.raises(ValueError, match=r"max_bytes=4096.*queries=\[0\]"), explain.capture(model, max_bytes=4096):
        model(torch.randn(2, 1, 8, 8))


def test_several_passes_follow_one_another_in_the_batch() -> None:
    model, first, second = vit(), torch.randn(2, 1, 8, 8), torch.randn(3, 1, 8, 8)
    with explain.capture(model) as captured:
        model(first)
        model(second)
    with explain.capture(model, torch.cat([first, second])) as together:
        pass
    torch.testing.assert_close(captured.maps(1), together.maps(1))


def test_maps_follow_another_image_size() -> None:
    with explain.capture(vit(), torch.randn(1, 1, 12, 16), queries=[0]) as captured:
        pass
    assert captured.tokens == explain.TokenLayout(1, (6, 8))
    assert captured.maps(0).shape == (1, 4, 1, 49)


def test_half_precision_models_give_float32_maps() -> None:
    model = vit().to(torch.bfloat16)
    with explain.capture(model, torch.randn(1, 1, 8, 8, dtype=torch.bfloat16)) as captured:
        pass
    assert captured.maps(0).dtype == torch.float32
    torch.testing.assert_close(captured.maps(0).sum(-1), torch.ones(1, 4, 17), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": [7]}, "layers must be numbers from 0 to 3, got 7"),
        ({"heads": [4]}, "heads of layer 0 must be numbers from 0 to 3, got 4"),
        ({"queries": "some"}, "queries must be a list of tokens"),
    ],
)
def test_a_wrong_request_names_what_there_is(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        explain.capture(vit(), **given)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no attention layer"):
        explain.capture(nn.Linear(2, 2))


def test_maps_before_any_pass_are_an_error() -> None:
    with explain.capture(vit(), layers=[1]) as captured:
        pass
    with pytest.raises(RuntimeError, match="layer 1 has shown no weights"):
        captured.maps(1)
    with pytest.raises(ValueError, match=r"one of \[1\]"):
        captured.maps(0)


def test_tokens_counted_from_the_end_are_known_by_their_number() -> None:
    model, images = vit(), torch.randn(2, 1, 8, 8)
    with explain.capture(model, images, queries=[-1, 3]) as captured:
        pass
    assert captured.queries == [16, 3]
    with explain.capture(model, images, queries=[16, 3]) as same:
        pass
    for name, value in explain.summary(captured).items():
        torch.testing.assert_close(value, explain.summary(same)[name], equal_nan=True)


def test_a_layer_named_twice_is_kept_once() -> None:
    with explain.capture(vit(), torch.randn(2, 1, 8, 8), layers=[1, 1, -3]) as captured:
        pass
    assert captured.layers == [1]
    assert captured.maps(1).shape == (2, 4, 17, 17)


def test_a_token_between_two_is_none() -> None:
    with (
        pytest.raises(ValueError, match=r"queries must be numbers from 0 to 16, got 1\.5"),
        explain.capture(vit(), torch.randn(2, 1, 8, 8), queries=[1.5]),
    ):
        pass


@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
def test_maps_under_autocast_have_all_digits(attention: str) -> None:
    model, images = vit(attention), torch.randn(2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with explain.capture(model, images) as captured:
            pass
        assert explain.relevance(model, images).dtype == torch.float32
    assert captured.maps(0).dtype == torch.float32
    torch.testing.assert_close(captured.maps(0).sum(-1), torch.ones(2, 4, 17))


def test_one_number_in_the_place_of_a_list_is_told() -> None:
    for how in ({"layers": 2}, {"heads": 1}):
        with pytest.raises(ValueError, match=r"must be a list of numbers or None, got"):
            explain.capture(vit(), **how)
