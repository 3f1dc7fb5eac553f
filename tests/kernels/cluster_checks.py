"""What the tests of the cluster kernels share: kernels and plain torch in float64, outputs and gradients compared."""

from __future__ import annotations

from typing import Any

import torch
from kernel_checks import NAMES, error, tokens
from torch import Tensor

from cumulant.cluster import cluster_attention

FLOAT32 = 3e-6


def results(q: Tensor, k: Tensor, v: Tensor, backend: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out = cluster_attention(*leaves, backend=backend, **options)
    assert out.dtype == dtype
    grad = tokens(*q.shape[:-1], v.shape[-1], seed=7).to(q.dtype).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(q: Tensor, k: Tensor, v: Tensor, tolerance: float = FLOAT32, **options: Any) -> None:
    ours, exact = (
        results(q, k, v, backend, dtype, **options)
        for backend, dtype in (("triton", q.dtype), ("reference", torch.float64))
    )
    errors = {name: error(x, y) for name, x, y in zip(NAMES, ours, exact, strict=True)}
    assert all(value < tolerance for value in errors.values()), errors  # NaN is not below it
