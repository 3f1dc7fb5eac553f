"""The two figures of the Comprehensive Attention Benchmark (CAB, ICML 2023): efficiency length, compositional index.

Both are plain arithmetic on numbers that were measured elsewhere; the tests hold them to CAB's published ones.
And from which length on a mechanism pays: fits of measured costs, what they say, and the table of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cumulant.bench.scaling import MATRIX_SOFTMAX

if TYPE_CHECKING:
    from cumulant.bench.efficiency import Row

FUSED_SOFTMAX = "softmax"
OPPONENTS = {"naive": MATRIX_SOFTMAX, "fused": FUSED_SOFTMAX}
PHASES = ("forward", "both")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)

# Non-causal self attention: metrics by task, each with its sign (higher is better: 1), mean and standard deviation over
# CAB's set of mechanisms. TTS has two backbones (FastSpeech 2, Transformer-TTS) with two metrics each.
NS_CONSTANTS: dict[str, dict[str, tuple[int, float, float]]] = {
    "TTS": {
        "FS2-MCD": (-1, 3.4245, 0.06832),
        "FS2-MSD": (-1, 1.97429, 0.0361768),
        "TTTS-MCD": (-1, 4.06947, 0.09422),
        "TTTS-MSD": (-1, 2.19021, 0.03866),
    },
    "Sum": {"R1": (1, 34.88667, 1.39697), "R2": (1, 6.79333, 1.41078), "RL": (1, 31.96889, 1.31499)},
    "SR": {"PSNR": (1, 23.208, 0.27499), "SSIM": (1, 0.6758, 0.01557)},
    "MLM": {"PPL": (-1, 36.292, 62.30827)},
}
Constants = Mapping[str, Mapping[str, tuple[int, float, float]]]


def task_scores(scores: Mapping[str, float], constants: Constants = NS_CONSTANTS) -> dict[str, float]:
    """Mean over the metrics x of a task of sign (x - mu) / sigma, for every task; 0 is the average mechanism."""
    known = [metric for task in constants.values() for metric in task]
    if set(scores) != set(known):
        raise ValueError(f"scores must have exactly the metrics {', '.join(known)}, got {', '.join(scores)}")
    return {
        task: statistics.mean(sign * (scores[metric] - mu) / sigma for metric, (sign, mu, sigma) in metrics.items())
        for task, metrics in constants.items()
    }


def compositional_index(scores: Mapping[str, float], constants: Constants = NS_CONSTANTS) -> float:
    """Mean of the task scores of one mechanism in one pattern of attention."""
    return statistics.mean(task_scores(scores, constants).values())


def constants_of(table: Mapping[str, Mapping[str, float]], signs: Mapping[str, Mapping[str, int]]) -> Constants:
    """Constants from runs of one's own: table[mechanism][metric], signs[task][metric]; sigma is that of a sample."""
    if len(table) < 2:
        raise ValueError(f"a spread needs two mechanisms or more, got {len(table)}")
    columns = {metric: [row[metric] for row in table.values()] for task in signs.values() for metric in task}
    flat = [metric for metric, values in columns.items() if len(set(values)) == 1]
    if flat:
        raise ValueError(f"{', '.join(flat)} must differ between mechanisms: without a spread there is no score")
    return {
        task: {
            metric: (sign, statistics.mean(columns[metric]), statistics.stdev(columns[metric]))
            for metric, sign in metrics.items()
        }
        for task, metrics in signs.items()
    }


@dataclass(frozen=True)
class Crossing:
    """From which length on a linear cost d L + e is below a quadratic one a L^2 + b L + c, and how well both fit."""

    length: float | None  # 0: from the first token on; None: no such length, see `why`
    why: str
    quadratic: tuple[float, float, float]
    linear: tuple[float, float]
    r2_quadratic: float
    r2_linear: float


