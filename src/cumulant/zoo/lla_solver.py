"""Solvers of local linear attention: (C + ridge I) x = y for the covariances C of the keys of many rows at once.

Shape legend: ... leading dimensions, S keys, D key width, b queries of a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import check_choice, is_finite, whole
from ..tracing import transformed

SOLVERS = ("auto", "direct", "cg")
STEPS = 32  # of conjugate gradients before "auto" solves the rest directly
ROWS = 16  # that are then solved at a time, so that their matrices stay few


class Settings(NamedTuple):
    """How the fit is computed; none of it changes the answer beyond `tolerance`, or it is said.

    `solver` "auto" is conjugate gradients, and a direct solve of the rows that they leave short.
    """

    scale: float
    is_causal: bool
    solver: str = "auto"
    iterations: int | None = None
    tolerance: float = 1e-12
    precondition: bool = False
    block: int = 128

    def checked(self) -> Settings:
        check_choice("solver", self.solver, SOLVERS)
        for name in ("iterations", "block"):
            number = getattr(self, name)
            if not whole(number, 1) and not (number is None and name == "iterations"):
                raise ValueError(f"{name} must be at least 1, got {number!r}")
        number = self.tolerance
        if isinstance(number, bool) or not isinstance(number, int | float) or not (is_finite(number) and number >= 0):
            raise ValueError(f"tolerance must not be negative, got {number!r}; it is a finite number, 0 or more")
        return self


def solver_of(w: Tensor, k: Tensor, key_mean: Tensor, lam: Tensor, settings: Settings) -> Callable[[Tensor], Tensor]:
    """x -> (C + ridge I)^-1 x for the covariances C of k (..., S, D) under w (..., b, S)."""
    lam = lam.unsqueeze(-1)
    if settings.solver == "direct":
        matrix = _matrices(w, k, key_mean, lam, settings.block)
        return lambda x: torch.linalg.solve(matrix, x.unsqueeze(-1)).squeeze(-1)

    def product(p: Tensor) -> Tensor:
        """C p + ridge p. The weighted (k_j - k_bar).p sum to 0, so that the second factor need not be centred."""
        along = p @ k.mT - (p * key_mean).sum(-1, keepdim=True)
        return (w * along) @ k + lam * p

    diagonal = (w @ k.square() - key_mean.square()).clamp(min=0) + lam if settings.precondition else None
    iterations, tolerance = settings.iterations or STEPS, settings.tolerance

    def solve(x: Tensor) -> Tensor:
        found, short = conjugate_gradients(product, x, iterations=iterations, tolerance=tolerance, diagonal=diagonal)
        if short is None or not bool(short.any()):
            return found
        if settings.solver == "auto":
            return torch.where(short, _solved(w, k, key_mean, lam, x, settings.block), found)
        warnings.warn(
            f"lla: {int(short.sum())} of {short.numel()} rows ran out of iterations={iterations} and are off by more "
            'than their tolerance; raise iterations or ridge, pass precondition=True, or take solver="direct"',
            RuntimeWarning,
            stacklevel=2,
        )
        return found

    return solve


def _solved(w: Tensor, k: Tensor, key_mean: Tensor, lam: Tensor, x: Tensor, block: int) -> Tensor:
    """(C + ridge I)^-1 x directly, a few rows at a time."""
    parts = []
    for start in range(0, x.shape[-2], ROWS):
        w_rows, mean, ridge, target = (z[..., start : start + ROWS, :] for z in (w, key_mean, lam, x))
        matrix = _matrices(w_rows, k, mean, ridge, block)
        parts.append(torch.linalg.solve(matrix, target.unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts, -2)


def _matrices(w: Tensor, k: Tensor, key_mean: Tensor, lam: Tensor, block: int) -> Tensor:
    """C + ridge I, (..., b, D, D)."""
    return _covariances(w, k, key_mean, block) + torch.diag_embed(lam.expand(key_mean.shape))


def _covariances(w: Tensor, k: Tensor, key_mean: Tensor, block: int) -> Tensor:
    """C (..., b, D, D), from keys about their plain mean, so that little cancels. Cost: b S D^2."""
    origin = k.mean(-2, keepdim=True)
    k, mean = k - origin, key_mean - w.sum(-1, keepdim=True) * origin
    second: Tensor | float = 0.0
    for start in range(0, k.shape[-2], block):
        part = k[..., start : start + block, :]
        second = second + w[..., start : start + block] @ (part.unsqueeze(-1) * part.unsqueeze(-2)).flatten(-2)
    assert isinstance(second, Tensor)
    return second.unflatten(-1, (k.shape[-1], k.shape[-1])) - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    target: Tensor,
    *,
    iterations: int,
    tolerance: float = 1e-12,
    diagonal: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x with product(x) = target for every row of target (..., D) at once; product is symmetric and positive.

    A row stops where its squared residual is at most tolerance * max(tolerance, its start). `diagonal` preconditions.
    Also which rows ran out of steps, (..., 1), as far as their dtype can tell; None where nobody may look.
    """
    x, r = torch.zeros_like(target), target
    z = r if diagonal is None else r / diagonal
    p, rz = z, (r * z).sum(-1, keepdim=True)
    start = r.square().sum(-1, keepdim=True)
    enough = tolerance * start.clamp(min=tolerance)
    active = rz > 0
    # Looking whether all rows have stopped makes a GPU wait: rarely there, never in a traced graph.
    every = 0 if torch.compiler.is_compiling() or transformed() else 4 if target.is_cuda else 1
    for step in range(iterations):
        if every and step % every == 0 and not bool(active.any()):
            break
        y = product(p)
        a = torch.where(active, rz, 0) / torch.where(active, (p * y).sum(-1, keepdim=True), 1)
        x, r = x + a * p, r - a * y
        left = r.square().sum(-1, keepdim=True)
        active = active & (left > enough) & left.isfinite()
        z = r if diagonal is None else r / diagonal
        rz_new = (r * z).sum(-1, keepdim=True)
        p = z + torch.where(active, rz_new, 0) / torch.where(active, rz, 1) * p
        rz = rz_new
    if not every:
        return x, None
    rounding = (32 * torch.finfo(target.dtype).eps) ** 2 * start
    return x, active & (r.square().sum(-1, keepdim=True) > torch.maximum(enough, rounding))
