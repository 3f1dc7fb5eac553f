"""The one judge of all studies: what an interval over seeds says about a claim.

A claim says that a number lies between two bounds. It is confirmed when the whole 95 % interval does, refuted when the
whole interval lies outside, and otherwise not told apart: a tie agrees with nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIRMED, REFUTED, OPEN, UNTESTED = "confirmed", "refuted", "not told apart", "not tested"
AGAIN = ", again"  # behind the name of a configuration: its A/A control, the same with other seeds

Measured = Mapping[str, Mapping[str, Any]]  # of one seed: configuration -> what was measured of it
Quantity = Callable[[Measured], float]


def judge(low: float | None, high: float | None, least: float = -math.inf, most: float = math.inf) -> str:
    """What the interval from `low` to `high` says about "between `least` and `most`"; no interval decides nothing."""
    if low is None or high is None:
        return OPEN
    if high < least or low > most:
        return REFUTED
    return CONFIRMED if low > least and high < most else OPEN


def half_width(error: float, freedom: float) -> float:
    """Half of a 95 % interval: Student's quantile times the standard error."""
    from scipy.stats import t  # type: ignore[import-untyped]  # comes with scikit-learn

    return float(t.ppf(0.975, freedom)) * error


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the mean; none of a single value, which has no spread."""
    if len(values) < 2:
        return None, None
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    margin = half_width(error, len(values) - 1) if error else 0.0
    return mean - margin, mean + margin


@dataclass(frozen=True)
class Statement:
    """One claim about one number, which is computed for every seed from what was measured with it.

    `exact`: nothing in it is drawn, so that one seed is enough. `chance`: the same number of two sets of runs of one
    configuration (the A/A control); a number that is not larger than its mean counts as a tie.
    """

    text: str
    quantity: Quantity
    least: float = -math.inf
    most: float = math.inf
    source: str = "published"  # or "known" (measured before), "derived", "new"
    exact: bool = False
    chance: Quantity | None = None

    @property
    def bounds(self) -> str:
        """What the number should be, in short."""
        if math.isinf(self.least):
            return f"< {self.most:.4g}"
        return f"> {self.least:.4g}" if math.isinf(self.most) else f"{self.least:.4g} to {self.most:.4g}"


@dataclass(frozen=True)
class Judged:
    """A statement with what was found."""

    text: str
    source: str
    bounds: str
    verdict: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    why: str = ""

    @property
    def found(self) -> str:
        """The number with its interval."""
        if self.mean is None or self.low is None or self.high is None or self.low == self.high:
            return "-" if self.mean is None else f"{self.mean:.4g}"
        return f"{self.mean:.4g} ({self.low:.4g} to {self.high:.4g})"


def judged(statement: Statement, seeds: Sequence[Measured]) -> Judged:
    """What these seeds say about a statement; a seed that lacks a configuration takes no part."""
    head = (statement.text, statement.source, statement.bounds)
    values, lacking = _values(statement.quantity, seeds)
    if not values:
        return Judged(*head, UNTESTED, why=f"{lacking} was not measured" if lacking else "no run is finished")
    mean = statistics.mean(values)
    low, high = (mean, mean) if statement.exact and len(values) == 1 else interval(values)
    verdict, why = judge(low, high, statement.least, statement.most), ""
    if low is None:
        why = "one seed says nothing about chance"
    if statement.chance is not None and verdict != OPEN:
        gaps, _ = _values(statement.chance, seeds)
        gap = abs(statistics.mean(gaps)) if gaps else 0.0
        if abs(mean) <= gap:
            verdict, why = OPEN, f"the control differs from itself by {gap:.4g}"
    return Judged(*head, verdict, mean, low, high, len(values), why)


def _values(quantity: Quantity, seeds: Sequence[Measured]) -> tuple[list[float], str]:
    values, lacking = [], ""
    for one in seeds:
        try:
            value = float(quantity(one))
        except KeyError as error:
            lacking = str(error.args[0])
            continue
        if math.isfinite(value):
            values.append(value)
    return values, lacking


def number(configuration: str, key: str) -> Quantity:
    """What was measured of a configuration under `key`."""
    return lambda of: of[configuration][key]


def ratio(first: str, second: str, key: str, other: str = "") -> Quantity:
    """What was measured of `first` under `key` over that of `second` under the same, or under `other`."""
    return quotient(number(first, key), number(second, other or key))


def quotient(first: Quantity, second: Quantity) -> Quantity:
    return lambda of: first(of) / second(of)


def difference(first: Quantity, second: Quantity) -> Quantity:
    return lambda of: first(of) - second(of)


def above(
    first: str, second: str, key: str, text: str = "", *, by: float = 0.0, source: str = "published", control: str = ""
) -> Statement:
    """`first` is above `second` in what was measured under `key`, seed by seed; `control`: whose repetition shows
    what chance does, see `AGAIN`."""
    chance = difference(number(control + AGAIN, key), number(control, key)) if control else None
    text = text or f"{first} above {second} in {key}"
    quantity = difference(number(first, key), number(second, key))
    return Statement(text, quantity, least=by, source=source, chance=chance)


def values(found: Judged) -> dict[str, Any]:
    """For JSON."""
    return {**asdict(found), "found": found.found}
