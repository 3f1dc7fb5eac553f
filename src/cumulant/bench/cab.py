"""The two figures of the Comprehensive Attention Benchmark (CAB, ICML 2023): efficiency length, compositional index.

Both are plain arithmetic on numbers that were measured elsewhere; the tests hold them to CAB's published ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
