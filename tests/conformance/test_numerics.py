"""Gradients in float64, half precision against float64, autocast."""

import pytest
import torch
from cases import SMOOTH, calls, draw, tokens

from cumulant import zoo


def away_from_kinks(*shape, seed):
    """Numbers of either sign that are at least 0.1 in size, as ReLU needs for differences."""
    x = draw(*shape, seed=seed)
    return x.sign() * (0.1 + x.abs())


@calls()
def test_gradients_agree_with_differences(name, is_causal):
    inputs = tuple(away_from_kinks(1, 2, 5, 4, seed=s).requires_grad_() for s in range(3))
    options = SMOOTH.get(name, {})

    def function(*x):
        return zoo.get(name)(*x, is_causal=is_causal, **options)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@calls("key_mask")
def test_gradients_with_a_mask_agree_with_differences(name, is_causal):
    inputs = tuple(away_from_kinks(2, 1, 5, 4, seed=s).requires_grad_() for s in range(3))
    mask = torch.tensor([[True, True, False, True, False], [True, True, True, True, True]])
    options = SMOOTH.get(name, {})

    def function(*x):
        return zoo.get(name)(*x, is_causal=is_causal, key_mask=mask, **options)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@calls()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float64_and_keeps_its_dtype(name, is_causal, dtype):
    """Inputs are rounded first, so that only the arithmetic is judged: a few roundings of the result."""
    query, key, value = tokens(64, 64, dim=16, value_dim=16, dtype=dtype)
    out = zoo.get(name)(query, key, value, is_causal=is_causal)
    exact = zoo.get(name)(query.double(), key.double(), value.double(), is_causal=is_causal)
    assert out.dtype == dtype
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (2e-2 if dtype == torch.bfloat16 else 3e-3)


@calls()
def test_gradients_in_bfloat16_are_finite_and_close(name, is_causal):
    inputs = tuple(x.to(torch.bfloat16).requires_grad_() for x in tokens(32, 32, dim=16, value_dim=16))
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    for x in (inputs, exact):
        zoo.get(name)(*x, is_causal=is_causal).square().sum().backward()
    for rounded, reference in zip(inputs, exact, strict=True):
        error = (rounded.grad.double() - reference.grad).norm()
        assert error <= 0.1 * reference.grad.norm() + 1e-6


@calls()
def test_autocast_sets_the_dtype_of_the_result(name, is_causal):
    query, key, value = tokens(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert zoo.get(name)(query, key, value, is_causal=is_causal).dtype == torch.bfloat16


@calls()
def test_large_inputs_stay_finite_in_float32(name, is_causal):
    query, key, value = (x * 30 for x in tokens(dtype=torch.float32))
    assert zoo.get(name)(query, key, value, is_causal=is_causal).isfinite().all()
