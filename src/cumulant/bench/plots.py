"""The figures of the bench as files: error against cost, cost against length, accuracy against cost, four uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..style import DIVERGING, RULE, SOFT, SPARE, colour, dashed, mark, new_figure, save, styled

FILES = ("svg", "png"), 110
SHOWN = 3  # random cases in a figure, spread over the sizes


def panels(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups that a Pareto figure shows: at most SHOWN random ones, and the trained model's."""
    random = [group for group in result["groups"] if group["kind"] == "random"]
    if len(random) > SHOWN:
        random = [random[round(i * (len(random) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
    return random + [group for group in result["groups"] if group["kind"] == "captured"]


@styled
def pareto(result: dict[str, Any], path: Path) -> None:
    """Centred error against the share of softmax's work, a panel for each group; the line is the front."""
    shown = panels(result)
    figure, axes = new_figure(1, len(shown), (5.2 * len(shown), 5.4), sharey=True)
    for axis, group in zip(axes[0], shown, strict=True):
        rows = [row for row in group["rows"] if row.get("centred")]
        front = sorted((row for row in rows if row["front"]), key=lambda row: row["of_softmax"])
        if front:
            x = [row["of_softmax"] for row in front]
            axis.step([*x, 1.0], [*(row["centred"] for row in front), front[-1]["centred"]], where="post",
                      color=SOFT, linewidth=1.4, zorder=1)  # fmt: skip
        for row in rows:
            name, tint = row["variant"], colour(row["variant"])
            axis.scatter(row["of_softmax"], row["centred"], marker=mark(name), s=70 if row["front"] else 34,
                         facecolor="none" if dashed(name) else tint, edgecolor=tint, zorder=3,
                         alpha=1.0 if row["front"] else 0.65, label=name)  # fmt: skip
        for number, row in enumerate(front):
            low = number % 2 == 1  # neighbours on a flat front would write over each other
            axis.annotate(short(row["variant"]), (row["of_softmax"], row["centred"]), fontsize=8,
                          xytext=(-4, -14 if low else 8), ha="right" if low else "left",
                          textcoords="offset points")  # fmt: skip
        axis.axvline(1, color=colour("softmax"), linewidth=1)
        axis.axhline(1, color=RULE, linewidth=1, linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="work, share of softmax's", title=group["name"])
        _plain_numbers(axis.xaxis, axis.yaxis)
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("error against softmax (1: the mean of the values)")
    _shared_legend(figure, axes[0], columns=6)
    save(figure, path, *FILES)


@styled
def efficiency(result: dict[str, Any], path: Path) -> None:
    """Time and memory against length, forward and forward + backward; both axes logarithmic."""
    figure, axes = new_figure(2, 2, (11.5, 9), sharex=True)
    for column, (phase, title) in enumerate((("forward", "forward"), ("both", "forward + backward"))):
        for axis, quantity in zip(axes[:, column], ("milliseconds a call", "peak memory, MiB"), strict=True):
            for name in dict.fromkeys(row["name"] for row in result["rows"]):
                rows = [row for row in result["rows"] if row["name"] == name and phase in row["milliseconds"]]
                if not rows:
                    continue
                x = [row["length"] for row in rows]
                y = [row["milliseconds"][phase][0] for row in rows]
                if quantity != "milliseconds a call":
                    y = [row["peak_bytes"][phase] / 2**20 for row in rows]
                opponent = name.startswith("softmax")
                axis.plot(x, y, color=colour(name), marker=mark(name), markersize=4, label=name,
                          linewidth=2.6 if opponent else 1.2, linestyle="--" if dashed(name) else "-")  # fmt: skip
                if quantity == "milliseconds a call":
                    low, high = ([row["milliseconds"][phase][i] for row in rows] for i in (1, 2))
                    axis.fill_between(x, low, high, color=colour(name), alpha=0.12, linewidth=0)
            axis.set(yscale="log", ylabel=quantity)
            axis.set_xscale("log", base=2)
            _plain_numbers(axis.xaxis, axis.yaxis)
            axis.grid(alpha=0.25)
        axes[0, column].set_title(title)
        axes[1, column].set_xlabel("tokens L")
    setting = result["setting"]
    where = result.get("machine", {}).get("gpu") or setting["device"]
    figure.suptitle(
        f"{where}, {setting['dtype']}, batch {setting['batch']}, {setting['heads']} heads of {setting['dim']}, "
        f"{setting['pattern']}; bands: quartiles", fontsize=10,
    )  # fmt: skip
    _shared_legend(figure, axes.flat, columns=6)
    save(figure, path, *FILES)


@styled
def training(result: dict[str, Any], path: Path) -> None:
    """Accuracy against FLOPs and against throughput; the band is the range of the baseline's runs."""
    quantities = [("flops", "MFLOP an item (forward)", 1e-6), ("throughput", "training items a second", 1.0)]
    figure, axes = new_figure(1, 2, (11.5, 5), sharey=True)
    control = result["control"]
    for axis, (key, label, factor) in zip(axes[0], quantities, strict=True):
        rows = [row for row in result["ranking"] if row[key] is not None]
        named = with_room([(row[key], row["mean"]) for row in rows]) if rows else []
        for row, has_room in zip(rows, named, strict=True):
            x, y = factor * row[key], 100 * row["mean"]
            spread = [[y - 100 * row["low"]], [100 * row["high"] - y]]
            axis.errorbar(x, y, yerr=spread, color=colour(row["variant"]), marker=mark(row["variant"]), markersize=8,
                          linestyle="none", label=row["variant"], capsize=2)  # fmt: skip
            if has_room:
                axis.annotate(short(row["variant"]), (x, y), xytext=(7, 3), textcoords="offset points", fontsize=8)
        if control["low"] is not None:
            axis.axhspan(100 * control["low"], 100 * control["high"], color=colour(result["baseline"]), alpha=0.12)
        axis.set(xlabel=label)
        axis.margins(x=0.18)
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    figure.suptitle(
        f"{result['model']} on {result['data']}, {result['epochs']} epochs; band: {control['runs']} runs of "
        f"{result['baseline']}", fontsize=10,
    )  # fmt: skip
    _shared_legend(figure, axes.flat, columns=6)
    save(figure, path, *FILES)


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
