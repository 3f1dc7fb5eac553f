"""What a study consists of: its runs in the order in which they are made, with their seeds and the control, and the
budget of time that they have."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumulant.train.state import BEFORE, STATE, read_progress

CONTROL_SEED = 1000  # of the first control run: whatever the number of seeds, no run is both compared and control

Key = tuple[str, int]  # fingerprint, seed


@dataclass(frozen=True)
class Run:
    """One run of a study: enough to find its record. A kind of study adds what it takes to make it."""

    configuration: str
    seed: int
    role: str  # "compared" or "control"
    fingerprint: str  # of all that decides its outcome besides the seed and the code

    @property
    def key(self) -> Key:
        return self.fingerprint, self.seed

    @property
    def epochs(self) -> int:
        """How long it is, for the budget of time: in whatever `epochs_done` counts."""
        return 1

    @property
    def name(self) -> str:
        """Name of its files: letters, digits, dots, dashes and underscores only, so that any place takes it."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", self.configuration).strip("_") + mark(*self.key)

    def __str__(self) -> str:
        return f"{self.configuration}, seed {self.seed}"


def digest(values: Mapping[str, Any]) -> str:
    """A fingerprint of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def mark(fingerprint: str, seed: int) -> str:
    """The end of the name of a run's own files."""
    return f"-{seed}-{fingerprint[:8]}"


def seeded(
    names: Sequence[str], baseline: str, seeds: int, controls: int, first_control: int = CONTROL_SEED
) -> list[tuple[str, int, str]]:
    """(name, seed, role) of all runs; seed by seed, so that a stopped study has the same seeds of every one; then the
    baseline again with other seeds, the A/A control."""
    compared = [(name, seed, "compared") for seed in range(seeds) for name in names]
    return compared + [(baseline, seed, "control") for seed in range(first_control, first_control + controls)]


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
    try:
        if (folder / "result.json").is_file():
            return float(json.loads((folder / "result.json").read_text(encoding="utf-8"))["result"]["epochs"])
        states = [folder / name for name in (STATE, BEFORE) if (folder / name).is_file()]
        return read_progress(states[0]).epochs if states else 0.0
    except (OSError, KeyError, TypeError, ValueError):
        return 0.0
