"""What every training loop here shares: the schedule of the rate, what decays, one step of AdamW or of Muon,
and the moving average of the weights, which takes their place for evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from .processes import local

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of X, X X^T X and (X X^T)^2 X: steepest at 0 that stays bounded
# Learned tables and factors, by the end of their name: they are no matrices, whatever their shape.
TABLES = ("cls_token", "dist_token", "pos_embed", "temperature", "bias")


class Schedule(Protocol):
    """The part of a recipe that decides the learning rate."""

    @property
    def epochs(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def warmup_epochs(self) -> float: ...


def learning_rate(recipe: Schedule, epoch: float) -> float:
    """Rate after that (fractional) number of epochs: linear warm-up, then a cosine down to min_lr."""
    if epoch < recipe.warmup_epochs:
        return recipe.lr * epoch / recipe.warmup_epochs
    done = (epoch - recipe.warmup_epochs) / max(recipe.epochs - recipe.warmup_epochs, 1e-9)
    return recipe.min_lr + 0.5 * (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups: matrices and convolutions decay; biases, norms, tokens, positions and factors do not."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer_weight = name.endswith("weight") and parameter.ndim >= 2
            is_matrix = layer_weight or sum(side > 1 for side in parameter.shape) >= 2
            (decayed if is_matrix and not name.endswith(TABLES) else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def adamw(groups: list[dict], *, lr: float, beta2: float, recordable: bool = False, kind: type[AdamW] = AdamW) -> AdamW:
    """AdamW, or a `kind` of it, over parameter groups, as one fused kernel where there is one.

    `recordable`: on a GPU, in such a way that a step can be part of a CUDA graph; the rate then lies on the device.
    """
    rate = torch.tensor(lr, device=groups[0]["params"][0].device) if recordable else lr
    return kind(groups, lr=rate, betas=(0.9, beta2), fused=True, capturable=recordable)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the steps to come."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], rate: float, clip: float | None) -> None:
    """`apply` with that rate."""
    set_rate(optimizer, rate)
    apply(optimizer, parameters, clip)


def apply(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], clip: float | None) -> None:
    """Apply the gradients that are there, clipped to a norm of `clip`; then drop them.

    Nothing here waits for the device.
    """
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def descend(
    optimizer: torch.optim.Optimizer, losses: Iterable[Tensor], clip: float | None = None, schedule: Any = None
) -> None:
    """A step along each of the losses; each is asked for when the step before it is made."""
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    for loss in losses:
        loss.backward()
        apply(optimizer, parameters, clip)
        if schedule is not None:
            schedule.step()


def set_drop_path(model: nn.Module, rate: float) -> None:
    """Set the model's stochastic depth; an error that says so if it has none."""
    setter = getattr(model, "set_drop_path", None)
    if setter is None:
        raise ValueError(f"drop_path={rate} in the recipe, but {type(model).__name__} has no set_drop_path")
    setter(rate)


class Average:
    """a <- d a + (1 - d) w after every step, with d = min(decay, (1 + step) / (10 + step)).

    The lower decay of the first steps forgets the random initial weights. Cost: one pass over the weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = [local(p) for p in model.parameters()]
        self.average = [w.detach().clone() for w in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after that many steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, self.weights, 1 - decay)

    @torch.no_grad()
    def take(self) -> None:
        """Start again from the weights as they are."""
        torch._foreach_copy_(self.average, self.weights)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is held the model has the averaged weights; afterwards its own again, bit for bit."""
        with torch.no_grad():
            own = [w.clone() for w in self.weights]
            torch._foreach_copy_(self.weights, self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, own)


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
    """Groups with `orthogonal=True` hold matrices and move along orthogonalised momentum, the others by AdamW.

    For a matrix W (A, B) with gradient G: M <- 0.95 M + 0.05 G, then W <- (1 - lr decay) W - lr 0.2 sqrt(max(A, B)) U.
    U is 0.05 G + 0.95 M (Nesterov) with its singular values brought near 1 by five Newton-Schulz steps. The factor
    gives the update the size that AdamW's has, so that both share one rate and one decay. Momentum is `exp_avg`. Cost a
    step: 15 products of matrices of one shape at once, A B min(A, B) each.
    """

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
