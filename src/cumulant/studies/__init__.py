"""Experiments from the literature: one engine, and one file for each study with its plan, its claim and its judgement.

A study's module has `CLAIM` or `CLAIMS`, `planned(...)` (its runs, see `plan` and `training`) and a function that makes
them with `runs.train_all` and says what they allow to be said. Nothing heavy is loaded here.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

STUDIES = {  # name -> its file in this folder
    "cumulant-vit": "cumulant_vit",  # cumulant reproduce
    "mechanisms": "mechanisms",  # cumulant bench train
    "heads": "heads",  # cumulant study heads
}


def names() -> list[str]:
    """The studies that there are."""
    return list(STUDIES)


def get(name: str) -> ModuleType:
    """The module of the study of that name."""
    if name not in STUDIES:
        from cumulant.grammar import suggest

        raise ValueError(f"unknown study {name!r}; {suggest(name, STUDIES)}")
    return import_module(f"cumulant.studies.{STUDIES[name]}")
