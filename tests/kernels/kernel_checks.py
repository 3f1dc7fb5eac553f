"""What the tests of the Triton kernels share: where they run, poisoned memory, tokens, and the comparison.

Import this before anything of `cumulant.kernels`: without a GPU it turns Triton's interpreter on.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo import trace_rules

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

    trace_rules.get_torch_obj_rule_map()  # torch.compile keeps the functions of torch that it finds first: not these
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


def beside_plain_torch(
    kernels: Callable[..., Tensor], reference: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor,
    order: int,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Errors of the kernels and of the plain version, which rounds only its result, in the dtype of q."""

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = function(*inputs, None, order, q.shape[-1] ** -0.5)
        out.backward(grad.to(dtype))
        return [out, *(x.grad for x in inputs)]

    exact, plain, found = run(reference, torch.float64), run(reference, q.dtype), run(kernels, q.dtype)
    return {n: (error(x, z), error(y, z)) for n, x, y, z in zip(NAMES, found, plain, exact, strict=True)}


def compare_packed(
    kernels: Callable[..., Tensor], reference: Callable[..., Tensor], lengths: tuple[list[int], list[int]], order: int,
    tolerance: float,
) -> None:  # fmt: skip
    """Sequences end to end, of so many queries and keys, give what the reference gives for each of them."""
    (cu_q, of_queries), (cu_k, of_keys) = (
        (torch.tensor([0, *n], device=DEVICE).cumsum(0).to(torch.int32), sum(n)) for n in lengths
    )
    shapes = [(of_queries, 2, 16), (of_keys, 1, 16), (of_keys, 1, 24)]
    inputs = [tokens(*shape, mean=1, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    longest = {"max_q": max(lengths[0]), "max_k": max(lengths[1])}
    out = kernels(*inputs, None, order, 0.3, cu_q=cu_q, cu_k=cu_k, **longest)
    parts = zip(*(x.split(n) for x, n in zip(exact, (*lengths, lengths[1]), strict=True)), strict=True)
    expected = torch.cat([
        reference(*(x.transpose(0, 1)[None] for x in part), None, order, 0.3)[0].transpose(0, 1)
        if min(len(part[0]), len(part[1])) else part[0].new_zeros(len(part[0]), 2, 24)
        for part in parts
    ])  # fmt: skip
    grad = tokens(*out.shape, seed=5)
    out.backward(grad)
    expected.backward(grad.double())
    assert error(out, expected) < tolerance
    for x, y in zip(inputs, exact, strict=True):
        assert error(x.grad, y.grad) < tolerance


def compare_runs(kernels: Callable[..., Tensor], heads: int, length: int) -> None:
    """Outputs and gradients of two runs are equal bit by bit."""

    def run() -> list[Tensor]:
        inputs = [tokens(1, heads, length, 16, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(3)]
        out = kernels(*inputs, None, 3, 0.25)
        out.backward(tokens(*out.shape, dtype=torch.bfloat16, seed=4))
        return [out, *(x.grad for x in inputs)]

    for x, y in zip(run(), run(), strict=True):
        assert torch.equal(x, y)


def compare_empty(kernels: Callable[..., Tensor]) -> None:
    """Without sequences, queries or keys all there is is 0."""
    for B, Lq, Lk in ((0, 4, 4), (1, 0, 4), (1, 4, 0)):
        q, k, v = (tokens(B, 1, n, 16).requires_grad_() for n in (Lq, Lk, Lk))
        out = kernels(q, k, v, None, 3, 0.25)
        out.sum().backward()
        assert out.shape == (B, 1, Lq, 16)
        for x in (out, q.grad, k.grad, v.grad):
            assert not x.any()
