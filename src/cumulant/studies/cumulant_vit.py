"""`cumulant reproduce`: the paper's comparison of attention mechanisms on any data, as a whole that can be stopped.

The same model is trained with each configuration, same recipe and seeds, and once more with the baseline and other
seeds, the A/A control. On the digits (four layers, 136,650 parameters, 20 epochs) a run takes about 12 s on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any

from cumulant.bench.provenance import provenance
from cumulant.studies import report
from cumulant.studies.command import Reproduce
from cumulant.studies.configuration import changed
from cumulant.studies.plan import Budget, Run
from cumulant.studies.records import by_name, read_records, source_digest
from cumulant.studies.runs import TimeOverError
from cumulant.studies.study import Classifiers, Line, earlier_results, train_missing, write_results
from cumulant.studies.training import Training, check_models, device_of, trainings
from cumulant.studies.verdict import Claim
from cumulant.train import TrainRecipe, read_recipe, recipe_names
from cumulant.train.build import open_recipe_source
from cumulant.train.files import claim_room

SUBSETS = {"ucf101-6": "ucf101"}  # parts of a data set that are trained with its recipe
CLAIM = Claim(  # Morimoto, Wang, Yasuda: ViT on ImageNet-100, top-1 in percent
    (("softmax", "cumulant3", False), ("cumulant3", "cumulant2", True), ("cumulant2", "linear", False)),
    {"softmax": 69.1, "cumulant3": 64.0, "cumulant2": 63.6, "linear": 43.0},
)


def recipe_of(settings: Reproduce) -> TrainRecipe:
    """The recipe of every run but for its attention: it was chosen for softmax."""
    recipe = read_recipe(settings.recipe or recipe_name(settings.data_name))
    own_data = settings.recipe is not None and settings.data == Reproduce.data
    recipe = replace(recipe, data=recipe.data if own_data else settings.data, seed=0)
    if settings.epochs is not None:
        recipe = recipe.lasting(settings.epochs)
    return changed(recipe, settings.change)


def recipe_name(data: str) -> str:
    """The built-in recipe for data of that name."""
    names, data = recipe_names(), SUBSETS.get(data, data)
    if data in names:
        return data
    raise ValueError(f"no recipe is named like the data {data!r}; choose one with --recipe: {', '.join(names)}")


def planned(settings: Reproduce, data: str | None = None) -> list[Training]:
    """All runs, on data with that digest of its content."""
    count, names = settings.controls, settings.attention
    return trainings(recipe_of(settings), names, settings.baseline, settings.seeds, count, data=data)


def reproduce(settings: Reproduce, *, progress: IO[str] | None = None) -> dict[str, Any]:
    """The whole study: train, measure, write results.json and report.html into the folder, return the results.

    `progress` is where progress bars go; None for none. Wrong names, missing data and an unwritable folder are
    reported before anything is trained. `results["missing"]` lists the runs for which `settings.minutes` had no time.
    """
    budget = Budget(settings.minutes)
    planned(settings)  # a wrong name is told before the data is looked at
    report.check_packages()
    source = open_recipe_source(recipe_of(settings))
    runs = planned(settings, source.identity()["digest"])
    check_models(runs, source)
    if progress is not None:
        print(f"data: {source}", file=progress)
    device, out = device_of(settings, small=settings.data == "digits"), settings.folder
    claim_room(out, 0)
    made: dict[str, Any] = {"provenance": provenance(settings.command()), "source": source_digest()}
    shop = Classifiers(out, device, made, settings.fresh)
    for place in ("records", "runs"):
        (out / place).mkdir(exist_ok=True)
    line = Line(progress, measures=device == "cpu")
    train_missing(settings, runs, shop, budget, line)
    kept, _ = read_records(out / "records")
    if not any(run.key in kept for run in runs):
        raise TimeOverError(settings.minutes)
    spare = budget.left is None or budget.left > 60
    return write_results(CLAIM, settings, runs, out, made["provenance"], line=line if line.measures and spare else None)


def remake_report(settings: Reproduce) -> dict[str, Any]:
    """results.json and report.html from the records in the folder; nothing is trained or measured.

    The runs are those of the results.json in the folder, or the ones that the settings plan where they name any.
    """
    report.check_packages()
    out, data = settings.folder, _digest_of_data(settings)
    before = earlier_results(out)
    if before is None and not (out / "records").is_dir():
        raise FileNotFoundError(f"there are no records in {out}; run `cumulant reproduce --out {out}` first")
    choices = ("attention", "seeds", "control", "epochs", "change")
    chosen = any(getattr(settings, name) != getattr(Reproduce, name) for name in choices)
    if settings.data != Reproduce.data and before is not None:  # the results may be of other data of that name
        chosen |= data is not None and before["data"].get("digest") not in (None, data)
    if before is None or chosen:
        return write_results(CLAIM, settings, _planned_again(settings, data), out, None)
    stored: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in before["settings"].items()
    }
    runs = [Run(**one) for one in before["plan"]]
    return write_results(CLAIM, Reproduce(**stored, out=out), runs, out, before["provenance"])


def _digest_of_data(settings: Reproduce) -> str | None:
    """What tells the data from others of its name; None where it is not at hand."""
    with suppress(OSError, ValueError, ImportError):
        return open_recipe_source(recipe_of(settings)).identity()["digest"]
    return None


def _planned_again(settings: Reproduce, data: str | None) -> Sequence[Run]:
    """The runs of the settings; where their data is not at hand, those with the records of data of that name."""
    runs = planned(settings, data)
    known = by_name(read_records(settings.folder / "records")[0]) if data is None else {}
    return [replace(run, fingerprint=known[run.key]["fingerprint"]) if run.key in known else run for run in runs]