def efficiency_length(
    lengths: Sequence[float],
    vanilla: Sequence[float],
    mechanism: Sequence[float],
    *,
    mechanism_lengths: Sequence[float] | None = None,
    drop_first: bool = False,
) -> Crossing:
    """CAB's efficiency length: the larger root of a L^2 + (b - d) L + (c - e) = 0, least-squares fits of both costs.

    `mechanism_lengths` where the mechanism was measured at other lengths; `drop_first` leaves the shortest of them
    out, as CAB does for time, where it is the cost of starting anything.
    """
    x, y = np.asarray(lengths, float), np.asarray(vanilla, float)
    u, w = np.asarray(lengths if mechanism_lengths is None else mechanism_lengths, float), np.asarray(mechanism, float)
    if len(x) != len(y) or len(u) != len(w):
        raise ValueError(f"one cost for each length, got {len(y)} and {len(w)} costs for {len(x)} and {len(u)} lengths")
    x, y, u, w = *_ascending(x, y), *_ascending(u, w)
    if drop_first:
        u, w = u[1:], w[1:]
    if len(x) < 3 or len(u) < 2:
        raise ValueError(f"a parabola needs 3 lengths and a line 2, got {len(x)} and {len(u)}")
    a, b, c = (float(z) for z in np.polyfit(x, y, 2))
    d, e = (float(z) for z in np.polyfit(u, w, 1))
    fits = (a, b, c), (d, e), _r2(y, np.polyval((a, b, c), x)), _r2(w, np.polyval((d, e), u))
    longest = float(x[-1])
    # A quadratic part below a hundredth of the cost at the longest length is noise: the opponent is linear there.
    if a * longest**2 < 0.01 * abs(a * longest**2 + b * longest + c):
        cheaper = "grows slower" if d < b else "grows faster"
        return Crossing(None, f"the opponent is linear in this range; this one {cheaper}", *fits)
    inside = (b - d) ** 2 - 4 * a * (c - e)
    root = (d - b + math.sqrt(inside)) / (2 * a) if inside >= 0 else -1.0
    if root <= 0:
        return Crossing(0.0, "below at every length", *fits)
    return Crossing(root, "" if root <= longest else "beyond the longest length measured", *fits)


def measured_crossing(lengths: Sequence[int], opponent: Sequence[float], mechanism: Sequence[float]) -> int | None:
    """The shortest measured length from which on the mechanism costs less at every measured length; None if none."""
    crossing = None
    for length, theirs, own in zip(reversed(lengths), reversed(opponent), reversed(mechanism), strict=True):
        if own >= theirs:
            break
        crossing = length
    return crossing


