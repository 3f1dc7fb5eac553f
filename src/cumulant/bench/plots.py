"""The figures of the bench: error against cost, cost against length, accuracy against cost, four uses.

A chart is described once and drawn twice: into files by matplotlib (`write`), on the page by plotly (`on_page`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import style
from ..style import DIVERGING, RULE, SOFT, SPARE, colour, dashed, mark, new_figure, save, styled

FILES = ("svg", "png"), 110
SHOWN = 3  # random cases in a figure, spread over the sizes
ERRORS = {"type": "log", "tickvals": [1e-4, 1e-3, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100]}
SHARES = {"type": "log", "tickvals": [1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100]}
PHASES = {"forward": "forward", "both": "forward + backward"}
COSTS = (("flops", "MFLOP an item (forward)", 1e-6), ("throughput", "training items a second", 1.0))
Figure = dict[str, Any]  # of plotly


@dataclass(frozen=True)
class Series:
    """A contender: one point or a line of them; `ends` are the lowest and the highest values of each."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    ends: tuple[Sequence[float], Sequence[float]] | None = None
    text: str = ""  # where its name stands: "above" or "below" the point; "" only where it is pointed at
    large: bool = True


@dataclass(frozen=True)
class Chart:
    """One panel; `axes` are plotly's, of which matplotlib takes the type."""

    x: str
    y: str
    series: Sequence[Series]
    hover: str
    title: str = ""
    lines: bool = False  # through the points of a series
    front: Sequence[Series] = ()  # a stepped line behind all
    band: tuple[float, float, str] | None = None  # from, to, colour
    axes: dict[str, Any] = field(default_factory=dict)


def error_against_work(group: dict[str, Any]) -> Chart:
    """Centred error against work as a share of softmax's; the stepped line is the front."""
    rows = [row for row in group["rows"] if row.get("centred")]
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["of_softmax"])
    # In turn: neighbours on a flat front would write over each other.
    sides = {row["variant"]: "below" if number % 2 else "above" for number, row in enumerate(front)}
    series = [
        Series(row["variant"], [row["of_softmax"]], [row["centred"]], None, sides.get(row["variant"], ""), row["front"])
        for row in rows
    ]
    work, off = ([row[key] for row in front] for key in ("of_softmax", "centred"))
    steps = [Series("", work, off)] if front else []
    about, hover = "error against softmax (1: the mean of the values)", "%{x:.3~g} of softmax's work, error %{y:.3~g}"
    axes = {"xaxis": SHARES, "yaxis": ERRORS}
    return Chart("work, share of softmax's", about, series, hover, group["name"], front=steps, axes=axes)


def against_length(result: dict[str, Any], phase: str, quantity: str) -> Chart:
    """Median milliseconds with quartiles, or peak MiB, against the number of tokens; both axes logarithmic."""
    series = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["name"] == name and phase in row["milliseconds"]]
        if rows:
            median, low, high = zip(*(row["milliseconds"][phase] for row in rows), strict=True)
            held, lengths = [row["peak_bytes"][phase] / 2**20 for row in rows], [row["length"] for row in rows]
            timed = quantity == "time"
            series.append(Series(name, lengths, median if timed else held, (low, high) if timed else None))
    ticks = {"type": "log", "tickvals": result["setting"]["lengths"], "tickformat": ",d"}
    axes = {"xaxis": ticks, "yaxis": style.logarithmic(tickformat="~g")}
    about = {"time": "milliseconds a call", "memory": "peak memory, MiB"}[quantity]
    return Chart("tokens L", about, series, "%{y:.3~g}", PHASES[phase], lines=True, axes=axes)


def accuracy(result: dict[str, Any], key: str, about: str, factor: float) -> Chart:
    """Top-1 accuracy against a cost; the band is the range of the baseline's runs."""
    rows = [row for row in result["ranking"] if row[key] is not None]
    named = with_room([(row[key], row["mean"]) for row in rows]) if rows else []
    series = []
    for row, has_room in zip(rows, named, strict=True):  # the others say their names when they are pointed at
        y, low, high = (100 * row[one] for one in ("mean", "low", "high"))
        series.append(Series(row["variant"], [factor * row[key]], [y], ([low], [high]), "above" if has_room else ""))
    low, high = (result["control"][end] for end in ("low", "high"))
    band = None if low is None else (100 * low, 100 * high, colour(result["baseline"]))
    return Chart(about, "top-1 accuracy, %", series, "%{y:.2f} % at %{x:.4~g}", band=band)


