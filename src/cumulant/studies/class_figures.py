"""Figures of the report about single classes: the accuracy of each, and what is taken for what."""

from __future__ import annotations

from html import escape
from typing import Any

from cumulant.studies.figures import Figure
from cumulant.studies.outcome import MANY_CLASSES
from cumulant.style import COLOURS, MARKS, layout, mark, palette, transparent


def short(name: str) -> str:
    """A class name for a narrow place: the first of several synonyms."""
    return (name.split(",")[0].strip() or name.strip())[:28]


def drawn(name: str) -> str:
    """A class name in a figure, where plotly would take what stands in angle brackets for markup."""
    return escape(short(name), quote=False)


def by_accuracy(results: dict[str, Any]) -> list[int]:
    """Classes in the order in which they are shown: as they are if few, else by the first configuration's accuracy."""
    classes = range(len(results["classes"]))
    if len(classes) <= MANY_CLASSES:
        return list(classes)
    shares = results["per_class"][results["attention"][0]]
    return sorted(classes, key=lambda i: -1 if shares[i] is None else shares[i], reverse=True)


def class_accuracy(results: dict[str, Any]) -> Figure:
    """Mean accuracy of every class, one mark per configuration."""
    order = by_accuracy(results)
    few = len(order) <= MANY_CLASSES
    names = [results["classes"][i] for i in order]
    colours = palette(results["attention"])
    data = []
    for configuration in results["attention"]:
        shares = results["per_class"][configuration]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": configuration,
                "x": list(range(len(order))),
                "y": [None if shares[i] is None else 100 * shares[i] for i in order],
                "text": [drawn(name) for name in names],
                "marker": {
                    "color": colours[configuration],
                    "size": 9 if few else 6,
                    "opacity": 0.85,
                    "symbol": MARKS[mark(configuration)],
                },
                "hovertemplate": "%{y:.1f} % %{text}" if not few else "%{y:.1f} %",
            }
        )
    ticks = {"tickvals": list(range(len(order))), "ticktext": [drawn(name) for name in names]}
    axis = (
        {**ticks, "automargin": True}
        if few
        else {"showticklabels": False, "ticks": "", "showgrid": False, "range": [-1, len(order)]}
    )
    title = "class" if few else f"{len(order)} classes, by the accuracy of {results['attention'][0]}"
    return {"data": data, "layout": layout(title, "test accuracy, %", height=380, xaxis=axis)}


def confusion(results: dict[str, Any]) -> Figure:
    """One heat map per configuration, of which the page shows one: share of a label's items by prediction."""
    names = [drawn(name) for name in results["classes"]]
    few = len(names) <= MANY_CLASSES
    places = [f"{name} ({i})" for i, name in enumerate(names)]  # short names may coincide
    data = []
    for configuration in results["attention"]:
        matrix = results["confusion"][configuration]
        shares = [[round(100 * cell / max(sum(row), 1), 2) for cell in row] for row in matrix]
        trace: dict[str, Any] = {
            "type": "heatmap",
            "name": configuration,
            "x": places,
            "y": places,
            "z": shares,
            "zmin": 0,
            "zmax": 100,
            # Mistakes are rare: most of the colours go to small shares. The numbers are read on all of them.
            "colorscale": [
                [0, transparent(COLOURS["cumulant3"], 0)],
                [0.02, transparent(COLOURS["cumulant3"], 0.18)],
                [0.1, transparent(COLOURS["cumulant3"], 0.35)],
                [0.4, transparent(COLOURS["cumulant3"], 0.55)],
                [1, transparent(COLOURS["cumulant3"], 0.8)],
            ],
            "showscale": False,
            "hovertemplate": f"%{{z:.1f}} % of %{{y}}<br>taken for %{{x}}<extra>{configuration}</extra>",
        }
        if few:
            trace["text"] = [[f"{cell:.0f}" if cell >= 0.5 else "" for cell in row] for row in shares]
            trace["texttemplate"] = "%{text}"
        data.append(trace)
    ticks = {"tickvals": places, "ticktext": names} if few else {"showticklabels": False, "ticks": ""}
    axis = {"type": "category", "showgrid": False, "constrain": "domain", "automargin": True, **ticks}
    upright = {**axis, "autorange": "reversed", "scaleanchor": "x"}
    return {
        "data": data,
        "layout": layout("taken for", "label", height=560, hovermode="closest", xaxis=axis, yaxis=upright),
    }
