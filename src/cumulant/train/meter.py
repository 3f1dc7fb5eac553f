"""The training loss, added up on the device and read without making the device wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from .processes import Processes

CHECK_STEPS = 16  # a loss that is no number is noticed about so many steps later


class Meter:
    """Mean loss since the last reading. `request` copies it to the host in the background; `deliver` hands it over.

    A value that is not finite raises FloatingPointError as soon as it arrives.
    """

    def __init__(self, processes: Processes, complain: Callable[[int, float], Exception]) -> None:
        self.processes, self.complain = processes, complain
        self.total = torch.zeros((), device=processes.device)
        self.steps = 0
        self.waiting: deque[tuple[int, int, Tensor, torch.cuda.Event | None, Callable[[float], None] | None]] = deque()

    def add(self, loss: Tensor) -> None:
        """The loss of one step, which may still be on its way."""
        self.total += loss
        self.steps += 1

    def check(self, step: int) -> None:
        """Every `CHECK_STEPS` steps, have it seen whether the loss is still a number."""
        if step % CHECK_STEPS == 0:
            self.request(step)
        else:
            self.deliver()

    def request(self, step: int, then: Callable[[float], None] | None = None) -> None:
        """Have the mean so far checked and, with `then`, handed over and counted from 0 again."""
        value = self.processes.sum(self.total.detach().clone()) / self.processes.world
        event = None
        if value.is_cuda:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            host.copy_(value, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            value = host
        self.waiting.append((step, self.steps, value, event, then))
        if then is not None:
            self.total.zero_()
            self.steps = 0
        self.deliver()

    def deliver(self, *, wait: bool = False) -> None:
        """Hand over what has arrived; with `wait`, everything that was asked for."""
        while self.waiting:
            step, steps, value, event, then = self.waiting[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self.waiting.popleft()
            mean = float(value) / max(steps, 1)
            if not math.isfinite(mean):
                raise self.complain(step, mean)
            if then is not None:
                then(mean)
