"""What a run tells while it goes on, its loss and its progress bar, and stopping it politely."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

import torch
from torch import Tensor

from .processes import Agreement, Processes

CHECK_STEPS = 16  # a loss that is no number is noticed about so many steps later
ONE_STOP = 1.0  # signals within so many seconds mean the same stop: one of the terminal, one passed on by a parent


def bar_of(what: str | None, total: float, unit: str, screen: IO[str] | None, **options: Any) -> Any:
    """A progress bar, redrawn often on a terminal and seldom in a file; none where there is no screen."""
    from tqdm import tqdm

    often = screen is not None and screen.isatty()
    shown: dict[str, Any] = {"file": screen, "disable": screen is None, "mininterval": 0.1 if often else 10}
    return tqdm(total=total, desc=what, unit=unit, dynamic_ncols=True, **shown, **options)


class Bar:
    """Items done, items per second and time left."""

    def __init__(self, screen: IO[str] | None, steps: int, done: int, batch: int) -> None:
        self.batch, self.said = batch, {}  # type: ignore[var-annotated]
        self.bar = bar_of(None, steps * batch, "item", screen, initial=done * batch, unit_scale=True)

    def update(self, steps: int = 1) -> None:
        """So many steps are done."""
        self.bar.update(steps * self.batch)

    def say(self, **values: str) -> None:
        """Values to show behind the bar, with those said before."""
        self.said.update(values)
        self.bar.set_postfix(self.said, refresh=False)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()


class Stop:
    """Ctrl-C or a SIGTERM asks the run to save its state after this step; another one, later, ends it at once.

    Of the processes of `team` any may be asked, or all, some of them twice (by torchrun and by the batch system): they
    hear of each other in `poll` and stop after the same step.
    """

    def __init__(self, team: Processes | None = None, active: bool = True) -> None:
        self.active = active and threading.current_thread() is threading.main_thread()  # others cannot catch signals
        self.team = team if team is not None and team.world > 1 else None
        self.asked = False
        self._heard: float | None = None

    def __enter__(self) -> Stop:
        if self.active:
            self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.team is not None:
            self.agreement = Agreement()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.active:
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._heard is not None and time.monotonic() > self._heard + ONE_STOP:
            raise KeyboardInterrupt
        self._heard = time.monotonic() if self._heard is None else self._heard
        self.asked = self.asked or self.team is None

    def poll(self) -> None:
        """After every step, in every process: see whether another one was asked."""
        if self.team is not None:
            self.asked = self.agreement.any(self._heard is not None) or self.asked

    def obey(self) -> None:
        """End here if that was asked for."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
    """A stop that comes within is obeyed at the end; the compiled code that reads files would tell it as a damage."""
    with Stop() as stop:
        yield
    stop.obey()


class Meter:
    """Mean loss since the last reading. `request` copies it to the host in the background; `deliver` hands it over.

    A value that is not finite raises FloatingPointError as soon as it arrives. Added up in float64 and told in the
    digits of float32, it is the same wherever a run was stopped and its sum was shared anew among the processes.
    """

    def __init__(self, processes: Processes, complain: Callable[[int, float], Exception]) -> None:
        self.processes, self.complain = processes, complain
        self.total = torch.zeros((), device=processes.device, dtype=torch.float64)
        self.steps = 0
        self.waiting: deque[tuple[int, int, Tensor, torch.cuda.Event | None, Callable[[float], None] | None]] = deque()

    def add(self, loss: Tensor) -> None:
        """The loss of one step, which may still be on its way."""
        self.total += loss
        self.steps += 1

    def shared(self) -> Tensor:
        """The sum so far, its mean over the processes. All of them must ask at the same time."""
        return self.processes.sum(self.total.detach().clone()) / self.processes.world

    def check(self, step: int) -> None:
        """Every `CHECK_STEPS` steps, have it seen whether the loss is still a number."""
        if step % CHECK_STEPS == 0:
            self.request(step)
        else:
            self.deliver()

    def request(self, step: int, then: Callable[[float], None] | None = None) -> None:
        """Have the mean so far checked and, with `then`, handed over and counted from 0 again."""
        value = self.shared()
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
            mean = (value / max(steps, 1)).float().item()
            if not math.isfinite(mean):
                raise self.complain(step, mean)
            if then is not None:
                then(mean)
