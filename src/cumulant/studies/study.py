"""`cumulant reproduce`: the paper's comparison of attention mechanisms on any data, as a whole that can be stopped.

The same model is trained with each configuration, same recipe and seeds, and once more with the baseline and other
seeds, the A/A control. On the digits (four layers, 136,650 parameters, 20 epochs) a run takes about 12 s on one core.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from cumulant.studies.budget import Budget
from cumulant.studies.command import DECISIVE, Reproduce
from cumulant.studies.outcome import outcome, records_of
from cumulant.studies.plan import Planned, as_values, check_models, device_of, planned
from cumulant.studies.records import FORMAT, MAPS, Run, device_name, read_records, source_digest
from cumulant.studies.runs import RunError, Workshop, train_all
from cumulant.train.files import claim_room, write_atomically


class TimeOverError(RunError):
    """The time given was over before the first run was finished."""


def reproduce(
    settings: Reproduce, *, progress: IO[str] | None = None, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """The whole study: train, measure, write results.json and report.html into the folder, return the results.

    `progress` is where progress bars go; None for none. Wrong names, missing data and an unwritable folder are
    reported before anything is trained. `results["missing"]` lists the runs for which `settings.minutes` had no time.
    """
    from cumulant.bench import provenance
    from cumulant.studies import report
    from cumulant.train.build import open_recipe_source

    budget = Budget(settings.minutes, clock)
    runs = planned(settings)
    report.check_packages()
    check_models(runs, open_recipe_source(runs[0].recipe))
    device, out = device_of(settings), settings.folder
    claim_room(out, 0)
    made: dict[str, Any] = {"provenance": provenance(settings.command()), "source": source_digest()}
    shop = Workshop(out, device, made, settings.fresh)
    for place in ("records", "runs"):
        (out / place).mkdir(exist_ok=True)
    _train(settings, runs, shop, budget, progress)
    kept, _ = read_records(out / "records")
    if not any(run.key in kept for run in runs):
        raise TimeOverError(
            f"no run was finished within the {settings.minutes:g} minutes; give the same command again to go on"
        )
    spare = budget.left is None or budget.left > 60
    return _write(settings, runs, out, made["provenance"], measure=device == "cpu" and spare, progress=progress)


def remake_report(settings: Reproduce) -> dict[str, Any]:
    """results.json and report.html from the records in the folder; nothing is trained or measured.

    The runs are those of the results.json in the folder, or the ones that the settings plan where they name any.
    """
    from cumulant.studies import report

    report.check_packages()
    out = settings.folder
    before = _earlier(out)
    choices = ("attention", "seeds", "control", "epochs", "change")
    chosen = any(getattr(settings, name) != getattr(Reproduce, name) for name in choices)
    if before is None and not (out / "records").is_dir():
        raise FileNotFoundError(f"there are no records in {out}; run `cumulant reproduce --out {out}` first")
    if before is None or chosen:
        return _write(settings, planned(settings), out, None, measure=False, progress=None)
    runs = [Planned(**one) for one in before["plan"]]
    stored = Reproduce(**{name: _tuple(value) for name, value in before["settings"].items()}, out=out)
    return _write(stored, runs, out, before["provenance"], measure=False, progress=None)


def _train(settings: Reproduce, runs: Sequence[Run], shop: Workshop, budget: Budget, progress: IO[str] | None) -> None:
    """Train the runs that have no record yet."""
    kept, unreadable = read_records(shop.out / "records")
    if progress is not None and unreadable:
        print(f"left out, not records of this version: {', '.join(unreadable)}", file=progress)
    missing = [run for run in runs if settings.fresh or run.key not in kept]
    for run in missing:
        shop.record(run).unlink(missing_ok=True)
    here = device_name(shop.device)
    names = {run.key[0]: run.configuration for run in runs}
    for one in kept.values():
        # Times of another machine say nothing about this one, nor do those of other recipes in the same folder.
        if one["fingerprint"] in names and one["device"] == here and "failed" not in one:
            budget.saw(names[one["fingerprint"]], one["epochs"], one["wall_seconds"])
    if progress is not None and len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs are finished already", end="", file=progress)
        print(" (--fresh trains them anew)", file=progress)
        others = {record["source"] for run in runs if (record := kept.get(run.key))} - {source_digest()}
        if others:
            print("some of them were made with another version of the code; the report says which", file=progress)
    side_by_side = shop.device == "cpu" and min(settings.workers, len(missing)) > 1
    total = sum(run.recipe.epochs for run in missing)
    finished = len(runs) - len(missing)
    with _bar("training", total, "epoch", progress if side_by_side else None) as bar:

        def report(run: Run, record: dict[str, Any] | None) -> None:
            nonlocal finished
            if record is None:
                bar.update()
                return
            finished += 1
            reached = "failed" if "failed" in record else f"{record['accuracy']:.1%}"
            last = f"{run.configuration} seed {run.seed}: {reached}"
            bar.set_postfix_str(f"{finished}/{len(runs)} runs, {last}")

        left = train_all(
            missing, shop, workers=settings.workers, report=report, budget=budget,
            progress=None if side_by_side else progress,
        )  # fmt: skip
    if left and progress is not None:
        print(f"no time was left for {len(left)} of {len(runs)} runs", file=progress)


def _write(
    settings: Reproduce,
    runs: Sequence[Run | Planned],
    out: Path,
    origin: dict[str, Any] | None,
    *,
    measure: bool,
    progress: IO[str] | None,
) -> dict[str, Any]:
    """Results of the runs that have a record, with what was measured now or before; both files are written."""
    from cumulant.studies import report

    kept, _ = read_records(out / "records")
    records = records_of(runs, kept)
    if not records:
        raise FileNotFoundError(f"no record in {out / 'records'} belongs to a run of this study")
    if all("failed" in record for record in records):
        raise RunError(f"every run failed, the first with: {records[0]['failed']}")
    before = _earlier(out) or {}
    results = {
        "format": FORMAT,
        "provenance": origin or before.get("provenance") or records[0]["provenance"],
        "settings": {name: getattr(settings, name) for name in DECISIVE}
        | {"data": settings.data_name, "recipe": settings.recipe and Path(settings.recipe).name},
        "plan": as_values(runs),
        **outcome(records, runs, settings.attention, settings.baseline, _maps(out, before, records)),
    }
    if measure:
        from cumulant.studies.measured import measured

        results |= measured(results, lambda what, total, unit: _bar(what, total, unit, progress))
    else:
        results |= {"error": before.get("error"), "scaling": before.get("scaling")}
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
    earlier = (before.get("maps") or {}).get("models", {})
    return {name: value for name, value in earlier.items() if name not in found} | found


def _earlier(out: Path) -> dict[str, Any] | None:
    """The results.json in the folder, if this version can read it."""
    path = out / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return results if results.get("format") == FORMAT else None


def _bar(what: str, total: int, unit: str, progress: IO[str] | None) -> Any:
    """A progress bar that redraws often on a terminal and seldom in a log file."""
    from tqdm import tqdm

    often = progress is not None and progress.isatty()
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        file=progress,
        disable=progress is None,
        dynamic_ncols=True,
        mininterval=0.1 if often else 10,
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
