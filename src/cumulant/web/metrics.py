"""The numbers of `explain.summary` in words for people."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import explain
from . import schemas
from .problems import NotFiniteError

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


def plain(values: Tensor, digits: int = 6) -> Any:
    """Nested lists of rounded numbers."""
    if not bool(torch.isfinite(values).all()):
        raise NotFiniteError
    return values.double().mul(10**digits).round().div(10**digits).tolist()


def described(found: dict[str, Tensor], tokens: explain.TokenLayout) -> list[schemas.Metric]:
    """Metrics (layers, heads) as the page shows them, each with its value for a map that is the same everywhere."""
    uniform = explain.uniform_distance(tokens.grid)
    references = {
        **dict.fromkeys(("negative_mass", "gini"), 0.0),
        **dict.fromkeys(("distance", "distance_positive", "distance_signed"), uniform),
        **dict.fromkeys(("class_share", "self_share"), 1 / tokens.count),
        "tokens_used": float(tokens.count),
        "largest": 1.0,
    }
    words = {**METRICS, **{name: (name.replace("_", " "), "") for name in found if name not in METRICS}}
    return [
        schemas.Metric(
            name=name, title=title, meaning=meaning, values=plain(found[name], 4), reference=references.get(name)
        )
        for name, (title, meaning) in words.items()
        if name in found and not bool(found[name].isnan().all())
    ]
