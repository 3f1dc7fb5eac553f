"""What `cumulant study list` says: each study's claim, and how long it takes."""

from __future__ import annotations

import inspect
from textwrap import fill
from typing import Any

from cumulant.studies import get, names

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
