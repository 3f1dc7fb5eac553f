"""The folder of a run and the state from which it goes on: one safetensors file, whole or the one before it.

recipe.json        what the folder is for          log.jsonl                one line per logged step
state.safetensors  to go on from; gone at the end  result.json              of a finished run
best.safetensors   best weights so far             last.safetensors         weights after the last step
predictions.safetensors  class probabilities of the test part
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .average import Average
from .checkpoint import read_header
from .files import write_atomically
from .meter import Meter
from .processes import like, put, whole
from .recipe_files import differences, from_json, to_json
from .train_recipe import TrainRecipe

# In the order in which a run is deleted: what makes it finished, then what it goes on from, what it is for at the end.
FILES = ("result.json", "state.safetensors", "log.jsonl", "best.safetensors", "last.safetensors",
         "predictions.safetensors", "recipe.json")  # fmt: skip
FRESH = "choose another folder with --out, or start afresh with --fresh, which deletes that run"


class RecipeError(ValueError):
    """The folder holds a run with another recipe."""


@dataclass
class Progress:
    """How far a run is: steps done, best accuracy so far with its epoch, seconds of work."""

    step: int = 0
    best: float = -1.0
    best_epoch: int = 0
    seconds: float = 0.0
    loss_steps: int = field(default=0)  # steps in the loss that is added up and not yet logged


def begun(folder: Path) -> bool:
    """Whether a run left anything in the folder beside its recipe: one that failed before it began does not hold it."""
    there = {name for name in FILES if (folder / name).is_file() and (folder / name).stat().st_size > 0}
    return bool(there - {"recipe.json"})


def check_recipe(folder: Path, recipe: TrainRecipe) -> None:
    """Refuse to go on in a folder where a run was begun with another recipe, or one not known; claim any other."""
    path = folder / "recipe.json"
    if begun(folder):
        try:
            known = from_json(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError) as error:
            raise RecipeError(
                f"{folder} holds files of a run, but its recipe.json is missing or damaged ({error}): {FRESH}"
            ) from error
        changed = differences(known, recipe)
        if changed:
            raise RecipeError(
                f"{folder} holds a run with another recipe ({'; '.join(changed)}). Give the old values to go on "
                f"with it, {FRESH}"
            )
    write_atomically(path, json.dumps(json.loads(to_json(recipe)), indent=1).encode())


def clear(folder: Path) -> None:
    """Delete the run in the folder, so that the rest of a stopped deletion is known for a run that has to begin."""
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def bytes_needed(model: nn.Module, averaged: bool, folder: Path | None = None) -> int:
    """Room on the disk for the states (an old and a new one at the moment of saving), the best and the last weights;
    what a run that goes on has in its folder already is not needed again."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    there = [folder / name for name in FILES if (folder / name).is_file()] if folder else []
    held = sum(path.stat().st_size for path in there)
    return max(weights * (2 * (4 if averaged else 3) + 2) - held, 0) + (1 << 20)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU, whole in every process. Every process must ask at the same time."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    meter: Meter,
    progress: Progress,
    *,
    write: bool,
) -> None:
    """Gather everything (all processes together) and, if `write`, put it into one file."""
    tensors = {f"model.{name}": tensor for name, tensor in whole_weights(model).items()}
    if average is not None:
        with average.in_place():
            tensors |= {f"average.{name}": tensor for name, tensor in whole_weights(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = whole(value)
    tensors["loss"] = whole(meter.processes.sum(meter.total.detach().clone()) / meter.processes.world)
    progress.loss_steps = meter.steps
    if write:
        header = {"format": "pt", "progress": json.dumps(asdict(progress)), "torch": torch.__version__}
        write_atomically(path, to_bytes(tensors, metadata=header))


def load_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None, meter: Meter
) -> Progress:
    """Put everything back and say how far the run was. Without a file it has not begun."""
    if not path.is_file():
        return Progress()
    try:
        tensors, progress = load_file(path), _known(json.loads(read_header(path)["progress"]))
        _check_fit(tensors, model, average is not None)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no state that this run can go on from ({error}): {FRESH}") from error
    if average is not None:
        put(model, _under("average.", tensors))
        average.take()
    put(model, _under("model.", tensors))
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            full = tensors.get(f"optimizer.{key}.{name}")
            if full is not None:
                # The step counter is one number, never cut into shards.
                placed = full.to(parameter.device) if key == "step" else like(full, parameter)
                optimizer.state[parameter][key] = placed
    meter.total.copy_(tensors["loss"])
    meter.steps = progress.loss_steps
    return progress


def read_result(folder: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """These values of the result that a finished run left, or None."""
    path = folder / "result.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["result"]
        return {name: values[name] for name in names}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of a run, or cut short ({error}): {FRESH}") from error


def _known(values: Mapping[str, Any]) -> Progress:
    """Progress from stored values; what another version stored beside them is passed over."""
    return Progress(**{"step": values["step"]} | {f.name: values[f.name] for f in fields(Progress) if f.name in values})


def _check_fit(tensors: Mapping[str, Tensor], model: nn.Module, averaged: bool) -> None:
    """Refuse the tensors of another model: each must have its place and its shape."""
    own = model.state_dict()
    wanted = {"loss": torch.Size()} | {f"model.{name}": one.shape for name, one in own.items()}
    wanted |= {f"average.{name}": one.shape for name, one in own.items()} if averaged else {}
    found = {name: one.shape for name, one in tensors.items() if not name.startswith("optimizer.")}
    for name in wanted | found:
        if found.get(name) != wanted.get(name):
            got, want = (f"shape {tuple(of[name])}" if name in of else "nothing" for of in (found, wanted))
            raise ValueError(f"{name}: {got} in the file, {want} in the model")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
