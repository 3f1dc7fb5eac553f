"""Training runs of a study: each in a folder of its own, kept as a record when it is finished, never done twice.

On CPUs worker processes train side by side; on a GPU one run follows the other in this process. A killed run goes on
from its last saved state, a stopped one from the step at which it was stopped.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from cumulant.bench.scaling import threads
from cumulant.data.jobs import apart
from cumulant.studies.budget import Budget, epochs_done
from cumulant.studies.records import MAPS, Run, failed_record, make_record
from cumulant.train.files import write_atomically

if TYPE_CHECKING:
    from cumulant.data.part import Source
    from cumulant.train import TrainRecipe

Record = dict[str, Any]
Report = Callable[[Run, Record | None], None]  # (run, None) after an epoch, (run, record) at the end


class RunError(RuntimeError):
    """A training run stopped with an error; the message names configuration and seed."""


@dataclass(frozen=True)
class Workshop:
    """Where and how the runs of a study are made; `made` goes into every record."""

    out: Path
    device: str
    made: dict[str, Any]
    fresh: bool = False

    def folder(self, run: Run) -> Path:
        return self.out / "runs" / run.name

    def record(self, run: Run) -> Path:
        return self.out / "records" / f"{run.name}.json"

    def maps(self, run: Run) -> Path:
        return self.out / "records" / f"{run.name}{MAPS}"


def train_one(run: Run, shop: Workshop, held: Source | None = None, progress: IO[str] | None = None) -> Record:
    """Train one model, look at its maps and keep the record; `held` is its data where that is in memory already.

    On a CPU it has one thread, so that the result does not depend on how many run beside it. A loss that is no number
    ends the run, not the study: its record says so.
    """
    from cumulant.train.build import open_recipe_source

    with threads(1) if shop.device == "cpu" else nullcontext():
        start = time.perf_counter()
        recipe = replace(run.recipe, seed=run.seed)
        if held is not None:
            recipe = replace(recipe, workers=0)  # nothing to decode
        source = held or open_recipe_source(recipe)
        # By name only: the run goes on, and its files say the same, wherever the data lies.
        recipe = replace(recipe, data=Path(recipe.data).name)
        try:
            record = _trained(run, recipe, source, shop, progress)
        except FloatingPointError as error:
            record = failed_record(run, str(error), shop.device, shop.made)
        # With start and evaluation; of a run that went on, at least all its training.
        record["wall_seconds"] = round(max(time.perf_counter() - start, record.get("seconds", 0.0)), 2)
    write_atomically(shop.record(run), json.dumps(record, allow_nan=False).encode())
    return record


def _trained(run: Run, recipe: TrainRecipe, source: Source, shop: Workshop, progress: IO[str] | None) -> Record:
    from cumulant.studies.maps import look
    from cumulant.train import load, train

    result = train(recipe, shop.folder(run), source=source, device=shop.device, fresh=shop.fresh, progress=progress)
    record = make_record(run, result, source, shop.device, shop.made)
    seen = look(load(result.out / "last.safetensors"), recipe, source, examples=run.seed == 0) or {}
    record["locality"] = seen.get("locality")
    record["trained"] = seen.get("trained", [])
    if "maps" in seen:
        write_atomically(shop.maps(run), json.dumps(seen["maps"], allow_nan=False).encode())
    return record


def train_all(
    runs: Sequence[Run],
    shop: Workshop,
    *,
    workers: int,
    report: Report,
    budget: Budget | None = None,
    progress: IO[str] | None = None,
) -> list[Run]:
    """Train `runs` in order, `workers` at a time on CPUs, telling `report` of every finished run; those left undone.

    With workers beside this process `report` hears of every epoch too; otherwise the trainer draws its bar on
    `progress`. Runs for which the budget has no time are left undone; one that outlasts it is stopped with its state
    saved.
    """
    budget = budget or Budget(None)
    workers = min(workers, len(runs))
    if workers > 1 and shop.device == "cpu":
        return _Team(shop, workers, report, budget).train(runs)
    from cumulant.train.stepping import room_for_compiled_code

    compiles = any(run.recipe.compile for run in runs)
    with room_for_compiled_code() if compiles else nullcontext():
        return _one_by_one(runs, shop, report, budget, progress)


def _one_by_one(
    runs: Sequence[Run], shop: Workshop, report: Report, budget: Budget, progress: IO[str] | None
) -> list[Run]:
    left: list[Run] = []
    kept: dict[tuple[Any, ...], Source] = {}
    for number, run in enumerate(runs, 1):
        to_do = run.recipe.epochs - epochs_done(shop.folder(run))
        if not budget.fits(run.configuration, to_do):
            left.append(run)
            continue
        if progress is not None:
            print(f"[{number}/{len(runs)}] {run.configuration}, seed {run.seed}", file=progress)
        started = budget.clock()
        try:
            with sigterm_stops(), time_limit(budget) as over:
                record = train_one(run, shop, _decoded(run, kept), progress)
        except KeyboardInterrupt:
            if not over.is_set():
                raise KeyboardInterrupt(how_far([run], shop)) from None
            left.append(run)
            continue
        except Exception as error:
            raise RunError(f"{run.configuration}, seed {run.seed}: {type(error).__name__}: {error}") from error
        finally:
            _clean_up()
        if "failed" not in record:
            budget.saw(run.configuration, to_do, budget.clock() - started)
        report(run, record)
    return left


@contextmanager
def time_limit(budget: Budget) -> Iterator[threading.Event]:
    """Ask the trainer to stop, as a SIGTERM would, when the time of the budget is over; the event then is set."""
    over, done = threading.Event(), threading.Event()
    if budget.left is None or threading.current_thread() is not threading.main_thread():
        yield over
        return

    def watch() -> None:
        while not done.wait(0.2):
            if (budget.left or 0) <= 0:
                over.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    with sigterm_stops():
        watcher.start()
        try:
            yield over
        finally:
            done.set()
            watcher.join()


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """A SIGTERM to this process is what Ctrl-C is; else it would end without a word, and its workers with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def how_far(runs: Iterable[Run], shop: Workshop) -> str:
    """How far each of the stopped runs is kept; "" for none."""
    said = []
    for run in runs:
        done = epochs_done(shop.folder(run))
        said.append(f"{run.configuration}, seed {run.seed}: {f'kept after {done:.2f} epochs' if done else 'not begun'}")
    return "; ".join(said)


