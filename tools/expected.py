"""Numbers that a study must show, beside those that it shows: docs/studies/expected.md (`python -m tools.pages`).

Expected numbers were measured before this library had the studies, most of them once, with one seed. Found ones are
means over the seeds of the records that the repository keeps (`tools.records`), or of a table in study_NAME.json.
Within the tolerance, or not; where not, whether a single run may lie there by chance (95 % prediction interval).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cumulant.studies import pavlovian, position_bias, universal_approximation
from cumulant.studies.statements import half_width
from tools.pages import table
from tools.records import Records

WITHIN, CHANCE, OUTSIDE = "within", "by chance", "outside"
# Pairs of which 99 % come back without a wrong bit at d_k = 128, by 12 trials as the expected number was: 95 % of 60
# repetitions. By the law 1 + d/z², where z has no wrong bit in 99 %, there are 9.96; ours, by 200 trials, are 10.3.
TWELVE_TRIALS = (7, 11)


@dataclass(frozen=True)
class Line:
    """One row of an expected table: values of one configuration by their keys."""

    what: str
    configuration: str
    expected: Mapping[str, float]  # by key of the record's values
    share: float = 0.0  # tolerance, as a share of the value
    least: float = 0.0  # and at least so much
    over: float = math.inf  # numbers above it are noise: any two of them agree
    # By key: where the expected measurement itself comes out when it is repeated. Ours may have less noise than it had.
    repeated: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """The tables of one study."""

    study: str
    command: str  # that made the records
    tolerance: str
    lines: Sequence[Line]
    settings: Mapping[str, Any]  # which records belong to it
    title: str = ""  # of the table of its results that counts where there are no records: a row a configuration


@dataclass(frozen=True)
class Found:
    """Mean and standard deviation over so many seeds."""

    mean: float
    deviation: float
    seeds: int


Finds = Mapping[tuple[str, str], Found]  # by configuration and key


def row(keys: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return dict(zip(keys, values, strict=True))


def in_context() -> Expected:
    lengths = (10, 20, 40, 80, 160)
    plain = [f"L={length}" for length in lengths]
    five: dict[str, Any] = {"share": 0.05}
    found = [
        Line("1 head", "softmax, 1 heads", row(plain, (0.847, 0.578, 0.403, 0.301, 0.238)), **five),
        Line("2 heads", "softmax, 2 heads", row(plain, (0.593, 0.365, 0.247, 0.181, 0.147)), **five),
        Line("4 heads", "softmax, 4 heads", row(plain, (0.593, 0.365, 0.247, 0.181, 0.147)), **five),
        Line("linear attention / L", "unnormalised, 1 heads", row(plain, (0.613, 0.361, 0.243, 0.180, 0.149)), **five),
        Line("linear attention, 1/40 always", "unnormalised, 1 heads, over 40 always",
             row(plain, (0.750, 0.481, 0.239, 0.849, 6.43)), **five),
        Line("one gradient step, the best", "step", row(plain, (0.596, 0.355, 0.239, 0.178, 0.150)), **five),
        Line("ridge (Bayes)", "ridge", row(plain, (0.198, 0.135, 0.113, 0.108, 0.104)), **five),
    ]  # fmt: skip
    name, title = "in-context-linear-regression", "Risk by length of the prompt, trained at 40"
    return Expected(name, f"cumulant study {name}", "5 % (acceptance 1)", found, {}, title)


def random_features() -> Expected:
    cells = {
        "f1 p=2": {256: (0.170, 0.447, 1.20), 1024: (0.019, 0.176, 0.973), 2048: (0.012, 0.131, 0.828)},
        "f1 p=3": {256: (0.331, 0.437, 0.359), 2048: (0.149, 0.217, 0.346)},
        "f2 p=1": {256: (0.133, 0.415, 1.37), 2048: (0.017, 0.175, 0.80)},
        "f2 p=2": {1024: (1.14, 0.774, 1.22), 2048: (1.00, 0.531, 1.29)},
        "f2 p=3": {2048: (0.350, 0.493, 1.01)},
        "f2 p=4": {1024: (1.13, 0.769, 1.22), 2048: (1.02, 0.622, 1.23)},
        "f3": {1024: (0.689, 0.545, 0.775), 2048: (0.658, 0.415, 0.757)},
    }
    wide = {
        ("RFA", "f1 p=1"): {64: 0.175, 256: 0.013, 1024: 0.003},
        ("BRFA", "f1 p=1"): {64: 0.330, 256: 0.154, 1024: 0.088},
        ("RFMLP", "f1 p=1"): {64: 0.794, 256: 0.329, 1024: 0.029},
        ("RFA", "f2 p=1"): {256: 0.996, 1024: 0.253, 2048: 0.136},
        ("BRFA", "f2 p=1"): {256: 0.525, 1024: 0.363, 2048: 0.278},
        ("RFMLP", "f2 p=1"): {256: 1.32, 1024: 1.32, 2048: 1.32},
    }
    noise: dict[str, Any] = {"least": 0.05, "over": 0.95}
    found = [
        Line(f"{target}, {name}", name, {f"{target} n={n}": three[at] for n, three in counts.items()}, **noise)
        for at, name in enumerate(("RFA", "BRFA", "RFMLP")) for target, counts in cells.items()
    ]  # fmt: skip
    found += [
        Line(f"d = 16: {target}, {name}", name, {f"wide {target} n={n}": x for n, x in counts.items()}, **noise)
        for (name, target), counts in wide.items()
    ]
    heads = {10: 0.685, 30: 0.305, 100: 0.095, 300: 0.021, 600: 0.0095}  # middles of two seeds
    found.append(
        Line("f1 p=2 by heads", "RFA", {f"heads={count}": x for count, x in heads.items()}, share=0.2, least=0.05)
    )
    said = "0.05 (acceptance 3: noise); above 0.95 both are noise of 500 test points"
    return Expected("random-features", "cumulant study random-features", said, found, {"heads": 300, "centred": False})


def approximation() -> Expected:
    sup = {
        "max": (0.28, 0.088, 0.046, 0.016, 1.08), "prod": (0.27, 0.115, 0.053, 0.027, 1.17),
        "reverse": (0.041, 0.025, 0.014, 1.42, 1.00), "sort": (0.70, 0.70, 0.63, 1.43, 1.08),
    }  # fmt: skip
    found = []
    for target, errors in universal_approximation.KNOWN.items():
        for at, variant in enumerate(universal_approximation.VARIANTS):
            expected = {"error": errors[at], "largest": sup[target][at]}
            found.append(Line(f"{target}, {variant}: MSE, sup", f"{target}, {variant}", expected, 0.25, 0.001))
    found.append(
        Line("sort, two layers: MSE, sup", "sort, two layers", {"error": 0.0025, "largest": 0.44}, 0.25, 0.001)
    )
    anchors = {f"softmax {count}": x for count, x in universal_approximation.ANCHORS.items()}
    found.append(Line("anchors 8 to 128, b = M²: sup", "construction", anchors, 0.03))
    half = row([f"softmax half {m}" for m in universal_approximation.ANCHORS], (0.094, 0.035, 0.020, 0.011, 0.0054))
    found.append(Line("anchors 8 to 128, b = M²/2: sup", "construction", half, 0.03, least=0.0005))  # two digits
    command = "cumulant study universal-approximation --setting paper --attention softmax --seeds 1"
    said = "none is stated for trained networks: a quarter, at least 0.001; constructions 3 %"
    return Expected("universal-approximation", command, said, found, {"steps": 3000, "clip": 1.0})


def memory() -> Expected:
    measured = {
        32: (0.089, 0.205, 0.470, 0.978, 1.994), 64: (0.112, 0.230, 0.478, 0.998, 1.979),
        256: (0.123, 0.244, 0.496, 0.994, 1.997),
    }  # fmt: skip
    found = [
        Line(f"1: MSE, d_k = {width}, n/d_k = 1/8 to 2", "fidelity",
             row([f"{width} {ratio}" for ratio in pavlovian.RATIOS], values), 0.05)
        for width, values in measured.items()
    ]  # fmt: skip
    bits = row([f"error {ratio}" for ratio in pavlovian.ERRORS], (0.0006, 0.0093, 0.0341, 0.0780, 0.1582))
    found.append(Line("2: wrong bits, n/d_k = 0.1 to 1", "bits", bits, 0.05, 0.0005))
    widths = (16, 32, 64, 128, 256)
    found.append(
        Line("3a: pairs without a wrong bit, d_k = 16 to 256", "faultless",
             row([f"pairs {width}" for width in widths], (2, 5, 7, 8.5, 19)), 0.2, 1.0,
             repeated={"pairs 128": TWELVE_TRIALS})
    )  # fmt: skip
    safe = row([f"pairs {width}" for width in (16, 64, 256, 1024)], (3, 4, 7, 12))
    found.append(Line("3b: pairs safe whatever the values, d_k = 16 to 1,024", "guaranteed", safe, 0.2, 1.0))
    for rule, values in pavlovian.KNOWN.items():
        found.append(
            Line(f"4: {rule}, 16 to 64 pairs", "rules", row([f"{rule} {n}" for n in pavlovian.ITEMS], values), 0.06)
        )
    counts = (16, 32, 64, 128)
    maps = {
        "identity": (0.23, 0.49, 0.99, 1.97), "identity, values shifted": (0.21, 0.48, 1.00, 2.07),
        "relu": (1.79, 3.33, 6.94, 13.7), "relu, values shifted": (12, 52, 210, 851),
        "elu+1": (7.3, 15.3, 30.1, 62.4), "relu, centred": (0.30, 0.53, 1.01, 2.00),
        "relu, centred, values shifted": (0.64, 0.75, 1.01, 1.54), "elu+1, centred": (0.29, 0.52, 0.98, 2.00),
    }  # fmt: skip
    for name, values in maps.items():
        keys = [f"{name} {n}" for n in counts]
        found.append(Line(f"feature map {name}, 16 to 128 pairs", "feature maps", row(keys, values), 0.06))
    said = "5 % (stated for d_k of 64 and more), 6 % for rules and feature maps, whole pairs one or a fifth"
    return Expected("pavlovian", "cumulant study pavlovian", said, found, {"trials": 8})


def rollout() -> Expected:
    found = [
        Line(f"{name}, layers {', '.join(map(str, known))}", "exact",
             {f"{name} {layers}": x for layers, x in known.items()}, least=6e-4)
        for name, known in position_bias.KNOWN.items()
    ]  # fmt: skip
    said = "three digits (0.0006)"
    return Expected("position-bias", "cumulant study position-bias", said, found, {"steps": 1500})


def all_expected() -> list[Expected]:
    return [in_context(), random_features(), approximation(), memory(), rollout()]


def judged(line: Line, key: str, found: Found) -> str:
    """Whether the mean of these runs is the number that was expected."""
    expected = line.expected[key]
    off = abs(found.mean - expected)
    if off <= max(line.share * abs(expected), line.least) or min(found.mean, expected) > line.over:
        return WITHIN
    if key in line.repeated and line.repeated[key][0] <= expected <= line.repeated[key][1]:
        return CHANCE
    if found.seeds < 2:
        return OUTSIDE
    spread = found.deviation * math.sqrt(1 + 1 / found.seeds)  # of one run around our mean
    return CHANCE if off <= half_width(spread, found.seeds - 1) else OUTSIDE


def of_records(expected: Expected, records: Records) -> dict[tuple[str, str], Found]:
    """What the records of these settings say."""
    values: dict[tuple[str, str], list[float]] = {}
    for one in records.values():
        same = all(one["settings"].get(key) == value for key, value in expected.settings.items())
        if same and one["role"] == "compared":
            for key, value in one["values"].items():
                if isinstance(value, int | float):
                    values.setdefault((one["configuration"], key), []).append(value)
    return {
        at: Found(statistics.mean(xs), statistics.stdev(xs) if len(xs) > 1 else 0.0, len(xs))
        for at, xs in values.items()
    }


def of_table(expected: Expected, result: Mapping[str, Any]) -> dict[tuple[str, str], Found]:
    """What the table of that title says: cells are a mean and half of its 95 % interval over the seeds."""
    found = {}
    for one in result["tables"]:
        if one["title"] != expected.title:
            continue
        for name, *cells in one["rows"]:
            for key, cell in zip(one["head"][1:], cells, strict=True):
                mean, _, half = cell.partition(" ± ")
                seeds = result["settings"]["seeds"] if half else 1
                error = float(half) / half_width(1.0, seeds - 1) if half else 0.0
                found[name, key] = Found(float(mean), error * math.sqrt(seeds), seeds)
    return found


def finds(expected: Expected, kept: Mapping[str, Records], results: Mapping[str, Any]) -> Finds:
    if not expected.title:
        return of_records(expected, kept.get(expected.study, {}))
    result = results.get(f"study_{expected.study}")
    return of_table(expected, result) if result else {}


def rows(expected: Expected, found: Finds) -> tuple[list[list[str]], Counter[str], int]:
    """Lines of the table, how many numbers got which verdict, and of how many seeds."""
    counts, lines, seeds = Counter[str](), [], 0
    for line in expected.lines:
        cells, marks = [], []
        for key, known in line.expected.items():
            one = found.get((line.configuration, key))
            if one is None:
                cells.append(f"{known:g} / -")
                continue
            seeds = max(seeds, one.seeds)
            verdict = judged(line, key, one)
            counts[verdict] += 1
            marks.append(verdict)
            text = f"{known:g} / {one.mean:.3g}"
            cells.append({WITHIN: text, CHANCE: f"*{text}*", OUTSIDE: f"**{text}**"}[verdict])
        inside = "not run" if not marks else f"{marks.count(WITHIN)} of {len(line.expected)}"
        lines.append([line.what, " ; ".join(cells), inside])
    return lines, counts, seeds


def page(kept: Mapping[str, Records], results: Mapping[str, Any]) -> str:
    """A line a study with how many numbers are within their tolerance, then all of them: expected / found."""
    lines, parts = [], []
    for one in all_expected():
        own, counts, seeds = rows(one, finds(one, kept, results))
        total = sum(len(line.expected) for line in one.lines)
        verdicts = [counts[WITHIN], counts[CHANCE], counts[OUTSIDE], total - sum(counts.values())]
        lines.append([f"[{one.study}]({one.study}.md)", *map(str, (total, *verdicts, seeds))])
        said = f"Tolerance: {one.tolerance}. `{one.command}`"
        parts += [f"### {one.study}", said, table(["what", "expected / found", "within"], own)]
    head = ["study", "numbers", "within", "outside, by chance", "outside", "not run", "seeds"]
    return "\n\n".join([table(head, lines), *parts])
