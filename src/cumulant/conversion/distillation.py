"""`distill`: train a converted model to say what the model before it said, going on exactly after a kill.

First every replaced layer learns the output of its softmax original on the same input: one forward pass of the frozen
teacher feeds all of them, and nothing else is trained. Then all weights learn the teacher's answers.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from ..inspect.batches import Batch, evaluating, some
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import KEPT
from ..train.files import claim_room, read_json, remove_leftovers, sole_owner, write_atomically
from ..train.state import remove_states
from .distill_data import Batches, as_batches
from .distill_steps import NOTES, RESULT, DistillResult, Output, Run
from .saving import load
from .settings import DistillRecipe

ABOUT, LOG = "distill.json", "log.jsonl"
FREE = ("checkpoint_steps",)  # what may change between two parts of a run


def distill(
    model: nn.Module,
    teacher: nn.Module,
    data: Batches | Sequence[Batch] | Batch,
    recipe: DistillRecipe | None = None,
    *,
    out: str | Path | None = None,
    output: Output | None = None,
    measure: Sequence[Batch] | Batch | None = None,
    fresh: bool = False,
    progress: IO[str] | None = None,
) -> DistillResult:
    """Train a converted model, in place, to say what `teacher` says.

        teacher = copy.deepcopy(model)
        convert(model, "cumulant3")
        distill(model, teacher, batches, DistillRecipe(epochs=5), out="runs/distilled")
        model = load("runs/distilled")

    Both models stay in evaluation mode: nothing is dropped, so that the same input has one right answer. A step costs a
    forward pass of the teacher, and forward and backward of the replaced layers, later of the whole model.

    Args:
        model: converted by `convert`, with the weights to start from (those of the teacher).
        teacher: the model before; its weights are left alone.
        data: batches as the model takes them, in a list (their order changes from epoch to epoch), or `Batches`.
        recipe: how to train, `DistillRecipe()` unless given.
        out: folder for the trained model and, while it runs, for its state: the same call goes on from there after a
            kill, to the same weights bit for bit on a CPU. A finished run is only read.
        output: function(output, batch) -> tensor to match; logits or hidden states unless given.
        measure: batches on which the change of the output is measured before and after.
        fresh: delete an earlier run in the folder.
        progress: where the progress bar goes.
    """
    recipe = recipe or DistillRecipe()
    plan = plans.plan_of(model)
    if plans.is_converted(teacher):
        raise ValueError("teacher is converted: pass the model as it was before, e.g. copy.deepcopy(model) made then")
    if teacher is model:
        raise ValueError("teacher and model are the same object: pass a copy made before convert(model)")
    missing = sorted(set(plan) - {name for name, _ in teacher.named_modules()})
    if missing:
        raise ValueError(f"teacher is not the model from before the conversion: it has no layer {', '.join(missing)}")
    batches = as_batches(data, model, recipe.seed)
    if len(batches) < 1:
        raise ValueError("data holds no batch")
    with ExitStack() as stack:
        folder = None if out is None else Path(out)
        if folder is not None:
            claim_room(folder, 0)
            stack.enter_context(sole_owner(folder))
            remove_leftovers(folder)
            if fresh:
                clear(folder)
            about = {
                "recipe": {key: value for key, value in asdict(recipe).items() if key not in FREE},
                "layers": {name: choice.to_json() for name, choice in plan.items()},
                "steps_of_an_epoch": len(batches),
                "teacher": fingerprint(teacher),
            }
            check_run(folder, about)
            if (folder / RESULT).is_file():
                return _finished(folder, model, teacher)
        measured = [] if measure is None else some(measure, 10**9, model)
        stack.enter_context(_frozen_teacher(teacher))
        stack.enter_context(evaluating(model))
        for one in (model, teacher):
            stack.enter_context(_without_cache(one))
        stack.enter_context(_gradients_as_they_were(model))
        return Run(model, teacher, batches, recipe, folder, output, measured, progress).go()


def clear(folder: Path) -> None:
    """Delete the run in a folder, what says what it is last."""
    remove_states(folder)
    for name in (NOTES, RESULT, LOG, ABOUT):
        (folder / name).unlink(missing_ok=True)


def planned(folder: str | Path) -> dict[int | str, Any] | None:
    """The choices by layer of a run that was begun in this folder, so that the same command need not choose again."""
    path = Path(folder) / ABOUT
    return read_json(path)["layers"] if path.is_file() else None


def check_run(folder: Path, about: dict[str, Any]) -> None:
    """Refuse to go on in a folder with a run of another kind; claim an empty one."""
    path = folder / ABOUT
    if path.is_file():
        before, now = read_json(path), json.loads(json.dumps(about))
        changed = [
            f"{key} was {before['recipe'].get(key)}, now {value}"
            for key, value in now["recipe"].items()
            if before["recipe"].get(key) != value
        ]
        changed += [
            key.replace("_", " ") for key in ("layers", "steps_of_an_epoch", "teacher") if before[key] != now[key]
        ]
        if changed:
            raise ValueError(
                f"{folder} holds another distillation ({'; '.join(changed)}). Give the old values to go on with it, "
                "choose another folder, or start afresh (fresh=True, --fresh), which deletes that run"
            )
    write_atomically(path, json.dumps(about, indent=1).encode())


def fingerprint(model: nn.Module) -> str:
    """A short digest of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _finished(folder: Path, model: nn.Module, teacher: nn.Module) -> DistillResult:
    trained = load(folder, model=copy.deepcopy(teacher), check=False)
    model.load_state_dict(trained.state_dict())
    stored = read_json(folder / RESULT)
    pairs = {key: {name: tuple(pair) for name, pair in stored[key].items()} for key in ("layers", "losses")}
    change = None if stored["change"] is None else tuple(stored["change"])
    return DistillResult(**{**stored, **pairs, "change": change})


@contextmanager
def _frozen_teacher(teacher: nn.Module) -> Iterator[None]:
    """In evaluation mode; layers of transformers under our own softmax, which takes the same masks as the student."""
    with evaluating(teacher):
        if plans.library_of(teacher) != plans.TRANSFORMERS:
            yield
            return
        with plans.applied(teacher, dict.fromkeys(plans.attention_layers(teacher), KEPT)):
            yield


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """No key-value cache of transformers: a layer that is called twice would find its own tokens in it."""
    config: Any = getattr(model, "config", None)
    before = None if config is None or isinstance(config, dict) else getattr(config, "use_cache", None)
    if before is None:
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = before


@contextmanager
def _gradients_as_they_were(model: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
            parameter.grad = None


__all__ = ["Batches", "DistillRecipe", "DistillResult", "distill"]
