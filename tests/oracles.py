"""Independent answers: none of these shares code with the library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def softmax_taylor(q: Tensor, k: Tensor, v: Tensor, order: int, weights: Tensor | None = None) -> Tensor:
    """Taylor polynomial of degree order - 1 in t of softmax(t q k^T) v at t = 0, evaluated at t = 1.

    Nested forward-mode derivatives; q already carries the scale. Any order, for the full cumulant expansion.
    """

    def f(t: Tensor) -> Tensor:
        logits = t * (q @ k.mT)
        if weights is not None:
            logits = logits + weights.log()
        return torch.softmax(logits, -1) @ v

    def derivative(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda t: torch.func.jvp(g, (t,), (torch.ones_like(t),))[1]

    total, term, factorial = torch.zeros_like(f(torch.ones((), dtype=q.dtype))), f, 1.0
    for n in range(order):
        total = total + term(torch.zeros((), dtype=q.dtype)) / factorial
        term, factorial = derivative(term), factorial * (n + 1)
    return total


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    order: int,
    full: bool = False,
    weights: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    normalization: str = "mean",
) -> Tensor:
    """The printed formula, one query of one head at a time, in float64.

    q (B, Hq, Lq, D), k (B, H, Lk, D), v (B, H, Lk, E), weights (B, Lk). Tokens of weight 0 are dropped.
    """
    q, k, v = q.double(), k.double(), v.double()
    (B, Hq, Lq, D), (H, Lk) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    out = torch.zeros(B, Hq, Lq, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(Hq):
            for i in range(Lq):
                w = torch.ones(Lk, dtype=torch.float64) if weights is None else weights[b].double().clone()
                if is_causal:
                    w[i + 1 :] = 0
                seen = w > 0
                if not seen.any():
                    continue
                keys, values, share = k[b, h * H // Hq][seen], v[b, h * H // Hq][seen], w[seen] / w.sum()
                dk, dv = keys - share @ keys, values - share @ values
                x = q[b, h, i] * scale
                row = share @ values
                if order >= 2:
                    row = row + share * (dk @ x) @ dv
                if order == 3:
                    square = (dk @ x) ** 2 if full else (dk**2) @ (x**2)
                    row = row + 0.5 * share * square @ dv
                out[b, h, i] = row * (w.sum() if normalization == "sum" else 1)
    return out


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||; NaN anywhere gives NaN, which no bound accepts."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)).item()