def figures(results: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """All figures by the id of their place on the page; `results` has the keys error, efficiency, train, or some."""
    found: dict[str, Chart] = {}
    if "error" in results:
        found |= {f"error-{i}": error_against_work(group) for i, group in enumerate(panels(results["error"]))}
    if "efficiency" in results:
        for phase in PHASES:
            for quantity in ("time", "memory"):
                found[f"{quantity}-{phase}"] = against_length(results["efficiency"], phase, quantity)
    if "train" in results:
        found |= {f"accuracy-{cost[0]}": accuracy(results["train"], *cost) for cost in COSTS}
    return {name: on_page(chart) for name, chart in found.items()}


def on_page(chart: Chart) -> Figure:
    """For plotly, as a plain dictionary."""
    data: list[dict[str, Any]] = []
    for one in chart.front:
        line = {"shape": "hv", "color": "#999999", "width": 1.5}
        data.append(_trace(one, mode="lines", line=line, hoverinfo="skip", showlegend=False))
    for one in chart.series:
        size = 6 if chart.lines else 12 if one.large else 8
        symbol = style.MARKS[mark(one.name)] + ("-open" if dashed(one.name) else "")
        trace = _trace(one, name=one.name, marker={"color": colour(one.name), "symbol": symbol, "size": size})
        if chart.lines:
            width, dash = 3 if one.name.startswith("softmax") else 1.5, "dash" if dashed(one.name) else "solid"
            trace |= {"mode": "lines+markers", "line": {"color": colour(one.name), "width": width, "dash": dash}}
        else:
            side = "bottom center" if one.text == "below" else "top center"
            trace |= {"mode": "markers+text" if one.text else "markers", "text": [one.name], "textposition": side,
                      "textfont": {"size": 11}, "showlegend": False}  # fmt: skip
        extra = "" if chart.lines else f"<extra>{one.name}</extra>"
        data.append({**trace, "hovertemplate": chart.hover + extra})
    closest = {} if chart.lines else {"hovermode": "closest"}
    shape = style.layout(chart.x, chart.y, height=520 if chart.lines else 430, **closest, **chart.axes)
    if chart.band is not None:
        low, high, tint = chart.band
        shape["shapes"] = [{"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high, "layer": "below",
                            "fillcolor": style.transparent(tint, 0.14), "line": {"width": 0}}]  # fmt: skip
    return {"data": data, "layout": shape}


def _trace(one: Series, **more: Any) -> dict[str, Any]:
    if one.ends is not None:
        down, up = ([abs(end - y) for end, y in zip(ends, one.y, strict=True)] for ends in one.ends)
        more["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1,
                           "width": 2}  # fmt: skip
    return {"type": "scatter", "x": list(one.x), "y": list(one.y), **more}


def draw(chart: Chart, axis: Any) -> None:
    """For matplotlib."""
    for one in chart.front:
        axis.step([*one.x, 1.0], [*one.y, one.y[-1]], where="post", color=SOFT, linewidth=1.4, zorder=1)
        axis.axvline(1, color=colour("softmax"), linewidth=1)
        axis.axhline(1, color=RULE, linewidth=1, linestyle=":")
    for one in chart.series:
        tint = colour(one.name)
        if chart.lines:
            axis.plot(one.x, one.y, color=tint, marker=mark(one.name), markersize=4, label=one.name,
                      linewidth=2.6 if one.name.startswith("softmax") else 1.2,
                      linestyle="--" if dashed(one.name) else "-")  # fmt: skip
        else:
            axis.scatter(one.x, one.y, marker=mark(one.name), s=70 if one.large else 34, zorder=3, label=one.name,
                         facecolor="none" if dashed(one.name) else tint, edgecolor=tint,
                         alpha=1.0 if one.large else 0.65)  # fmt: skip
        if one.ends is not None and chart.lines:
            axis.fill_between(one.x, *one.ends, color=tint, alpha=0.12, linewidth=0)
        elif one.ends is not None:
            axis.vlines(one.x, *one.ends, color=tint)
        if one.text:
            low = one.text == "below"
            axis.annotate(short(one.name), (one.x[0], one.y[0]), fontsize=8, xytext=(-4, -14) if low else (6, 6),
                          ha="right" if low else "left", textcoords="offset points")  # fmt: skip
    if chart.band is not None:
        axis.axhspan(*chart.band[:2], color=chart.band[2], alpha=0.12)
    if chart.axes:
        axis.set(yscale="log")
        axis.set_xscale("log", base=2 if chart.lines else 10)
        _plain_numbers(axis.xaxis, axis.yaxis)
    else:
        axis.margins(x=0.18)
    axis.grid(alpha=0.25)
    axis.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)


@styled
def write(charts: Sequence[Sequence[Chart]], path: Path, size: tuple[float, float], title: str = "") -> None:
    """Rows of panels of that size each, those of a row with one scale, as files with one legend."""
    rows, columns = len(charts), len(charts[0])
    figure, axes = new_figure(rows, columns, (size[0] * columns, size[1] * rows), sharex="col", sharey="row")
    for chart, axis in zip((one for row in charts for one in row), axes.flat, strict=True):
        draw(chart, axis)
        axis.label_outer()
    if title:
        figure.suptitle(title, fontsize=10)
    _shared_legend(figure, axes.flat, columns=6)
    save(figure, path, *FILES)


