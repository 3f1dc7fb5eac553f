"""What is measured: a mechanism with options of its own, written `name` or `name:option=value:option=value`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cumulant import zoo
from cumulant.zoo.grammar import json_or_word, suggest
from cumulant.zoo.registry import Mechanism

ALL = "all"
# Settings of a mechanism that are measured beside its default where all are asked for: the ends of its dial.
DIALS = ("cumulant3:full=true", "agent:agents=16", "cluster16:near=2", "cluster64:near=2")
PATTERNS = ("noncausal", "causal", "cross")


@dataclass(frozen=True)
class Variant:
    """A mechanism with options, called as q, k, v -> out; `label` is how it was written."""

    label: str
    mechanism: Mechanism
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Tensor:
        """query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E)."""
        # Some look at the grid in their module only (a convolution), not in the operator.
        looks = "grid" in inspect.signature(self.mechanism.function).parameters
        place: dict[str, Any] = {"grid": grid, "prefix": prefix} if looks else {}
        return self.mechanism(query, key, value, key_mask=key_mask, is_causal=is_causal, **place, **self.options)

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


def parse(text: str, *, layer: bool = False) -> Variant:
    """`cumulant3:full=true` -> that mechanism with that option; values are JSON where they are JSON.

    Options are those of the operator or, with `layer`, those of a layer that holds the mechanism.
    """
    name, *words = text.split(":")
    if "+" in name:
        raise ValueError(f"options of a mechanism are written name:option=value here, got {text!r}")
    mechanism = zoo.get(name)
    known = mechanism.options if layer else mechanism.function_options
    options: dict[str, Any] = {}
    for word in words:
        option, sign, value = word.partition("=")
        if not option or not sign:
            raise ValueError(f"options of a mechanism are written name:option=value, got {text!r}")
        if option not in known:
            raise ValueError(f"unknown option {option!r} in {text!r}; {suggest(option, list(known))}")
        options[option] = json_or_word(value)  # none is a word here: combiner has an option with that value
    return Variant(text, mechanism, options)


def select(texts: Sequence[str], pattern: str = "noncausal") -> tuple[list[Variant], dict[str, str]]:
    """The variants that the texts name, and, where `all` was asked for, why others of them take no part.

    `all` stands for every mechanism and the settings in DIALS; whatever else is named must have the pattern.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}, got {pattern!r}")
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
        chosen.setdefault(text, variant)
    return list(chosen.values()), left_out


def _exists(dial: str) -> bool:
    """Whether the mechanism is registered and takes these options."""
    name, *words = dial.split(":")
    return name in zoo.names() and {w.split("=")[0] for w in words} <= set(zoo.get(name).function_options)
