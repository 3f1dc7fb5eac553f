"""Runs of a study: each in a folder of its own, kept as a record when it is finished, never done twice.

On CPUs, and on a GPU where a study says so, worker processes work side by side; else one run follows the other in this
process. Several machines share the runs by claims in a folder that all of them see, or a Ray cluster makes them. A
killed training goes on from its last saved state, a stopped one from the step at which it was stopped.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import torch

from cumulant.studies.crews import Claims, Crew, Lost, RayCluster, Workers
from cumulant.studies.plan import Budget, Run, epochs_done
from cumulant.train import RecipeError, read_log
from cumulant.train.files import claim_room, read_json, write_atomically
from cumulant.train.progress import ONE_STOP

R = TypeVar("R", bound=Run)
Record = dict[str, Any]
POLL = 1.0  # seconds between two looks at what others do
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

    def given_up(self, run: Any, why: str) -> Record | None:
        """The record, with "failed", of a run whose processes were lost; None where that ends the study."""
        return None

    def finished(self, run: Any) -> Record | None:
        """The record that is kept of a run; None where there is none that counts."""
        path = self.record(run)
        return read_json(path) if path.is_file() else None

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
    on: str = "here",
) -> list[R]:
    """Do `runs` in order, telling `report` of every finished run, `workers` at a time where the workshop lets them
    stand side by side; those left undone.

    `before` of the study's runs were finished already. With workers beside this process `report` hears of every epoch
    too; otherwise the trainer draws its bar on `progress`. Runs for which the budget has no time are left undone; one
    that outlasts it is stopped with its state saved. `on`: "folder" shares the runs with whoever else has the same
    plan in the folder of the shop, "ray" gives them to a Ray cluster.
    """
    if on == "folder" and shop.fresh:
        raise ValueError(
            "--fresh would train again what other machines have just finished: leave it out of --on folder"
        )
    if runs:
        claim_room(shop.out, 0)
    budget = budget or Budget(None)
    with Claims(shop.out / "claims") if on == "folder" else nullcontext() as claims:
        waiting = Queue(runs, shop, budget, report, claims)
        crew: Crew | None = None
        if on == "ray":
            crew = RayCluster(shop)
        elif min(workers, len(runs)) > 1 and shop.side_by_side:
            crew = Workers(shop, min(workers, len(runs)))
        if crew is not None:
            undone = _Team(crew, waiting, shop, report, budget).train()
        else:
            undone = _one_by_one(waiting, shop, report, budget, progress, before, len(runs))
    return sorted(undone, key=list(runs).index)


def _one_by_one(
    waiting: Queue[R], shop: Workshop, report: Report, budget: Budget, progress: IO[str] | None, before: int, count: int
) -> list[R]:
    """In this process; the runs that are left undone."""
    while waiting:
        if (found := waiting.next()) is None:
            if waiting:  # others are at the rest
                time.sleep(POLL)
            continue
        run, to_do = found
        if progress is not None:
            number = before + count - len(waiting.runs)
            print(f"[{number}/{before + count}] {run}, {run.role}", file=progress)
        started = budget.clock()
        try:
            with one_stop(), time_limit(budget) as over:
                record = shop.kept(run, shop.share(run), progress)
        except KeyboardInterrupt:
            if not over.is_set():
                raise KeyboardInterrupt(how_far([run], shop)) from None
            waiting.left.append(run)
            waiting.done(run)
            continue
        except (RecipeError, OSError, ImportError):  # of the folder or the machine, not of this run
            raise
        except Exception as error:
            raise RunError(f"{run}: {type(error).__name__}: {error}") from error
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if "failed" not in record:
            budget.saw(run.configuration, to_do, budget.clock() - started)
        waiting.done(run)
        report(run, record)
    return waiting.left


def complete(runs: Sequence[R], shop: Workshop, told: Report | None = None, **options: Any) -> dict[R, Record]:
    """The records of these runs: those that are kept, and of the others those made now; `options` as of `train_all`,
    `told` hears of all of them."""
    kept = {} if shop.fresh else {run: shop.finished(run) for run in runs}
    found = {run: record for run, record in kept.items() if record is not None}

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
    """A crew kept busy: each of its places is given the next run as soon as it is free."""

    def __init__(self, crew: Crew, waiting: Queue[R], shop: Workshop, report: Report, budget: Budget) -> None:
        self.crew, self.waiting, self.shop, self.report, self.budget = crew, waiting, shop, report, budget
        self.running: dict[Any, tuple[float, float, int]] = {}  # when it began, epochs to do, epochs told

    def train(self) -> list[Any]:
        with one_stop():
            try:
                with self.crew:
                    return self._train()
            except KeyboardInterrupt:  # every worker has ended by now, and saved its state before
                raise KeyboardInterrupt(how_far(self.running, self.shop)) from None

    def _train(self) -> list[Any]:
        while self.waiting or self.running:
            while len(self.running) < self.crew.size and (found := self.waiting.next()) is not None:
                run, to_do = found
                self.running[run] = (self.budget.clock(), to_do, 0)
                self.crew.begin(run)
            if self.running and self.budget.left is not None and self.budget.left <= 0:
                return [*self.waiting.left, *self.running, *self.waiting.runs]
            self._listen()
        return self.waiting.left

    def _listen(self) -> None:
        """Wait up to a second for a finished run; tell of the epochs that the others have logged since."""
        try:
            heard = self.crew.heard(POLL)
        except RuntimeError as error:
            raise RunError(str(error)) from None
        if heard is not None:
            run, record, failure = heard
            if record is None and isinstance(failure, Lost):
                record = self.shop.given_up(run, failure)
            if record is None:
                raise RunError(f"{run}: {failure}")
            self._tell_epochs(run, record.get("epochs", 0))
            began, to_do, _ = self.running.pop(run)
            if "failed" not in record:
                self.budget.saw(run.configuration, to_do, self.budget.clock() - began)
            self.waiting.done(run)
            self.report(run, record)
        for run in self.running:
            self._tell_epochs(run, _epochs_logged(self.shop.folder(run)))

    def _tell_epochs(self, run: Run, count: int) -> None:
        began, to_do, told = self.running[run]
        for _ in range(count - told):
            self.report(run, None)
        self.running[run] = (began, to_do, max(count, told))


class Queue(Generic[R]):
    """The runs to make, handed out in order; with claims, those that another machine makes are asked for again."""

    def __init__(
        self, runs: Sequence[R], shop: Workshop, budget: Budget, report: Report, claims: Claims | None
    ) -> None:
        self.runs, self.left = list(runs), []  # type: tuple[list[R], list[R]]
        self.shop, self.budget, self.report, self.claims = shop, budget, report, claims

    def __bool__(self) -> bool:
        return bool(self.runs)

    def next(self) -> tuple[R, float] | None:
        """A run that nobody makes yet and its epochs to do, None if there is none now; those without time are left."""
        for run in list(self.runs):
            if self._made_elsewhere(run):
                continue
            to_do = run.epochs - epochs_done(self.shop.folder(run))
            if not self.budget.fits(run.configuration, to_do):
                self.left.append(run)
            elif self.claims is None:
                self.runs.remove(run)
                return run, to_do
            elif not self.claims.take(run.name):
                continue
            elif not self._made_elsewhere(run):  # nor between our looking and claiming
                self.runs.remove(run)
                return run, to_do
            else:
                self.claims.give_back(run.name)
                continue
            self.runs.remove(run)
        return None

    def done(self, run: R) -> None:
        """Its record is kept, or it is left undone."""
        if self.claims is not None:
            self.claims.give_back(run.name)

    def _made_elsewhere(self, run: R) -> bool:
        """Whether another machine has finished a run; then it is told."""
        record = self.shop.finished(run) if self.claims is not None else None
        if record is None:
            return False
        self.runs.remove(run)
        self.report(run, record)
        return True


def _epochs_logged(folder: Path) -> int:
    try:
        return int(max((line["epoch"] for line in read_log(folder)), default=0))
    except OSError:
        return 0
