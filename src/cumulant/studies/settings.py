"""What a user may choose for `cumulant reproduce`. No heavy import: the command line shows its help from this."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Reproduce:
    """Compare attention mechanisms on handwritten digits, as the cumulant-attention paper does on ImageNet-100.

    Trains the same small vision transformer with each mechanism and several seeds, then measures the error against
    softmax and the cost on this machine. Ends with a table and one self-contained page, report.html. Finished runs
    are kept, so a stopped command goes on where it was when it is given again.

    Example: cumulant reproduce

    Example: cumulant reproduce --attention softmax cumulant3 --seeds 3 --epochs 10 --out runs/quick
    """

    attention: tuple[str, ...] = ("softmax", "linear", "cumulant2", "cumulant3")
    """Mechanisms to compare, by the names that `cumulant list` prints."""
    seeds: int = 5
    """Training runs per mechanism. The control, softmax once more with other seeds, has as many."""
    epochs: int = 20
    """Passes over the training images in each run."""
    out: Path = Path("runs/digits")
    """Folder for report.html, results.json and the finished runs."""
    workers: int = 2
    """Training runs at the same time, one processor core each. The results do not depend on it."""
    fresh: bool = False
    """Train every run anew, also those that are finished."""
    report_only: bool = False
    """Only write report.html again, from the results.json in the folder."""
    json: bool = False
    """Print the results as JSON instead of the table."""

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not self.attention:
            raise ValueError("attention must name at least one mechanism, got none")
        if len(set(self.attention)) < len(self.attention):
            raise ValueError(f"attention must name each mechanism once, got {' '.join(self.attention)}")

    @property
    def baseline(self) -> str:
        """The mechanism that the control repeats."""
        return "softmax" if "softmax" in self.attention else self.attention[0]

    def command(self) -> str:
        """The command line that gives these results. Where they are written does not belong to it."""
        words = ["cumulant", "reproduce"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name not in ("attention", "seeds", "epochs", "workers"):
                continue
            words.append(f"--{field.name}")
            words.extend(value if isinstance(value, tuple) else [str(value)])
        return shlex.join(words)
