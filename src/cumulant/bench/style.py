"""How mechanisms look in every figure of the bench: one colour and one mark each, for matplotlib and plotly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cumulant import zoo
from cumulant.optional import needed

# Mid-tones that hold on white and on dark. Families share a hue: softmax violet, cumulants blue and green.
COLOURS = {
    "softmax": "#8a63d2",
    "softmax, matrix formed": "#b9a3e6",
    "linear": "#e0861a",
    "cumulant1": "#b0952f",
    "cumulant2": "#1b9e8f",
    "cumulant3": "#2b7de0",
    "cosformer": "#c0558f",
    "flow": "#6b8e23",
    "focused_linear": "#a0522d",
    "rala": "#d4526e",
    "mala": "#e377c2",
    "agent": "#17becf",
    "combiner": "#7a7a3a",
    "aaren": "#7f7f7f",
    "lla": "#c23b22",
    "hierarchical": "#4a6fa4",
    "cluster4": "#7fc8a9",
    "cluster16": "#2f9e6e",
    "cluster64": "#0b6e4f",
}
SPARE = "#555555"
MARKS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8", "H")
PLOTLY_MARKS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross", "X": "x",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "*": "star", "d": "diamond-tall",
    "8": "octagon", "H": "hexagon2",
}  # fmt: skip


def family(label: str) -> str:
    """The mechanism of a label: agent of agent:agents=16."""
    return label.split(":")[0]


def colour(label: str) -> str:
    return COLOURS.get(family(label), SPARE)


def mark(label: str) -> str:
    names = zoo.names()
    name = family(label)
    return MARKS[names.index(name) % len(MARKS)] if name in names else "o"


def dashed(label: str) -> bool:
    """A setting of a mechanism is drawn dashed beside its default form."""
    return ":" in label or label == "softmax, matrix formed"


def short(label: str) -> str:
    """A label that fits beside a point."""
    return label.replace("cumulant3:full=true", "cumulant3 full").replace(":", " ", 1)


def with_room(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points of a panel have room for their name above them: those before them in the list come first."""
    across, up = (max(values) - min(values) or 1.0 for values in zip(*points, strict=True))
    named: list[tuple[float, float]] = []
    found = []
    for x, y in points:
        found.append(all(abs(x - a) > 0.25 * across or abs(y - b) > 0.05 * up for a, b in named))
        if found[-1]:
            named.append((x, y))
    return found


def pyplot() -> Any:
    """matplotlib's pyplot for files, without a screen."""
    with needed("the plots need matplotlib", "train"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def save(figure: Any, path: Path) -> None:
    """The figure as .svg and .png beside each other, and closed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=110, bbox_inches="tight")
    pyplot().close(figure)
