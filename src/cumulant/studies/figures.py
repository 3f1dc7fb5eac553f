"""The plotly figures of the report, as plain dictionaries {"data": [...], "layout": {...}} made from results.json.

Text and grid colours are left to the page, which sets them for light or dark when it draws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from cumulant.studies.outcome import MANY_CLASSES
from cumulant.style import COLOURS, DASHES, MARKS, colour, layout, logarithmic, mark, palette, transparent

Figure = dict[str, Any]
RING_SHIFT = 1.07  # along the axis, so that the rings of the orders stand side by side
POWERS = ["0.0001 %", "0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %", "1000 %", "10⁴ %", "10⁵ %"]


def scatter(mode: str, x: Sequence[Any], y: Sequence[Any], hover: str, **more: Any) -> dict[str, Any]:
    """A trace of points or lines; without a name it is no part of the legend."""
    hidden = {} if "name" in more else {"showlegend": False}
    return {"type": "scatter", "mode": mode, "x": x, "y": y, "hovertemplate": hover, **hidden, **more}


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
    data, colours = [], palette(results["attention"])
    for row, (label, key, runs) in enumerate(groups(results)):
        values = [100 * run["accuracy"] for run in runs]
        mean, extra = statistics.mean(values), f"<extra>{label}</extra>"
        # Runs of the same accuracy would hide each other: spread them a little around their row.
        offsets = [row + 0.3 * (i / (len(runs) - 1) - 0.5) if len(runs) > 1 else row for i in range(len(runs))]
        points = {"color": transparent(colours[key], 0.55), "size": 10}
        seeds = [f"seed {run['seed']}" for run in runs]
        bar, upright = {"color": colours[key], "width": 4}, [row - 0.34, row + 0.34]
        data.append(
            scatter("markers", values, offsets, "%{x:.2f} %<br>%{text}" + extra, text=seeds, marker=points, name=label,
                    showlegend=False)
        )  # fmt: skip
        data.append(scatter("lines", [mean, mean], upright, f"mean {mean:.2f} %{extra}", line=bar))
    labels = [label.replace(" (", "<br>(") for label, _, _ in groups(results)]
    rows = {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5],
            "title": {"text": ""}, "showgrid": False, "automargin": True}  # fmt: skip
    shape = layout("test accuracy, %", "", height=90 + 46 * len(labels), hovermode="closest", yaxis=rows)
    return {"data": data, "layout": shape}


def curves(results: dict[str, Any], field: str, y: str, factor: float = 1.0) -> Figure:
    """Mean over seeds against epochs, with a band from the lowest to the highest seed."""
    data: list[dict[str, Any]] = []
    colours = palette(results["attention"])
    for label, key, runs in groups(results):
        by_run = [dict(zip(run["evaluated"] if field == "test_accuracy" else range(1, len(run[field]) + 1), run[field],
                           strict=True)) for run in runs]  # fmt: skip
        epochs = [epoch for epoch in by_run[0] if all(epoch in run for run in by_run)]
        by_epoch = [[factor * run[epoch] for run in by_run] for epoch in epochs]
        low, high = [min(v) for v in by_epoch], [max(v) for v in by_epoch]
        mean, mode = [statistics.mean(v) for v in by_epoch], "lines" if len(epochs) > 1 else "markers"
        line = {"color": colours[key], "width": 2.2, "dash": DASHES.get(key, "solid")}
        band = {"type": "scatter", "x": epochs + epochs[::-1], "y": high + low[::-1], "fill": "toself", "mode": "none",
                "fillcolor": transparent(colours[key], 0.15), "hoverinfo": "skip", "showlegend": False}  # fmt: skip
        data += [{**band, "legendgroup": label}]
        data += [scatter(mode, epochs, mean, "%{y:.2f}", name=label, legendgroup=label, line=line)]
    whole = {"dtick": 1} if max((len(run["loss"]) for run in results["runs"]), default=0) <= 10 else {}
    return {"data": data, "layout": layout("epoch", y, xaxis=whole)}


def error_by_order(results: dict[str, Any]) -> Figure:
    """Relative error against the size of the logits, lines for random data, rings for the trained softmax model."""
    error, trained = results["error"], results["trained"]
    data, sizes = [], [layer["logit_size"] for layer in trained]
    for place, (name, values) in enumerate(error["relative_error"].items()):
        line = {"color": colour(name), "width": 2.4, "dash": DASHES.get(name, "solid")}
        data.append(
            scatter("lines", error["logit_sizes"], values, "%{y:.2~%} at %{x}", name=name, legendgroup=name, line=line)
        )
        if trained:  # one ring with the range over layers: a ring a layer would pile up
            ring = {"color": colour(name), "size": 10, "symbol": "circle-open", "line": {"width": 2}}
            reached = [layer["relative_error"][name] for layer in trained]
            here, size = statistics.median(reached), statistics.median(sizes) * RING_SHIFT ** (place - 1.5)
            span = {"type": "data", "symmetric": False, "array": [max(reached) - here], "thickness": 1.5,
                    "arrayminus": [here - min(reached)], "color": colour(name), "width": 4}  # fmt: skip
            hover = f"{min(reached):.1%} to {max(reached):.1%} in the layers<extra>{name}, trained model</extra>"
            data.append(
                scatter("markers", [size], [here], hover, name=f"{name}, trained model", legendgroup=name,
                        showlegend=False, marker=ring, error_y=span)
            )  # fmt: skip
    across = {"tickvals": [0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10], "type": "log"}
    up = {"type": "log", "tickvals": [10.0**power for power in range(-6, 4)], "ticktext": POWERS}
    about = "logit size (standard deviation of q·k)"
    shape = layout(about, "relative error", height=420, hovermode="closest", xaxis=across, yaxis=up)
    return {"data": data, "layout": shape}


def cost_by_length(results: dict[str, Any], field: str, y: str, factor: float) -> Figure:
    """Time or memory of every mechanism against the number of tokens, both axes logarithmic."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in results["scaling"]["measurements"]:
        by_name.setdefault(one["name"], []).append(one)
    data, colours = [], palette(by_name)
    for name, own in by_name.items():
        line = {"color": colours[name], "width": 2.2, "dash": DASHES.get(name, "solid")}
        marker, values = {"size": 7, "symbol": MARKS[mark(name)]}, [factor * one[field] for one in own]
        spread = {}
        if field.startswith("seconds"):
            up, down = ([factor * abs(one[end] - one[field]) for one in own] for end in ("seconds_high", "seconds_low"))
            spread["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1,
                                 "width": 2, "visible": field == "seconds"}  # fmt: skip
        lengths = [one["length"] for one in own]
        data.append(
            scatter("lines+markers", lengths, values, "%{y:.3~g}", name=name, line=line, marker=marker, **spread)
        )
    every = sorted({one["length"] for own in by_name.values() for one in own})
    ticks = {"type": "log", "tickvals": every[:: 1 if len(every) < 6 else 2], "tickformat": ",d"}
    shape = layout("tokens L", y, height=380, xaxis=ticks, yaxis=logarithmic(tickformat="~g"))
    meeting = crossing(by_name, field)
    if meeting is not None:
        name, length = meeting
        shape["shapes"] = [{"type": "line", "x0": length, "x1": length, "yref": "paper", "y0": 0, "y1": 1,
                            "line": {"color": colours[name], "dash": "dot", "width": 1.5}}]  # fmt: skip
        text = f" {name} crosses softmax<br> at {length:,.0f} tokens"
        shape["annotations"] = [{"x": math.log10(length), "y": 0, "yref": "paper", "xanchor": "left", "text": text,
                                 "yanchor": "bottom", "showarrow": False}]  # fmt: skip
    return {"data": data, "layout": shape}


