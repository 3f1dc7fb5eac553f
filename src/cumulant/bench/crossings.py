"""From which length on a mechanism pays: fits of measured costs, what they say, and the table of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cumulant.bench import cab
from cumulant.bench.scaling import MATRIX_SOFTMAX

if TYPE_CHECKING:
    from cumulant.bench.efficiency import Row

FUSED_SOFTMAX = "softmax"
OPPONENTS = {"naive": MATRIX_SOFTMAX, "fused": FUSED_SOFTMAX}
PHASES = ("forward", "both")


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
    measured = cab.measured_crossing(both, [theirs[n] for n in both], [own[n] for n in both])
    if len(theirs) < 3 or len(own) < 2 + drop_first:
        return {"length": None, "why": "too few lengths to fit", "measured": measured}
    fit = cab.efficiency_length(
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
