"""What is measured: a mechanism with options of its own, written `agent+agents=16`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cumulant import grammar, zoo
from cumulant.call import Call, check_choice
from cumulant.zoo.registry import Mechanism

ALL = "all"
# Settings of a mechanism that are measured beside its default where all are asked for: the ends of its dial.
DIALS = ("cumulant3+full", "agent+agents=16", "cluster16+near=2", "cluster64+near=2")
PATTERNS = ("noncausal", "causal", "cross")


@dataclass(frozen=True)
class Variant:
    """A mechanism with options, called as q, k, v -> out."""

    label: str
    mechanism: Mechanism
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        """query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E); see `Call`."""
        return self.mechanism(query, key, value, **arguments, **self.options)

    def run(self, call: Call) -> Tensor:
        """The output for a call, (..., H, Lq, E)."""
        return self.mechanism.run(call, **self.options)

    def plain(self) -> Variant:
        """The same result by ordinary tensor operations: what is counted, and the reference of a fused kernel."""
        if "backend" not in self.mechanism.function_options:
            return self
        return Variant(self.label, self.mechanism, {**self.options, "backend": "reference"})

    def lacks(self, pattern: str) -> str | None:
        """Why it cannot be used in `pattern`, one of PATTERNS; None if it can."""
        try:
            self.mechanism.require(pattern)
        except ValueError as error:
            return str(error)
        return None


def parse(text: str) -> Variant:
    """`cumulant3+full` -> that mechanism with that option of its operator; the label has them in alphabetical order."""
    name, options = grammar.parse(text)
    mechanism = zoo.get(name)
    for option in options:
        if option not in mechanism.function_options:
            known = grammar.suggest(option, mechanism.function_options)
            raise ValueError(f"unknown option {option!r} in {text!r}; {known}")
    return Variant(grammar.write(name, options), mechanism, options)


def select(texts: Sequence[str], pattern: str = "noncausal") -> tuple[list[Variant], dict[str, str]]:
    """The variants that the texts name, and, where `all` was asked for, why others of them take no part.

    `all` stands for every mechanism and the settings in DIALS; whatever else is named must have the pattern.
    """
    check_choice("pattern", pattern, PATTERNS)
    if not texts:
        raise ValueError(f"name at least one mechanism, or {ALL!r}; known: {', '.join(zoo.names())}")
    chosen: dict[str, Variant] = {}
    left_out: dict[str, str] = {}
    for text in texts:
        if text == ALL:
            for variant in map(parse, [*zoo.names(), *filter(_exists, DIALS)]):
                reason = variant.lacks(pattern)
                if reason is None:
                    chosen.setdefault(variant.label, variant)
                else:
                    left_out[variant.label] = reason
            continue
        variant = parse(text)
        if reason := variant.lacks(pattern):
            raise ValueError(f"{text!r} cannot take part: {reason}")
        chosen.setdefault(variant.label, variant)
    return list(chosen.values()), left_out


def _exists(dial: str) -> bool:
    """Whether the mechanism is registered and takes these options."""
    name, options = grammar.parse(dial)
    return name in zoo.names() and options.keys() <= set(zoo.get(name).function_options)