def crossing(by_name: dict[str, list[dict[str, Any]]], field: str) -> tuple[str, float] | None:
    """Where the highest order compared becomes and stays cheaper than softmax: its name and the length between those
    measured, on logarithmic axes; None where the curves do not cross there."""
    name = next((one for one in ("cumulant3", "cumulant2", "linear") if one in by_name), None)
    if name is None or "softmax" not in by_name:
        return None
    softmax, own = ({one["length"]: one[field] for one in by_name[key]} for key in ("softmax", name))
    lengths = sorted(softmax.keys() & own.keys())
    gaps = [math.log(softmax[length] / own[length]) for length in lengths]
    after = next((i for i in range(len(gaps)) if all(gap > 0 for gap in gaps[i:])), 0)
    if after == 0:
        return None
    share = gaps[after - 1] / (gaps[after - 1] - gaps[after])
    return name, lengths[after - 1] * (lengths[after] / lengths[after - 1]) ** share


def dial_curve(dial: dict[str, Any]) -> Figure:
    """Error against multiply-adds along the dial, from second order to softmax."""
    rows = dial["rows"][:-1]  # softmax has no error, and no place on a logarithmic axis
    cost, error = [100 * one["cost"] for one in rows], [100 * one["error"] for one in rows]
    titles = [one["title"] for one in rows]
    line = {"color": colour("cluster64"), "width": 2.2}
    # The curve falls: names on its upper side, and where the right edge is near on its lower one.
    sides = ["top right" if one < 15 else "bottom left" for one in cost]
    points = scatter("lines+markers+text", cost, error, "%{text}: %{y:.1f} % at %{x:.1f} %<extra></extra>", text=titles,
                     textposition=sides, cliponaxis=False, line=line, marker={"size": 8}, name="the dial",
                     showlegend=False)  # fmt: skip
    across = {"type": "log", "tickvals": [1, 2, 5, 10, 20, 50, 100], "range": [math.log10(min(cost) / 1.5), 2.2]}
    up = {"type": "log", "tickvals": [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]}
    up["range"] = [math.log10(max(min(error), 0.05) / 2), math.log10(max(error) * 2)]
    shape = layout("multiply-adds, % of softmax", "error, %", hovermode="closest", xaxis=across, yaxis=up)
    return {"data": [points], "layout": shape}


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
    order, colours, data = by_accuracy(results), palette(results["attention"]), []
    few, places = len(order) <= MANY_CLASSES, list(range(len(order)))
    names = [drawn(results["classes"][i]) for i in order]
    for one in results["attention"]:
        shares = [results["per_class"][one][i] for i in order]
        marker = {"color": colours[one], "size": 9 if few else 6, "opacity": 0.85, "symbol": MARKS[mark(one)]}
        values, hover = [None if x is None else 100 * x for x in shares], "%{y:.1f} %" + " %{text}" * (not few)
        data.append(scatter("markers", places, values, hover, name=one, text=names, marker=marker))
    axis = {"showticklabels": False, "ticks": "", "showgrid": False, "range": [-1, len(order)]}
    if few:
        axis = {"tickvals": places, "ticktext": names, "automargin": True}
    title = "class" if few else f"{len(order)} classes, by the accuracy of {results['attention'][0]}"
    return {"data": data, "layout": layout(title, "test accuracy, %", height=380, xaxis=axis)}


