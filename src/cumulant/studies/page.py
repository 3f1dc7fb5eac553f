"""The page of a study that measures: verdicts, tables and figures, one file that fetches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant import style
from cumulant.train.files import write_atomically

TAGS = {"confirmed": "above", "refuted": "below"}  # the classes of report.css; all else is open


def write(result: Mapping[str, Any], figures: Sequence[tuple[str, str]], path: Path) -> None:
    """Write the page to `path`, whole or not at all; `figures`: title and SVG of each."""
    filters = {"tag": lambda word: TAGS.get(word, "level")}
    text = style.page("studies", filters, "study.html.j2", plotly=False, result=result, figures=figures)
    write_atomically(path, text.encode())
