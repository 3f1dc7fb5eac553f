"""What follows from the records of a study: table, verdict, classes, maps and where the runs come from."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cumulant.studies.plan import Run
from cumulant.studies.records import dense
from cumulant.studies.verdict import Claim, summarise, verdict

MANY_CLASSES = 20  # more than that are shown without a number in every cell
CONFUSED_PAIRS = 12

Record = dict[str, Any]


def outcome(
    paper: Claim,
    every: Sequence[Record],
    plan: Sequence[Run],
    attention: Sequence[str],
    baseline: str,
    maps: Mapping[str, Any],
) -> dict[str, Any]:
    """All that results.json holds besides its origin and the measurements; not every record may be a failed one."""
    records = [record for record in every if "failed" not in record]
    names = [name for name in attention if _of(records, name)]
    there = [(record["configuration"], record["seed"], record["role"]) for record in every]
    wanted = [(run.configuration, run.seed, run.role) for run in plan]
    accuracies = {name: [record["accuracy"] for record in _of(records, name)] for name in names}
    control = [record["accuracy"] for record in records if record["role"] == "control"]
    first = next((record for record in records if record["configuration"] == baseline), records[0])
    _check_classes(records, first)
    head = ("configuration", "seed", "role")
    told = {} if names else {"ordering": "nothing yet: only control runs are finished"}
    return {
        "data": {key: first["data"].get(key) for key in ("name", "kind", "train", "test", "digest")},
        "classes": first["data"]["classes"],
        "recipe": {key: value for key, value in first["recipe"].items() if not key.startswith("attention")},
        "baseline": baseline,
        "attention": names,
        "seeds": {
            role: sorted({record["seed"] for record in records if record["role"] == role})
            for role in ("compared", "control")
        },
        "runs": list(records),
        "missing": [dict(zip(head, one, strict=True)) for one in wanted if one not in there],
        "failed": [{key: record[key] for key in (*head, "failed")} for record in every if "failed" in record],
        "summary": summarise(records),
        "verdict": verdict(paper, accuracies or {baseline: [0.0]}, control if names else [], baseline) | told,
        "per_class": {name: per_class(_of(records, name)) for name in names},
        "confusion": {name: confusion(_of(records, name)) for name in names},
        "maps": {
            "models": {name: maps[name] for name in names if name in maps},
            "locality": localities(records, names),
            "tokens": next((r["locality"]["tokens"] for r in [first, *records] if r["locality"]), None),
        },
        "trained": next((record["trained"] for record in records if record["trained"]), []),
        "origins": origins(records),
    }


def per_class(records: Sequence[Record]) -> list[float | None]:
    """Mean over the runs of the share of every class that is recognised; None for a class without test items."""
    shares = zip(*(record["per_class"] for record in records), strict=True)
    return [None if None in one else round(statistics.mean(one), 5) for one in shares]


def confusion(records: Sequence[Record]) -> list[list[int]]:
    """Counts summed over the runs: row the label, column the prediction."""
    count = len(records[0]["data"]["classes"])
    matrices = [dense(record["confusion"], count) for record in records]
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def confused(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> list[dict[str, Any]]:
    """The pairs that are mistaken most often: label, prediction, share of the label's items."""
    found: list[dict[str, Any]] = [
        {"label": classes[i], "predicted": classes[j], "share": cell / max(sum(row), 1)}
        for i, row in enumerate(matrix)
        for j, cell in enumerate(row)
        if i != j and cell
    ]
    return sorted(found, key=lambda one: -one["share"])[:CONFUSED_PAIRS]


def localities(records: Sequence[Record], names: Sequence[str]) -> dict[str, Any]:
    """Tokens used and negative mass of every configuration: mean, lowest and highest over its seeds."""
    found: dict[str, Any] = {}
    for name in names:
        each = [record["locality"] for record in _of(records, name) if record["locality"]]
        if each:
            found[name] = {"tokens": each[0]["tokens"]}
            for key in ("tokens_used", "negative_mass"):
                values = [one[key] for one in each]
                found[name][key] = {"mean": statistics.mean(values), "low": min(values), "high": max(values)}
    return found


def origins(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Where the runs were made: commit, digest of the code, device and versions, with the number of runs from there."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        versions = record["provenance"]["versions"]
        values = {
            "commit": record["provenance"]["commit"],
            "source": record.get("source"),
            "device": record.get("machine") or named(record),
            "system": record["provenance"]["machine"]["system"],
            "versions": {name: versions[name] for name in ("python", "torch") if name in versions},
        }
        key = tuple(str(value) for value in values.values())
        one = found.setdefault(key, {**values, "runs": 0, "dates": []})
        one["runs"] += 1
        one["dates"] = sorted({*one["dates"], record["provenance"]["date"][:10]})
    return list(found.values())


def named(record: Record) -> str:
    """The device of a record, a processor by its name."""
    device = record["device"]
    return record["provenance"]["machine"]["processor"] if device == "cpu" else device


def _check_classes(records: Sequence[Record], first: Record) -> None:
    """Records from before digests are merged by the name of their data: its classes must be the same ones too."""
    for record in records:
        mine, others = first["data"]["classes"], record["data"]["classes"]
        if mine != others:
            raise ValueError(
                f"the records are of different data named {first['data']['name']}: {first['configuration']}, seed "
                f"{first['seed']} has {len(mine)} classes, {record['configuration']}, seed {record['seed']} has "
                f"{len(others)}, not all the same; take those of one of them out of the folder"
            )


def _of(records: Sequence[Record], name: str) -> list[Record]:
    return [record for record in records if record["configuration"] == name and record["role"] == "compared"]
