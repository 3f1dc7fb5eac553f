"""A budget of time for a study: whether a run would still end within it, judged by the runs so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cumulant.train import read_log
from cumulant.train.checkpoint import read_header


class Budget:
    """So many minutes from now on; None is no limit.

    `saw` learns the seconds per epoch of a configuration, `fits` says whether that many further epochs would end in
    time. A configuration not seen yet is taken to be as slow as the slowest one seen; before anything was seen, a run
    is started as long as there is time at all.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.began = clock, clock()
        self.seconds = None if minutes is None else 60 * minutes
        self.per_epoch: dict[str, float] = {}

    @property
    def left(self) -> float | None:
        """Seconds that remain; None without a limit."""
        return None if self.seconds is None else self.seconds - (self.clock() - self.began)

    def saw(self, configuration: str, epochs: float, seconds: float) -> None:
        """A run of that configuration took so long for so many epochs, its start and evaluation included."""
        if epochs > 0 and seconds > 0:
            self.per_epoch[configuration] = seconds / epochs

    def expected(self, configuration: str, epochs: float) -> float | None:
        """Seconds that so many epochs will take; None if nothing is known."""
        if not self.per_epoch:
            return None
        return epochs * self.per_epoch.get(configuration, max(self.per_epoch.values()))

    def fits(self, configuration: str, epochs: float) -> bool:
        """Whether so many epochs would end in time."""
        left = self.left
        if left is None:
            return True
        return left > 0 and (self.expected(configuration, epochs) or 0.0) <= left


def epochs_done(folder: Path) -> float:
    """Epochs from which the run in a folder will go on: all if it is finished, else those of its saved state."""
    import json

    try:
        if (folder / "result.json").is_file():
            return float(json.loads((folder / "result.json").read_text(encoding="utf-8"))["result"]["epochs"])
        step = json.loads(read_header(folder / "state.safetensors")["progress"])["step"]
        lines = [line for line in read_log(folder) if line["kind"] == "train" and line["step"] > 0]
    except (OSError, KeyError, TypeError, ValueError):
        return 0.0
    return step * lines[-1]["epoch"] / lines[-1]["step"] if lines else 0.0
