"""The folder of a run: what it is for, what may go on in it, and what a finished one holds.

recipe.json        what the folder is for          log.jsonl                one line per logged step
data.json          what the data set held          result.json              of a finished run
state.safetensors  to go on from; gone at the end  state-before.safetensors the one before it, likewise
state-*-*.safetensors    parts of these that other processes wrote
best.safetensors   best on the hold-out so far     last.safetensors         weights after the last step
predictions.safetensors  class probabilities of the test part
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from ..data.identity import ENTRIES, changes
from ..data.part import Source
from .files import read_json, write_atomically
from .recipe_files import differences, from_json, to_json
from .state import BEFORE, FRESH, PART, STATE, remove_states
from .train_recipe import TrainRecipe

# In the order in which a run is deleted: what makes it finished, then what it goes on from, what it is for at the end.
FILES = ("result.json", STATE, BEFORE, "log.jsonl", "best.safetensors", "last.safetensors", "predictions.safetensors",
         "data.json", "recipe.json")  # fmt: skip


class RecipeError(ValueError):
    """The folder holds a run with another recipe or of other data."""


def begun(folder: Path) -> bool:
    """Whether a run left anything in the folder beside what it is for: one that failed before it began does not hold
    it."""
    there = {name for name in FILES if (folder / name).is_file() and (folder / name).stat().st_size > 0}
    return bool(there - {"recipe.json", "data.json"})


def check_recipe(folder: Path, recipe: TrainRecipe) -> bool:
    """Refuse to go on in a folder where a run was begun with another recipe, or one not known.

    Data of another name may be the same: where the folder knows what it held, the answer is whether to compare it.
    """
    if not begun(folder):
        return False
    try:
        known = from_json((folder / "recipe.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise RecipeError(
            f"{folder} holds files of a run, but its recipe.json is missing or damaged ({error}): {FRESH}"
        ) from error
    changed = differences(known, recipe)
    renamed = known.data != recipe.data and _known_data(folder) is not None
    if renamed:
        changed = [one for one in changed if not one.startswith("data: ")]
    if changed:
        raise RecipeError(
            f"{folder} holds a run with another recipe ({'; '.join(changed)}). Give the old values to go on "
            f"with it, {FRESH}"
        )
    return renamed


def check_data(folder: Path, source: Source) -> None:
    """Refuse to go on with data that is not what the run was begun with."""
    known = _known_data(folder) if begun(folder) else None
    if known is None and begun(folder):
        why = "its data.json is missing or damaged: what it was begun with cannot be compared with what is there now"
        warnings.warn(f"{folder} goes on with {source.name}, but {why}", stacklevel=4)
    changed = changes(known, source.identity()) if known is not None else []
    if changed:
        raise RecipeError(
            f"{folder} holds a run on other data than {source.name} has now ({'; '.join(changed)}). Put the data back "
            f"as it was to go on with it, {FRESH}"
        )


def claim(folder: Path, recipe: TrainRecipe, source: Source | None) -> None:
    """Write down what the folder is for; None: the data that it knows already."""
    if source is not None:
        write_atomically(folder / "data.json", json.dumps({"name": source.name, **source.identity()}).encode())
    write_atomically(folder / "recipe.json", json.dumps(json.loads(to_json(recipe)), indent=1).encode())


def clear(folder: Path) -> None:
    """Delete the run in the folder, so that the rest of a stopped deletion is known for a run that has to begin."""
    for name in ("tensorboard", "wandb"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / FILES[0]).unlink(missing_ok=True)
    remove_states(folder)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def bytes_held(folder: Path) -> int:
    """What the run in the folder takes of the disk, without its log for TensorBoard."""
    paths = [*(folder / name for name in FILES), *folder.glob(PART)]
    return sum(path.stat().st_size for path in paths if path.is_file())


def read_result(folder: Path, names: Mapping[str, Any]) -> dict[str, Any] | None:
    """These values of the result that a finished run left, or None; one with a default may be missing."""
    path = folder / "result.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["result"]
        return {name: values[name] if usual is MISSING else values.get(name, usual) for name, usual in names.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the result of a run, or is cut short ({error}): {FRESH}") from error


def _known_data(folder: Path) -> Mapping[str, Any] | None:
    """The identity of the data that the run was begun with; None of a run that did not write it down."""
    try:
        known = read_json(folder / "data.json")
    except (FileNotFoundError, ValueError):
        return None
    return known if known.keys() >= ENTRIES else None
