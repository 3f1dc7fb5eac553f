"""What the conformance tests share: the mechanisms, their inputs, and options that a test of one of them needs."""

from typing import Any

import pytest
import torch
from random_tokens import one as draw
from random_tokens import tokens as tokens  # of those that import from here

from cumulant import zoo
from cumulant.zoo.probes import fixed_length

NAMES = zoo.names()
MODULES = [name for name in NAMES if zoo.get(name).module is not None]

# Options under which a mechanism is smooth where the inputs of a gradient check lie.
SMOOTH: dict[str, dict[str, Any]] = {"flow": {"clamp": None}, "combiner": {"pooling": "mean"}}
# Mechanisms whose heads look at each other: FLatten takes its norms over all channels of a token.
HEADS_INTERACT = {"focused_linear"}
# Mechanisms that divide the tokens into parts by their number: padding moves the borders.
PADDING_MOVES = {"agent"}
# Options with which a module that can do without parameters has some.
WITH_PARAMETERS: dict[str, dict[str, Any]] = {
    "lla": {"learn_ridge": True},
    "hierarchical": {"position": 2},
    "combiner": {"variant": "axial"},
}
# Options under which causal rows do not depend on how many tokens follow, where the longest length is a poor choice.
FIXED: dict[str, dict[str, Any]] = {"combiner": {"segment": 4}}
LONG = 32_768
DIM, HEADS, GRID, PREFIX = 16, 2, (3, 4), 1


def having(*needed: str, missing: tuple[str, ...] = ()) -> Any:
    """Parametrises over the mechanisms that declare all of `needed` and none of `missing`."""

    def fits(mechanism: zoo.Mechanism) -> bool:
        return all(getattr(mechanism, n) for n in needed) and not any(getattr(mechanism, m) for m in missing)

    return pytest.mark.parametrize("name", [name for name in NAMES if fits(zoo.get(name))])


def fixed(name: str, length: int) -> dict[str, Any]:
    """Options that make causal rows independent of how many tokens follow, up to `length` of them."""
    return FIXED.get(name) or fixed_length(zoo.get(name), length)


def ways(name: str) -> list[bool]:
    """The values of is_causal that a mechanism takes."""
    mechanism = zoo.get(name)
    return [False] * mechanism.noncausal + [True] * mechanism.causal


def calls(*needed: str) -> Any:
    """Parametrises over (name, is_causal) of the mechanisms that declare all of `needed`."""
    chosen = [name for name in NAMES if all(getattr(zoo.get(name), n) for n in needed)]
    cases = [pytest.param(name, c, id=f"{name}-{'causal' if c else 'full'}") for name in chosen for c in ways(name)]
    return pytest.mark.parametrize(("name", "is_causal"), cases)


def build(name: str, *patterns: str, grid_size=GRID, prefix=PREFIX, dtype=torch.float64, **options: Any) -> Any:
    """The module of a mechanism for a layer of width DIM, with random parameters in place of published zeros."""
    mechanism = zoo.get(name)
    for pattern in patterns:
        options = {**mechanism.pattern_options.get(pattern, {}), **options}
    module = mechanism.build(DIM, HEADS, grid_size=grid_size, prefix=prefix, dtype=dtype, **options)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(0.3 * draw(*parameter.shape, seed=100 + index, dtype=dtype))
    return module


def extras(name: str, queries: int, grid=GRID, prefix=PREFIX, dtype=torch.float64, batch=2) -> dict[str, Any]:
    """What a layer tells the module of this mechanism at each call."""
    mechanism = zoo.get(name)
    given: dict[str, Any] = {"grid": grid, "prefix": prefix} if mechanism.wants_grid else {}
    if mechanism.wants_input:
        given["x"] = draw(batch, queries, DIM, seed=3, dtype=dtype)
    return given
