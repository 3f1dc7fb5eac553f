"""Records of finished training runs: small JSON files that hold all a report says about a run.

Records from another machine or another day are merged by copying them into the folder. Which data, code, machine and
versions made a run is in its record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch

import cumulant
from cumulant.bench.provenance import cpu_model
from cumulant.data.part import Source
from cumulant.studies.plan import Key, Run, mark
from cumulant.studies.training import Training, deciding, fingerprint, key_by_name
from cumulant.train import TrainResult, read_log

FORMAT = 2  # of records and results.json; raised when the report could not read an older file
# What a training run depends on, under src/cumulant.
SOURCES = ("*.py", "kernels/**/*.py", "zoo/*.py", "nn/*.py", "models/*.py", "data/*.py", "train/*.py")
NOT_SOURCES = {"__init__.py", "cli.py", "command.py", "lazy.py", "listing.py", "style.py", "train/command.py"}
MAPS = ".maps.json"


def source_digest() -> str:
    """Digest of the code that takes part in training: it tells apart what a commit with changes does not."""
    digest = hashlib.sha256()
    root = Path(cumulant.__file__).parent
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        if path.relative_to(root).as_posix() not in NOT_SOURCES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def device_name(device: str) -> str:
    """The accelerator or the processor that trains."""
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else cpu_model()


def make_record(
    run: Training, result: TrainResult, source: Source, device: str, made: dict[str, Any]
) -> dict[str, Any]:
    """The record of a run finished on `device`; `made` says where it comes from: provenance and digest of the code."""
    log = read_log(result.out)
    tests = [line for line in log if line["kind"] == "test"]
    predictions = result.predictions
    each = predictions.per_class().tolist()
    return {
        **_head(run, device, made),
        "data": {
            **data_of(run),
            "kind": source.kind,
            "train": len(source.train),
            "test": len(predictions.labels),
            "classes": list(source.classes),
        },
        "accuracy": result.top1,  # of the last epoch: picking the best would look at the test part
        "top5": result.top5,
        "best_accuracy": max(line["top1"] for line in tests),  # to tell a run that collapsed
        "loss": [round(loss, 5) for loss in epoch_losses(log)],
        "evaluated": [int(line["epoch"]) for line in tests],
        "test_accuracy": [round(line["top1"], 6) for line in tests],
        "per_class": [None if share != share else round(share, 5) for share in each],
        "confusion": sparse(predictions.confusion()),
        "steps": result.steps,
        "parameters": result.parameters,
        "seconds": round(result.seconds, 3),
        "epoch_seconds": round(result.epoch_seconds, 4) or None,  # 0 where no epoch was done in one go
        "items_per_epoch": result.steps // result.epochs * run.recipe.batch_size,
    }


def epoch_losses(log: Iterable[dict[str, Any]]) -> list[float]:
    """Mean training loss of every epoch, however often it was logged: a line tells the mean since the one before."""
    losses: list[list[tuple[float, int]]] = [[]]
    before, ended = 0, False
    for line in log:
        if line["kind"] == "train":
            if ended:
                losses.append([])
            losses[-1].append((line["loss"], line["step"] - before))
            before, ended = line["step"], float(line["epoch"]).is_integer()
    return [sum(loss * steps for loss, steps in one) / sum(steps for _, steps in one) for one in losses if one]


def failed_record(run: Training, why: str, device: str, made: dict[str, Any]) -> dict[str, Any]:
    """The record of a run whose loss became no number: a result too, and one that would be the same again."""
    return {**_head(run, device, made), "failed": why}


def _head(run: Training, device: str, made: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "configuration": run.configuration,
        "mechanism": run.recipe.attention,
        "seed": run.seed,
        "role": run.role,
        "fingerprint": run.fingerprint,
        "recipe": deciding(run.recipe),
        "data": data_of(run),
        "epochs": run.epochs,
        "device": device_name(device),
        "device_kind": torch.device(device).type,
        **made,
    }


def data_of(run: Training) -> dict[str, Any]:
    """What a record says about the data of its run: what it is called, and what tells it from data of that name."""
    return {"name": Path(run.recipe.data).name, "digest": run.data}


def sparse(counts: torch.Tensor) -> list[list[int]]:
    """A matrix of counts as [column, count, column, count, ...] for each row: most are 0."""
    rows = counts.tolist()
    return [[number for column, count in enumerate(row) if count for number in (column, count)] for row in rows]


def dense(rows: Iterable[list[int]], classes: int) -> list[list[int]]:
    """What `sparse` wrote, as rows of counts."""
    whole = []
    for row in rows:
        line = [0] * classes
        for column, count in zip(row[::2], row[1::2], strict=True):
            line[column] = count
        whole.append(line)
    return whole


def key_of(record: Mapping[str, Any]) -> Key:
    return record["fingerprint"], record["seed"]


def read_records(folder: Path) -> tuple[dict[Key, dict[str, Any]], list[str]]:
    """All records in the JSON files of a folder by their key, and the names of the files that hold none.

    A file is one record, a list of them, or a whole results.json with its `runs`. Where several tell of the same run,
    the file that is named after it counts, else the first by file name.
    """
    found: dict[Key, dict[str, Any]] = {}
    own: dict[Key, dict[str, Any]] = {}
    unreadable = []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(MAPS):
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = None
        several = content.get("runs", [content]) if isinstance(content, dict) else content
        several = several if isinstance(several, list) else []
        records = [one for one in several if is_record(one)]
        if not records:
            unreadable.append(path.name)
        for record in records:
            key = key_of(record)
            (own if path.stem.endswith(mark(*key)) else found).setdefault(key, record)
    return found | own, unreadable


def by_name(kept: Mapping[Key, dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """The records by what a plan without its data at hand knows them by, see `training.key_by_name`."""
    found: dict[Key, dict[str, Any]] = {}
    for one in kept.values():
        other = found.setdefault(key_by_name(one), one)
        digests = [_data_digest(record) for record in (other, one)]
        if None not in digests and digests[0] != digests[1]:
            raise ValueError(
                f"there are records of different data named {one['recipe']['data']}; say with --data where it lies"
            )
        found[key_by_name(one)] = one if digests[1] else other
    return found


def records_of(plan: Sequence[Run], kept: Mapping[Key, dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the runs of a plan that have one, under the names that they have there."""
    there = [run for run in plan if run.key in kept]
    return [{**kept[run.key], "configuration": run.configuration, "role": run.role} for run in there]


def strangers(runs: Sequence[Training], kept: Mapping[Key, dict[str, Any]]) -> list[str]:
    """What is said of records that would belong to these runs if data of one name were the same: they are not used."""
    names = {(fingerprint(run.recipe), run.seed) for run in runs}
    wanted = {run.key for run in runs}
    like = [one for key, one in kept.items() if key not in wanted and "recipe" in one and key_by_name(one) in names]
    if not like:
        return []
    old = sum(_data_digest(one) is None for one in like)
    told = (
        (old, "from an earlier version, which did not write down what their data held"),
        (len(like) - old, f"of other data that is also named {Path(runs[0].recipe.data).name}"),
    )
    return [f"records that are left alone and not used: {count} {why}" for count, why in told if count]


def _data_digest(record: Mapping[str, Any]) -> str | None:
    """What tells its data from others of that name; None in records of versions that knew no digests."""
    return record.get("data", {}).get("digest")


def is_record(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether this is a record that this version can read."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        return False
    return isinstance(value.get("fingerprint"), str) and isinstance(value.get("seed"), int)
