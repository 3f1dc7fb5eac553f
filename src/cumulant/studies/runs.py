"""Runs of a study: each in a folder of its own, kept as a record when it is finished, never done twice.

On CPUs, and on a GPU where a study says so, worker processes work side by side; else one run follows the other in this
process. A killed training goes
on from its last saved state, a stopped one from the step at which it was stopped.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from cumulant.data.jobs import apart
from cumulant.studies.budget import Budget, epochs_done
from cumulant.studies.plan import Run
from cumulant.train.files import read_json, write_atomically
from cumulant.train.progress import ONE_STOP

R = TypeVar("R", bound=Run)
Record = dict[str, Any]
Report = Callable[[Any, Record | None], None]  # (run, None) after an epoch, (run, record) at the end


class RunError(RuntimeError):
    """A run stopped with an error; the message names configuration and seed."""


class TimeOverError(RunError):
    """The time given was over before the first run was finished."""

    def __init__(self, minutes: float | None) -> None:
        super().__init__(f"no run was finished within the {minutes:g} minutes; give the same command again to go on")


@dataclass(frozen=True)
class Workshop(ABC):
    """Where and how the runs of a study are made; a study says what is done for a run, in `make`."""

    out: Path
    device: str
    made: dict[str, Any]  # where it comes from: part of every record
    fresh: bool = False

    @property
    def side_by_side(self) -> bool:
        """Whether worker processes may share the device."""
        return self.device == "cpu"

    @abstractmethod
    def make(self, run: Any, shared: Any = None, progress: IO[str] | None = None) -> Record:
        """Do the run; its record. One of a run that came to nothing has "failed", with the reason."""

    def folder(self, run: Any) -> Path:
        """Where a run may write what it goes on from."""
        return self.out / "runs" / run.name

    def record(self, run: Any) -> Path:
        """Where its record is kept."""
        return self.out / "records" / f"{run.name}.json"

    def kept(self, run: Any, shared: Any = None, progress: IO[str] | None = None) -> Record:
        """Do the run and keep its record."""
        record = self.make(run, shared, progress)
        write_atomically(self.record(run), json.dumps(record, allow_nan=False).encode())
        return record

    def share(self, run: Any) -> Any:
        """What this run can take from the one before it in the same process, such as decoded data; None for nothing."""
        return None


def train_all(
    runs: Sequence[R],
    shop: Workshop,
    *,
    report: Report,
    workers: int = 1,
    budget: Budget | None = None,
    progress: IO[str] | None = None,
    before: int = 0,
) -> list[R]:
    """Do `runs` in order, telling `report` of every finished run, `workers` at a time where the workshop lets them
    stand side by side; those left undone.

    `before` of the study's runs were finished already. With workers beside this process `report` hears of every epoch
    too; otherwise the trainer draws its bar on `progress`. Runs for which the budget has no time are left undone; one
    that outlasts it is stopped with its state saved.
    """
    from cumulant.train import RecipeError

    budget = budget or Budget(None)
    workers = min(workers, len(runs))
    if workers > 1 and shop.side_by_side:
        return _Team(shop, workers, report, budget).train(runs)
    left: list[R] = []
    for number, run in enumerate(runs, before + 1):
        to_do = run.epochs - epochs_done(shop.folder(run))
        if not budget.fits(run.configuration, to_do):
            left.append(run)
            continue
        if progress is not None:
            print(f"[{number}/{before + len(runs)}] {run}, {run.role}", file=progress)
        started = budget.clock()
        try:
            with one_stop(), time_limit(budget) as over:
                record = shop.kept(run, shop.share(run), progress)
        except KeyboardInterrupt:
            if not over.is_set():
                raise KeyboardInterrupt(how_far([run], shop)) from None
            left.append(run)
            continue
        except (RecipeError, OSError, ImportError):  # of the folder or the machine, not of this run
            raise
        except Exception as error:
            raise RunError(f"{run}: {type(error).__name__}: {error}") from error
        finally:
            _clean_up()
        if "failed" not in record:
            budget.saw(run.configuration, to_do, budget.clock() - started)
        report(run, record)
    return left


def complete(runs: Sequence[R], shop: Workshop, told: Report | None = None, **options: Any) -> dict[R, Record]:
    """The records of these runs: those that are kept, and of the others those made now; `options` as of `train_all`,
    `told` hears of all of them."""
    paths = {run: shop.record(run) for run in runs}
    found = {run: read_json(path) for run, path in paths.items() if path.is_file() and not shop.fresh}

    def report(run: R, record: Record | None) -> None:
        if record is not None:
            found[run] = record
        if told is not None:
            told(run, record)

    for run, record in list(found.items()):
        report(run, record)
    train_all([run for run in runs if run not in found], shop, report=report, before=len(found), **options)
    return {run: found[run] for run in runs if run in found}


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
    with one_stop():
        watcher.start()
        try:
            yield over
        finally:
            done.set()
            watcher.join()


@contextmanager
def one_stop() -> Iterator[None]:
    """A SIGTERM to this process is what Ctrl-C is, else it would end without a word, and its workers with it; signals
    that follow at once, as `timeout` and batch systems send them, are the same stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = -ONE_STOP

    def stop(*_: Any) -> None:
        nonlocal heard
        if time.monotonic() > heard + ONE_STOP:
            heard = time.monotonic()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def how_far(runs: Iterable[Run], shop: Workshop) -> str:
    """How far each of the stopped runs is kept; "" for none."""
    said = []
    for run in runs:
        done = epochs_done(shop.folder(run))
        said.append(f"{run}: {f'kept after {done:.2f} epochs' if done else 'not begun'}")
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
        self.running: dict[Any, tuple[float, float, int]] = {}  # when it began, epochs to do, epochs told

    def train(self, runs: Sequence[R]) -> list[R]:
        with one_stop():
            try:
                return self._train(runs)
            except KeyboardInterrupt:  # every worker has ended by now, and saved its state before
                raise KeyboardInterrupt(how_far(self.running, self.shop)) from None

    def _train(self, runs: Sequence[R]) -> list[R]:
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
                    to_do = run.epochs - epochs_done(self.shop.folder(run))
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
                raise RunError(f"{run}: {failure}")
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
        try:
            events.put((run, shop.kept(run), None))
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


def _clean_up() -> None:
    """The memory that a run leaves in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
