"""What the tests of the cluster kernels share: kernels and plain torch in float64, outputs and gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import NAMES, error, tokens
from torch import Tensor

from cumulant.cluster import cluster_attention, fields, near
from cumulant.cluster.alike import as_before
from cumulant.kernels.cluster import host
from cumulant.kernels.past import host as past

FLOAT32 = 3e-6
PATHS = ("triton", "reference", "reference")  # kernels, plain torch in the same precision, plain torch in float64


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
    rows = causal_rows_of_one_choice(q, k, v, **options) if options.get("is_causal") and options.get("near") else None
    ours, exact = (
        results(q, k, v, backend, dtype, rows, **options)
        for backend, dtype in (("triton", q.dtype), ("reference", torch.float64))
    )
    if rows is not None:
        ours[0], exact[0] = ours[0] * rows, exact[0] * rows
    errors = {name: error(x, y) for name, x, y in zip(NAMES, ours, exact, strict=True)}
    assert all(value < tolerance for value in errors.values()), errors  # NaN is not below it


def compare_half(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor | None = None, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """At most twice as far from float64 as plain torch in the same precision. Plain torch's and exact results.

    Who chooses clusters may choose another one where two weigh the same to the digits that they have: outputs hardly
    move then, and gradients do. There may be few of them, and what is compared are the others.
    `order` (B H, Lq): of queries by content, in which those of a block stand together.
    """
    dtypes = (q.dtype, q.dtype, torch.float64)
    alike = None
    response = options.get("response")
    if options.get("is_causal") and options.get("near"):
        alike = causal_rows_of_one_choice(q, k, v, **options)
    elif not options.get("is_causal") and (options.get("near") or (isinstance(response, int) and response > 0)):
        chosen = [choices(q, k, v, *path, **options) for path in zip(PATHS, dtypes, strict=True)]
        alike = rows_of_one_choice(chosen, q.shape[-2], options["near_rows"])
        assert alike.float().mean() > 0.9
        alike = alike if order is None else as_before(alike.to(q.dtype), order)
    ours, plain, exact = (
        results(q, k, v, backend, dtype, alike, **options) for backend, dtype in zip(PATHS, dtypes, strict=True)
    )
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


def causal_rows_of_one_choice(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Rows (B, H, Lq, 1) whose near clusters are the same by kernels, by plain torch and in float64.

    Kernels choose with the digits of float32; in 16 bits the means of clusters lose some where four tokens are alike by
    chance (`common_point`). So few rows choose otherwise, and only between clusters that weigh the same: the largest
    logarithms of masses in float64, and those of what the kernels chose, differ by no more than that.
    """
    named = named_by_kernels(q, k, v, **options)
    found = [named_by_plain_torch(q, k, v, dtype, **options) for dtype in (q.dtype, torch.float64)]
    scores = found[1][1]
    chosen = [F.pad(x, (0, named.shape[-1] - x.shape[-1]), value=-1) for x, _ in found]
    ours, exact = (scored(scores, x).sort(-1).values for x in (named, chosen[1]))
    apart = torch.where(ours == exact, 0, ours - exact).abs()  # both -inf where fewer clusters hold anything
    assert apart.max() < (2e-5 if q.dtype == torch.float32 else 1e-3), apart.max()
    same = [x.sort(-1).values == chosen[1].sort(-1).values for x in (named, chosen[0])]
    alike = torch.stack(same).all(0).all(-1, keepdim=True)
    assert (~alike).sum() <= 1 + alike.numel() / 1000, (~alike).sum()
    return alike


def named_by_kernels(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Near clusters of causal rows, (B, H, Lq, T), -1 for none."""
    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(past.attention, "run", _noting(past.attention.run, kept))
        cluster_attention(q, k, v, backend="triton", **options)
    return kept[0][6].view(*q.shape[:-1], -1).long()


def named_by_plain_torch(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    """The same, and what they were chosen by: the logarithm of the mass of every cluster, (B, H, Lq, K)."""
    scores: list[Tensor] = []
    found: list[Tensor] = []

    def noting(score: Tensor, count: int) -> Tensor:
        scores.append(score)
        found.append(largest(score, count))
        return found[-1]

    largest = near.largest
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(near, "largest", noting)
        cluster_attention(*(x.to(dtype) for x in (q, k, v)), backend="reference", **options)
    group, first = q.shape[1] // k.shape[1], options.get("offset", 0)
    blocks = [torch.cat(x, 2).unflatten(3, (group, -1)).transpose(2, 3) for x in (found, scores)]  # of rows
    start = first % blocks[0].shape[-2]
    which, score = (x.flatten(3, 4)[..., start : start + q.shape[-2], :].flatten(1, 2) for x in blocks)
    return which, score


def scored(scores: Tensor, which: Tensor) -> Tensor:
    """Scores (..., K) of clusters `which` (..., T), -inf of none."""
    return scores.gather(-1, which.clamp(min=0)).masked_fill(which < 0, float("-inf"))


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
