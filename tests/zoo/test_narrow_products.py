"""Products of bfloat16 features, which a GPU takes, are as good as the rounding of the result. Simulated on the CPU."""

import pytest
import torch

from cumulant import zoo
from cumulant.zoo import agent, combiner_parts, linear, products

NAMES = ["linear", "cosformer", "flow", "focused_linear", "rala", "mala", "agent", "combiner", "hierarchical"]
SQUARE = {"grid": (16, 16)}
GRID = {"agent": SQUARE, "rala": SQUARE | {"use_rope": True}, "mala": SQUARE | {"use_rope": True}}


@pytest.fixture
def narrow(monkeypatch):
    """As on a GPU."""
    for module in (products, agent, combiner_parts, linear):
        monkeypatch.setattr(module, "multiplies_narrow", lambda x, dtype: dtype == torch.bfloat16)


def draw(length):
    """q, k, v and a gradient: noise on waves, without which gradients in q are differences of equal numbers."""
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([0.2, 0.5, 0.5, 0.0]).reshape(4, 1, 1, 1, 1)
    turns = torch.linspace(0, 4, length)[:, None] + torch.rand(4, 1, 2, 1, 32, generator=generator)
    noise = torch.randn(4, 1, 2, length, 32, generator=generator)
    return (noise + means + 2 * (2 * torch.pi * turns).cos()).to(torch.bfloat16).unbind()


def with_gradients(function, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs[3])


def error(name, inputs, is_causal):
    exact = zoo.get(name)(*(x.double() for x in inputs), is_causal=is_causal)
    return ((zoo.get(name)(*inputs, is_causal=is_causal).double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("name", "is_causal"), [(n, c) for n in NAMES for c in (False, True) if not c or zoo.get(n).causal]
)
def test_narrow_products_cost_at_most_a_few_roundings(name, is_causal, request):
    inputs = draw(300)[:3]
    wide = error(name, inputs, is_causal)
    request.getfixturevalue("narrow")
    narrow = error(name, inputs, is_causal)
    assert wide < 2**-8
    assert narrow < 3 * 2**-8


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_narrow_products_cost_at_most_a_few_roundings(name, narrow):
    inputs, mechanism = draw(256), zoo.get(name)
    found, exact = (
        with_gradients(lambda *x: mechanism(*x, **GRID.get(name, {})), one)
        for one in (inputs, [x.double() for x in inputs])
    )
    for part, own, wanted in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert (own.double() - wanted).norm() / wanted.norm() < 8 * 2**-8, part


@pytest.mark.parametrize("name", NAMES)
def test_narrow_products_are_compiled_to_what_they_are_as_called(name, narrow):
    inputs, mechanism = draw(256), zoo.get(name)

    def function(query, key, value):
        return mechanism(query, key, value, **GRID.get(name, {}))

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    for own, wanted in zip(with_gradients(compiled, inputs), with_gradients(function, inputs), strict=True):
        torch.testing.assert_close(own, wanted, rtol=2**-6, atol=2**-6 * wanted.abs().max().item())


def test_biases_of_agents_learn_by_narrow_products(narrow):
    query, key, value, grad = draw(64)
    biases = torch.randn(2, 2, 9, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        to_keys, to_queries = biases[0].to(dtype).requires_grad_(), biases[1].mT.to(dtype).requires_grad_()
        out = zoo.get("agent")(
            *(x.to(dtype) for x in (query, key, value)), grid=(8, 8), agents=9, key_bias=to_keys, query_bias=to_queries
        )
        gradients.append(torch.autograd.grad(out, (to_keys, to_queries), grad.to(dtype)))
    for own, wanted in zip(*gradients, strict=True):
        assert (own.double() - wanted).norm() / wanted.norm() < 8 * 2**-8


@pytest.mark.parametrize("name", ["linear", "cosformer", "flow", "focused_linear", "rala", "mala", "combiner"])
def test_values_far_from_zero_cost_no_precision(name, narrow):
    """Their mean moves no weight, and gradients of queries and keys do not see it."""
    query, key, value, grad = draw(256)
    inputs, mechanism = (query, key, value + 8, grad), zoo.get(name)
    found, exact = (with_gradients(mechanism, one) for one in (inputs, [x.double() for x in inputs]))
    for part, own, wanted in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert (own.double() - wanted).norm() / wanted.norm() < (1 if part == "out" else 6) * 2**-8, part


def test_only_bfloat16_on_a_gpu_is_multiplied_narrow():
    assert not products.multiplies_narrow(torch.zeros(1), torch.bfloat16)
    a, b = torch.full((1, 4), 1e-3), torch.full((4, 1), 1e3)
    assert products.product(a, b, torch.float16).dtype == torch.float32
