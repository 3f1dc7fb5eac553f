"""Tables for docs/results.md from records: nothing in them is written by hand.

A block of the page stands between `<!-- results: NAME -->` and `<!-- end -->`; filling the page replaces what is
between the two and leaves the rest alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cumulant.studies.command import Reproduce
from cumulant.studies.cumulant_vit import CLAIM, planned
from cumulant.studies.outcome import outcome
from cumulant.studies.plan import Key
from cumulant.studies.records import records_of
from cumulant.studies.report import collapses, failures, missing
from cumulant.studies.verdict import signed

BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def study_block(settings: Reproduce, records: Mapping[Key, dict[str, Any]]) -> str:
    """The command of a study, and its table, verdict and origin as far as there are records."""
    plan = planned(settings)
    found = records_of(plan, records)
    command = f"```\n{settings.command()}\n```\n"
    if not found:
        return f"{command}\nNot run yet: none of {len(plan)} runs.\n"
    if all("failed" in record for record in found):
        return f"{command}\nEvery run so far failed: {found[0]['failed']}\n"
    results = outcome(CLAIM, found, plan, settings.attention, settings.baseline, {})
    parts = [command, table(results), *filter(None, [words(results)]), origin(results)]
    parts += [f"Failed: {sentence}\n" for sentence in failures(results)]
    parts += [f"Diverged: {sentence}.\n" for sentence in collapses(results)]
    if results["missing"]:
        parts.insert(1, f"Not finished: {len(found)} of {len(plan)} runs; missing are {missing(results)}.\n")
    return "\n".join(parts)


def overview(studies: Mapping[str, Reproduce], records: Mapping[Key, dict[str, Any]]) -> str:
    """A row for each study, by what it is about: runs done, the baseline, and the best of what it is compared with."""
    lines = ["| study | runs | baseline | top-1, % | best other | top-1, % |", "|---|---|---|---|---|---|"]
    for about, settings in studies.items():
        plan = planned(settings)
        found = records_of(plan, records)
        rows: list[dict[str, Any]] = []
        if any("failed" not in record for record in found):
            rows = outcome(CLAIM, found, plan, settings.attention, settings.baseline, {})["summary"]
        own = [row for row in rows if row["configuration"] == settings.baseline and row["role"] != "control"]
        others = [row for row in rows if row["configuration"] != settings.baseline]
        cells = [f"{len(found)} of {len(plan)}"]
        for row in (own[0] if own else None, max(others, key=lambda row: row["mean"], default=None)):
            cells += ["", ""] if row is None else [row["configuration"], reached(row)]
        lines.append(f"| {about} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def reached(row: Mapping[str, Any]) -> str:
    """Mean and spread of a configuration in per cent."""
    return f"{100 * row['mean']:.2f}" + ("" if row["std"] is None else f"\u00a0±\u00a0{100 * row['std']:.2f}")


def table(results: Mapping[str, Any]) -> str:
    """One row per configuration, the control last."""
    items = "clips" if results["data"]["kind"] == "video" else "images"
    lines = [
        f"| attention | runs | top-1, % | lowest .. highest | top-5, % | parameters | s/epoch | {items}/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(results["summary"], key=lambda row: row["role"] == "control"):
        name = row["configuration"] + (" again (control)" if row["role"] == "control" else "")
        extremes = "" if row["std"] is None else f"{100 * row['low']:.2f} .. {100 * row['high']:.2f}"
        epoch = f"{row['epoch_seconds']:.2f}" if row["epoch_seconds"] else ""
        speed = f"{row['items_per_second']:,.0f}" if row["items_per_second"] else ""
        lines.append(
            f"| {name} | {len(row['seeds'])} | {reached(row)} | {extremes} | {100 * row['top5']:.2f} "
            f"| {row['parameters']:,} | {epoch} | {speed} |"
        )
    return "\n".join(lines) + "\n"


def words(results: Mapping[str, Any]) -> str:
    """The verdict, one line per comparison; nothing where there is one configuration, and nothing of the paper's claim
    where its mechanisms did not all take part."""
    verdict = results["verdict"]
    roles = [row["role"] for row in results["summary"]]
    if len(roles) == 1:
        return ""
    found = [f"Found: {verdict['ordering']}."] if roles.count("control") < len(roles) - 1 else []
    claim = [] if verdict["claim"] == "untested" else [verdict["claim_text"]]
    lines = [" ".join([*found, *claim, verdict["control_text"]]), ""]
    lines += [f"- {one['text']}" for one in verdict["comparisons"]]
    for one in verdict["pairs"]:
        between = "one run each" if one["low"] is None else f"95 % {signed(one['low'])} to {signed(one['high'])}"
        lines.append(f"- {one['first']} against {one['second']}: {signed(one['difference'])} points ({between})")
    return "\n".join(lines).rstrip() + "\n"


def origin(results: Mapping[str, Any]) -> str:
    """Commit, code, machine, versions and dates of the runs, and their seeds."""
    lines = [made(one) for one in results["origins"]]
    seeds = ", ".join(map(str, results["seeds"]["compared"]))
    control = ", ".join(map(str, results["seeds"]["control"]))
    lines.append(f"Seeds {seeds}{f'; control {control}' if control else ''}.")
    return "\n".join(lines) + "\n"


FULL = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def made(one: Mapping[str, Any]) -> str:
    """One of the origins of runs, in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    count = f"{one['runs']} run{'s' if one['runs'] > 1 else ''}"
    commit = FULL.sub(r"\1", one["commit"] or "")  # a machine may be told all 40 digits
    code = [f"commit {commit}"] * bool(commit) + [f"code {one['source']}"] * bool(one["source"])
    told = [", ".join(code) or "a checkout without a commit", one["device"], versions, ", ".join(one["dates"])]
    return f"{count}: {'; '.join(told)}."


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """The page with every block replaced; a block without a place, or a place without a block, is an error."""
    places = [name for _, name, _, _ in BLOCK.findall(page)]
    if sorted(places) != sorted(blocks):
        raise ValueError(f"the page has places for {sorted(places)}, got blocks {sorted(blocks)}")
    return BLOCK.sub(lambda match: f"{match[1]}{_tidy(blocks[match[2]])}{match[4]}", page)


def in_order(records: Mapping[Key, dict[str, Any]], studies: Sequence[Reproduce]) -> list[dict[str, Any]]:
    """Those of the records that belong to the studies, in the order of their plans, each once."""
    keys = dict.fromkeys(run.key for settings in studies for run in planned(settings))
    return [records[key] for key in keys if key in records]


def _tidy(block: str) -> str:
    return block.strip("\n") + "\n"
