"""What a study consists of: the recipe of its data, and all its runs in the order in which they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cumulant.studies.command import Reproduce
from cumulant.studies.configuration import changed, configured, parse
from cumulant.studies.records import Key, Run

if TYPE_CHECKING:
    from cumulant.data.part import Source
    from cumulant.train import TrainRecipe

CONTROL_SEED = 1000  # of the first control run: whatever the number of seeds, no run is both compared and control
SUBSETS = {"ucf101-6": "ucf101"}  # parts of a data set that are trained with its recipe


@dataclass(frozen=True)
class Planned:
    """A run as a results file knows it: enough to find its record, without recipe and data at hand."""

    configuration: str
    seed: int
    role: str
    fingerprint: str

    @property
    def key(self) -> Key:
        return self.fingerprint, self.seed


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


def planned(settings: Reproduce) -> list[Run]:
    """All runs; seed by seed, so that a stopped study has the same seeds of every configuration, the control last."""
    base = recipe_of(settings)
    recipes = {name: configured(base, parse(name)) for name in settings.attention}
    compared = [
        Run(name, seed, "compared", recipes[name]) for seed in range(settings.seeds) for name in settings.attention
    ]
    again = range(CONTROL_SEED, CONTROL_SEED + settings.controls)
    runs = compared + [Run(settings.baseline, seed, "control", recipes[settings.baseline]) for seed in again]
    same: dict[Key, str] = {}
    for run in runs:
        if same.setdefault(run.key, run.configuration) != run.configuration:
            raise ValueError(f"{same[run.key]} and {run.configuration} in attention are the same model; name one")
    return runs


def check_models(runs: Sequence[Run], source: Source) -> None:
    """Build every model once: a wrong value of an extra is told before anything is trained."""
    from cumulant.train.build import build_model

    for name, recipe in {run.configuration: run.recipe for run in runs}.items():
        try:
            build_model(recipe, source)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def device_of(settings: Reproduce) -> str:
    """Where the runs are trained: the digits are too small for a GPU to help."""
    from cumulant.train.processes import chosen_device

    if settings.device is None and settings.data == "digits":
        return "cpu"
    return str(chosen_device(settings.device))


def as_values(runs: Sequence[Run | Planned]) -> list[dict[str, Any]]:
    """The plan as plain values, see `Planned`."""
    return [
        {"configuration": run.configuration, "seed": run.seed, "role": run.role, "fingerprint": run.key[0]}
        for run in runs
    ]
