"""Short clusters answer token by token: the same function as through their covariances, outputs and gradients."""

import pytest
import torch
from torch import Tensor

from cumulant.cluster import attention as module
from cumulant.cluster import cluster_attention, short

SHAPE = (2, 2, 21, 12)  # sequences, heads, tokens, width: 4 (12 + 12) <= 12 x 12, so blocks of up to 6 are short


def tokens(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def with_gradients(given: list[Tensor], **options) -> list[Tensor]:
    out = cluster_attention(*given, **options)
    slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, given, slope)]


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How often the short form was taken."""
    seen: list[int] = []
    plain = module.token_responses

    def counted(*given, **options):
        seen.append(1)
        return plain(*given, **options)

    monkeypatch.setattr(module, "token_responses", counted)
    return seen


MASK = torch.ones(2, 21, dtype=torch.bool)
MASK[0, 3:9], MASK[1] = False, False  # the second sequence has no key at all
WEIGHTS = torch.linspace(0, 2, 21, dtype=torch.float64)

CASES = {
    "blocks": dict(clusters=7),
    "unequal blocks": dict(clusters=4),
    "prefix and grid": dict(clusters=4, grid=(4, 5), prefix=1),
    "full variance": dict(clusters=7, variance="full"),
    "gauss": dict(clusters=7, closure="gauss", scale=0.2),
    "langevin": dict(clusters=7, closure="langevin"),
    "mask": dict(clusters=7, key_mask=MASK),
    "weights": dict(clusters=7, key_mask=WEIGHTS),
    "prefix and weights": dict(clusters=5, prefix=2, key_mask=WEIGHTS),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [None, 50], ids=["at once", "in blocks of rows"])
def test_tokens_and_covariances_give_the_same(name, block, calls, monkeypatch):
    given = tokens(*SHAPE)
    if block is not None:
        monkeypatch.setattr(short, "room", lambda q: block * 40)
    found = with_gradients(given, **CASES[name])
    assert calls
    monkeypatch.setattr(module, "answers_by_token", lambda packed, form: False)
    expected = with_gradients(given, **CASES[name])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_grouped_queries(calls, monkeypatch):
    q, k, v = tokens(2, 6, 21, 12)
    given = [q, *(x.detach()[:, :2].requires_grad_() for x in (k, v))]
    found = with_gradients(given, clusters=7, enable_gqa=True)
    assert calls
    monkeypatch.setattr(module, "answers_by_token", lambda packed, form: False)
    for x, y in zip(found, with_gradients(given, clusters=7, enable_gqa=True), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [dict(clusters=2), dict(clusters=7, near=1), dict(clusters=7, response=2), dict(clusters=7, near="neighbours")],
    ids=["long clusters", "near field", "few respond", "neighbours"],
)
def test_what_is_not_cheaper_or_not_the_same_goes_through_covariances(options, calls):
    cluster_attention(*tokens(*SHAPE), **options)
    assert not calls


def test_gradients_of_the_short_form(calls):
    given = [x.detach()[:1, :1, :7].requires_grad_() for x in tokens(*SHAPE)]
    assert torch.autograd.gradcheck(lambda *x: cluster_attention(*x, clusters=3, prefix=1), given)
    assert calls


def test_bfloat16_products_are_as_good_as_those_of_softmax(monkeypatch):
    """As on a GPU: at most twice as far from float64 as plain softmax in bfloat16 is from its own."""
    shape = (2, 2, 65, 64)
    exact = [x.detach().bfloat16().double().requires_grad_() for x in tokens(*shape)]
    given = [x.detach().bfloat16().requires_grad_() for x in exact]
    options = dict(clusters=4, grid=(8, 8), prefix=1)
    monkeypatch.setattr(short, "multiplied_in", lambda dtype, device: torch.bfloat16)
    found = with_gradients(given, **options)
    monkeypatch.setattr(short, "multiplied_in", lambda dtype, device: None)
    wanted = with_gradients(exact, **options)

    def softmax(inputs: list[Tensor]) -> list[Tensor]:
        q, k, v = inputs
        out = (q @ k.mT / 8).softmax(-1) @ v
        slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return [out.detach(), *torch.autograd.grad(out, inputs, slope)]

    def apart(a: list[Tensor], b: list[Tensor]) -> list[float]:
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(a, b, strict=True)]

    for own, plain in zip(apart(found, wanted), apart(softmax(given), softmax(exact)), strict=True):
        assert own <= 2 * plain
