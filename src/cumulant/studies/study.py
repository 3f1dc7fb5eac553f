"""What a study of classifiers goes through, whatever it compares: train what is missing, judge, write it down.

Every run leaves a model, a record of accuracies and confusions, and maps of its attention.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from cumulant.data.part import Source
from cumulant.studies import report
from cumulant.studies.command import DECISIVE, Reproduce
from cumulant.studies.maps import look
from cumulant.studies.measured import measured
from cumulant.studies.outcome import outcome
from cumulant.studies.plan import Budget, Run
from cumulant.studies.records import (
    FORMAT,
    MAPS,
    device_name,
    failed_record,
    is_record,
    key_of,
    make_record,
    read_records,
    records_of,
    source_digest,
    strangers,
)
from cumulant.studies.runs import Record, RunError, train_all
from cumulant.studies.training import Training, Trainings
from cumulant.studies.verdict import Claim
from cumulant.tensors import threads
from cumulant.train import TrainRecipe, load, train
from cumulant.train.files import write_atomically
from cumulant.train.progress import bar_of
from cumulant.train.stepping import room_for_compiled_code

COUNTDOWN = "{desc:9} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} to go{postfix}"


class Classifiers(Trainings):
    """Trains one model a run into runs/ and keeps what is said about it in records/."""

    def maps(self, run: Training) -> Path:
        return self.out / "records" / f"{run.name}{MAPS}"

    def finished(self, run: Training) -> Record | None:
        """A file that is no record of this version does not count."""
        with suppress(OSError, ValueError):
            record = super().finished(run)
            return record if is_record(record) and key_of(record) == run.key else None
        return None

    def make(self, run: Training, shared: Source | None = None, progress: IO[str] | None = None) -> Record:
        """Train one model and look at its maps.

        On a CPU it has one thread, so that the result does not depend on how many run beside it. A loss that is no
        number ends the run, not the study: its record says so.
        """
        recipe, start = replace(run.recipe, seed=run.seed), time.perf_counter()
        with ExitStack() as stack:
            if self.device == "cpu":
                stack.enter_context(threads(1))
            if recipe.compile:
                stack.enter_context(room_for_compiled_code())
            if shared is not None or multiprocessing.current_process().daemon:
                # There is nothing to decode, or this may have no processes of its own.
                recipe = replace(recipe, workers=0)
            source = self.opened(run, shared)
            # By name only: the run goes on, and its files say the same, wherever the data lies.
            recipe = replace(recipe, data=Path(recipe.data).name)
            try:
                record = self._trained(run, recipe, source, progress)
            except FloatingPointError as error:
                record = failed_record(run, str(error), self.device, self.made)
            # With start and evaluation; of a run that went on, at least all its training.
            record["wall_seconds"] = round(max(time.perf_counter() - start, record.get("seconds", 0.0)), 2)
        return record

    def _trained(self, run: Training, recipe: TrainRecipe, source: Source, progress: IO[str] | None) -> Record:
        result = train(recipe, self.folder(run), source=source, device=self.device, fresh=self.fresh, progress=progress)
        record = make_record(run, result, source, self.device, self.made)
        seen = look(load(result.out / "last.safetensors"), recipe, source, examples=run.seed == 0) or {}
        record["locality"] = seen.get("locality")
        record["trained"] = seen.get("trained", [])
        if "maps" in seen:
            write_atomically(self.maps(run), json.dumps(seen["maps"], allow_nan=False).encode())
        return record


def train_missing(settings: Reproduce, runs: Sequence[Training], shop: Classifiers, budget: Budget, line: Line) -> None:
    """Train the runs that have no record yet."""
    progress = line.progress
    kept, unreadable = read_records(shop.out / "records")
    if progress is not None:
        if unreadable:
            print(f"left out, not records of this version: {', '.join(unreadable)}", file=progress)
        for sentence in strangers(runs, kept):
            print(sentence, file=progress)
    missing = [run for run in runs if settings.fresh or run.key not in kept]
    for run in missing:
        if settings.fresh or shop.finished(run) is None:  # another machine may have just finished it
            shop.record(run).unlink(missing_ok=True)
    here = device_name(shop.device)
    names = {run.key[0]: run.configuration for run in runs}
    for one in kept.values():
        # Times of another machine say nothing about this one, nor do those of other recipes in the same folder.
        if one["fingerprint"] in names and one["device"] == here and "failed" not in one:
            budget.saw(names[one["fingerprint"]], one["epochs"], one["wall_seconds"])
    if progress is not None and len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs are finished already", end="", file=progress)
        print(" (--fresh trains them again)", file=progress)
        others = {record["source"] for run in runs if (record := kept.get(run.key))} - {source_digest()}
        if others:
            print("some of them were made with another version of the code; the report says which", file=progress)
    side_by_side = settings.on == "ray" or (shop.device == "cpu" and min(settings.workers, len(missing)) > 1)
    finished = len(runs) - len(missing)
    with line.training(sum(run.epochs for run in missing), shown=side_by_side) as bar:

        def report(run: Training, record: dict[str, Any] | None) -> None:
            nonlocal finished
            if record is None:
                bar.update()
                return
            finished += 1
            reached = "failed" if "failed" in record else f"{record['accuracy']:.1%}"
            bar.set_postfix_str(f"{finished}/{len(runs)} runs, {run}: {reached}")

        left = train_all(
            missing, shop, workers=settings.workers, report=report, budget=budget,
            progress=None if side_by_side else progress, before=finished,
            on=settings.on,
        )  # fmt: skip
    if left and progress is not None:
        print(f"no time was left for {len(left)} of {len(runs)} runs", file=progress)


def write_results(
    claim: Claim,
    settings: Reproduce,
    runs: Sequence[Run],
    out: Path,
    origin: dict[str, Any] | None,
    *,
    line: Line | None = None,
) -> dict[str, Any]:
    """results.json and report.html of the runs that have a record, with what was measured before, or now if there is
    a `line` for it."""
    kept, _ = read_records(out / "records")
    records = records_of(runs, kept)
    if not records:
        planned = [run for run in runs if isinstance(run, Training)]
        why = "; ".join([f"no record in {out / 'records'} belongs to a run of this study", *strangers(planned, kept)])
        raise FileNotFoundError(why)
    if all("failed" in record for record in records):
        raise RunError(f"every run failed, the first with: {records[0]['failed']}")
    before = earlier_results(out) or {}
    results = {
        "format": FORMAT,
        "provenance": origin or before.get("provenance") or records[0]["provenance"],
        "settings": {name: getattr(settings, name) for name in DECISIVE}
        | {"data": settings.data_name, "recipe": settings.recipe and Path(settings.recipe).name},
        "plan": [
            {name: getattr(run, name) for name in ("configuration", "seed", "role", "fingerprint")} for run in runs
        ],
        **outcome(claim, records, runs, settings.attention, settings.baseline, _maps(out, before, records)),
    }
    if line is not None:
        results |= measured(results, line.measuring)
    else:
        results |= {name: before.get(name) for name in ("error", "scaling", "dial")}
    write_atomically(out / "results.json", json.dumps(results, allow_nan=False).encode())
    report.write(results, out / "report.html")
    return json.loads(json.dumps(results))


def _maps(out: Path, before: dict[str, Any], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Example maps by configuration: those beside the records, else those of an earlier results.json."""
    found: dict[str, Any] = {}
    for record in records:
        name, mark = record["configuration"], record["fingerprint"][:8]
        for path in sorted((out / "records").glob(f"*-{record['seed']}-{mark}{MAPS}")):
            found.setdefault(name, json.loads(path.read_text(encoding="utf-8")))
    same_data = before.get("data", {}).get("digest") == records[0].get("data", {}).get("digest")
    return (before["maps"]["models"] if before.get("maps") and same_data else {}) | found


def earlier_results(out: Path) -> dict[str, Any] | None:
    """The results.json in the folder, if this version can read it."""
    path = out / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return results if results.get("format") == FORMAT else None


class Line:
    """The progress line of a study that trains and then measures: it counts down to the end of both."""

    MEASURING = 0.25  # of the demo's time, on two cores

    def __init__(self, progress: IO[str] | None, measures: bool) -> None:
        self.progress, self.measures = progress, measures
        self._began: float | None = None

    def training(self, epochs: int, shown: bool) -> Any:
        """A bar of so many epochs; where each run has one of its own, it is not shown."""
        whole = epochs / (1 - self.MEASURING * self.measures)
        bar = bar_of("training", whole, "epoch", self.progress if shown else None, bar_format=COUNTDOWN)
        self._began = bar.start_t if epochs and shown and self.progress is not None else None
        return bar

    def measuring(self, what: str, steps: int, unit: str) -> Any:
        """A bar that begins where that of the training ended."""
        done = 0.0 if self._began is None else steps * (1 / self.MEASURING - 1)
        bar = bar_of(what, steps + done, unit, self.progress, bar_format=COUNTDOWN, initial=done)
        if self._began is not None:
            bar.initial, bar.start_t = 0, self._began
        return bar
