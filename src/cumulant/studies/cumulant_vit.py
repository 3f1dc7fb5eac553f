"""`cumulant reproduce`: the paper's comparison of attention mechanisms on any data, as a whole that can be stopped.

The same model is trained with each configuration, same recipe and seeds, and once more with the baseline and other
seeds, the A/A control. On the digits (four layers, 136,650 parameters, 20 epochs) a run takes about 12 s on one core.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cumulant.studies.budget import Budget
from cumulant.studies.classifiers import Classifiers
from cumulant.studies.command import DECISIVE, Reproduce
from cumulant.studies.configuration import changed
from cumulant.studies.outcome import outcome
from cumulant.studies.plan import Run
from cumulant.studies.records import (
    FORMAT,
    MAPS,
    by_name,
    device_name,
    read_records,
    records_of,
    source_digest,
    strangers,
)  # fmt: skip
from cumulant.studies.runs import RunError, TimeOverError, train_all
from cumulant.studies.training import Training, check_models, trainings
from cumulant.studies.verdict import Claim
from cumulant.train.files import claim_room, write_atomically

if TYPE_CHECKING:
    from cumulant.train import TrainRecipe

SUBSETS = {"ucf101-6": "ucf101"}  # parts of a data set that are trained with its recipe
CLAIM = Claim(  # Morimoto, Wang, Yasuda: ViT on ImageNet-100, top-1 in percent
    (("softmax", "cumulant3", False), ("cumulant3", "cumulant2", True), ("cumulant2", "linear", False)),
    {"softmax": 69.1, "cumulant3": 64.0, "cumulant2": 63.6, "linear": 43.0},
)


def recipe_of(settings: Reproduce) -> TrainRecipe:
    """The recipe of every run but for its attention: it was chosen for softmax."""
    from cumulant.train import read_recipe

    recipe = read_recipe(settings.recipe or recipe_name(settings.data_name))
    own_data = settings.recipe is not None and settings.data == Reproduce.data
    recipe = replace(recipe, data=recipe.data if own_data else settings.data, seed=0)
    if settings.epochs is not None:
        recipe = recipe.lasting(settings.epochs)
    return changed(recipe, settings.change)


def recipe_name(data: str) -> str:
    """The built-in recipe for data of that name."""
    from cumulant.train import recipe_names

    names, data = recipe_names(), SUBSETS.get(data, data)
    if data in names:
        return data
    raise ValueError(f"no recipe is named like the data {data!r}; choose one with --recipe: {', '.join(names)}")


def planned(settings: Reproduce, data: str | None = None) -> list[Training]:
    """All runs, on data with that digest of its content."""
    count, names = settings.controls, settings.attention
    return trainings(recipe_of(settings), names, settings.baseline, settings.seeds, count, data=data)


def device_of(settings: Reproduce) -> str:
    """Where the runs are trained: the digits are too small for a GPU to help."""
    from cumulant.train.processes import chosen_device

    if settings.device is None and settings.data == "digits":
        return "cpu"
    return str(chosen_device(settings.device))


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
    planned(settings)  # a wrong name is told before the data is looked at
    report.check_packages()
    source = open_recipe_source(recipe_of(settings))
    runs = planned(settings, source.identity()["digest"])
    check_models(runs, source)
    if progress is not None:
        print(f"data: {source}", file=progress)
    device, out = device_of(settings), settings.folder
    claim_room(out, 0)
    made: dict[str, Any] = {"provenance": provenance(settings.command()), "source": source_digest()}
    shop = Classifiers(out, device, made, settings.fresh)
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
        return _write(settings, _planned_again(settings), out, None, measure=False, progress=None)
    runs = [Run(**one) for one in before["plan"]]
    stored = Reproduce(**{name: _tuple(value) for name, value in before["settings"].items()}, out=out)
    return _write(stored, runs, out, before["provenance"], measure=False, progress=None)


def _planned_again(settings: Reproduce) -> Sequence[Run]:
    """The runs of the settings; where their data is not at hand, those with the records of data of that name."""
    from cumulant.train.build import open_recipe_source

    with suppress(OSError, ValueError, ImportError):
        return planned(settings, open_recipe_source(recipe_of(settings)).identity()["digest"])
    known = by_name(read_records(settings.folder / "records")[0])
    return [
        replace(run, fingerprint=known[run.key]["fingerprint"]) if run.key in known else run
        for run in planned(settings)
    ]


def _train(
    settings: Reproduce, runs: Sequence[Training], shop: Classifiers, budget: Budget, progress: IO[str] | None
) -> None:
    """Train the runs that have no record yet."""
    kept, unreadable = read_records(shop.out / "records")
    if progress is not None:
        if unreadable:
            print(f"left out, not records of this version: {', '.join(unreadable)}", file=progress)
        for sentence in strangers(runs, kept):
            print(sentence, file=progress)
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
    total = sum(run.epochs for run in missing)
    finished = len(runs) - len(missing)
    with _bar("training", total, "epoch", progress if side_by_side else None) as bar:

        def report(run: Training, record: dict[str, Any] | None) -> None:
            nonlocal finished
            if record is None:
                bar.update()
                return
            finished += 1
            reached = "failed" if "failed" in record else f"{record['accuracy']:.1%}"
            last = f"{run}: {reached}"
            bar.set_postfix_str(f"{finished}/{len(runs)} runs, {last}")

        left = train_all(
            missing, shop, workers=settings.workers, report=report, budget=budget,
            progress=None if side_by_side else progress, before=finished,
        )  # fmt: skip
    if left and progress is not None:
        print(f"no time was left for {len(left)} of {len(runs)} runs", file=progress)


def _write(
    settings: Reproduce,
    runs: Sequence[Run],
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
        planned = [run for run in runs if isinstance(run, Training)]
        why = "; ".join([f"no record in {out / 'records'} belongs to a run of this study", *strangers(planned, kept)])
        raise FileNotFoundError(why)
    if all("failed" in record for record in records):
        raise RunError(f"every run failed, the first with: {records[0]['failed']}")
    before = _earlier(out) or {}
    results = {
        "format": FORMAT,
        "provenance": origin or before.get("provenance") or records[0]["provenance"],
        "settings": {name: getattr(settings, name) for name in DECISIVE}
        | {"data": settings.data_name, "recipe": settings.recipe and Path(settings.recipe).name},
        "plan": [
            {name: getattr(run, name) for name in ("configuration", "seed", "role", "fingerprint")} for run in runs
        ],
        **outcome(CLAIM, records, runs, settings.attention, settings.baseline, _maps(out, before, records)),
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
