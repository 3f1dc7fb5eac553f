"""The pages of a study that measures: verdicts, tables and figures, each one file that fetches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant import style
from cumulant.train.files import write_atomically

TAGS = {"confirmed": "above", "refuted": "below"}  # the classes of report.css; all else is open
WHOLE = "page"  # has everything


def write(
    result: Mapping[str, Any], figures: Sequence[tuple[str, str]], folder: Path, views: Mapping[str, Sequence[str]]
) -> None:
    """Write page.html, and a page for each view with those of the `figures` (title, SVG) whose titles begin so."""
    shown = {name: [one for one in figures if one[0].startswith(tuple(starts))] for name, starts in views.items()}
    for name, own in {WHOLE: figures, **shown}.items():
        given = {"result": result, "figures": own, "view": "" if name == WHOLE else name, "pages": [WHOLE, *views]}
        filters = {"tag": lambda word: TAGS.get(word, "level")}
        text = style.page("studies", filters, "study.html.j2", plotly=False, **given)
        write_atomically(folder / f"{name}.html", text.encode())
