"""Saving a converted model so that loading it gives the converted model again, and nothing else."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..inspect.batches import Batch, check_model
from ..inspect.examples import example_for
from ..inspect.opening import open_converted
from ..kinds import kinds_checked
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import Choice
from ..train.checkpoint import PLAN_FILE, WEIGHTS_FILE
from ..train.checkpoint import save as save_weights
from ..train.files import filling, write_atomically
from .checks import count_calls

# Files of another model, where one was saved in the folder before.
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*")
CONFIG = "config.json"  # of transformers, with our plan
# What stands beside the weights of a model of transformers: files and folders of its tokenizers, of its preprocessing,
# and of what sentence-transformers does with its output.
BESIDE = (
    "*token*.json",
    "*vocab*",
    "merges.txt",
    "dict.txt",
    "bpe.codes",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.tokenizer",
    "tekken.json",
    "normalizer.json",
    "emoji.json",
    "byte_maps.json",
    "word_*.json",
    "*_tokenizer",
    "*processor_config.json",
    "*chat_template*",
    "modules.json",
    "*sentence_*.json",
)


@kinds_checked
def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a converted model to a folder: weights as safetensors, and which layer computes what.

    A model of transformers is written by its own save_pretrained, with the tokenizer and preprocessor files of the
    folder or name of the Hub it came from, and with the modules of a SentenceTransformer; its config.json carries the
    plan. What `cumulant train` made keeps its recipe and classes: `cumulant evaluate` takes the folder. A module of
    your own around a model is loaded with `load(folder, model=fresh)`. Of a PeftModel the weights with its adapters
    merged in are written, which `load` gives, and the adapters alone into the folder "adapter".
    """
    if not str(folder):
        raise ValueError('folder must be named, got ""; "." is the one you are in')
    folder = Path(folder)
    with filling(folder, WEIGHTS, last=(PLAN_FILE, CONFIG)) as place:
        _write(model, place, folder)
    return folder


def _write(model: Any, place: Path, folder: Path) -> None:
    """All of a converted model, into `place`; what is to stand beside it unless `folder` has it already."""
    plan = plans.plan_of(model)
    if hasattr(model, "peft_config") and hasattr(model, "merge_and_unload"):
        # Its own save_pretrained writes the adapters alone, without the weights they belong to and without the plan.
        _write(_merged(model, plan), place, folder)
        (place / "adapter").mkdir()
        model.save_pretrained(place / "adapter")
        return
    library = plans.library_of(model)
    if library == plans.TRANSFORMERS and plans.config_of(model) is not None:
        model.save_pretrained(place)
        _copy_beside(str(getattr(model, "name_or_path", None) or ""), place, folder)
        return
    known: dict[str, Any] = {"library": library, "layers": {name: choice.to_json() for name, choice in plan.items()}}
    if library == plans.OURS:
        known["config"] = plans.original_config(model)
    elif library == plans.TIMM:
        config: Any = getattr(model, "pretrained_cfg", None) or {}
        known["architecture"], known["num_classes"] = config.get("architecture"), getattr(model, "num_classes", None)
    save_weights(model, place / WEIGHTS_FILE)
    write_atomically(place / PLAN_FILE, json.dumps(known, indent=1).encode())


def _merged(model: Any, plan: dict[str, Choice]) -> nn.Module:
    """A PeftModel's model with its adapters merged into the weights, converted as it was."""
    merged = copy.deepcopy(model).merge_and_unload()
    stored = {name.removeprefix("base_model.model."): choice for name, choice in plan.items()}
    if plans.is_converted(merged):
        plans.forget(merged)
    plans.put_back(merged, {name: choice.to_json() for name, choice in stored.items()}, whole=False)
    return merged


def _copy_beside(name: str, place: Path, folder: Path) -> None:
    """What stands beside the weights that a model was read from: without it texts and pictures would be prepared
    otherwise, and other libraries make up a tokenizer or a pooling without a word."""
    source = _source(name, BESIDE)
    if source is None:
        return
    found = [path for pattern in BESIDE for path in source.glob(pattern)]
    modules = _modules(source)
    if modules and not all((source / one).is_dir() for one in modules):
        _source(name, [f"{one}/*" for one in modules])
    for path in (*found, *(source / one for one in modules)):
        name_there = path.relative_to(source)
        if path.is_dir():
            shutil.copytree(path, place / name_there, dirs_exist_ok=True)
        elif path.exists() and not (place / name_there).exists() and not (folder / name_there).exists():
            shutil.copy(path, place / name_there)  # (a module without numbers, a normalization, has no folder)


def _modules(source: Path) -> list[str]:
    """Folders of the modules that sentence-transformers puts behind a model: a pooling, a normalization."""
    if not (source / "modules.json").is_file():
        return []
    stated: Any = json.loads((source / "modules.json").read_text(encoding="utf-8"))
    paths = [str(one.get("path") or "") for one in stated]
    return [path for path in paths if path and (source / path).resolve().is_relative_to(source.resolve())]


def _source(name: str, patterns: Sequence[str]) -> Path | None:
    """The folder that a model was read from; for a name of the Hub its place in the cache, after files of these
    patterns were fetched. None where there is neither."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        known = snapshot_download(name, local_files_only=True)
    except (OSError, HFValidationError):  # not from the Hub
        return None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of the network
        said = " ".join(str(error).split())[:160]
        warnings.warn(f"only what the cache holds of {name} goes beside its weights: {said}", stacklevel=2)
        return Path(known)


@kinds_checked
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
    if model is not None:
        check_model(model)
    made = open_converted(folder, model, **kw)
    if check:
        count_calls(made, example if example is not None else example_for(made), plans.plan_of(made))
    return made
