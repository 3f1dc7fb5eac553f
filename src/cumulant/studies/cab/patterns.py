"""The four uses of attention, a layer for each, and whether a mechanism really serves it: found by running it.

Shape legend: B sequences, n targets (queries), m sources (keys and values), C width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cumulant import zoo
from cumulant.grammar import parse
from cumulant.models.lm import causal
from cumulant.nn import create_layer
from cumulant.nn.heads.base import crossed
from cumulant.tensors import threads

SHORT = {"noncausal self": "NS", "causal self": "CS", "noncausal cross": "NC", "causal cross": "CC"}
PATTERNS = tuple(SHORT.values())
WIDTH, HEADS, BATCH, TARGETS, SOURCES = 128, 8, 4, 50, 100  # as in CAB's own test, there 512 wide
TOLERANCE = 1e-4  # on the sum of absolute differences


def layer_of(pattern: str, attention: str, width: int, heads: int, length: int, **options: Any) -> nn.Module:
    """The attention layer of a backbone in that pattern, for at most `length` tokens; no grid is told, since tables as
    large as a grid would break the rule of 10 % more parameters."""
    given: dict[str, Any] = {"attention": attention, "attention_options": None}
    if pattern == "CS":
        given = causal(given, length)
    elif pattern in ("NC", "CC"):
        given = crossed(given)
        name, own = parse(attention)
        last = zoo.get(name).length_option
        if pattern == "CC" and last is not None and last not in own:  # a prefix must give the same rows
            given["attention_options"] = {last: length, **(given["attention_options"] or {})}
    return create_layer("multihead", width, heads, **given, **options)


@functools.cache
def support(attention: str, width: int = WIDTH, heads: int = HEADS) -> dict[str, str]:
    """For each pattern "" where the layer serves it, else why not: CAB's test of prefixes, in float64."""
    found = {}
    for pattern in PATTERNS:
        torch.manual_seed(0)
        try:
            with torch.no_grad(), threads(1):
                longest = max(TARGETS, SOURCES)
                layer = layer_of(pattern, attention, width, heads, longest, dtype=torch.float64).eval()
                found[pattern] = _fault(pattern, layer, width)
        except (ValueError, TypeError, NotImplementedError) as error:
            found[pattern] = str(error)
    return found


def _fault(pattern: str, layer: nn.Module, width: int) -> str:
    """What is wrong with a layer in a pattern; "" for nothing."""
    x, source = (torch.randn(BATCH, count, width, dtype=torch.float64) for count in (TARGETS, SOURCES))
    other = source.clone()
    if pattern in ("NC", "CC"):
        other[:, -1] += 1
        if not _differ(layer(x, context=source)[:, 0], layer(x, context=other)[:, 0]):
            return "the first row does not see the last token of the other sequence"
    elif pattern == "NS":
        later = x.clone()
        later[:, -1] += 1
        if not _differ(layer(x)[:, 0], layer(later)[:, 0]):
            return "the first row does not see the last token"
    rows: dict[str, Callable[[Tensor], Tensor]] = {
        "CS": lambda part: layer(part, is_causal=True),
        "CC": lambda part: layer(part, context=source),
    }
    if pattern in rows:
        gap = prefix_gap(rows[pattern], x)
        if not gap < TOLERANCE:
            return f"a row changes by {gap:.1e} with the targets after it"
    return ""


def prefix_gap(rows: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The largest sum of absolute differences between row i of the first i targets alone and of all, x (B, n, C)."""
    whole = rows(x)
    return max((rows(x[:, :i])[:, -1] - whole[:, i - 1]).abs().sum().item() for i in (1, 2, 17, 32, x.shape[1] - 1))


def _differ(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() > 1e-9).any())
