"""What a set of accuracies allows one to say: every sentence of the report's summary is computed here.

A difference counts when two things hold: its 95 % interval (Welch's, from the spread over seeds) leaves out zero, and
it is larger than the difference between two sets of runs of the *same* mechanism, the control.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cumulant.studies.statements import CONFIRMED, OPEN, REFUTED, half_width
from cumulant.studies.statements import judge as judge_interval

NAMED = 3  # pairs that differ across neighbours that do not
OUTCOMES = {CONFIRMED: "above", REFUTED: "below", OPEN: "level"}  # of "the first is above the second"


@dataclass(frozen=True)
class Claim:
    """What a paper says: an ordering as links (above, below, whether a tie agrees), and accuracies in %."""

    links: tuple[tuple[str, str, bool], ...]
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {name for link in self.links for name in link[:2]}


@dataclass(frozen=True)
class Comparison:
    """`first` against `second`, in percentage points: difference of the means and its 95 % interval."""

    first: str
    second: str
    difference: float
    low: float | None  # None with a single seed: one run has no spread
    high: float | None
    control_gap: float

    @property
    def outcome(self) -> str:
        """'above' or 'below' when the difference counts, else 'level'."""
        if abs(self.difference) <= self.control_gap:
            return "level"
        return OUTCOMES[judge_interval(self.low, self.high, least=0)]


def compare(first: str, second: str, accuracies: Mapping[str, Sequence[float]], control_gap: float = 0.0) -> Comparison:
    """Welch's interval for the difference of two means; accuracies are fractions, the result is in points."""
    a, b = ([100 * x for x in accuracies[name]] for name in (first, second))
    difference = statistics.mean(a) - statistics.mean(b)
    if min(len(a), len(b)) < 2:
        return Comparison(first, second, difference, None, None, control_gap)
    va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    if va + vb == 0:
        return Comparison(first, second, difference, difference, difference, control_gap)
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    margin = half_width(math.sqrt(va + vb), freedom)
    return Comparison(first, second, difference, difference - margin, difference + margin, control_gap)


def signed(points: float) -> str:
    """+1.23 or −1.23, with a real minus sign."""
    return f"{points:+.2f}".replace("-", "−")


def describe(result: Comparison) -> str:
    """One comparison in words."""
    size = f"{abs(result.difference):.2f} points"
    if result.low is None or result.high is None:
        gap = f"{signed(result.difference)} points"
        return f"{result.first} against {result.second}: {gap}, but a single run says nothing about chance"
    interval = f"95 % interval {signed(result.low)} to {signed(result.high)}"
    if result.outcome == "level":
        return (
            f"{result.first} and {result.second} cannot be told apart: difference {signed(result.difference)} points, "
            f"{interval}"
        )
    return f"{result.first} is {result.outcome} {result.second} by {size} ({interval})"


def agreement(outcome: str) -> str:
    """What a comparison says about one link of the claim; a tie is not told apart, also where it would agree."""
    return next(word for word, found in OUTCOMES.items() if found == outcome)


def ordering(accuracies: Mapping[str, Sequence[float]], control_gap: float) -> str:
    """Mechanisms by mean accuracy; '>' where neighbours differ beyond chance and control, '≈' where not.

    '≈' does not carry over: two that are each level with a third may still differ. Such pairs are named as well, the
    first few of them.
    """
    names = sorted(accuracies, key=lambda name: -statistics.mean(accuracies[name]))
    if len(names) > 1 and all(len(values) < 2 for values in accuracies.values()):
        return f"{', '.join(names)} from best to worst in one run each"
    apart = {
        pair for pair in itertools.combinations(names, 2) if compare(*pair, accuracies, control_gap).outcome == "above"
    }
    text = names[0]
    hidden = []
    for i, below in enumerate(names[1:], start=1):
        text += f" {'>' if (names[i - 1], below) in apart else '≈'} {below}"
        for above in names[: i - 1]:
            chain = itertools.pairwise(names[names.index(above) : i + 1])
            if (above, below) in apart and not any(pair in apart for pair in chain):
                hidden.append(f"{above} > {below}")
    if len(hidden) > NAMED:
        hidden[NAMED:] = [f"so in {len(hidden) - NAMED} more pairs"]
    return text + (f", yet {' and '.join(hidden)}" if hidden else "")


