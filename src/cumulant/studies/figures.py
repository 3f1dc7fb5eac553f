"""The plotly figures of the report, as plain dictionaries {"data": [...], "layout": {...}} made from results.json.

Text and grid colours are left to the page, which sets them for light or dark when it draws.
"""

from __future__ import annotations

import statistics
from typing import Any

from cumulant.style import DASHES, MARKS, colour, layout, logarithmic, mark, palette, transparent

Figure = dict[str, Any]


def groups(results: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(label, name of the colour, runs) of every configuration and of the control, as far as there are runs."""
    found = [
        (name, name, [r for r in results["runs"] if r["configuration"] == name and r["role"] == "compared"])
        for name in results["attention"]
    ]
    control = [run for run in results["runs"] if run["role"] == "control"]
    return [*found, (f"{results['baseline']} again (control)", "control", control)] if control else found


def accuracy_points(results: dict[str, Any]) -> Figure:
    """Every run as a point, the mean as a bar across: the spread is seen before any statistic."""
    data = []
    colours = palette(results["attention"])
    for row, (label, key, runs) in enumerate(groups(results)):
        values = [100 * run["accuracy"] for run in runs]
        # Runs of the same accuracy would hide each other: spread them a little around their row.
        offsets = [row + 0.3 * (i / (len(runs) - 1) - 0.5) if len(runs) > 1 else row for i in range(len(runs))]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "x": values,
                "y": offsets,
                "text": [f"seed {run['seed']}" for run in runs],
                "hovertemplate": "%{x:.2f} %<br>%{text}<extra>" + label + "</extra>",
                "marker": {"color": transparent(colours[key], 0.55), "size": 10},
                "showlegend": False,
            }
        )
        mean = statistics.mean(values)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [mean, mean],
                "y": [row - 0.34, row + 0.34],
                "line": {"color": colours[key], "width": 4},
                "hovertemplate": f"mean {mean:.2f} %<extra>{label}</extra>",
                "showlegend": False,
            }
        )
    labels = [label.replace(" (", "<br>(") for label, _, _ in groups(results)]
    rows = {
        "tickvals": list(range(len(labels))),
        "ticktext": labels,
        "range": [len(labels) - 0.5, -0.5],
        "title": {"text": ""},
        "showgrid": False,
        "automargin": True,
    }
    return {
        "data": data,
        "layout": layout("test accuracy, %", "", height=90 + 46 * len(labels), hovermode="closest", yaxis=rows),
    }


def curves(results: dict[str, Any], field: str, y: str, factor: float = 1.0) -> Figure:
    """Mean over seeds against epochs, with a band from the lowest to the highest seed."""
    data = []
    colours = palette(results["attention"])
    for label, key, runs in groups(results):
        by_run = [dict(zip(epochs_of(run, field), run[field], strict=True)) for run in runs]
        epochs = [epoch for epoch in by_run[0] if all(epoch in run for run in by_run)]
        by_epoch = [[factor * run[epoch] for run in by_run] for epoch in epochs]
        low, high = [min(v) for v in by_epoch], [max(v) for v in by_epoch]
        data.append(
            {
                "type": "scatter",
                "x": epochs + epochs[::-1],
                "y": high + low[::-1],
                "fill": "toself",
                "mode": "none",
                "fillcolor": transparent(colours[key], 0.15),
                "hoverinfo": "skip",
                "showlegend": False,
                "legendgroup": label,
            }
        )
        data.append(
            {
                "type": "scatter",
                "mode": "lines" if len(epochs) > 1 else "markers",
                "name": label,
                "legendgroup": label,
                "x": epochs,
                "y": [statistics.mean(v) for v in by_epoch],
                "line": {"color": colours[key], "width": 2.2, "dash": DASHES.get(key, "solid")},
                "hovertemplate": "%{y:.2f}",
            }
        )
    whole = {"dtick": 1} if max((len(run["loss"]) for run in results["runs"]), default=0) <= 10 else {}
    return {"data": data, "layout": layout("epoch", y, xaxis=whole)}


def epochs_of(run: dict[str, Any], field: str) -> list[int]:
    """The epochs, counted from 1, that a list of a record belongs to."""
    return run["evaluated"] if field == "test_accuracy" else list(range(1, len(run[field]) + 1))


def error_by_order(results: dict[str, Any]) -> Figure:
    """Relative error against the size of the logits, lines for random data, points for the trained softmax model."""
    error, trained = results["error"], results["trained"]
    data = []
    for name, values in error["relative_error"].items():
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "legendgroup": name,
                "x": error["logit_sizes"],
                "y": values,
                "line": {"color": colour(name), "width": 2.4, "dash": DASHES.get(name, "solid")},
                "hovertemplate": "%{y:.2~%} at %{x}",
            }
        )
        if trained:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{name}, trained model",
                    "legendgroup": name,
                    "showlegend": False,
                    "x": [layer["logit_size"] for layer in trained],
                    "y": [layer["relative_error"][name] for layer in trained],
                    "text": [f"layer {layer['layer']}" for layer in trained],
                    "marker": {"color": colour(name), "size": 9, "symbol": "circle-open", "line": {"width": 2}},
                    "hovertemplate": "%{text}: %{y:.2~%} at %{x:.2f}<extra>" + name + ", trained model</extra>",
                }
            )
    ticks = {"tickvals": [0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10], "type": "log"}
    shape = layout(
        "logit size (standard deviation of q·k)",
        "relative error",
        height=420,
        hovermode="closest",
        xaxis=ticks,
        yaxis={
            "type": "log",
            "tickvals": [10.0**power for power in range(-6, 4)],
            "ticktext": ["0.0001 %", "0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %", "1000 %", "10⁴ %", "10⁵ %"],
        },
    )
    return {"data": data, "layout": shape}


def cost_by_length(results: dict[str, Any], field: str, y: str, factor: float) -> Figure:
    """Time or memory of every mechanism against the number of tokens, both axes logarithmic."""
    measurements = results["scaling"]["measurements"]
    data = []
    colours = palette(list(dict.fromkeys(one["name"] for one in measurements)))
    for name in dict.fromkeys(one["name"] for one in measurements):
        own = [one for one in measurements if one["name"] == name]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [one["length"] for one in own],
            "y": [factor * one[field] for one in own],
            "line": {"color": colours[name], "width": 2.2, "dash": DASHES.get(name, "solid")},
            "marker": {"size": 7, "symbol": MARKS[mark(name)]},
            "hovertemplate": "%{y:.3~g}",
        }
        if field.startswith("seconds"):
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [factor * (one["seconds_high"] - one[field]) for one in own],
                "arrayminus": [factor * (one[field] - one["seconds_low"]) for one in own],
                "thickness": 1,
                "width": 2,
                "visible": field == "seconds",
            }
        data.append(trace)
    lengths = sorted({one["length"] for one in measurements})
    ticks = {"type": "log", "tickvals": lengths[:: 1 if len(lengths) < 6 else 2], "tickformat": ",d"}
    return {"data": data, "layout": layout("tokens L", y, height=380, xaxis=ticks, yaxis=logarithmic(tickformat="~g"))}


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """All figures of the report by the id of their place on the page; none of what was not measured."""
    from cumulant.studies import class_figures

    found = {
        "accuracy-points": accuracy_points(results),
        "loss-curves": curves(results, "loss", "training loss"),
        "accuracy-curves": curves(results, "test_accuracy", "test accuracy, %", 100.0),
    }
    if results["attention"]:
        found["class-accuracy"] = class_figures.class_accuracy(results)
        found["confusion"] = class_figures.confusion(results)
    if results["error"]:
        found["error-by-order"] = error_by_order(results)
    if results["scaling"]:
        seconds = results["scaling"]["time_shown"]
        found["time-by-length"] = cost_by_length(results, seconds, "milliseconds per call", 1e3)
        found["memory-by-length"] = cost_by_length(results, "peak_bytes", "peak memory, MiB", 2.0**-20)
    return found
