"""Linear attention (elu + 1) against the quadratic form, and the properties that follow from its positive kernel."""

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant import zoo
from cumulant.zoo.linear import EPS, feature_map

LINEAR = zoo.get("linear")


def quadratic(query, key, value, weights=None, is_causal=False, scale=1.0):
    """A = phi(q) phi(k)^T, masked; out = A v / (A 1 + eps). Shares no code with the fast form."""
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    A = (F.elu(query * scale) + 1) @ (F.elu(key) + 1).mT
    if weights is not None:
        A = A * weights.to(A.dtype)[..., None, None, :]
    if is_causal:
        A = A.tril()
    A = A / (A.sum(-1, keepdim=True) + 1e-6)
    return A @ value, A


MASKS = {
    "none": None,
    "bool": torch.arange(11).lt(torch.tensor([[8], [11]])),
    "weights": torch.arange(22.0, dtype=torch.float64).reshape(2, 11).remainder(4),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries", [5, 11, 17])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_fast_form_is_the_quadratic_one(mask, is_causal, queries, key_heads):
    query, key, value = draw((2, 4, queries, 3), (2, key_heads, 11, 3), (2, key_heads, 11, 6))
    output, weights = quadratic(query, key, value, MASKS[mask], is_causal)
    shared = {"key_mask": MASKS[mask], "is_causal": is_causal, "enable_gqa": key_heads != 4}
    torch.testing.assert_close(LINEAR(query, key, value, chunk=4, **shared), output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(LINEAR.scores(query, key, **shared), weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 64, 150, 1000])
def test_the_chunk_size_does_not_matter(chunk):
    query, key, value = draw((1, 2, 150, 4), (1, 2, 150, 4), (1, 2, 150, 5))
    whole, _ = quadratic(query, key, value, is_causal=True)
    torch.testing.assert_close(LINEAR(query, key, value, is_causal=True, chunk=chunk), whole, rtol=1e-10, atol=1e-12)


def test_the_scale_is_one_unless_given():
    query, key, value = draw((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    assert torch.equal(LINEAR(query, key, value), LINEAR(query, key, value, scale=1.0))
    torch.testing.assert_close(LINEAR(query, key, value, scale=0.3), quadratic(query, key, value, scale=0.3)[0])


def test_the_feature_map_is_elu_plus_one_and_never_zero():
    x = torch.linspace(-10, 10, 101, dtype=torch.float64)
    torch.testing.assert_close(feature_map(x), F.elu(x) + 1)
    assert (feature_map(torch.tensor([-30.0, -80.0])) > 0).all()


def test_rows_sum_to_one_up_to_epsilon():
    query, key = draw((2, 2, 9, 4), (2, 2, 9, 4))
    ones = torch.ones(2, 2, 9, 1, dtype=torch.float64)
    denominator = feature_map(query) @ feature_map(key).sum(-2)[..., None]
    torch.testing.assert_close(LINEAR(query, key, ones), denominator / (denominator + EPS))
    assert (LINEAR.scores(query, key).sum(-1) - 1).abs().max() < 1e-5


def test_outputs_lie_between_the_smallest_and_the_largest_value():
    query, key, value = draw((2, 2, 9, 4), (2, 2, 9, 4), (2, 2, 9, 4))
    out = LINEAR(query, key, value, eps=0.0)
    assert (out <= value.amax(-2, keepdim=True)).all()
    assert (out >= value.amin(-2, keepdim=True)).all()


def test_the_magnitude_of_query_features_is_ignored():
    query, key, value = draw((1, 1, 5, 4), (1, 1, 5, 4), (1, 1, 5, 4))
    # q -> log(phi(q)) keeps phi in its exponential branch, where adding log c multiplies phi(q) by c.
    small = feature_map(query).log().clamp(max=-2.0)
    scaled = small + torch.log(torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(LINEAR(small, key, value), LINEAR(scaled, key, value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_right_also_at_zero(is_causal):
    query, key, value = draw((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 2))
    query[..., 0, :] = 0.5
    inputs = tuple(x.requires_grad_() for x in (query, key, value))
    assert torch.autograd.gradcheck(lambda *x: LINEAR(*x, is_causal=is_causal, chunk=2), inputs)
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(feature_map(zero).sum(), zero)
    assert torch.equal(gradient, torch.ones(3, dtype=torch.float64))


def test_bfloat16_inputs_keep_float32_sums():
    query, key, value = draw((1, 1, 4000, 8), (1, 1, 4000, 8), (1, 1, 4000, 8), dtype=torch.bfloat16)
    exact, _ = quadratic(query.double(), key.double(), value.double(), is_causal=True)
    out = LINEAR(query, key, value, is_causal=True)
    assert out.dtype == torch.bfloat16
    # One rounding of the result at the end; running sums in bf16 would be off by far more at this length.
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_a_chunk_below_one_is_refused():
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        LINEAR(*draw((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8)), is_causal=True, chunk=0)
