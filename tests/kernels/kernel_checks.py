"""What the tests of the Triton kernels share: where they run, poisoned memory, tokens, and the comparison.

Import this before anything of `cumulant.kernels`: without a GPU it turns Triton's interpreter on.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

pytest.importorskip("triton")

NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN; a test module that imports this fixture has it in every test."""

    @torch.no_grad()  # memory may be asked for with requires_grad=True, as torch.utils.checkpoint does
    def poison(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


def tokens(*shape: int, mean: float = 0.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) + mean).to(DEVICE, dtype)


def error(x: Tensor, y: Tensor) -> float:
    return float((x.detach().double() - y.detach()).norm() / y.detach().norm().clamp_min(1e-6))


def compare_with(
    kernels: Callable[..., Tensor], reference: Callable[..., Tensor],
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, order: int, tolerance: float, normalization: str = "mean",
) -> None:  # fmt: skip
    """Outputs and gradients of the kernels and of the reference in float64, relative to the latter's norm."""
    scale = q.shape[-1] ** -0.5
    grad = tokens(*q.shape[:-1], v.shape[-1], dtype=q.dtype, seed=7)
    absent = None if weights is None else (weights == 0)[:, None, :, None]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double() for x in (q, k, v)]
    exact = [exact[0], *(x if absent is None else x.masked_fill(absent, 0) for x in exact[1:])]
    exact = [x.requires_grad_() for x in exact]
    out = kernels(*inputs, weights, order, scale, normalization)
    out.backward(grad)
    expected = reference(*exact, weights, order, scale, normalization)
    expected.backward(grad.double())
    assert out.dtype == q.dtype
    found, wanted = [out, *(x.grad for x in inputs)], [expected, *(x.grad for x in exact)]
    errors = {name: error(x, y) for name, x, y in zip(NAMES, found, wanted, strict=True)}
    assert all(value < tolerance for value in errors.values()), errors  # NaN is not below it
    if absent is not None:
        assert not inputs[1].grad.masked_select(absent).any()
        assert not inputs[2].grad.masked_select(absent).any()


def compare_views(
    kernels: Callable[..., Tensor], reference: Callable[..., Tensor], length: int, tolerance: float
) -> None:
    """Views of one projection are read in place, and their gradients are its own."""
    qkv = tokens(1, length, 3, 2, 24, mean=1).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    out, expected = (
        function(*(x.transpose(1, 2) for x in whole.unbind(2)), None, 3, 0.2)
        for function, whole in ((kernels, qkv), (reference, exact))
    )
    assert out.transpose(1, 2).is_contiguous()
    for one in (out, expected):
        one.square().sum().backward()
    assert error(out, expected) < tolerance
    assert error(qkv.grad, exact.grad) < tolerance