class _Team:
    """Worker processes, each fed with the next run as soon as it is free; they are ended here whatever happens."""

    def __init__(self, shop: Workshop, workers: int, report: Report, budget: Budget) -> None:
        context = multiprocessing.get_context("spawn")  # forked threads of torch would hang
        self.shop, self.report, self.budget = shop, report, budget
        self.tasks: Any = context.Queue()
        self.events: Any = context.Queue()
        self.processes = [
            context.Process(target=_work, args=(self.tasks, self.events, shop), daemon=True) for _ in range(workers)
        ]
        self.running: dict[Run, tuple[float, float, int]] = {}  # when it began, epochs to do, epochs told

    def train(self, runs: Sequence[Run]) -> list[Run]:
        with sigterm_stops():
            try:
                return self._train(runs)
            except KeyboardInterrupt:  # every worker has ended by now, and saved its state before
                raise KeyboardInterrupt(how_far(self.running, self.shop)) from None

    def _train(self, runs: Sequence[Run]) -> list[Run]:
        # The workers leave the answer to Ctrl-C to this process, whose one SIGTERM has their trainers save their state:
        # until they are in groups of their own, which a terminal's signal does not reach, they inherit this.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for process in self.processes:
                process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        waiting, left = list(runs), []
        try:
            while waiting or self.running:
                while waiting and len(self.running) < len(self.processes):
                    run = waiting.pop(0)
                    to_do = run.recipe.epochs - epochs_done(self.shop.folder(run))
                    if self.budget.fits(run.configuration, to_do):
                        self.running[run] = (self.budget.clock(), to_do, 0)
                        self.tasks.put(run)
                    else:
                        left.append(run)
                if self.running and self.budget.left is not None and self.budget.left <= 0:
                    return sorted([*left, *self.running, *waiting], key=list(runs).index)
                self._listen()
            return left
        finally:
            if not self.running:
                for _ in self.processes:
                    self.tasks.put(None)
                for process in self.processes:
                    process.join(5)
            for process in self.processes:
                process.terminate()
            for process in self.processes:
                process.join()

    def _listen(self) -> None:
        """Wait up to a second for a finished run; tell of the epochs that the others have logged since."""
        try:
            run, record, failure = self.events.get(timeout=1)
        except queue.Empty:
            dead = [p.exitcode for p in self.processes if p.exitcode is not None]  # also 0: none was told to end yet
            if dead:
                raise RunError(f"a training process ended by itself with exit status {dead[0]}") from None
        else:
            if failure is not None:
                raise RunError(f"{run.configuration}, seed {run.seed}: {failure}")
            self._tell_epochs(run, record["epochs"])
            began, to_do, _ = self.running.pop(run)
            if "failed" not in record:
                self.budget.saw(run.configuration, to_do, self.budget.clock() - began)
            self.report(run, record)
        for run in self.running:
            self._tell_epochs(run, _epochs_logged(self.shop.folder(run)))

    def _tell_epochs(self, run: Run, count: int) -> None:
        began, to_do, told = self.running[run]
        for _ in range(count - told):
            self.report(run, None)
        self.running[run] = (began, to_do, max(count, told))


def _work(tasks: Any, events: Any, shop: Workshop) -> None:
    """Take runs until there are none, or until the process that started this one is gone."""
    apart(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while (run := tasks.get()) is not None:
        run = replace(run, recipe=replace(run.recipe, workers=0))  # a daemon may have no processes of its own
        try:
            events.put((run, train_one(run, shop), None))
        except KeyboardInterrupt:
            return
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            events.put((run, None, f"{type(error).__name__}: {error} ({where})"))
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)  # the trainer saves its state
    time.sleep(60)
    os._exit(1)


def _epochs_logged(folder: Path) -> int:
    from cumulant.train import read_log

    try:
        return int(max((line["epoch"] for line in read_log(folder)), default=0))
    except OSError:
        return 0


def _decoded(run: Run, kept: dict[tuple[Any, ...], Source]) -> Source | None:
    """The data of a run, decoded once for all runs that follow each other; None for what is not held in memory."""
    from cumulant.data.held import hold
    from cumulant.train.build import open_recipe_source

    recipe = run.recipe
    reading = (recipe.frames, recipe.stride, recipe.views, recipe.crops, recipe.split, str(recipe.data_options))
    key = (recipe.data, recipe.loaded_size, *reading)
    if key not in kept:
        held = None if recipe.in_memory == "no" else hold(open_recipe_source(recipe), recipe.loaded_size)
        if held is None:
            return None
        kept.clear()
        kept[key] = held
    return kept[key]


def _clean_up() -> None:
    """The memory that a run leaves in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
