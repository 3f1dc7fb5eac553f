"""What the runs allow to be said: figures with their spread, the compositional index, how uses of attention agree.

Everything is computed from the records alone: means over seeds, the A/A control (softmax again, with other seeds)
beside them, CAB's index once with constants of these runs and, where the metrics are CAB's own, once with CAB's.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cumulant.bench.cab import NS_CONSTANTS, compositional_index, constants_of
from cumulant.studies.cab.backbones import PATTERNS
from cumulant.studies.cab.tasks import Task
from cumulant.studies.statements import judge
from cumulant.studies.verdict import compare

Record = Mapping[str, Any]
Cells = Mapping[tuple[str, str, str, int, str], Record]  # pattern, task, mechanism, seed, role
BASELINE, AGAIN = "softmax", "softmax again"
# Metrics that CAB measures too, on other data: (our task, our metric) -> (CAB's task, CAB's metric).
SHARED = {("sr", "PSNR"): ("SR", "PSNR"), ("sr", "SSIM"): ("SR", "SSIM"), ("mlm", "perplexity"): ("MLM", "PPL")}
# What CAB reads from its correlations between uses: +1 agree, -1 opposite.
READING = {("NS", "CS"): 1, ("CS", "NC"): -1, ("CS", "CC"): -1, ("NC", "CC"): 1}


def judged(tasks: Mapping[str, Task], cells: Cells) -> dict[str, Any]:
    """Rows, indices and correlations from the records of all cells."""
    rows = [row for pattern in PATTERNS for task in tasks.values() for row in column_rows(pattern, task, cells)]
    index = {pattern: indices(pattern, tasks, rows) for pattern in PATTERNS}
    return {
        "rows": rows,
        "metrics": {name: dict(task.metrics) for name, task in tasks.items()},
        "titles": {name: task.title for name, task in tasks.items()},
        "index": {pattern: found for pattern, found in index.items() if found},
        "correlation": correlations({pattern: found["own"] for pattern, found in index.items() if found}),
        "failed": sorted({
            f"{pattern} {task}, {name}: {record['failed']}"
            for (pattern, task, name, _, _), record in cells.items() if "failed" in record
        }),
    }  # fmt: skip


def column_rows(pattern: str, task: Task, cells: Cells) -> list[dict[str, Any]]:
    """One row for each mechanism of a column: values by metric and seed; the control is a row of its own."""
    found: dict[str, list[Record]] = {}
    for (use, name, mechanism, _, role), record in cells.items():
        if (use, name) == (pattern, task.name) and "failed" not in record:
            found.setdefault(AGAIN if role == "control" else mechanism, []).append(record)
    rows = []
    for mechanism, records in found.items():
        values = {metric: [one["metrics"][metric] for one in records] for metric in task.metrics}
        rows.append({
            "pattern": pattern, "task": task.name, "mechanism": mechanism, "values": values,
            "mean": {metric: statistics.mean(one) for metric, one in values.items()},
            "deviation": {metric: statistics.stdev(one) if len(one) > 1 else None for metric, one in values.items()},
            "parameters": records[0]["parameters"], "ratio": records[0]["ratio"],
            "seconds": statistics.median(one["seconds"] for one in records), "graph": records[0]["graph"],
        })  # fmt: skip
    for row in rows:
        row["beyond"] = beyond(row, rows, task)
    return rows


def beyond(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], task: Task) -> str:
    """'above' or 'below' softmax in the first metric of a task, judged by Welch's interval and the A/A gap; else
    'level', or '' where it cannot be judged."""
    metric, sign = next(iter(task.metrics.items()))
    values = {one["mechanism"]: [sign * x for x in one["values"][metric]] for one in rows}
    name = row["mechanism"]
    if name in (BASELINE, AGAIN) or BASELINE not in values or min(len(values[name]), len(values[BASELINE])) < 2:
        return ""
    gap = 100 * abs(statistics.mean(values[BASELINE]) - statistics.mean(values[AGAIN])) if AGAIN in values else 0.0
    return compare(name, BASELINE, values, gap).outcome


def indices(pattern: str, tasks: Mapping[str, Task], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """CAB's index of every mechanism that has all columns of a pattern: of its means, and of each seed.

    Constants are those of the means of these mechanisms, the control left out; a metric in which all are
    equal says nothing and is left out. None where nothing is left to compare.
    """
    own = [row for row in rows if row["pattern"] == pattern]
    columns = list(dict.fromkeys(row["task"] for row in own))
    by_name: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in own:
        by_name.setdefault(row["mechanism"], {})[row["task"]] = row
    whole = {name: found for name, found in by_name.items() if len(found) == len(columns)}
    signs = {name: {f"{name} {metric}": sign for metric, sign in tasks[name].metrics.items()} for name in columns}
    table = {name: flat(found, "mean") for name, found in whole.items() if name != AGAIN}
    if len(table) < 2:
        return None
    equal = {metric for metric in next(iter(table.values())) if len({row[metric] for row in table.values()}) == 1}
    signs = {
        name: kept for name, ms in signs.items() if (kept := {m: sign for m, sign in ms.items() if m not in equal})
    }
    if not signs:
        return None
    constants = constants_of(table, signs)
    scores: dict[str, Any] = {}

    def scored(values: dict[str, float]) -> float:
        return compositional_index({m: x for m, x in values.items() if m not in equal}, constants)

    for name, found in whole.items():
        count = min(len(values) for row in found.values() for values in row["values"].values())
        each = [scored(flat(found, "values", seed)) for seed in range(count)]
        scores[name] = {"index": scored(flat(found, "mean")), "each": each}
    answer: dict[str, Any] = {
        "tasks": columns, "constants": constants, "own": scores,
        "incomplete": [name for name in by_name if name not in whole],
    }  # fmt: skip
    if pattern == "NS":
        answer["frozen"] = frozen(whole)
    return answer


def flat(found: Mapping[str, Mapping[str, Any]], key: str, seed: int | None = None) -> dict[str, float]:
    """{"task metric": value} of one mechanism: its means, or the values of one seed."""
    return {
        f"{task} {metric}": value if seed is None else value[seed]
        for task, row in found.items() for metric, value in row[key].items()
    }  # fmt: skip


def frozen(whole: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """The index by CAB's published constants, over the metrics that both have. CAB's data are others (faces, words of
    books), so that it says how mechanisms stand to each other, and nothing about CAB's own table."""
    answer = {}
    for name, found in whole.items():
        values = {
            SHARED[task, m]: x for task, row in found.items() for m, x in row["mean"].items() if (task, m) in SHARED
        }
        constants = {
            task: kept for task, metrics in NS_CONSTANTS.items()
            if (kept := {metric: three for metric, three in metrics.items() if (task, metric) in values})
        }  # fmt: skip
        if constants:
            answer[name] = compositional_index({metric: x for (_, metric), x in values.items()}, constants)
    return answer


