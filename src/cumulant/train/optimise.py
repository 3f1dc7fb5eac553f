"""What every training loop here shares: the schedule of the rate, what decays, one step of AdamW, and
the moving average of the weights, which takes their place for evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.optim import AdamW

from .processes import local

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