def pareto(result: dict[str, Any], path: Path) -> None:
    """Centred error against the share of softmax's work, a panel for each group."""
    write([[error_against_work(group) for group in panels(result)]], path, (5.2, 5.4))


def efficiency(result: dict[str, Any], path: Path) -> None:
    """Time and memory against length, forward and forward + backward."""
    setting = result["setting"]
    where = result.get("machine", {}).get("gpu") or setting["device"]
    title = f"{where}, {setting['dtype']}, batch {setting['batch']}, {setting['heads']} heads of {setting['dim']}, "
    charts = [[against_length(result, phase, quantity) for phase in PHASES] for quantity in ("time", "memory")]
    write(charts, path, (5.75, 4.5), f"{title}{setting['pattern']}; bands: quartiles")


def training(result: dict[str, Any], path: Path) -> None:
    """Accuracy against FLOPs and against throughput."""
    about = f"{result['model']} on {result['data']}, {result['epochs']} epochs; band: {result['control']['runs']} runs"
    write([[accuracy(result, *cost) for cost in COSTS]], path, (5.75, 5.0), f"{about} of {result['baseline']}")


def panels(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups that a Pareto figure shows: at most SHOWN random ones, and the trained model's."""
    random = [group for group in result["groups"] if group["kind"] == "random"]
    if len(random) > SHOWN:
        random = [random[round(i * (len(random) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
    return random + [group for group in result["groups"] if group["kind"] == "captured"]


@styled
def uses(result: dict[str, Any], path: Path) -> None:
    """The compositional index of every mechanism in each use of attention, and how uses agree."""
    index = {use: found["own"] for use, found in result["index"].items()}
    names = list(dict.fromkeys(name for own in index.values() for name in own))
    means = {name: [own[name]["index"] for own in index.values() if name in own] for name in names}
    names.sort(key=lambda name: sum(means[name]) / len(means[name]))
    figure, axes = new_figure(1, 2, (11.5, 0.28 * len(names) + 1.8), width_ratios=(2, 1))
    left, right = axes[0]
    for number, (use, own) in enumerate(index.items()):
        there = [name for name in names if name in own]
        x = [own[name]["index"] for name in there]
        spread = [[a - min(own[name]["each"]) for a, name in zip(x, there, strict=True)],
                  [max(own[name]["each"]) - a for a, name in zip(x, there, strict=True)]]  # fmt: skip
        y = [names.index(name) + 0.18 * (1.5 - number) for name in there]
        left.errorbar(x, y, xerr=[[max(0.0, one) for one in side] for side in spread], label=use, linestyle="none",
                      marker="osD^"[number % 4], markersize=5, color=SPARE[number], capsize=1.5)  # fmt: skip
    for name in ("softmax", "softmax again"):
        if name in names:
            left.axhspan(names.index(name) - 0.45, names.index(name) + 0.45, color=RULE, alpha=0.4, linewidth=0)
    left.axvline(0, color=RULE, linewidth=1)
    left.set(yticks=range(len(names)), yticklabels=names, xlabel="index: standard deviations above the mean mechanism")
    kinds = list(index)
    matrix = [[1.0 if a == b else float("nan") for b in kinds] for a in kinds]
    for one in result["correlation"]:
        a, b = (kinds.index(use) for use in one["uses"])
        matrix[a][b] = matrix[b][a] = one["r"]
    if kinds:
        left.legend(loc="lower right", fontsize=8)
        right.imshow(matrix, cmap=DIVERGING, vmin=-1, vmax=1)
    else:
        left.set_title("one mechanism alone has no index")
    for a, row in enumerate(matrix):
        for b, r in enumerate(row):
            text = "-" if r != r else f"{r:+.2f}"
            right.text(b, a, text, ha="center", va="center", color="white" if abs(r) > 0.6 else "black")
    right.set(xticks=range(len(kinds)), yticks=range(len(kinds)), xticklabels=kinds, yticklabels=kinds,
              title="correlation over mechanisms")  # fmt: skip
    save(figure, path, *FILES)


def short(label: str) -> str:
    """A label that fits beside a point."""
    return re.sub("[+:]", " ", label, count=1).replace("full=true", "full")


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


def _shared_legend(figure: Any, axes: Any, columns: int) -> None:
    """One legend below all panels, each name once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=columns,
                  frameon=False, fontsize=8)  # fmt: skip


def _plain_numbers(*axes: Any) -> None:
    """0.1 and 1024 instead of powers of ten and two."""
    from matplotlib.ticker import FuncFormatter

    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1e6 else f"{x:.0e}"))
