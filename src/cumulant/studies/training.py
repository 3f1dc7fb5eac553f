"""Runs that train a model on a data set as a recipe says: what tells them apart, and the data they share.

A run is known by its recipe, the content of its data and its seed, not by the place where it was trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cumulant.data.memory import hold
from cumulant.data.part import Source
from cumulant.studies.configuration import configured
from cumulant.studies.plan import CONTROL_SEED, Key, Run, digest, seeded
from cumulant.studies.runs import Workshop
from cumulant.train import RecipeError, TrainRecipe
from cumulant.train.build import build_model, open_recipe_source
from cumulant.train.processes import chosen_device

# Fields of a recipe that do not decide what comes out of a run.
INDIFFERENT = {
    "seed", "data", "workers", "in_memory", "max_bad", "parallel", "context_parallel", "compile", "compile_mode",
    "cuda_graph", "eval_epochs", "checkpoint_epochs", "checkpoint_steps", "log_steps", "tensorboard", "wandb",
}  # fmt: skip
ALWAYS = {"model", "attention", "epochs", "batch_size", "lr", "image_size"}


@dataclass(frozen=True)
class Training(Run):
    """One model trained with one configuration from one seed, on data with that digest of its content."""

    recipe: TrainRecipe = field(repr=False, compare=False, hash=False)
    data: str | None = None

    @property
    def epochs(self) -> int:
        return self.recipe.epochs

    @property
    def name(self) -> str:
        """With that of its data first."""
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', Path(self.recipe.data).name)}-{super().name}"


def trainings(
    base: TrainRecipe,
    names: Sequence[str],
    baseline: str,
    seeds: int,
    controls: int,
    *,
    data: str | None = None,
    first_control: int = CONTROL_SEED,
) -> list[Training]:
    """The plan of a study that trains each configuration under the same recipe; `data`: the digest of its data.

    Without it runs are known by the name of their data, as in records that were made before digests.
    """
    base.check_schedule()
    recipes = {name: configured(base, name) for name in names}
    marks = {name: fingerprint(recipe, data) for name, recipe in recipes.items()}
    same: dict[str, str] = {}
    for name in names:
        if same.setdefault(marks[name], name) != name:
            raise ValueError(f"{same[marks[name]]} and {name} in attention are the same model; name one")
    order = seeded(names, baseline, seeds, controls, first_control)
    return [Training(name, seed, role, marks[name], recipes[name], data) for name, seed, role in order]


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


def fingerprint(recipe: TrainRecipe, data: str | None = None) -> str:
    """Digest of all that decides the outcome of a run besides its seed and the code; `data`: that of the data's
    content, which then counts instead of its name."""
    return digest(deciding(recipe) | ({} if data is None else {"data": data}))


def key_by_name(record: Mapping[str, Any]) -> Key:
    """What a record would be known by if data of one name were the same: for records without their data at hand."""
    return digest(record["recipe"]), record["seed"]


def device_of(settings: Any, small: bool = False) -> str:
    """Where the runs of a command are trained; on other machines what it names is theirs to have. `small`: on data that
    a GPU does not help with, unless it is named."""
    if settings.device is None and small:
        return "cpu"
    return settings.device if settings.device and settings.on == "ray" else str(chosen_device(settings.device))


def check_models(runs: Sequence[Training], source: Source) -> None:
    """Build every model once: a wrong value of an extra is told before anything is trained."""
    for name, recipe in {run.configuration: run.recipe for run in runs}.items():
        try:
            build_model(recipe, source)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Trainings(Workshop):
    """A workshop whose runs follow each other on the same data, which is decoded once."""

    held: dict[tuple[Any, ...], Source] = field(default_factory=dict, repr=False, compare=False)

    def share(self, run: Training) -> Source | None:
        recipe = run.recipe
        reading = (recipe.frames, recipe.stride, recipe.views, recipe.crops, recipe.split, str(recipe.data_options))
        whole = recipe.augmentation.crops
        key = (recipe.data, recipe.loaded_size, whole, *reading)
        if key not in self.held:
            held = None if recipe.in_memory == "no" else hold(open_recipe_source(recipe), recipe.loaded_size, whole)
            if held is None:
                return None
            self.held.clear()
            self.held[key] = held
        return self.held[key]

    def opened(self, run: Training, shared: Source | None) -> Source:
        """The data of a run, where it is not `shared`: what the study was planned with, or an error. Another machine
        may have other data of that name, and data may change while a study goes on."""
        source = shared or open_recipe_source(run.recipe)
        found = source.identity()["digest"]
        if run.data not in (None, found):
            raise RecipeError(
                f"{run.recipe.data} holds other data now, or on this machine, than this study began with ({source}; "
                f"digest {run.data} -> {found}): put it back as it was, or give the command again to begin anew with it"
            )
        return source
