"""The leaderboard of docs/cab.md, from benchmarks/results/cab.json (`cumulant bench cab`), and its figure.

`python -m tools.pages` writes the text; `python -m tools.cab_page` draws docs/figures/cab.svg and .png.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cumulant.bench import plots
from cumulant.bench.cab import crossing_text
from cumulant.studies.cab.backbones import SHORT
from cumulant.studies.cab.leaderboard import AGAIN, BASELINE, cell, order, spread
from tools.pages import origin, table
from tools.tables import made

ROOT = Path(__file__).parents[1]
Result = Mapping[str, Any]
MARKS = {"above": " ▲", "below": " ▼", "level": "", "": ""}
LENGTHS = {  # of `bench efficiency`, noncausal, forward and backward
    "pays in time against fused softmax from": ("time", "both", "fused"),
    "in memory against textbook softmax from": ("memory", "both", "naive"),
}


def summary(result: Result, efficiency: Result | None) -> str:
    """The leaderboard: index in every use, best mean first, and from which length on a mechanism pays."""
    index = {use: found["own"] for use, found in result["index"].items()}
    names = list(dict.fromkeys(name for own in index.values() for name in own))
    mean = {name: statistics.mean(own[name]["index"] for own in index.values() if name in own) for name in names}
    found = {} if efficiency is None else efficiency["crossings"]
    crossings = {(c["name"], c["quantity"], c["phase"], c["opponent"]): c for c in found}
    rows = []
    for name in sorted(names, key=lambda name: -mean[name]):
        line = [f"*{name} (A/A)*" if name == AGAIN else f"`{name}`", f"**{mean[name]:+.2f}**"]
        line += [
            f"{own[name]['index']:+.2f}{spread(own[name]['each'])}" if name in own else "-" for own in index.values()
        ]
        lengths = [crossings.get((name, *key)) for key in LENGTHS.values()]
        rows.append([*line, *("-" if one is None else crossing_text(one) for one in lengths)])
    return table(["mechanism", "mean index", *index, *LENGTHS], rows)


def leaderboard(result: Result, pattern: str) -> str:
    """Index and figures of every task in one use of attention."""
    found = result["index"][pattern]
    columns = [(task, metric) for task in found["tasks"] for metric in result["metrics"][task]]
    marks = {
        (row["mechanism"], row["task"]): MARKS[row["beyond"]] for row in result["rows"] if row["pattern"] == pattern
    }
    rows = []
    for name in [*order(result, pattern), *found["incomplete"]]:
        own = found["own"].get(name)
        line = [f"`{name}`" if name != AGAIN else f"*{name} (A/A)*"]
        line.append("-" if own is None else f"**{own['index']:+.2f}**{spread(own['each'])}")
        if "frozen" in found:
            line.append(f"{found['frozen'][name]:+.2f}" if name in found["frozen"] else "-")
        for task, metric in columns:
            first = metric == next(iter(result["metrics"][task]))
            line.append(cell(result, pattern, name, task, metric) + (marks.get((name, task), "") if first else ""))
        rows.append(line)
    arrows = {1: "↑", -1: "↓"}
    head = ["mechanism", "index", *(["by CAB's constants"] if "frozen" in found else [])]
    head += [f"{task} {metric} {arrows[result['metrics'][task][metric]]}" for task, metric in columns]
    return table(head, rows)


def agreement(result: Result) -> str:
    """Correlations between uses, with what CAB read from its own."""
    rows = []
    for one in result["correlation"]:
        read = {1: "agree", -1: "opposite", None: "-"}[one["cab"]]
        interval = f"{one['low']:+.2f} to {one['high']:+.2f}"
        rows.append([" and ".join(one["uses"]), f"{one['r']:+.2f}", interval, f"{one['mechanisms']}", read,
                     one["verdict"] or "-"])  # fmt: skip
    return table(["uses", "correlation", "95 % interval", "mechanisms", "CAB's reading", "here"], rows)


def support(result: Result) -> str:
    """Which mechanism serves which use, found by running its layer."""
    rows = [
        [f"`{name}`", *("yes" if not why else "no" for why in uses.values())]
        for name, uses in result["support"].items()
    ]
    return table(["mechanism", *(f"{short}, {name}" for name, short in SHORT.items())], rows)


def noise(result: Result) -> str:
    """How far the two sets of softmax runs are apart, by column, in standard deviations between mechanisms."""
    gaps = []
    for pattern, found in result["index"].items():
        own = found["own"]
        if AGAIN in own and BASELINE in own:
            gaps.append(f"{pattern} {abs(own[AGAIN]['index'] - own[BASELINE]['index']):.2f}")
    ratios = [row["ratio"] for row in result["rows"]]
    return (
        f"A/A: two sets of softmax runs that differ in their seeds only are this far apart in the index: "
        f"{', '.join(gaps)}. Parameters of all backbones are {min(ratios):.3f} to {max(ratios):.3f} times softmax's. "
        f"A run took {statistics.median(row['seconds'] for row in result['rows']):.1f} s in the median, beside others."
    )


def board(results: Mapping[str, Result]) -> str:
    """The leaderboard, what its signs mean, and what chance does."""
    result = results["cab"]
    setting = result["setting"]
    steps = ", ".join(f"{name} {task['steps']:,}" for name, task in setting["tasks"].items())
    each = sorted({len(values) for row in result["rows"] for values in row["values"].values()})
    seeds = f"{each[0]} to {each[-1]}" if len(each) > 1 else str(each[0])
    said = (
        f"Steps: {steps}; {seeds} seeds, {setting['precision']}, size {setting['size']}. ± is the standard "
        "deviation over seeds."
    )
    paying = next((results[name] for name in ("zoo_efficiency", "zoo_efficiency_cpu") if name in results), None)
    if paying is not None:
        said += f" From which length on it pays: {origin(paying)}"
    parts = [summary(result, paying), said, noise(result)]
    if result["missing"]:
        parts.append(f"No time was left for {len(result['missing'])} runs.")
    return "\n\n".join(parts)


def details(result: Result) -> str:
    """Every figure by use and task, how uses agree, who serves which, and where the runs were made."""
    parts = [
        "▲ and ▼: better or worse than softmax in the first metric of a task, beyond Welch's 95 % interval and the A/A "
        "gap."
    ]
    for name, short in SHORT.items():
        if short in result["index"]:
            parts += [f"### {short}: {name} attention", leaderboard(result, short)]
    parts += ["### How uses agree", agreement(result)]
    parts += ["### Who serves which use", support(result)]
    if result["failed"]:
        parts += ["### Without a figure", "\n".join(f"- {line}" for line in result["failed"])]
    parts += ["### Where the runs were made", "\n".join(f"- {made(one)}" for one in result["origins"])]
    return "\n\n".join(parts)


def main() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "cab.json").read_text(encoding="utf-8"))
    plots.uses(result, ROOT / "docs" / "figures" / "cab")


if __name__ == "__main__":
    main()
