"""Training runs of a study: done by worker processes, each kept on disk when it is finished, never done twice.

A finished run is one JSON file and one checkpoint, named after mechanism and seed. It is used again only while its
fingerprint holds: recipe, model, torch version and the source of every module that takes part in training.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import cumulant
from cumulant.bench.scaling import threads

if TYPE_CHECKING:
    from cumulant.train import Recipe

# Initial weights of 0.1: with the 0.02 of wide models this narrow one is far from converged after 20 epochs.
MODEL = {"name": "vit_nano_patch2_8", "num_classes": 10, "init_std": 0.1}
# What a training run depends on, under src/cumulant: an edit to any of it makes finished runs stale.
SOURCES = ("*.py", "kernels/*.py", "zoo/*.py", "nn/*.py", "models/*.py", "data/*.py", "train/*.py", "studies/runs.py")
NOT_SOURCES = {"__init__.py", "cli.py"}

Report = Callable[["Run", dict[str, Any] | None], None]  # (run, None) after an epoch, (run, record) at the end


class RunError(RuntimeError):
    """A training run stopped with an error; the message names mechanism and seed."""


@dataclass(frozen=True, order=True)
class Run:
    """One model trained with one mechanism from one seed."""

    mechanism: str
    seed: int

    def file(self, folder: Path) -> Path:
        return folder / f"{self.mechanism}-{self.seed}.json"

    def checkpoint(self, folder: Path) -> Path:
        return folder / f"{self.mechanism}-{self.seed}.safetensors"


def fingerprint(recipe: Recipe) -> str:
    """Digest of all that decides the outcome of a run besides mechanism and seed."""
    digest = hashlib.sha256()
    choices = {**asdict(recipe), "seed": None, "model": MODEL, "torch": torch.__version__}
    digest.update(json.dumps(choices, sort_keys=True, default=str).encode())
    root = Path(cumulant.__file__).parent
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        if path.relative_to(root).as_posix() not in NOT_SOURCES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Either the whole file or none of it: a reader never sees half, a stopped run leaves no broken file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def finished(run: Run, folder: Path, mark: str) -> dict[str, Any] | None:
    """The record of a run that is complete and still valid, else None."""
    try:
        record = json.loads(run.file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    valid = isinstance(record, dict) and record.get("fingerprint") == mark and run.checkpoint(folder).exists()
    return record if valid else None


def train_one(run: Run, recipe: Recipe, folder: Path, mark: str, on_epoch: Callable[[], None]) -> dict[str, Any]:
    """Train one model on one thread (so that the result does not depend on how many run beside it) and keep it."""
    from cumulant.data import digits
    from cumulant.models import create_model
    from cumulant.train import fit, save

    with threads(1):
        torch.manual_seed(run.seed)
        model = create_model(**MODEL, attention=run.mechanism)  # type: ignore[arg-type]
        start = time.perf_counter()
        history = fit(model, digits(), replace(recipe, seed=run.seed), on_epoch=lambda *_: on_epoch())
        seconds = time.perf_counter() - start
    record = {
        "mechanism": run.mechanism,
        "seed": run.seed,
        "accuracy": history.test_accuracy[-1],  # of the last epoch: picking the best would look at the test images
        "test_accuracy": history.test_accuracy,
        "loss": history.loss,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "fingerprint": mark,
    }
    save(model, run.checkpoint(folder))
    write_atomically(run.file(folder), json.dumps(record, allow_nan=False))
    return record


def train_all(runs: Sequence[Run], recipe: Recipe, folder: Path, mark: str, *, workers: int, report: Report) -> None:
    """Train `runs`, `workers` at a time, telling `report` of every epoch and every finished run.

    `mark` is the fingerprint taken before training: the source may be edited while the workers run the old one.
    """
    workers = min(workers, len(runs))
    if workers > 1:
        return _train_in_processes(runs, recipe, folder, mark, workers, report)
    for run in runs:
        try:
            record = train_one(run, recipe, folder, mark, lambda run=run: report(run, None))  # type: ignore[misc]
        except Exception as error:
            raise RunError(f"{run.mechanism}, seed {run.seed}: {type(error).__name__}: {error}") from error
        report(run, record)
    return None


def _train_in_processes(
    runs: Sequence[Run], recipe: Recipe, folder: Path, mark: str, workers: int, report: Report
) -> None:
    """One process per worker, fed from a queue; they are ended here whatever happens."""
    context = multiprocessing.get_context("spawn")  # forked threads of torch would hang
    tasks: Any = context.Queue()
    events: Any = context.Queue()
    for run in runs:
        tasks.put(run)
    for _ in range(workers):
        tasks.put(None)
    processes = [
        context.Process(target=_work, args=(tasks, events, recipe, folder, mark), daemon=True) for _ in range(workers)
    ]
    # Ctrl-C reaches the whole group: the workers inherit this and leave the answer to the process that started them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        left = len(runs)
        while left:
            try:
                run, record, failure = events.get(timeout=1)
            except queue.Empty:
                dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                if dead:
                    raise RunError(f"a training process ended by itself with exit status {dead[0]}") from None
                continue
            if failure is not None:
                raise RunError(f"{run.mechanism}, seed {run.seed}: {failure}")
            report(run, record)
            left -= record is not None
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _work(tasks: Any, events: Any, recipe: Recipe, folder: Path, mark: str) -> None:
    """Take runs until there are none, or until the process that started this one is gone."""
    parent = multiprocessing.parent_process()

    def epoch_done(run: Run) -> None:
        if parent is not None and not parent.is_alive():
            os._exit(1)
        events.put((run, None, None))

    while (run := tasks.get()) is not None:
        try:
            record = train_one(run, recipe, folder, mark, lambda run=run: epoch_done(run))  # type: ignore[misc]
            events.put((run, record, None))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            events.put((run, None, f"{type(error).__name__}: {error} ({where})"))
            return
