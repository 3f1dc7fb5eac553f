"""Muon: the matrices of the blocks move along orthogonalised momentum, everything else is AdamW.

For a matrix W (A, B) with gradient G: M <- 0.95 M + 0.05 G, then W <- (1 - lr decay) W - lr 0.2 sqrt(max(A, B)) U.
U is 0.05 G + 0.95 M (Nesterov) with its singular values brought near 1 by five Newton-Schulz steps. The factor gives
the update the size that AdamW's has, so that both share one rate and one decay. Cost a step: 15 products of matrices
of one shape at once, A B min(A, B) each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .optimise import decay_groups

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of X, X X^T X and (X X^T)^2 X: steepest at 0 that stays bounded


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, A, B) with singular values between about 0.7 and 1.2 and the same singular vectors."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.AdamW):
    """Groups with `orthogonal=True` hold matrices and move as above, the others by AdamW. Momentum is `exp_avg`."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__([{"orthogonal": False, **group} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        every = self.param_groups
        self.param_groups = [group for group in every if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = every
        for group in every:
            if group["orthogonal"]:
                for alike in _by_shape(group["params"]):
                    self._move(alike, group["lr"], group["weight_decay"])
        return loss

    def _move(self, matrices: list[nn.Parameter], lr: float | Tensor, decay: float) -> None:
        """One step of matrices of one shape."""
        for matrix in matrices:
            if "exp_avg" not in self.state[matrix]:
                self.state[matrix]["exp_avg"] = torch.zeros_like(matrix)
        weights: list[Tensor] = [*matrices]
        momenta = [self.state[matrix]["exp_avg"] for matrix in matrices]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        update = orthogonal(torch.lerp(torch.stack(gradients), torch.stack(momenta), MOMENTUM))
        update *= lr * (0.2 * max(update.shape[-2:]) ** 0.5)
        torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_sub_(weights, update.unbind())


def _by_shape(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that have a gradient, parameters of one shape together."""
    shapes: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            shapes.setdefault(parameter.shape, []).append(parameter)
    return list(shapes.values())


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices of the linear layers of the blocks apart; the rest as `decay_groups` has it."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    inside = {layer.weight for name, layer in layers.items() if "blocks." in name and layer.weight.requires_grad}
    if not inside:
        raise ValueError(
            f'optimizer="muon" needs linear layers in `blocks`, {type(model).__name__} has none; use "adamw"'
        )
    decayed, kept = decay_groups(model, weight_decay)
    matrices = [p for p in decayed["params"] if p in inside]
    decayed["params"] = [p for p in decayed["params"] if p not in inside]
    return [decayed, kept, {"params": matrices, "weight_decay": weight_decay, "orthogonal": True}]
