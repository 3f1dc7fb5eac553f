"""The products and sums that mechanisms share are those of torch; their gradients lie in memory as rows of tokens."""

import pytest
import torch

from cumulant.zoo.products import (
    dot_with_one,
    for_every_token,
    pair_products,
    sum_of_tokens,
    sums_of_products,
    written_down,
)


def draw(*shapes):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)


PRODUCTS = {"sums": (sums_of_products, lambda a, b: a.mT @ b), "pairs": (pair_products, lambda a, b: a @ b.mT)}


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products_and_their_gradients_are_those_of_matmul(name):
    own, plain = PRODUCTS[name]
    a, b = draw((2, 3, 7, 4), (2, 3, 7, 4))
    out, expected = own(a, b, torch.float64), plain(a, b)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, (a, b), upstream) for x in (out, expected))
    torch.testing.assert_close(found, wanted)
    assert all(x.is_contiguous() for x in found)


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products_have_second_derivatives(name):
    a, b = draw((2, 3, 2), (2, 3, 2))
    assert torch.autograd.gradgradcheck(lambda a, b: PRODUCTS[name][0](a, b, torch.float64), (a, b))


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products_work_inside_function_transforms(name):
    own, plain = PRODUCTS[name]
    a, b = (x.detach() for x in draw((2, 3, 2), (2, 3, 2)))

    def total(product):
        return torch.func.grad(lambda a: product(a, b).square().sum())

    torch.testing.assert_close(total(lambda a, b: own(a, b, torch.float64))(a), total(plain)(a))


@pytest.mark.parametrize("length", [0, 5, 128, 384], ids=["none", "odd", "one-span", "three-spans"])
def test_sums_over_spans_are_sums_over_tokens(length):
    x, y = draw((2, length, 3), (2, 1, 3))
    pairs = [
        (sum_of_tokens(x), x.sum(-2, keepdim=True)),
        (dot_with_one(x, y), (x * y).sum(-1, keepdim=True)),
        (for_every_token(y, length), y.expand(2, length, 3)),
    ]
    for own, plain in pairs:
        torch.testing.assert_close(own, plain)
        found, wanted = (torch.autograd.grad(z.square().sum(), (x, y), allow_unused=True) for z in (own, plain))
        torch.testing.assert_close(found, wanted)


def test_what_is_written_down_keeps_its_values():
    x = torch.arange(12.0).reshape(3, 4).mT

    def function(x):
        return written_down(x.sin()) + 1

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x.sin() + 1)
    assert written_down(x) is x
