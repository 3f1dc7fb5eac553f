"""The numbers of `explain.summary` in words for people."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import explain
from .engine_values import plain

# name: (title, meaning)
METRICS: dict[str, tuple[str, str]] = {
    "negative_mass": (
        "negative mass",
        "Sum of the sizes of the negative weights, mean over queries; softmax has none.",
    ),
    "distance": ("mean distance", "How far the head looks, in patches: mean hop weighted by |w|."),
    "tokens_used": ("tokens used", "Over how many tokens a row is spread: (sum |w|)² / sum w²."),
    "entropy": ("entropy", "Entropy in nats of |w| / sum |w|, mean over queries."),
    "largest": ("largest weight", "The greatest |w| of the head, times the number of tokens."),
    "class_share": ("share of the class token", "Mean weight that patches give to the class token."),
    "self_share": ("share of itself", "Mean weight that patches give to themselves."),
    "sink_patch": ("strongest patch", "Share of all attention that the most watched patch receives."),
    "sink_class": ("class token as a sink", "Share of all attention that the class token receives."),
    "gini": ("inequality of keys", "Gini coefficient of the attention that keys receive: 0 all alike, 1 one has all."),
    "distance_positive": ("mean distance, positive part", "As mean distance, of the positive weights alone."),
    "distance_signed": ("mean distance, signed", "With signed weights: far negative weights shorten it; no bounds."),
}


def describe(name: str, values: Tensor, tokens: int, grid: tuple[int, ...]) -> dict[str, Any]:
    """A metric (layers, heads) as the page shows it, with its value for a map that is the same everywhere."""
    title, meaning = METRICS.get(name, (name.replace("_", " "), ""))
    uniform = explain.uniform_distance(grid)
    references = {
        "negative_mass": 0.0,
        "distance": uniform,
        "distance_positive": uniform,
        "distance_signed": uniform,
        "tokens_used": float(tokens),
        "largest": 1.0,
        "class_share": 1 / tokens,
        "self_share": 1 / tokens,
        "gini": 0.0,
    }
    return {
        "name": name,
        "title": title,
        "meaning": meaning,
        "values": plain(values, 4),
        "reference": references.get(name),
    }
