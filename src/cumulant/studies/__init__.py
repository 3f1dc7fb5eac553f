"""Experiments from the literature: one engine, and one file for each study with its plan, its claim and its judgement.

A study that measures has a `STUDY` (see `measuring`). One that trains classifiers has `CLAIM` or `CLAIMS`,
`planned(...)` (its runs, see `plan` and `training`) and functions that make them and say what they allow to be said.
Nothing heavy is loaded here.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

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