def confusion(results: dict[str, Any]) -> Figure:
    """One heat map per configuration, of which the page shows one: share of a label's items by prediction."""
    names = [drawn(name) for name in results["classes"]]
    few = len(names) <= MANY_CLASSES
    places = [f"{name} ({i})" for i, name in enumerate(names)]  # short names may coincide
    # Mistakes are rare: most of the colours go to small shares. The numbers are read on all of them.
    strength = ((0, 0), (0.02, 0.18), (0.1, 0.35), (0.4, 0.55), (1, 0.8))
    scale = [[share, transparent(COLOURS["cumulant3"], alpha)] for share, alpha in strength]
    data = []
    for one in results["attention"]:
        shares = [[round(100 * cell / max(sum(row), 1), 2) for cell in row] for row in results["confusion"][one]]
        trace: dict[str, Any] = {
            "type": "heatmap", "name": one, "x": places, "y": places, "z": shares, "zmin": 0, "zmax": 100,
            "colorscale": scale, "showscale": False,
            "hovertemplate": f"%{{z:.1f}} % of %{{y}}<br>taken for %{{x}}<extra>{one}</extra>",
        }  # fmt: skip
        if few:
            trace["text"] = [[f"{cell:.0f}" if cell >= 0.5 else "" for cell in row] for row in shares]
            trace["texttemplate"] = "%{text}"
        data.append(trace)
    ticks = {"tickvals": places, "ticktext": names} if few else {"showticklabels": False, "ticks": ""}
    axis = {"type": "category", "showgrid": False, "constrain": "domain", "automargin": True, **ticks}
    upright = {**axis, "autorange": "reversed", "scaleanchor": "x"}
    shape = layout("taken for", "label", height=560, hovermode="closest", xaxis=axis, yaxis=upright)
    return {"data": data, "layout": shape}


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """All figures of the report by the id of their place on the page; none of what was not measured."""
    found = {
        "accuracy-points": accuracy_points(results),
        "loss-curves": curves(results, "loss", "training loss"),
        "accuracy-curves": curves(results, "test_accuracy", "test accuracy, %", 100.0),
    }
    if results["attention"]:
        found |= {"class-accuracy": class_accuracy(results), "confusion": confusion(results)}
    if results["error"]:
        found["error-by-order"] = error_by_order(results)
    if results["scaling"]:
        seconds = results["scaling"]["time_shown"]
        found["time-by-length"] = cost_by_length(results, seconds, "milliseconds per call", 1e3)
        found["memory-by-length"] = cost_by_length(results, "peak_bytes", "peak memory, MiB", 2.0**-20)
    if results.get("dial"):
        found["dial-curve"] = dial_curve(results["dial"])
    return found
