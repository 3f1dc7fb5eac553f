"""Every mechanism works by name in `nn.MultiheadAttention` and in the vision transformer, with its published parts."""

import pytest
import torch
from cases import DIM, GRID, HEADS, MODULES, NAMES, PREFIX, draw

from cumulant import create_model, zoo
from cumulant.nn import MultiheadAttention

TOKENS = PREFIX + GRID[0] * GRID[1]


def layer(name, *patterns, **options):
    for pattern in patterns:
        options = {**zoo.get(name).pattern_options.get(pattern, {}), **options}
    place = {"grid_size": GRID, "prefix": PREFIX, "dtype": torch.float64}
    return MultiheadAttention(DIM, HEADS, attention=name, attention_options=options, **place)


def way(name):
    """is_causal and the pattern options for a call that does not care."""
    causal = not zoo.get(name).noncausal
    return (["causal"] if causal else []), {"is_causal": causal}


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_keeps_the_shape_and_trains_all_its_parameters(name):
    pattern, call = way(name)
    module, x = layer(name, *pattern), draw(2, TOKENS, DIM)
    out = module(x, grid=GRID, prefix=PREFIX, **call)
    assert out.shape == x.shape
    out.square().sum().backward()
    missing = [key for key, p in module.named_parameters() if p.grad is None]
    assert missing == []


@pytest.mark.parametrize("name", [n for n in NAMES if zoo.get(n).key_mask])
def test_padded_tokens_do_not_act_on_the_others(name):
    pattern, call = way(name)
    module, x = layer(name, *pattern).eval(), draw(2, TOKENS, DIM)
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[0, 9:] = False
    clean = module(x, key_mask=mask, **call)
    x[0, 9:] = 1e3
    again = module(x, key_mask=mask, **call)
    torch.testing.assert_close(again[mask], clean[mask])


@pytest.mark.parametrize("name", [n for n in NAMES if zoo.get(n).cross and zoo.get(n).noncausal])
def test_a_layer_attends_to_another_sequence(name):
    module = MultiheadAttention(
        DIM, HEADS, attention=name, attention_options=dict(zoo.get(name).pattern_options.get("cross", {}))
    )
    out = module(draw(2, 5, DIM, dtype=torch.float32), context=draw(2, 9, DIM, seed=1, dtype=torch.float32))
    assert out.shape == (2, 5, DIM)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", [n for n in NAMES if not zoo.get(n).cross])
def test_a_layer_whose_mechanism_has_no_cross_attention_refuses_it(name):
    with pytest.raises(ValueError, match=r"has no cross attention.*nearest mechanism that can"):
        layer(name)(draw(2, 5, DIM), context=draw(2, 9, DIM), is_causal=not zoo.get(name).noncausal)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_is_named_with_those_that_exist(name):
    with pytest.raises(ValueError, match=f"unknown option 'colour' of mechanism {name!r}; accepted: "):
        layer(name, colour=3)


@pytest.mark.parametrize("name", [n for n in NAMES if zoo.get(n).noncausal])
@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_a_vision_transformer_takes_it_by_name_and_at_another_resolution(name, pool):
    shape = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3, "pool": pool}
    model = create_model("vit_tiny_patch16_224", img_size=16, attention=name, **shape)
    for size in (16, 24):
        out = model(draw(2, 3, size, size, dtype=torch.float32))
        assert out.shape == (2, 3)
        assert out.isfinite().all()
    out.sum().backward()
    inside = [key for key, p in model.named_parameters() if ".attn." in key and p.grad is None]
    assert inside == []
    if name not in MODULES:
        assert not any(".attn.mix." in key for key, _ in model.named_parameters())


@pytest.mark.parametrize("name", [n for n in NAMES if zoo.get(n).weights])
def test_a_layer_shows_the_weights_of_its_mechanism(name):
    pattern, call = way(name)
    weights = layer(name, *pattern).scores(draw(2, TOKENS, DIM), **call)
    assert weights.shape == (2, HEADS, TOKENS, TOKENS)
    assert weights.isfinite().all()