def judge(
    paper: Claim, accuracies: Mapping[str, Sequence[float]], control_gap: float
) -> tuple[str, str, list[Comparison]]:
    """Whether the ordering of a paper holds: a keyword, a sentence, the comparisons behind it.

    'reproduced': every '>' is seen, '>=' is not reversed, and not all of it is ties; 'contradicted': some link is
    reversed; 'partly': some link is seen and none reversed; 'undecided': none is seen and none reversed; 'untested': a
    mechanism is missing.
    """
    links = [link for link in paper.links if link[0] in accuracies and link[1] in accuracies]
    results = [compare(first, second, accuracies, control_gap) for first, second, _ in links]
    if len(links) < len(paper.links):
        missing = sorted(paper.names - set(accuracies))
        return "untested", f"The paper's ordering is not tested: {', '.join(missing)} did not take part.", results
    reversed_ = [r for r in results if r.outcome == "below"]
    ties = [tie for _, _, tie in links]
    signs = [(r, f"{r.first} {'>=' if tie else '>'} {r.second}", tie) for r, tie in zip(results, ties, strict=True)]
    seen = [text for r, text, _ in signs if r.outcome == "above"]
    unseen = [text for r, text, tie in signs if r.outcome == "level" and not tie]
    level = [text for r, text, tie in signs if r.outcome == "level" and tie]
    if reversed_:
        which = " and ".join(f"{r.second} came out above {r.first}" for r in reversed_)
        return "contradicted", f"The paper's ordering does not hold on this data: {which}.", results
    if seen and not unseen and (not all(ties) or not level):
        but = f"; {' and '.join(level)} is not told apart, which does not contradict it" if level else ""
        return "reproduced", f"The paper's ordering reproduces on this data{but}.", results
    if seen:
        missed = " and ".join(unseen or level)
        text = f"The paper's ordering reproduces in part: {' and '.join(seen)} is seen, {missed} is not."
        return "partly", text, results
    if any(r.low is None for r in results):
        text = "The paper's ordering is not tested: where there is one run of a mechanism, chance cannot be judged."
        return "undecided", text, results
    text = (
        "This data neither confirms nor contradicts the paper's ordering: from one mechanism to the next the "
        "differences are within chance."
    )
    return "undecided", text, results


def pairs(paper: Claim, accuracies: Mapping[str, Sequence[float]], control_gap: float) -> list[Comparison]:
    """Configurations with extras against their mechanism alone and against softmax with the same extras; mechanisms of
    which the paper says nothing against softmax, plain where it was not run with their extras."""
    plain = {_sorted(name): name for name in accuracies}
    found: list[Comparison] = []
    for name in accuracies:
        mechanism, *extras = name.split("+")
        others = [mechanism] if extras else []
        if mechanism != "softmax" and (extras or mechanism not in paper.names):
            alike = "+".join(["softmax", *extras])
            others.append(alike if mechanism in paper.names or _sorted(alike) in plain else "softmax")
        there = [plain[_sorted(other)] for other in others if _sorted(other) in plain]
        found += [compare(name, other, accuracies, control_gap) for other in there]
    return found


def _sorted(name: str) -> tuple[str, ...]:
    mechanism, *extras = name.split("+")
    return (mechanism, *sorted(extras))


def verdict(
    paper: Claim, accuracies: Mapping[str, Sequence[float]], control: Sequence[float], baseline: str
) -> dict[str, Any]:
    """The summary of a study: final accuracies (fractions) by configuration, the control's, and whom it repeats."""
    gap, control_text = judge_control(accuracies.get(baseline, ()), control, baseline)
    keyword, sentence, links = judge(paper, accuracies, gap)
    ties = {(first, second): tie for first, second, tie in paper.links}
    return {
        "claim": keyword,
        "claim_text": sentence,
        "ordering": ordering(accuracies, gap),
        "control_gap": gap,
        "control_text": control_text,
        "comparisons": [
            {**_values(result), "tie_agrees": ties[result.first, result.second], "agreement": agreement(result.outcome)}
            for result in links
        ],
        "pairs": [_values(result) for result in pairs(paper, accuracies, gap)],
        "paper_accuracy": dict(paper.reported),
    }


def judge_control(own: Sequence[float], control: Sequence[float], baseline: str) -> tuple[float, str]:
    """How far two sets of runs of the same model are apart, in points, and what that says."""
    if not own or not control:
        return 0.0, f"No control was run ({baseline} once more, with other seeds), so chance is judged by seeds alone."
    again = f"{baseline} again"
    check = compare(baseline, again, {baseline: own, again: control})
    gap = abs(check.difference)
    if check.low is None or check.high is None:
        return gap, "With one seed of the baseline or of its control there is no spread to judge by: use more seeds."
    caution = (
        f": not told apart, as it should be. Differences of up to about {(check.high - check.low) / 2:.1f} points "
        "are what chance alone can make of this many seeds."
        if check.low <= 0 <= check.high
        else ". They should not differ at all: by bad luck they do, and every other difference deserves doubt."
    )
    return gap, (
        f"Two sets of {baseline} runs that differ only in their seeds are {gap:.2f} points apart (95 % interval "
        f"{signed(check.low)} to {signed(check.high)}){caution}"
    )


def _values(result: Comparison) -> dict[str, Any]:
    return {**asdict(result), "outcome": result.outcome, "text": describe(result)}


def summarise(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per configuration and role: mean, standard deviation (over seeds), extremes, parameters, seconds."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["configuration"], record["role"]), []).append(record)
    rows = []
    for (name, role), group in groups.items():
        final = [record["accuracy"] for record in group]
        epochs = [record["epoch_seconds"] for record in group if record["epoch_seconds"]]
        rows.append(
            {
                "configuration": name,
                "role": role,
                "seeds": [record["seed"] for record in group],
                "mean": statistics.mean(final),
                "std": statistics.stdev(final) if len(final) > 1 else None,
                "low": min(final),
                "high": max(final),
                "top5": statistics.mean(record["top5"] for record in group),
                "parameters": group[0]["parameters"],
                "loss": statistics.mean(record["loss"][-1] for record in group),
                "seconds": statistics.mean(record["seconds"] for record in group),
                "epoch_seconds": statistics.median(epochs) if epochs else None,
                "epoch_range": [min(epochs), max(epochs)] if epochs else None,
                "items_per_second": group[0]["items_per_epoch"] / statistics.median(epochs) if epochs else None,
                "devices": sorted({record["device"] for record in group}),
            }
        )
    return rows
