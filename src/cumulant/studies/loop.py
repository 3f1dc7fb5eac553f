"""One small model trained on tensors that lie on its device: on a GPU in bfloat16, the step as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.train.optimise import adamw, apply, decay_groups, learning_rate, set_rate
from cumulant.train.stepping import Recorded, quick_float32


@dataclass(frozen=True)
class Schedule:
    """Steps with a linear warm-up and a cosine, as `train.optimise.learning_rate` reads them."""

    epochs: int  # steps
    lr: float = 2e-3
    min_lr: float = 0.0
    weight_decay: float = 0.01

    @property
    def warmup_epochs(self) -> float:
        return self.epochs / 10


def half(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def drawn(items: int, steps: int, batch: int, seed: int, device: torch.device) -> Tensor:
    """Which items each step learns from, (steps, batch); the same for every device."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(items, (steps, batch), generator=dice).to(device)


def fit(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    places: Tensor,
    schedule: Schedule,
    watch: Callable[[int], None] | None = None,
) -> tuple[float, bool]:
    """Train what has gradients by loss(places of a step); the last loss, and whether the step was a CUDA graph.

    `watch` is told the number of each step before it is made.
    """
    device, cuda = places.device, places.device.type == "cuda"
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [group for group in decay_groups(model, schedule.weight_decay) if group["params"]]
    optimizer = adamw(groups, lr=schedule.lr, beta2=0.98, recordable=cuda)

    def step(at: Tensor) -> Tensor:
        with half(device):
            found = loss(at)
        found.backward()
        apply(optimizer, parameters, 1.0)
        return found.detach()

    update: Callable[[Tensor], Tensor] = Recorded(step) if cuda else step
    last = torch.zeros(())
    with quick_float32(device, "bf16"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the step cannot be a CUDA graph")
        for number, at in enumerate(places):
            if watch is not None:
                watch(number)
            set_rate(optimizer, learning_rate(schedule, number + 1))
            last = update(at)
    return last.item(), isinstance(update, Recorded) and update.graph is not None
