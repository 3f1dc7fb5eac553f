"""Saving a converted model so that loading it gives the converted model again, and nothing else."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from ..inspect.batches import Batch
from ..inspect.examples import example_for
from ..inspect.opening import open_converted
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import Choice
from ..train.checkpoint import PLAN_FILE, WEIGHTS_FILE
from ..train.checkpoint import save as save_weights
from ..train.files import write_atomically
from .checks import count_calls

# What stands beside the weights of a model of transformers: files of its tokenizer and of its preprocessing.
BESIDE = (
    "*token*.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*processor_config.json",
    "chat_template*",
    "*.tiktoken",
)


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a converted model to a folder: weights as safetensors, and which layer computes what.

    A model of transformers is written by its own save_pretrained, with the tokenizer and preprocessor files of the
    folder it came from; its config.json carries the plan. What `cumulant
    train` made keeps its recipe and classes: `cumulant evaluate` takes the folder. A module of your own around a model
    is loaded with `load(folder, model=fresh)`. Of a PeftModel the weights with its adapters merged in are written,
    which `load` gives, and the adapters alone into the folder "adapter".
    """
    folder, plan = Path(folder), plans.plan_of(model)
    if hasattr(model, "peft_config") and hasattr(model, "merge_and_unload"):
        return _save_adapted(model, plan, folder)
    library = plans.library_of(model)
    folder.mkdir(parents=True, exist_ok=True)  # save_pretrained writes nothing where a file stands, and only logs it
    if library == plans.TRANSFORMERS and plans.config_of(model) is not None:
        writer: Any = model
        writer.save_pretrained(folder)
        _copy_beside(Path(str(writer.name_or_path or "")), folder)
        return folder
    known: dict[str, Any] = {"library": library, "layers": {name: choice.to_json() for name, choice in plan.items()}}
    if library == plans.OURS:
        known["config"] = plans.original_config(model)
    elif library == plans.TIMM:
        config: Any = getattr(model, "pretrained_cfg", None) or {}
        known["architecture"], known["num_classes"] = config.get("architecture"), getattr(model, "num_classes", None)
    (folder / PLAN_FILE).unlink(missing_ok=True)  # an older plan beside these weights would be another model
    save_weights(model, folder / WEIGHTS_FILE)
    write_atomically(folder / PLAN_FILE, json.dumps(known, indent=1).encode())
    return folder


def _save_adapted(model: Any, plan: dict[str, Choice], folder: Path) -> Path:
    """A PeftModel: the model with its adapters merged into the weights, and the adapters by themselves beside it.

    Its own save_pretrained writes the adapters alone, without the weights they belong to and without the plan.
    """
    merged = copy.deepcopy(model).merge_and_unload()
    stored = {name.removeprefix("base_model.model."): choice for name, choice in plan.items()}
    if plans.is_converted(merged):
        plans.forget(merged)
    plans.put_back(merged, {name: choice.to_json() for name, choice in stored.items()}, whole=False)
    save(merged, folder)
    (folder / "adapter").mkdir(exist_ok=True)
    model.save_pretrained(folder / "adapter")
    return folder


def _copy_beside(source: Path, folder: Path) -> None:
    """Tokenizer and preprocessor of the folder that a model was read from: without them texts and pictures would be
    prepared otherwise, and transformers makes up an empty tokenizer without a word."""
    files = [file for pattern in BESIDE for file in source.glob(pattern)] if source.is_dir() else []
    for file in files:
        if not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)


def load(
    folder: str | Path, *, model: nn.Module | None = None, example: Batch | None = None, check: bool = True, **kw: Any
) -> nn.Module:
    """The converted model of a folder that `save` (or save_pretrained of a converted model) wrote.

    Args:
        model: an unconverted model of the same shape to load into; needed where the folder does not say how to make it.
        example: a batch for the dry run that checks every replaced layer; from the model's config unless given.
        check: make that dry run.
        kw: passed to from_pretrained, timm.create_model or cumulant.create_model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    made = open_converted(folder, model, **kw)
    if check:
        count_calls(made, example if example is not None else example_for(made), plans.plan_of(made))
    return made
