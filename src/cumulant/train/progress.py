"""The progress bar of a run, and stopping it politely."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import IO, Any


class Bar:
    """Items done, items per second and time left; redrawn often on a terminal and seldom in a file."""

    def __init__(self, screen: IO[str] | None, steps: int, done: int, batch: int) -> None:
        from tqdm import tqdm

        self.batch, self.said = batch, {}  # type: ignore[var-annotated]
        self.bar = tqdm(
            total=steps * batch,
            initial=done * batch,
            unit="item",
            unit_scale=True,
            file=screen,
            disable=screen is None,
            dynamic_ncols=True,
            mininterval=0.2 if screen is not None and screen.isatty() else 10,
        )

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
    """Ctrl-C or a SIGTERM asks the run to save its state after this step; a second one ends it at once."""

    def __init__(self, active: bool = True) -> None:
        # Signals can be caught in the main thread only. Several processes could not agree on the step to stop at.
        self.active = active and threading.current_thread() is threading.main_thread()
        self.asked = 0

    def __enter__(self) -> Stop:
        if self.active:
            self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number

    def obey(self) -> None:
        """End here if that was asked for."""
        if self.asked:
            raise KeyboardInterrupt
