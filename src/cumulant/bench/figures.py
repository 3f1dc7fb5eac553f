"""The plotly figures of the bench's page, as plain dictionaries made from the JSON files of its commands."""

from __future__ import annotations

from typing import Any

from ..style import MARKS, colour, dashed, layout, logarithmic, mark, transparent
from .plots import panels, with_room

Figure = dict[str, Any]
ERROR_TICKS = {"type": "log", "tickvals": [1e-4, 1e-3, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100]}
SHARE_TICKS = {"type": "log", "tickvals": [1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100]}


def figures(results: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """All figures by the id of their place on the page; `results` has the keys error, efficiency, train, or some."""
    found: dict[str, Figure] = {}
    if "error" in results:
        found |= {f"error-{i}": error_against_work(group) for i, group in enumerate(panels(results["error"]))}
    if "efficiency" in results:
        for phase in ("forward", "both"):
            found[f"time-{phase}"] = against_length(results["efficiency"], phase, "time")
            found[f"memory-{phase}"] = against_length(results["efficiency"], phase, "memory")
    if "train" in results:
        found["accuracy-flops"] = accuracy(results["train"], "flops", "MFLOP an item, forward", 1e-6)
        found["accuracy-throughput"] = accuracy(results["train"], "throughput", "training items a second", 1.0)
    return found


def _marker(label: str, size: int) -> dict[str, Any]:
    symbol = MARKS[mark(label)] + ("-open" if dashed(label) else "")
    return {"color": colour(label), "symbol": symbol, "size": size}


def error_against_work(group: dict[str, Any]) -> Figure:
    """Centred error against work as a share of softmax's; the stepped line is the front."""
    rows = [row for row in group["rows"] if row.get("centred")]
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["of_softmax"])
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "x": [row["of_softmax"] for row in front],
            "y": [row["centred"] for row in front], "line": {"shape": "hv", "color": "#999999", "width": 1.5},
            "hoverinfo": "skip", "showlegend": False,
        }
    ]  # fmt: skip
    data += [
        {
            "type": "scatter", "mode": "markers+text" if row["front"] else "markers", "name": row["variant"],
            "x": [row["of_softmax"]], "y": [row["centred"]], "text": [row["variant"]],
            "textposition": _above_or_below(front, row), "textfont": {"size": 11}, "showlegend": False,
            "marker": _marker(row["variant"], 12 if row["front"] else 8),
            "hovertemplate": f"%{{x:.3~g}} of softmax's work, error %{{y:.3~g}}<extra>{row['variant']}</extra>",
        }
        for row in rows
    ]  # fmt: skip
    shape = layout("work, share of softmax's", "error (1: the mean of the values)", height=430, hovermode="closest",
                   xaxis=SHARE_TICKS, yaxis=ERROR_TICKS)  # fmt: skip
    return {"data": data, "layout": shape}


def _above_or_below(front: list[dict[str, Any]], row: dict[str, Any]) -> str:
    """In turn: neighbours on a flat front would write over each other."""
    return "bottom center" if row in front and front.index(row) % 2 == 1 else "top center"


def against_length(result: dict[str, Any], phase: str, quantity: str) -> Figure:
    """Median milliseconds with quartiles, or peak MiB, against the number of tokens."""
    data = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["name"] == name and phase in row["milliseconds"]]
        if not rows:
            continue
        trace: dict[str, Any] = {
            "type": "scatter", "mode": "lines+markers", "name": name, "x": [row["length"] for row in rows],
            "line": {"color": colour(name), "width": 3 if name.startswith("softmax") else 1.5,
                     "dash": "dash" if dashed(name) else "solid"},
            "marker": _marker(name, 6), "hovertemplate": "%{y:.3~g}",
        }  # fmt: skip
        if quantity == "time":
            median, low, high = zip(*(row["milliseconds"][phase] for row in rows), strict=True)
            trace["y"] = list(median)
            trace["error_y"] = {
                "type": "data", "symmetric": False, "array": [b - a for a, b in zip(median, high, strict=True)],
                "arrayminus": [a - b for a, b in zip(median, low, strict=True)], "thickness": 1, "width": 2,
            }  # fmt: skip
        else:
            trace["y"] = [row["peak_bytes"][phase] / 2**20 for row in rows]
        data.append(trace)
    y = "milliseconds a call" if quantity == "time" else "peak memory, MiB"
    ticks = {"type": "log", "tickvals": result["setting"]["lengths"], "tickformat": ",d"}
    return {"data": data, "layout": layout("tokens L", y, height=520, xaxis=ticks, yaxis=logarithmic(tickformat="~g"))}


def accuracy(result: dict[str, Any], key: str, label: str, factor: float) -> Figure:
    """Top-1 accuracy against a cost; the band is the range of the baseline's runs."""
    data: list[dict[str, Any]] = []
    rows = [row for row in result["ranking"] if row[key] is not None]
    named = with_room([(row[key], row["mean"]) for row in rows]) if rows else []
    for row, has_room in zip(rows, named, strict=True):  # the others say their names when they are pointed at
        y = 100 * row["mean"]
        data.append(
            {
                "type": "scatter", "mode": "markers+text" if has_room else "markers", "name": row["variant"],
                "x": [factor * row[key]], "y": [y],
                "text": [row["variant"]], "textposition": "top center", "textfont": {"size": 11}, "showlegend": False,
                "marker": _marker(row["variant"], 11),
                "error_y": {"type": "data", "symmetric": False, "array": [100 * row["high"] - y],
                            "arrayminus": [y - 100 * row["low"]], "thickness": 1, "width": 3},
                "hovertemplate": f"%{{y:.2f}} % at %{{x:.4~g}}<extra>{row['variant']}</extra>",
            }
        )  # fmt: skip
    shape = layout(label, "top-1 accuracy, %", height=430, hovermode="closest")
    control = result["control"]
    if control["low"] is not None:
        shape["shapes"] = [
            {
                "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": 100 * control["low"], "layer": "below",
                "y1": 100 * control["high"], "fillcolor": transparent(colour(result["baseline"]), 0.14),
                "line": {"width": 0},
            }
        ]  # fmt: skip
    return {"data": data, "layout": shape}
