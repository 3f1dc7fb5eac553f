"""benchmarks/public_formulations.py, against which speed is measured, computes what the library computes."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from cumulant import zoo

PATH = Path(__file__).parents[2] / "benchmarks" / "public_formulations.py"
SPEC = importlib.util.spec_from_file_location("public_formulations", PATH)
formulations = importlib.util.module_from_spec(SPEC)
sys.modules.setdefault("public_formulations", formulations)
SPEC.loader.exec_module(formulations)
CASES = formulations.cases("cpu", torch.float64, True)


def test_every_mechanism_of_the_registry_has_a_formulation():
    assert {case.mechanism for case in CASES.values()} == set(zoo.names())


@pytest.mark.parametrize("name", list(CASES))
def test_the_public_formulation_is_the_same_function_and_has_the_same_gradients(name):
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(case.shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    ours = zoo.get(case.mechanism)(*leaves, is_causal=case.is_causal, **case.options)
    public = case.public(*leaves)
    torch.testing.assert_close(public, ours, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for leaf, own, other in zip(
        leaves, *(torch.autograd.grad(out, leaves, upstream, allow_unused=True) for out in (ours, public)), strict=True
    ):
        none = torch.zeros_like(leaf)  # of what a mechanism does not look at
        own, other = (none if x is None else x for x in (own, other))
        torch.testing.assert_close(other, own, rtol=1e-4, atol=1e-5)