def _ascending(lengths: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(lengths)
    return lengths[order], costs[order]


def _r2(measured: np.ndarray, fitted: np.ndarray) -> float:
    """Share of the variance that the fit explains."""
    total = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 if total == 0 else 1 - float(((measured - fitted) ** 2).sum()) / total


def crossings(rows: Sequence[Row], linear: set[str]) -> list[dict[str, Any]]:
    """The efficiency length of every contender whose cost is linear, for time and memory, against both opponents."""
    found = []
    for name in dict.fromkeys(row.name for row in rows if row.name in linear):
        for quantity in ("time", "memory"):
            for phase in PHASES:
                own = costs(rows, name, quantity, phase)
                for opponent, label in OPPONENTS.items():
                    entry: dict[str, Any] = {"name": name, "quantity": quantity, "phase": phase, "opponent": opponent}
                    found.append(entry | _crossing(costs(rows, label, quantity, phase), own, quantity == "time"))
    return found


def _crossing(theirs: dict[int, float], own: dict[int, float], drop_first: bool) -> dict[str, Any]:
    both = sorted(theirs.keys() & own.keys())
    measured = measured_crossing(both, [theirs[n] for n in both], [own[n] for n in both])
    if len(theirs) < 3 or len(own) < 2 + drop_first:
        return {"length": None, "why": "too few lengths to fit", "measured": measured}
    fit = efficiency_length(
        list(theirs), list(theirs.values()), list(own.values()), mechanism_lengths=list(own), drop_first=drop_first
    )
    return {**asdict(fit), "measured": measured}


def checks(rows: Sequence[Row], found: Sequence[dict[str, Any]]) -> list[str]:
    """What CAB's page expects on any machine, in sentences: seen or not seen in these numbers."""
    sentences = []
    two, three, naive = (costs(rows, name, "memory", "forward") for name in ("cumulant2", "cumulant3", MATRIX_SOFTMAX))
    shared = sorted(two.keys() & three.keys() & naive.keys())
    if shared:
        start = next((n for n in shared if three[n] < naive[n]), None)
        holds = start is not None and all(two[n] <= three[n] < naive[n] for n in shared if n >= start)
        sentences.append(
            f"Memory of cumulant2 <= cumulant3 < textbook softmax from L = {start:,} on: "
            f"{'seen' if holds else 'not seen'}."
            if start is not None
            else "Memory of cumulant3 is not below the textbook softmax at any length measured."
        )
    by_key = {(c["name"], c["quantity"]): c for c in found if c["phase"] == "forward" and c["opponent"] == "naive"}
    pairs = [(name, by_key[name, "memory"]["length"], c["length"]) for (name, q), c in by_key.items() if q == "time"]
    pairs = [pair for pair in pairs if None not in pair]
    if pairs:
        later = [name for name, memory, seconds in pairs if memory > seconds]
        sentences.append(
            f"The memory crossing comes no later than the time crossing (forward, against the textbook softmax) for "
            f"{len(pairs) - len(later)} of {len(pairs)} mechanisms"
            + (f"; not for {', '.join(later)}." if later else ".")
        )
    return sentences


def costs(rows: Sequence[Row], name: str, quantity: str, phase: str) -> dict[int, float]:
    """Cost by length: median milliseconds, or bytes."""
    own = [row for row in rows if row.name == name and phase in row.milliseconds]
    return {row.length: row.milliseconds[phase][0] if quantity == "time" else row.peak_bytes[phase] for row in own}


def table(result: dict[str, Any]) -> str:
    """Efficiency lengths for a terminal: forward and forward+backward, time and memory, against both opponents."""
    columns = [(q, p, o) for q in ("time", "memory") for p in PHASES for o in OPPONENTS]
    lines = [
        "efficiency length: tokens from which on it costs less than softmax; CAB's fit / shortest measured length",
        f"{'':28s}" + "".join(f"{q + ' ' + ('fwd' if p == 'forward' else 'f+b'):>15s}" for q, p, _ in columns),
        f"{'against':28s}" + "".join(f"{o:>15s}" for _, _, o in columns),
    ]
    by_key = {(c["name"], c["quantity"], c["phase"], c["opponent"]): c for c in result["crossings"]}
    lines += [
        f"{name:28s}" + "".join(f"{crossing_text(by_key[name, *column]):>15s}" for column in columns)
        for name in dict.fromkeys(c["name"] for c in result["crossings"])
    ]
    lines += result["checks"]
    lines += [f"left out: {name}: {why}" for name, why in result["left_out"].items()]
    lines += [f"not measured further: {name}: {why}" for name, why in result["given_up"].items()]
    return "\n".join(lines)


def crossing_text(crossing: dict[str, Any]) -> str:
    """The fitted length (0: the fit is below everywhere; > : beyond what was measured) / the measured one.

    Against an opponent that is linear in this range there is nothing to fit: "less" or "more" says how it grows.
    """
    length, why = crossing["length"], crossing["why"]
    fit = "-" if length is None else f"{'> ' * ('beyond' in why)}{length:,.0f}"
    if length is None and "few" not in why:
        fit = "less" if "slower" in why else "more"
    measured = crossing["measured"]
    return f"{fit} / {'-' if measured is None else format(measured, ',')}"
