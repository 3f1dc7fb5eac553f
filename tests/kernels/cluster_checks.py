"""What the tests of the cluster kernels share: kernels and plain torch in float64, outputs and gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernel_checks import NAMES, error, tokens
from torch import Tensor

from cumulant.cluster import cluster_attention, fields
from cumulant.kernels.cluster import host

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
    There may be few of them, and what is compared are the others. Causal rows choose with the digits of float32.
    """
    paths = (("triton", q.dtype), ("reference", q.dtype), ("reference", torch.float64))
    alike = None
    response = options.get("response")
    if not options.get("is_causal") and (options.get("near") or (isinstance(response, int) and response > 0)):
        chosen = [choices(q, k, v, backend, dtype, **options) for backend, dtype in paths]
        alike = rows_of_one_choice(chosen, q.shape[-2], options["near_rows"])
        assert alike.float().mean() > 0.9
    ours, plain, exact = (results(q, k, v, backend, dtype, alike, **options) for backend, dtype in paths)
    if alike is not None:
        ours[0], plain[0], exact[0] = (x * alike for x in (ours[0], plain[0], exact[0]))
    errors = {name: (error(x, z), error(y, z)) for name, x, y, z in zip(NAMES, ours, plain, exact, strict=True)}
    said = {name: f"{x:.2e}, {x / max(y, 1e-30):.2f} x plain torch's" for name, (x, y) in errors.items()}
    assert all(x < 2 * y + 1e-4 for x, y in errors.values()), said  # NaN is not below it
    return plain, exact


def choices(q: Tensor, k: Tensor, v: Tensor, backend: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Clusters that blocks of queries choose, near ones and those that respond: (B, H, blocks, count), sorted."""
    near, responding, kept = [], [], []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name, found in (("nearest", near), ("responding", responding)):
            patch.setattr(fields, name, _noting(getattr(fields, name), found))
        patch.setattr(host.attention, "run", _noting(host.attention.run, kept))
        cluster_attention(*(x.to(dtype) for x in (q, k, v)), backend=backend, **options)
    blocks = [torch.cat(x, 2) for x in (near, responding) if x]
    lists = [x for x in kept[0] if x.dtype == torch.int32] if kept else blocks
    return [x.view(*q.shape[:2], -1, x.shape[-1]).long().sort(-1).values for x in lists if x.numel()]


def _noting(function: Callable[..., Any], found: list[Any]) -> Callable[..., Any]:
    def noting(*args: Any, **options: Any) -> Any:
        found.append(function(*args, **options))
        return found[-1]

    return noting


def rows_of_one_choice(chosen: Sequence[Sequence[Tensor]], length: int, n: int) -> Tensor:
    """Rows (B, H, length, 1) of blocks of n queries for which all paths chose the same."""
    same = [(x == chosen[0][i]).all(-1) for lists in chosen[1:] for i, x in enumerate(lists)]
    alike = torch.stack(same).all(0)
    return alike.repeat_interleave(n, -1)[..., :length, None]


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
