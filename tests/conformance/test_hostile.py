"""Every mechanism: empty inputs stay in the graph, other widths of values and wrong options are named."""

import contextlib
import math
from functools import partial

import pytest
import torch

from cumulant import zoo
from cumulant.zoo.options import CHECKS

NAMES = zoo.names()
EMPTY = {"no keys": (1, 3, 0), "no queries": (1, 0, 3), "no tokens": (1, 0, 0), "no batch": (0, 3, 3)}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("name", NAMES)
def test_empty_inputs_keep_the_graph(name, case):
    mechanism, (B, Lq, Lk) = zoo.get(name), EMPTY[case]
    if Lq != Lk and not mechanism.cross:
        return
    q, k, v = (torch.randn(B, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (Lq, Lk, Lk))
    weights = torch.rand(B, Lk, dtype=torch.float64, requires_grad=True) if mechanism.key_mask else None
    for key_mask in (None, weights):
        out = mechanism(q, k, v, key_mask=key_mask, is_causal=not mechanism.noncausal)
        assert out.shape == (B, 2, Lq, 4)
        assert not out.any()
        asked = [q, k, v] if key_mask is None else [q, k, v, key_mask]
        assert not any(x.any() for x in torch.autograd.grad(out.sum(), asked))


BUILT = {"agent", "focused_linear", "mala", "rala"}  # for the width of their convolution or gate


def columns(mix, E):
    """What values (1, 2, 16, E) become, and what their columns become four at a time, as wide as keys."""
    q, k, x = torch.randn(1, 2, 16, 4), torch.randn(1, 2, 16, 4), torch.randn(1, 16, 8)
    values = torch.randn(1, 2, 16, E)
    beside = torch.cat((values, torch.randn(1, 2, 16, -E % 4)), -1).split(4, -1)
    return mix(q, k, values, x), torch.cat([mix(q, k, part, x) for part in beside], -1)[..., :E]


def called(mix, q, k, v, x):
    return mix(q, k, v, x=x)


@pytest.mark.parametrize("E", [1, 3, 6])
@pytest.mark.parametrize("name", [name for name in NAMES if zoo.get(name).module is not None])
def test_a_layer_takes_values_of_another_width_or_says_which_it_was_built_for(name, E):
    mechanism = zoo.get(name)
    for options in ({}, *([{"use_lepe": False}] if "use_lepe" in mechanism.options else [])):
        mix = mechanism.build(8, 2, grid_size=(4, 4), **options).eval()
        refused = pytest.raises(ValueError, match=rf"value must be 4 wide.*{E}\b") if name in BUILT else None
        with refused or contextlib.nullcontext():
            found, wanted = columns(partial(called, mix), E)
            assert found.shape == (1, 2, 16, E)
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("E", [1, 3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_takes_values_of_another_width(name, E):
    """Columns of values do not know of each other."""
    mechanism = zoo.get(name)
    causal = {"is_causal": True} if not mechanism.noncausal else {}
    found, wanted = columns(lambda q, k, v, x: mechanism(q, k, v, **causal), E)
    assert found.shape == (1, 2, 16, E)
    torch.testing.assert_close(found, wanted)


WRONG = {"number": [-1.0, math.nan, "x"], "count": [0, 2.5, "x"], "switch": ["no", 3]}
KINDS = {
    "eps": "number", "power": "number", "clamp": "number", "query_std": "number", "ridge": "number", "chunk": "count",
    "block": "count", "segment": "count", "kernel": "count", "max_len": "count", "use_rope": "switch",
    "scaled": "switch", "use_alpha": "switch", "exclude_own": "switch", "qk_norm": "switch",
    "precondition": "switch", "use_gate": "switch",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_wrong_options_are_named_by_a_call_and_by_a_layer(name):
    mechanism = zoo.get(name)
    q, k, v = torch.randn(3, 1, 2, 16, 4)
    for option in set(KINDS) & {*mechanism.function_options, *mechanism.options}:
        for given in WRONG[KINDS[option]]:
            if option in mechanism.function_options:
                with pytest.raises((ValueError, TypeError), match=option):
                    mechanism(q, k, v, **{option: given})
            if option in mechanism.options:
                with pytest.raises((ValueError, TypeError), match=option):
                    mechanism.build(8, 2, grid_size=(4, 4), **{option: given})


def test_a_mechanism_of_ones_own_may_mean_something_else_by_a_name():
    other = zoo.registry.replace(zoo.get("linear"), name="other", checks={})
    other.check_values({"eps": "small"})
    assert "eps" in CHECKS
