"""The figures of docs/results.md: accuracy over training, and that of the last epoch with every seed as a point.

`python -m tools.experiments` draws them with the tables; nothing in them comes from anywhere but the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cumulant.studies.command import Reproduce
from cumulant.studies.cumulant_vit import planned
from cumulant.studies.plan import Key
from cumulant.studies.records import records_of
from cumulant.style import new_figure, palette, save, styled

Record = dict[str, Any]
SHOWN = 8  # configurations with too many colours to tell apart: only points are drawn, in those of the mechanisms
FAR = 10.0  # points below the others at which a configuration is shown by an arrow


@styled
def draw(settings: Reproduce, records: Mapping[Key, Record], place: Path) -> bool:
    """The figure of one study, written to `place`; False where fewer than two configurations have been run."""
    runs = [record for record in records_of(planned(settings), records) if "failed" not in record]
    groups = {name: found for name in settings.attention if (found := _of(runs, name, "compared"))}
    if len(groups) < 2:
        return False
    if all("+lr=" in name for name in groups):
        return _draw_rates(groups, place)
    colours = palette(list(groups))
    mechanisms = {name: name.partition("+")[0] for name in groups}
    if len(groups) >= SHOWN or len(set(mechanisms.values())) == len(groups):
        plain = palette(list(dict.fromkeys(mechanisms.values())))
        colours |= {name: plain[mechanism] for name, mechanism in mechanisms.items()}
    if control := [run for run in runs if run["role"] == "control"]:
        groups[f"{settings.baseline} again"] = control
        colours[f"{settings.baseline} again"] = colours["control"]
    height = 0.8 + 0.32 * len(groups)
    if len(mechanisms) < SHOWN:
        figure, ((left, right),) = new_figure(1, 2, (9.6, max(3.4, height)))
        _curves(left, groups, colours)
    else:
        figure, ((right,),) = new_figure(1, 1, (7.2, height))
    _points(right, groups, colours)
    return _saved(figure, place)


def _draw_rates(groups: Mapping[str, list[Record]], place: Path) -> bool:
    """Accuracy and tokens that a map is spread over against the learning rate, a curve for each mechanism."""
    curves: dict[str, dict[float, list[Record]]] = {}
    for configuration, runs in groups.items():
        name, _, rate = configuration.rpartition("+lr=")
        curves.setdefault(name, {})[float(rate)] = runs
    colours = palette(list(curves))
    figure, ((left, right),) = new_figure(1, 2, (9.6, 3.6))
    for axis, value in ((left, _accuracy), (right, _tokens_used)):
        for name, by_rate in curves.items():
            rates = sorted(by_rate)
            found = [[value(run) for run in by_rate[rate]] for rate in rates]
            axis.plot(rates, [fmean(one) for one in found], "o-", markersize=4, color=colours[name], label=name)
            lowest, highest = [min(one) for one in found], [max(one) for one in found]
            axis.fill_between(rates, lowest, highest, color=colours[name], alpha=0.15, linewidth=0)
        axis.set(xscale="log", xlabel="learning rate")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    left.set_ylabel("top-1 after the last epoch, %")
    right.set(ylabel="tokens that a map is spread over", ylim=(0, None))
    left.legend(frameon=False, loc="lower left")
    return _saved(figure, place)


def _accuracy(run: Record) -> float:
    return 100 * float(run["accuracy"])


def _tokens_used(run: Record) -> float:
    return float(run["locality"]["tokens_used"])


def _saved(figure: Figure, place: Path) -> bool:
    save(figure, place, ("svg",))
    return True


def _of(runs: Sequence[Record], name: str, role: str) -> list[Record]:
    return [run for run in runs if run["configuration"] == name and run["role"] == role]


def _curves(axis: Axes, groups: Mapping[str, list[Record]], colours: Mapping[str, str]) -> None:
    """Mean test accuracy of the seeds after each evaluated epoch, between the lowest and the highest of them."""
    for name, runs in groups.items():
        longest = max(runs, key=lambda run: len(run["evaluated"]))["evaluated"]
        values = [[100 * x for x in run["test_accuracy"]] for run in runs if run["evaluated"] == longest]
        columns = list(zip(*values, strict=True))
        line = "--" if name.endswith(" again") else "-"
        axis.plot(longest, [fmean(column) for column in columns], line, color=colours[name], linewidth=1.4, label=name)
        lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
        axis.fill_between(longest, lowest, highest, color=colours[name], alpha=0.15, linewidth=0)
    axis.set(xlabel="epoch", ylabel="top-1 on the test part, %")
    axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="lower right")


def _points(axis: Axes, groups: Mapping[str, list[Record]], colours: Mapping[str, str]) -> None:
    """Every seed a point, their mean a bar with its number; names from top to bottom as in the table.

    What lies far below the others stands at the edge, with an arrow: it would press them into one line.
    """
    means = {name: fmean(100 * run["accuracy"] for run in runs) for name, runs in groups.items()}
    middle, top = median(means.values()), max(means.values())
    least = middle - max(2 * (top - middle), FAR)
    edge = min(100 * run["accuracy"] for name, runs in groups.items() if means[name] >= least for run in runs)
    for y, (name, runs) in enumerate(groups.items()):
        values, far = [100 * run["accuracy"] for run in runs], means[name] < least
        at = edge if far else means[name]
        if far:
            axis.plot(at, y, "<", color=colours[name], markersize=7)
        else:
            axis.plot(values, [y] * len(values), "o", color=colours[name], alpha=0.65, markersize=6, markeredgewidth=0)
            axis.plot([at] * 2, [y - 0.28, y + 0.28], color=colours[name], linewidth=2.4)
        beside = far or len(values) == 1
        axis.annotate(
            f"{means[name]:.1f}",
            (at, y if beside else y - 0.28),
            (8, 0) if beside else (0, 2),
            textcoords="offset points",
            ha="left" if beside else "center",
            va="center" if beside else "bottom",
            fontsize=8.5,
        )
    axis.set_yticks(range(len(groups)), list(groups))
    axis.set_ylim(len(groups) - 0.4, -0.75)
    axis.margins(x=0.1)
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.06 * (right - left))  # for the number beside the rightmost
    axis.set_xlabel("top-1 after the last epoch, % (bar: mean)")
    axis.grid(alpha=0.3, axis="x")
