"""One run: a backbone with its mechanisms trained for so many steps from one seed, and what it reaches then."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.studies.cab.backbones import Uses, fitted
from cumulant.studies.cab.tasks import Data, Task
from cumulant.train.optimise import adamw, apply, decay_groups, learning_rate, set_rate
from cumulant.train.stepping import PLAIN_CALLS, Recorded, quick_float32

LOOK = PLAIN_CALLS + 4, PLAIN_CALLS + 8  # steps between which the speed is taken


class NotReachedError(RuntimeError):
    """A run that came to no figure, with the reason."""


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


def trained(
    task: Task, data: Data, uses: Uses, seed: int, schedule: Schedule, device: str, limit: float | None = None
) -> dict[str, Any]:
    """Metrics on the test part, seconds, parameters. On a GPU in bfloat16, the step as one CUDA graph where it can be.

    `NotReachedError` where it would take more than `limit` seconds, or where the loss is not finite.
    """
    where, start = torch.device(device), time.perf_counter()
    size, ratio = fitted(task.build, task.size, uses)
    torch.manual_seed(seed)
    model = task.build(size, uses).to(where)
    parameters = list(model.parameters())
    cuda = where.type == "cuda"
    optimizer = adamw(decay_groups(model, schedule.weight_decay), lr=schedule.lr, beta2=0.98, recordable=cuda)
    dice = torch.Generator().manual_seed(seed)
    places = torch.randint(task.items(data), (schedule.epochs, task.batch), generator=dice).to(where)

    def half() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    def step(at: Tensor) -> Tensor:
        with half():
            loss = task.loss(model, data, at)
        loss.backward()
        apply(optimizer, parameters, 1.0)
        return loss.detach()

    update: Callable[[Tensor], Tensor] = Recorded(step) if cuda else step
    loss = torch.zeros(())
    with quick_float32(where, "bf16"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the step cannot be a CUDA graph")
        for number, at in enumerate(places):
            if number in LOOK:
                _wait(cuda)
                now = time.perf_counter()
                if number == LOOK[0]:
                    first = now
                elif limit is not None and (now - first) / (LOOK[1] - LOOK[0]) * schedule.epochs > limit:
                    whole = (now - first) / (LOOK[1] - LOOK[0]) * schedule.epochs
                    raise NotReachedError(
                        f"{schedule.epochs} steps would take {whole:,.0f} s, the limit is {limit:g} s"
                    )
            set_rate(optimizer, learning_rate(schedule, number + 1))
            loss = update(at)
        _wait(cuda)
        if not math.isfinite(loss.item()):
            raise NotReachedError("the loss is not finite")
        model.eval()
        seconds = time.perf_counter() - start
        with torch.no_grad(), half():
            metrics = task.score(model, data)
    if not all(map(math.isfinite, metrics.values())):
        raise NotReachedError("a figure of the test part is not finite")
    return {
        "metrics": metrics, "loss": loss.item(), "seconds": round(seconds, 2), "hidden": size.hidden,
        "parameters": sum(one.numel() for one in parameters), "ratio": round(ratio, 4),
        "graph": isinstance(update, Recorded) and update.graph is not None,
    }  # fmt: skip


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
