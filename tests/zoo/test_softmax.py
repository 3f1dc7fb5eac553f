"""Softmax attention against its definition, written out in float64, and what masks and weights mean to it."""

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant import zoo

SOFTMAX = zoo.get("softmax")


def by_definition(query, key, value, weights, is_causal=False, scale=None):
    """sum w exp(q.k) v / sum w exp(q.k), and 0 without any key; heads repeated for grouped queries."""
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    kernel = logits.exp() * weights[..., None, None, :]
    if is_causal:
        kernel = kernel.tril()
    total = kernel.sum(-1, keepdim=True)
    probabilities = torch.where(total > 0, kernel / total, 0)
    return probabilities @ value, probabilities


MASKS = {
    "none": None,
    "bool": torch.tensor([[True, True, False, True, True, False, True], [False, False, True, True, True, True, True]]),
    "weights": torch.tensor([[1.0, 2.0, 0.0, 0.5, 1.0, 3.0, 0.0], [0.0, 0.0, 1.0, 1.0, 0.25, 1.0, 1.0]]).double(),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries", [3, 7, 9])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_output_and_scores_follow_the_definition(mask, is_causal, queries, key_heads):
    query, key, value = draw((2, 4, queries, 5), (2, key_heads, 7, 5), (2, key_heads, 7, 6))
    weights = torch.ones(2, 7, dtype=torch.float64) if MASKS[mask] is None else MASKS[mask].double()
    output, probabilities = by_definition(query, key, value, weights, is_causal, scale=0.7)
    shared = {"key_mask": MASKS[mask], "is_causal": is_causal, "scale": 0.7, "enable_gqa": key_heads != 4}
    torch.testing.assert_close(SOFTMAX(query, key, value, **shared), output)
    torch.testing.assert_close(SOFTMAX.scores(query, key, **shared), probabilities)


def test_without_a_mask_it_is_the_fused_kernel():
    query, key, value = draw((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), dtype=torch.float32)
    assert torch.equal(SOFTMAX(query, key, value), F.scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_without_any_key_gives_zero_and_finite_gradients(is_causal):
    query, key, value = (x.requires_grad_() for x in draw((2, 2, 4, 3), (2, 2, 4, 3), (2, 2, 4, 3)))
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    out = SOFTMAX(query, key, value, key_mask=mask, is_causal=is_causal)
    assert (out[0] == 0).all()
    assert (out[1, :, :2] == 0).all() == is_causal
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))
    assert (SOFTMAX.scores(query, key, key_mask=mask, is_causal=is_causal)[0] == 0).all()


def test_integer_weights_mean_repeated_tokens():
    query, key, value = draw((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    weighted = SOFTMAX(query, key, value, key_mask=torch.tensor([[1.0, 2.0, 3.0]]).double())
    repeats = torch.tensor([1, 2, 3])
    repeated = SOFTMAX(query, key.repeat_interleave(repeats, -2), value.repeat_interleave(repeats, -2))
    torch.testing.assert_close(weighted, repeated)


def test_scores_of_half_precision_are_those_of_its_tokens_in_float64():
    """Logits beyond the range of float16 included, as in the fused kernels."""
    query, key = (100 * x.half() for x in draw((1, 2, 6, 64), (1, 2, 6, 64)))
    for tokens in ((query, key), (query, query)):
        exact = SOFTMAX.scores(*(x.double() for x in tokens))
        torch.testing.assert_close(SOFTMAX.scores(*tokens).double(), exact, rtol=1e-3, atol=1e-6)


def test_weights_of_sixteen_bits_keep_their_logarithm():
    query, key = draw((1, 1, 5, 8), (1, 1, 9, 8))
    weights = (torch.rand(1, 9, dtype=torch.float64) * 1e-3).bfloat16()
    exact = SOFTMAX.scores(query, key, key_mask=weights.double())
    torch.testing.assert_close(SOFTMAX.scores(query, key, key_mask=weights), exact)
