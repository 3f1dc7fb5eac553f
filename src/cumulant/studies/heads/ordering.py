"""What a paper's ordering is made of: configurations, how one of them is measured, and what should come out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumulant.studies.statements import Statement, above, difference, number, quotient

Measure = Callable[[Mapping[str, Any], str, int, str], dict[str, Any]]  # of options, data, seed, device


@dataclass(frozen=True)
class Claim:
    """One link of an ordering; `statement` makes what the judge reads of it, for the configuration of the control."""

    statement: Callable[[str], Statement]


@dataclass(frozen=True)
class Ordering:
    """The ordering of a paper, on what it is tried here, and what is measured; the first name is the baseline."""

    names: Mapping[str, Mapping[str, Any]]  # of each configuration its options
    measure: Measure
    data: Mapping[str, str]  # by setting
    adapted: str  # how this differs from what the paper did
    claims: Sequence[Claim]
    columns: Sequence[str]  # of its table

    @property
    def baseline(self) -> str:
        return next(iter(self.names))

    @property
    def statements(self) -> list[Statement]:
        return [claim.statement(self.baseline) for claim in self.claims]


@dataclass(frozen=True)
class Links:
    """Claims about one figure: `better` is 1 where more is better and -1 where less is; `level` is how much worse still
    counts as not worse."""

    key: str
    better: int
    level: float = 0.0

    def better_than(self, first: str, second: str) -> Claim:
        """`first` is better than `second`, beyond what the control differs from itself by."""
        up, down = (first, second) if self.better > 0 else (second, first)
        text = f"{first} better than {second} in {self.key}"
        return Claim(lambda baseline: above(up, down, self.key, text, control=baseline))

    def not_worse(self, first: str, second: str) -> Claim:
        """`first` is worse than `second` by `level` at most: what a paper calls "at least as good"."""
        sign = self.better

        def statement(_: str) -> Statement:
            gap = difference(number(first, self.key), number(second, self.key))
            text = f"{first} at most {self.level:g} worse than {second} in {self.key}"
            return Statement(text, lambda of: sign * gap(of), least=-self.level)

        return Claim(statement)

    def fewer(self, first: str, second: str) -> Claim:
        """`first` has less than `second` of what is counted, not drawn."""
        gap = difference(number(second, self.key), number(first, self.key))
        text = f"{first} has less than {second} of {self.key}"
        return Claim(lambda _: Statement(text, gap, least=0, exact=True))


def falls(name: str, first: str, second: str) -> Claim:
    """Of one configuration the second figure is below the first."""
    gap = difference(number(name, first), number(name, second))
    return Claim(lambda _: Statement(f"{name}: {second} below {first}", gap, least=0))


def worse(name: str, key: str, than: str, least: float, most: float) -> Claim:
    """Of one configuration a figure is so many times another."""
    ratio = quotient(number(name, key), number(name, than))
    return Claim(lambda _: Statement(f"{name}: {key} {least:g} to {most:g} times {than}", ratio, least, most))


def folder(name: str) -> Path:
    """Where a data set lies: below $CUMULANT_DATA."""
    above_it = os.environ.get("CUMULANT_DATA")
    if not above_it:
        raise ValueError(f"this setting reads the data set {name}: set $CUMULANT_DATA to the folder that it lies in")
    place = Path(above_it).expanduser() / name
    if not place.is_dir():
        raise FileNotFoundError(f"{place} is not there: $CUMULANT_DATA must be the folder that {name} lies in")
    return place
