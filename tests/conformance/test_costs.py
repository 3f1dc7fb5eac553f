"""The cost that a mechanism states, in multiply-adds of one head, is what is counted while it runs."""

import re

import pytest
import torch
from cases import NAMES, draw
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cumulant import zoo
from cumulant.zoo.probes import own_way

SIZES = {"L": 1024, "D": 32, "E": 16, "n": 49, "b": 4, "T": 8}
# At this width LLA solves directly unless asked not to, and its steps may end early where many are allowed.
PLAIN = {"lla": {"solver": "cg", "tolerance": 0.0, "iterations": SIZES["T"]}}


def stated(cost: str) -> float:
    """The value of e.g. "2 L n (D + E), n agents" at SIZES."""
    formula = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", cost.split(",")[0].replace("^", "**"))
    return eval(formula, {"__builtins__": {}}, SIZES)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cumulant1"])  # which adds and multiplies nothing
def test_the_stated_cost_is_the_counted_one(name):
    """Within a half: the upper levels of a tree and the products before the steps of a solver are left out."""
    mechanism = zoo.get(name)
    L, D, E = (SIZES[size] for size in "LDE")
    query, key, value = (draw(1, 1, L, width, seed=s, dtype=torch.float32) for s, width in enumerate((D, D, E)))
    options = {"backend": "reference"} if "backend" in mechanism.options else PLAIN.get(name, {})
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops, torch.no_grad():
        mechanism(query, key, value, **own_way(mechanism), **options)
    assert 2 / 3 < flops.get_total_flops() / 2 / stated(mechanism.cost) < 3 / 2
