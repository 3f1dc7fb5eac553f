"""Mechanisms with parameters: modules are called like functions, know their grid, and refuse what does not fit."""

import copy

import pytest
import torch
from cases import DIM, GRID, HEADS, MODULES, NAMES, PREFIX, WITH_PARAMETERS, build, draw, extras, tokens

from cumulant import zoo
from cumulant.nn import MultiheadAttention
from cumulant.zoo.mixing import Bound

TOKENS = PREFIX + GRID[0] * GRID[1]
CAUSAL = [name for name in MODULES if zoo.get(name).causal]
CROSS = [name for name in MODULES if zoo.get(name).cross]
MASKED = [name for name in MODULES if zoo.get(name).key_mask]


def inputs(queries=TOKENS, keys=TOKENS, dtype=torch.float64):
    return tokens(queries, keys, value_dim=DIM // HEADS, dim=DIM // HEADS, dtype=dtype)


def patterns(name):
    """Pattern options that a call without further arguments needs: none, or the causal ones."""
    mechanism = zoo.get(name)
    return ((), {}) if mechanism.noncausal else (("causal",), {"is_causal": True})


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_and_the_accepted_ones_are_named(name):
    mechanism = zoo.get(name)
    accepted = ", ".join(mechanism.options) or "none"
    with pytest.raises(ValueError, match=f"unknown option 'colour' of mechanism {name!r}; accepted: {accepted}"):
        mechanism.build(DIM, HEADS, colour="red")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MODULES])
def test_mechanisms_without_parameters_build_into_their_function(name):
    mechanism = zoo.get(name)
    assert mechanism.build(DIM, HEADS, grid_size=GRID, prefix=PREFIX) == Bound(mechanism, {})


@pytest.mark.parametrize("name", MODULES)
def test_a_module_keeps_the_layout_and_reaches_every_parameter_with_a_gradient(name):
    pattern, call = patterns(name)
    module = build(name, *pattern, **WITH_PARAMETERS.get(name, {}))
    out = module(*inputs(), **extras(name, TOKENS), **call)
    assert out.shape == (2, HEADS, TOKENS, DIM // HEADS)
    assert out.isfinite().all()
    out.square().sum().backward()
    dead = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_made_where_and_as_asked(name):
    options = {"device": "meta", "dtype": torch.float16, **WITH_PARAMETERS.get(name, {})}
    module = zoo.get(name).build(DIM, HEADS, grid_size=GRID, prefix=PREFIX, **options)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.float16)}


