"""What a study consists of: its runs in the order in which they are made, with their seeds and the control."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        """How long it is, for the budget of time: in whatever `budget.epochs_done` counts."""
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
