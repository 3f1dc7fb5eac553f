"""Records of finished training runs: small JSON files that hold all a report says about a run.

A run is known by its recipe and its seed, not by the place where it was trained: records from another machine or
another day are merged by copying them into the folder. Which code, machine and versions made a run is in its record.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import cumulant

if TYPE_CHECKING:
    from cumulant.data.part import Source
    from cumulant.train import TrainRecipe, TrainResult

FORMAT = 2  # of records and results.json; raised when the report could not read an older file
# What a training run depends on, under src/cumulant.
SOURCES = ("*.py", "kernels/**/*.py", "zoo/*.py", "nn/*.py", "models/*.py", "data/*.py", "train/*.py")
NOT_SOURCES = {"__init__.py", "cli.py", "command.py", "lazy.py", "listing.py", "style.py", "train/command.py"}
# Fields of a recipe that do not decide what comes out of a run. The data counts by its name, wherever it lies.
INDIFFERENT = {
    "seed", "data", "workers", "in_memory", "max_bad", "parallel", "compile", "compile_mode", "cuda_graph",
    "eval_epochs", "checkpoint_epochs", "checkpoint_steps", "log_steps", "tensorboard",
}  # fmt: skip
ALWAYS = {"model", "attention", "epochs", "batch_size", "lr", "image_size"}
MAPS = ".maps.json"

Key = tuple[str, int]  # fingerprint of the recipe, seed


@dataclass(frozen=True)
class Run:
    """One model trained with one configuration from one seed; `role` is "compared" or "control"."""

    configuration: str
    seed: int
    role: str
    recipe: TrainRecipe = field(repr=False, compare=False, hash=False)

    @property
    def key(self) -> Key:
        return fingerprint(self.recipe), self.seed

    @property
    def name(self) -> str:
        """Name of its files: letters, digits, dots, dashes and underscores only, so that any place takes it."""
        data = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(self.recipe.data).name)
        plain = re.sub(r"[^A-Za-z0-9.]+", "_", self.configuration).strip("_")
        return f"{data}-{plain}{_mark(*self.key)}"


def _mark(fingerprint: str, seed: int) -> str:
    """The end of the name of a run's own files."""
    return f"-{seed}-{fingerprint[:8]}"


def deciding(recipe: TrainRecipe) -> dict[str, Any]:
    """The values of a recipe that decide a run besides its seed: some always, the others where not the usual ones."""
    usual, own = asdict(type(recipe)()), asdict(recipe.scaled())
    deciding = own.keys() - INDIFFERENT
    values = {key: own[key] for key in deciding if key in ALWAYS or own[key] != usual[key]}
    if "augmentation" in values:
        off = usual["augmentation"]
        values["augmentation"] = {key: v for key, v in own["augmentation"].items() if v != off[key]}
    values["data"] = Path(recipe.data).name
    return json.loads(json.dumps(values, sort_keys=True, default=list))


def fingerprint(recipe: TrainRecipe) -> str:
    """Digest of all that decides the outcome of a run besides its seed and the code."""
    return hashlib.sha256(json.dumps(deciding(recipe), sort_keys=True).encode()).hexdigest()[:16]


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
    from cumulant.bench.provenance import cpu_model

    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else cpu_model()


def make_record(run: Run, result: TrainResult, source: Source, device: str, made: dict[str, Any]) -> dict[str, Any]:
    """The record of a run finished on `device`; `made` says where it comes from: provenance and digest of the code."""
    from cumulant.train import read_log

    log = read_log(result.out)
    tests = [line for line in log if line["kind"] == "test"]
    predictions = result.predictions
    each = predictions.per_class().tolist()
    return {
        **_head(run, device, made),
        "data": {
            "name": Path(run.recipe.data).name,
            "kind": source.kind,
            "train": len(source.train),
            "test": len(predictions.labels),
            "classes": list(source.classes),
        },
        "accuracy": result.top1,  # of the last epoch: picking the best would look at the test part
        "top5": result.top5,
        "best_accuracy": result.best_top1,
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


def failed_record(run: Run, why: str, device: str, made: dict[str, Any]) -> dict[str, Any]:
    """The record of a run whose loss became no number: a result too, and one that would be the same again."""
    return {**_head(run, device, made), "failed": why}


def _head(run: Run, device: str, made: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "configuration": run.configuration,
        "mechanism": run.recipe.attention,
        "seed": run.seed,
        "role": run.role,
        "fingerprint": fingerprint(run.recipe),
        "recipe": deciding(run.recipe),
        "epochs": run.recipe.epochs,
        "device": device_name(device),
        "device_kind": torch.device(device).type,
        **made,
    }


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
        records = [one for one in several if _is_record(one)]
        if not records:
            unreadable.append(path.name)
        for record in records:
            key = record["fingerprint"], record["seed"]
            (own if path.stem.endswith(_mark(*key)) else found).setdefault(key, record)
    return found | own, unreadable


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        return False
    return isinstance(value.get("fingerprint"), str) and isinstance(value.get("seed"), int)