@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters_gives_a_fresh_module_again(name):
    """Deterministic starts (zeros, ones) come back exactly; random ones with their spread."""
    torch.manual_seed(0)
    fresh = zoo.get(name).build(DIM, HEADS, grid_size=GRID, prefix=PREFIX, **WITH_PARAMETERS.get(name, {}))
    torch.manual_seed(0)
    again = build(name, dtype=torch.float32, **WITH_PARAMETERS.get(name, {}))
    again.reset_parameters()
    for (key, a), b in zip(fresh.named_parameters(), again.parameters(), strict=True):
        assert (a.count_nonzero() == 0) == (b.count_nonzero() == 0), key
        if a.count_nonzero() and a.numel() > 100:
            assert 0.5 < a.std() / b.std() < 2, key


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_on_the_meta_device_has_shapes_and_can_be_filled_later(name):
    with torch.device("meta"):
        layer = MultiheadAttention(
            DIM, HEADS, attention=name, attention_options=WITH_PARAMETERS.get(name), grid_size=GRID, prefix=PREFIX
        )
        assert layer(torch.empty(2, TOKENS, DIM)).shape == (2, TOKENS, DIM)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    for module in layer.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    assert layer(draw(2, TOKENS, DIM, dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("name", [n for n in MODULES if n != "agent"])  # whose agents are pooled from patches
def test_tokens_that_are_all_prefix_still_attend(name):
    module = build(name, grid_size=None, prefix=3)
    assert module(*inputs(3, 3), **extras(name, 3, grid=(1, 0), prefix=3)).isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_a_grid_that_does_not_fit_the_tokens_is_refused(name):
    if not zoo.get(name).wants_grid:
        assert "grid" not in extras(name, TOKENS)
        return
    pattern, call = patterns(name)
    module = build(name, *pattern)
    with pytest.raises(ValueError, match=r"grid.*\(2, 4\)"):
        module(*inputs(), **(extras(name, TOKENS) | {"grid": (2, 4)}), **call)


@pytest.mark.parametrize("name", [n for n in MODULES if zoo.get(n).wants_grid])
def test_a_module_works_on_another_grid_than_it_was_built_for_and_on_clips(name):
    pattern, call = patterns(name)
    module = build(name, *pattern)
    out = module(*inputs(21, 21), **extras(name, 21, grid=(4, 5)), **call)
    assert out.isfinite().all()
    clip = build(name, *pattern, grid_size=(2, 3, 4))
    out = clip(*inputs(25, 25), **extras(name, 25, grid=(2, 3, 4)), **call)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_works_without_a_grid(name):
    pattern, call = patterns(name)
    module = build(name, *pattern, grid_size=None, prefix=0)
    given = {k: v for k, v in extras(name, 11).items() if k not in ("grid", "prefix")}
    assert module(*inputs(11, 11), **given, **call).isfinite().all()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_module_does_not_look_ahead(name):
    module = build(name, "causal")
    query, key, value = inputs()
    given = extras(name, TOKENS)
    before = module(query, key, value, is_causal=True, **given)
    for x in (query, key, value, *(given[k] for k in ("x",) if k in given)):
        x[..., 8:, :] += 5
    after = module(query, key, value, is_causal=True, **given)
    torch.testing.assert_close(after[..., :8, :], before[..., :8, :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CAUSAL if "causal" in zoo.get(name).pattern_options])
def test_a_module_whose_default_form_looks_ahead_refuses_is_causal_and_names_the_option(name):
    options = zoo.get(name).pattern_options["causal"]
    with pytest.raises(ValueError, match="|".join(f"{k}={v}" for k, v in options.items())):
        build(name)(*inputs(), is_causal=True, **extras(name, TOKENS))


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_of_a_module_takes_other_keys(name):
    pattern, call = patterns(name)
    module = build(name, "cross", *pattern)
    given = extras(name, 5)
    given = {k: v for k, v in given.items() if k == "x"}
    module.grid_size = None
    out = module(*inputs(5, TOKENS), **given, **call)
    assert out.shape == (2, HEADS, 5, DIM // HEADS)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", MASKED)
def test_nan_in_masked_tokens_stays_out_of_a_module(name):
    pattern, call = patterns(name)
    module = build(name, *pattern)
    query, key, value = inputs()
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[0, 9:] = False
    call = {**extras(name, TOKENS), **call, "key_mask": mask}
    if zoo.get(name).wants_query_mask:
        call["query_mask"] = mask
    clean = module(query, key, value, **call)
    absent = ~mask[:, None, :, None]
    key, value = (x.masked_fill(absent, float("nan")) for x in (key, value))
    torch.testing.assert_close(module(query, key, value, **call), clean)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_the_parameters_agree_with_differences(name):
    pattern, call = patterns(name)
    options = {"pooling": "mean"} if "pooling" in zoo.get(name).options else {}
    module = build(name, *pattern, **options, **WITH_PARAMETERS.get(name, {}))
    given = extras(name, TOKENS, batch=1)
    x = tuple(draw(1, HEADS, TOKENS, DIM // HEADS, seed=s) for s in range(3))
    values = tuple(p.detach().clone().requires_grad_() for p in module.parameters())
    keys = [key for key, _ in module.named_parameters()]

    def function(*parameters):
        return torch.func.functional_call(module, dict(zip(keys, parameters, strict=True)), x, {**given, **call})

    assert torch.autograd.gradcheck(function, values, fast_mode=True)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_compiles_into_one_graph_and_exports(name):
    torch._dynamo.reset()
    pattern, call = patterns(name)
    module = build(name, *pattern, dtype=torch.float32).eval()
    x, given = inputs(dtype=torch.float32), {**extras(name, TOKENS, dtype=torch.float32), **call}
    expected = module(*x, **given)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(*x, **given), expected)
    program = torch.export.export(module, x, given)
    torch.testing.assert_close(program.module()(*x, **given), expected)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_copied_and_its_weights_are_loaded(name):
    pattern, call = patterns(name)
    module = build(name, *pattern, **WITH_PARAMETERS.get(name, {}))
    twin = build(name, *pattern, **WITH_PARAMETERS.get(name, {}))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    twin.load_state_dict(copy.deepcopy(module).state_dict())
    given = extras(name, TOKENS)
    torch.testing.assert_close(twin(*inputs(), **given, **call), module(*inputs(), **given, **call))


@pytest.mark.parametrize("name", [n for n in MODULES if hasattr(zoo.get(n).module, "scores")])
def test_weights_of_a_module_mix_its_values_where_no_convolution_or_gate_follows(name):
    off = {"use_lepe", "use_gate", "use_conv", "conv"} & set(zoo.get(name).options)
    module = build(name, **dict.fromkeys(off, False))
    query, key, value = inputs()
    given = {k: v for k, v in extras(name, TOKENS).items() if k != "x"}
    torch.testing.assert_close(module.scores(query, key, **given) @ value, module(query, key, value, **given))
