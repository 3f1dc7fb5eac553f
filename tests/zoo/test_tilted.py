"""Cumulant attention around the mean query: its formula, where it is exact, masks, groups, gradients and refusals."""

import pytest
import torch
import torch.nn.functional as F

from cumulant import zoo
from cumulant.nn import MultiheadAttention

ORDERS = (1, 2, 3)


def draw(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def of_order(order):
    return zoo.get(f"cumulant{order}")


def test_order_2_is_its_formula():
    q, k, v = draw((2, 3, 5, 4), (2, 3, 9, 4), (2, 3, 9, 6))
    out = of_order(2)(q, k, v, around="mean")
    mean = q.mean(-2, keepdim=True)
    w = (mean @ k.mT / 2).softmax(-1)
    v_mean, k_mean = w @ v, w @ k
    covariance = torch.einsum("bhos,bhsd,bhse->bhde", w, k - k_mean, v - v_mean)
    torch.testing.assert_close(out, v_mean + (q - mean) / 2 @ covariance)


@pytest.mark.parametrize("order", ORDERS)
def test_one_query_gets_softmax_itself(order):
    q, k, v = draw((2, 3, 1, 4), (2, 3, 9, 4), (2, 3, 9, 6))
    torch.testing.assert_close(of_order(order)(q, k, v, around="mean"), F.scaled_dot_product_attention(q, k, v))


def test_queries_far_from_0_but_close_together_are_nearly_exact_and_not_so_around_0():
    q, k, v = draw((1, 2, 8, 4), (1, 2, 20, 4), (1, 2, 20, 4))
    q = 4 + 0.05 * q
    exact = F.scaled_dot_product_attention(q, k, v)
    errors = [(of_order(2)(q, k, v, around=a) - exact).norm() / exact.norm() for a in ("zero", "mean")]
    assert errors[1] < 1e-3 < 0.5 < errors[0]


@pytest.mark.parametrize("order", [2, 3])
def test_shifting_all_keys_changes_nothing(order):
    q, k, v, shift = draw((1, 2, 5, 4), (1, 2, 9, 4), (1, 2, 9, 3), (1, 2, 1, 4))
    call = of_order(order)
    torch.testing.assert_close(call(q, k + shift, v, around="mean"), call(q, k, v, around="mean"))


def test_class_tokens_apart_have_a_mean_of_their_own():
    q, k, v = draw((1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 7, 4))
    out = of_order(2)(q, k, v, around="mean", apart=1)
    torch.testing.assert_close(out[..., :1, :], F.scaled_dot_product_attention(q[..., :1, :], k, v))
    torch.testing.assert_close(out[..., 1:, :], of_order(2)(q[..., 1:, :], k, v, around="mean"))


def test_masked_keys_are_as_if_taken_out_and_a_row_without_keys_is_0():
    q, k, v = draw((2, 4, 5, 4), (2, 2, 6, 4), (2, 2, 6, 3))
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0] * 6]).bool()
    spoiled = k.masked_fill(~mask[:, None, :, None], torch.nan)
    out = of_order(3)(q, spoiled, v, around="mean", key_mask=mask, enable_gqa=True)
    kept = mask[0].nonzero().squeeze(-1)
    alone = of_order(3)(q[:1], k[:1, :, kept], v[:1, :, kept], around="mean", enable_gqa=True)
    torch.testing.assert_close(out[:1], alone)
    assert not out[1].any()


@pytest.mark.parametrize("order", ORDERS)
def test_its_weights_times_the_values_are_its_output(order):
    q, k, v = draw((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    weights = of_order(order).scores(q, k, around="mean", apart=1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
    torch.testing.assert_close(weights @ v, of_order(order)(q, k, v, around="mean", apart=1))


@pytest.mark.parametrize("order", ORDERS)
def test_gradients(order):
    q, k, v = (x.requires_grad_() for x in draw((1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2)))
    weights = torch.rand(1, 5, dtype=torch.float64) + 0.1

    def call(q, k, v):
        return of_order(order)(q, k, v, around="mean", apart=1, key_mask=weights, enable_gqa=True)

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_bfloat16_is_as_close_as_its_rounding():
    q, k, v = draw((1, 2, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16), dtype=torch.float32)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out, exact = (of_order(2)(*x, around="mean") for x in ((q, k, v), (q.double(), k.double(), v.double())))
    assert (out.double() - exact).norm() < 0.02 * exact.norm()


def test_a_layer_takes_it_by_name_and_empty_sequences_are_fine():
    layer = MultiheadAttention(16, 2, attention="cumulant2", attention_options={"around": "mean", "apart": 1})
    assert layer(torch.randn(2, 5, 16)).shape == (2, 5, 16)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    assert not of_order(2)(q, k, k, around="mean").any()


def test_what_it_cannot_do_is_named():
    q, k, v = draw((1, 2, 4, 4), (1, 2, 4, 4), (1, 2, 4, 4))
    with pytest.raises(ValueError, match='around="mean" has no causal form'):
        of_order(2)(q, k, v, around="mean", is_causal=True)
    with pytest.raises(ValueError, match="around must be one of 'zero', 'mean', got 'median'"):
        of_order(2)(q, k, v, around="median")
    with pytest.raises(ValueError, match="apart must lie between 0 and the 4 queries, got 5"):
        of_order(2)(q, k, v, around="mean", apart=5)