def correlations(index: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Pearson's correlation of the indices of two uses over the mechanisms that have both, with Fisher's interval, and
    what becomes of CAB's reading."""
    found = []
    for a, b in itertools.combinations(index, 2):
        names = [name for name in index[a] if name in index[b] and name != AGAIN]
        if len(names) < 4:
            continue
        first, second = ([index[use][name]["index"] for name in names] for use in (a, b))
        r = float(np.corrcoef(first, second)[0, 1])
        middle, margin = math.atanh(max(-0.999999, min(0.999999, r))), 1.96 / math.sqrt(len(names) - 3)
        low, high = math.tanh(middle - margin), math.tanh(middle + margin)
        read = READING.get((a, b))
        ends = [] if read is None else sorted((read * low, read * high))
        verdict = judge(ends[0], ends[1], least=0) if ends else None
        about = {"uses": [a, b], "mechanisms": len(names), "cab": read, "verdict": verdict}
        found.append({**about, "r": r, "low": low, "high": high})
    return found


def order(result: Mapping[str, Any], pattern: str) -> list[str]:
    """Mechanisms of a pattern by their index, best first, the control at its place."""
    own = result["index"][pattern]["own"]
    return sorted(own, key=lambda name: -own[name]["index"])


def spread(each: Sequence[float]) -> str:
    return f" ± {statistics.stdev(each):.2f}" if len(each) > 1 else ""


def table(result: Mapping[str, Any]) -> str:
    """Columns, indices and correlations for a terminal."""
    lines = []
    setting = result["setting"]
    lines.append(
        f"{setting['steps']} steps, {setting['seeds']} seeds, {setting['data']} data, size {setting['size']}; "
        f"{AGAIN} is the A/A control"
    )
    for pattern in result["index"]:
        found = result["index"][pattern]
        heads = [f"{task} {metric}" for task in found["tasks"] for metric in result["metrics"][task]]
        lines += ["", f"{pattern:24s}{'index':>14s}" + "".join(f"{head:>22s}" for head in heads)]
        for name in [*order(result, pattern), *found["incomplete"]]:
            own = found["own"].get(name)
            index = "-" if own is None else f"{own['index']:+.2f}{spread(own['each'])}"
            cells = [
                cell(result, pattern, name, task, metric)
                for task in found["tasks"]
                for metric in result["metrics"][task]
            ]
            lines.append(f"{name:24s}{index:>14s}" + "".join(f"{one:>22s}" for one in cells))
    lines.append("")
    for one in result["correlation"]:
        said = f"; CAB's reading {one['verdict']}" if one["verdict"] else ""
        lines.append(
            f"{' and '.join(one['uses'])}: r = {one['r']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f}) over "
            f"{one['mechanisms']} mechanisms{said}"
        )
    lines += skipped(result)
    lines += [f"no figure: {line}" for line in result["failed"]]
    if result["missing"]:
        lines.append(f"no time was left for {len(result['missing'])} runs; the same command goes on with them")
    return "\n".join(lines)


def cell(result: Mapping[str, Any], pattern: str, name: str, task: str, metric: str) -> str:
    """Mean ± deviation over seeds of one mechanism in one metric; "-" where there is none."""
    for row in result["rows"]:
        if (row["pattern"], row["mechanism"], row["task"]) == (pattern, name, task):
            deviation = row["deviation"][metric]
            return f"{row['mean'][metric]:.4g}" + ("" if deviation is None else f" ± {deviation:.2g}")
    return "-"


def skipped(result: Mapping[str, Any]) -> list[str]:
    """A line for each mechanism that lacks a use of attention."""
    lines = []
    for name, uses in result["support"].items():
        lacking = [pattern for pattern, why in uses.items() if why]
        if lacking:
            lines.append(f"left out: {name} in {', '.join(lacking)}: {uses[lacking[0]]}")
    return lines
