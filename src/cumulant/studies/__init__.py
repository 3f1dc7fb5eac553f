"""Experiments from the literature: one engine, and one file for each study with its plan, its claim and its judgement.

A study that measures has a `STUDY` (see `measuring`). One that trains classifiers has `CLAIM` or `CLAIMS`,
`planned(...)` (its runs, see `plan` and `training`) and functions that make them and say what they allow to be said.
Nothing heavy is loaded here.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from textwrap import fill
from types import ModuleType
from typing import Any

from ..grammar import Registry

# name -> its file in this folder
STUDIES = Registry("study", {
    "cumulant-vit": "cumulant_vit",  # also cumulant reproduce
    "mechanisms": "mechanisms",  # also cumulant bench train
    "heads": "heads",
    "deconstructing": "deconstructing",
    "attention-sink": "attention_sink",
    "random-features": "random_features",
    "universal-approximation": "universal_approximation",
    "pavlovian": "pavlovian",
    "position-bias": "position_bias",
    "visual-analytics": "visual_analytics",
    "in-context-linear-regression": "in_context_regression",
})  # fmt: skip


def names() -> list[str]:
    """The studies that there are: what `cumulant study` takes."""
    return list(STUDIES)


def get(name: str) -> ModuleType:
    """The module of the study of that name."""
    return import_module(f"cumulant.studies.{STUDIES.named(name)}")


WIDTH = 100


def rows() -> list[dict[str, Any]]:
    """Of every study its claim, where it is from, its settings and the seconds that the small one took."""
    found = []
    for name in names():
        module = get(name)
        study = getattr(module, "STUDY", None)
        if study is None:
            summary = inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]
            found.append({"name": name, "summary": summary, "paper": "", "settings": ["small"], "seconds": {}})
            continue
        found.append({"name": name, "summary": study.claim, "paper": study.paper, "settings": list(study.settings),
                      "seconds": dict(study.seconds)})  # fmt: skip
    return found


def times(seconds: dict[str, float]) -> str:
    """How long it took on each machine it was measured on."""
    return ", ".join(f"{minutes(taken)} on {machine}" for machine, taken in seconds.items()) or "not measured"


def minutes(seconds: float) -> str:
    """90 -> 1.5 min."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def listed() -> tuple[list[dict[str, Any]], str]:
    """The rows, and their text for a terminal."""
    every, lines = rows(), []
    for row in every:
        about = f"{row['summary']}" + (f" ({row['paper']})" if row["paper"] else "")
        lines += [row["name"], fill(about, WIDTH, initial_indent="  ", subsequent_indent="  ")]
        lines.append(f"  settings {', '.join(row['settings'])}; small: {times(row['seconds'])}")
    return every, "\n".join(lines)
