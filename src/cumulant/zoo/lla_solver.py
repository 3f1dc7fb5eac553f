"""Solvers of local linear attention: (C + ridge I) x = y for the covariances C of the keys of many rows at once.

Shape legend: ... leading dimensions, S keys, D key width, b queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..tracing import transformed

SOLVERS = ("auto", "direct", "cg")


class Settings(NamedTuple):
    """How the fit is computed; none of it changes the answer beyond `tolerance`."""

    scale: float
    is_causal: bool
    solver: str = "auto"
    iterations: int = 32
    tolerance: float = 1e-12
    precondition: bool = False
    block: int = 128

    def checked(self) -> Settings:
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, got {self.solver!r}")
        for name in ("iterations", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance}")
        return self


def solver_of(w: Tensor, k: Tensor, key_mean: Tensor, lam: Tensor, settings: Settings) -> Callable[[Tensor], Tensor]:
    """x -> (C + ridge I)^-1 x for the covariances C of k (..., S, D) under w (..., b, S)."""
    lam = lam.unsqueeze(-1)
    if settings.solver == "direct":
        matrix = _covariances(w, k, key_mean, settings.block) + torch.diag_embed(lam.expand(key_mean.shape))
        return lambda x: torch.linalg.solve(matrix, x.unsqueeze(-1)).squeeze(-1)

    def product(p: Tensor) -> Tensor:
        """C p + ridge p. The weighted (k_j - k_bar).p sum to 0, so that the second factor need not be centred."""
        along = p @ k.mT - (p * key_mean).sum(-1, keepdim=True)
        return (w * along) @ k + lam * p

    diagonal = (w @ k.square() - key_mean.square()).clamp(min=0) + lam if settings.precondition else None
    return lambda x: conjugate_gradients(
        product, x, iterations=settings.iterations, tolerance=settings.tolerance, diagonal=diagonal
    )


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
) -> Tensor:
    """x with product(x) = target for every row of target (..., D) at once; product is symmetric and positive.

    A row stops where its squared residual is at most tolerance * max(tolerance, its start). `diagonal` preconditions.
    """
    x, r = torch.zeros_like(target), target
    z = r if diagonal is None else r / diagonal
    p, rz = z, (r * z).sum(-1, keepdim=True)
    enough = tolerance * r.square().sum(-1, keepdim=True).clamp(min=tolerance)
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
    return x
