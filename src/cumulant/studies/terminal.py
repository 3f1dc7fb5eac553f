"""The results of a study as text for a terminal."""

from __future__ import annotations

import textwrap
from typing import Any

from cumulant.studies import wording


def terminal_summary(results: dict[str, Any]) -> str:
    """The table and the verdict."""
    labels = [row["configuration"] + (" (control)" if row["role"] == "control" else "") for row in results["summary"]]
    width = max(18, *map(len, labels))
    lines = [
        wording.about_data(results),
        f"{'attention':{width}}  {'runs':>4}  {'test accuracy':16}  {'lowest .. highest':18}  {'parameters':>10}  "
        f"{'s/epoch':>7}  {'s/run':>7}",
    ]
    for label, row in zip(labels, results["summary"], strict=True):
        spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
        extremes = f"{100 * row['low']:.2f} .. {100 * row['high']:.2f}"
        accuracy = f"{100 * row['mean']:.2f}{spread} %"
        epoch = f"{row['epoch_seconds']:.2f}" if row["epoch_seconds"] else "-"
        lines.append(
            f"{label:{width}}  {len(row['seeds']):>4}  {accuracy:16}  {extremes:18}  {row['parameters']:>10,}  "
            f"{epoch:>7}  {row['seconds']:>7.1f}"
        )
    words = results["verdict"]
    lines += [
        f"mean ± standard deviation over the runs; control: {results['baseline']} again, other seeds",
        "",
        f"found: {words['ordering']}" + ("   (≈: not told apart by these runs)" if "≈" in words["ordering"] else ""),
        words["claim_text"],
        *(f"  {comparison['text']}" for comparison in [*words["comparisons"], *words["pairs"]]),
        *textwrap.wrap(words["control_text"], 100),
    ]
    lines += [f"failed: {sentence}" for sentence in wording.failures(results)]
    lines += [f"diverged: {sentence}" for sentence in wording.collapses(results)]
    if results["missing"]:
        lines += ["", f"not finished: {wording.missing(results)}; the same command goes on with them"]
    return "\n".join(lines)
