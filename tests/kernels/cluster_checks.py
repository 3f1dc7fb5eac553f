"""What the tests of the cluster kernels share: kernels and plain torch in float64, outputs and gradients compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import NAMES, error, tokens
from torch import Tensor

from cumulant.cluster import cluster_attention

FLOAT32 = 3e-6


def results(
    q: Tensor, k: Tensor, v: Tensor, backend: str, dtype: torch.dtype, rows: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """The output and the gradients of q, k and v; with `rows` (B, H, Lq, 1) of those rows alone."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out = cluster_attention(*leaves, backend=backend, **options)
    assert out.dtype == dtype
    grad = tokens(*q.shape[:-1], v.shape[-1], seed=7).to(q.dtype).to(dtype)
    grad = grad if rows is None else grad * rows
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(q: Tensor, k: Tensor, v: Tensor, tolerance: float = FLOAT32, **options: Any) -> None:
    ours, exact = (
        results(q, k, v, backend, dtype, **options)
        for backend, dtype in (("triton", q.dtype), ("reference", torch.float64))
    )
    errors = {name: error(x, y) for name, x, y in zip(NAMES, ours, exact, strict=True)}
    assert all(value < tolerance for value in errors.values()), errors  # NaN is not below it


def compare_half(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """At most twice as far from float64 as plain torch in the same precision. Plain torch's and exact results.

    Blocks of queries that choose clusters may choose another one where two weigh the same to the digits that they have.
    Such a block shows in its output; there may be few of them, and the gradients compared are those of the others.
    """
    paths = (("triton", q.dtype), ("reference", q.dtype), ("reference", torch.float64))
    ours, plain, exact = (results(q, k, v, backend, dtype, **options) for backend, dtype in paths)
    if options.get("near") and options.get("response"):
        alike = agreeing_rows(ours[0], plain[0], exact[0], options["near_rows"])
        assert alike.float().mean() > 0.9
        assert error(ours[0], exact[0]) < 2 * error(plain[0], exact[0]) + 1e-4, "out"
        ours, plain, exact = (results(q, k, v, backend, dtype, alike, **options) for backend, dtype in paths)
        ours[0], plain[0], exact[0] = (x * alike for x in (ours[0], plain[0], exact[0]))
    for name, x, y, z in zip(NAMES, ours, plain, exact, strict=True):
        assert error(x, z) < 2 * error(y, z) + 1e-4, name
    return plain, exact


def agreeing_rows(ours: Tensor, plain: Tensor, exact: Tensor, n: int) -> Tensor:
    """Rows (B, H, Lq, 1) of blocks of n queries whose output is about as near to the exact one as plain torch's is."""

    def of_blocks(x: Tensor) -> Tensor:
        sums = (x.double() - exact).square().sum(-1), exact.square().sum(-1)
        blocks = [F.pad(s, (0, -s.shape[-1] % n)).unflatten(-1, (-1, n)).sum(-1) for s in sums]
        return (blocks[0] / blocks[1]).sqrt()

    alike = of_blocks(ours) < 1.15 * of_blocks(plain).amax()
    return alike.repeat_interleave(n, -1)[..., : exact.shape[-2], None]


def compare_full_size(
    B: int, H: int, Lq: int, Lk: int, D: int, E: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Kernels on a GPU: float32 near float64, half precision as above."""
    if dtype == torch.float32 and max(D, E) > 64:
        pytest.skip("float32 heads are at most 64 wide")
    q = tokens(B, H, Lq, D, dtype=dtype)
    k, v = tokens(B, H, Lk, D, mean=1, dtype=dtype, seed=1), tokens(B, H, Lk, E, mean=0.5, dtype=dtype, seed=2)
    if dtype == torch.float32:
        compare(q, k, v, 2e-5, **options)
    else:
        compare_half(q, k, v, **options)
