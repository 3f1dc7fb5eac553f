"""One run: a backbone with its mechanisms trained for so many steps from one seed, and what it reaches then."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from cumulant.studies.cab.backbones import Uses, fitted
from cumulant.studies.cab.tasks import Data, Task
from cumulant.studies.loop import Schedule, drawn, fit, half
from cumulant.train.stepping import PLAIN_CALLS, quick_float32

LOOK = PLAIN_CALLS + 4, PLAIN_CALLS + 8  # steps between which the speed is taken


class NotReachedError(RuntimeError):
    """A run that came to no figure, with the reason."""


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
    places = drawn(task.items(data), schedule.epochs, task.batch, seed, where)
    looked: list[float] = []

    def watch(number: int) -> None:
        """Stops a run that would take too long, as soon as its speed is known."""
        if number not in LOOK:
            return
        _wait(where)
        looked.append(time.perf_counter())
        whole = (looked[-1] - looked[0]) / (LOOK[1] - LOOK[0]) * schedule.epochs
        if limit is not None and whole > limit:
            raise NotReachedError(f"{schedule.epochs} steps would take {whole:,.0f} s, the limit is {limit:g} s")

    loss, graph = fit(model, lambda at: task.loss(model, data, at), places, schedule, watch)
    if not math.isfinite(loss):
        raise NotReachedError("the loss is not finite")
    model.eval()
    seconds = time.perf_counter() - start
    with torch.no_grad(), quick_float32(where, "bf16"), half(where):
        metrics = task.score(model, data)
    if not all(map(math.isfinite, metrics.values())):
        raise NotReachedError("a figure of the test part is not finite")
    return {
        "metrics": metrics, "loss": loss, "seconds": round(seconds, 2), "hidden": size.hidden,
        "parameters": sum(one.numel() for one in model.parameters()), "ratio": round(ratio, 4),
        "graph": graph,
    }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
