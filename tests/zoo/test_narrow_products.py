"""Products of bfloat16 features, which a GPU takes, are as good as the rounding of the result. Simulated on the CPU."""

import pytest
import torch

from cumulant import zoo
from cumulant.zoo import products

NAMES = ["linear", "cosformer", "flow", "focused_linear", "rala", "mala", "combiner"]


def error(name, inputs, is_causal):
    exact = zoo.get(name)(*(x.double() for x in inputs), is_causal=is_causal)
    return ((zoo.get(name)(*inputs, is_causal=is_causal).double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("name", "is_causal"), [(n, c) for n in NAMES for c in (False, True) if not c or zoo.get(n).causal]
)
def test_narrow_products_cost_at_most_a_few_roundings(name, is_causal, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 1, 2, 300, 32, generator=generator).to(torch.bfloat16).unbind()
    wide = error(name, inputs, is_causal)
    monkeypatch.setattr(products, "multiplies_narrow", lambda x, dtype: dtype == torch.bfloat16)
    narrow = error(name, inputs, is_causal)
    assert wide < 2**-8
    assert narrow < 3 * 2**-8


def test_only_bfloat16_on_a_gpu_is_multiplied_narrow():
    assert not products.multiplies_narrow(torch.zeros(1), torch.bfloat16)
    a, b = torch.full((1, 4), 1e-3), torch.full((4, 1), 1e3)
    assert products.product(a, b, torch.float16).dtype == torch.float32
