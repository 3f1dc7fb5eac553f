"""Saving a converted model so that loading it gives the converted model again, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from ..inspect.batches import Batch, example_for
from ..nn.swapped import hf
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import KEPT, Choice
from ..optional import needed
from ..train.checkpoint import read_header, remember
from ..train.checkpoint import save as save_weights
from ..train.files import read_json, write_atomically
from .conversion import count_calls

PLAN_FILE, WEIGHTS_FILE = "cumulant.json", "model.safetensors"


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a converted model to a folder: weights as safetensors, and which layer computes what.

    A model of transformers is written by its own save_pretrained; its config.json carries the plan. What `cumulant
    train` made keeps its recipe and classes: `cumulant evaluate` takes the folder. A module of your own around a model
    is loaded with `load(folder, model=fresh)`.
    """
    folder, plan = Path(folder), plans.plan_of(model)
    library = plans.library_of(model)
    folder.mkdir(parents=True, exist_ok=True)  # save_pretrained writes nothing where a file stands, and only logs it
    if library == plans.TRANSFORMERS and plans.config_of(model) is not None:
        write: Any = model.save_pretrained
        write(folder)
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
    if model is not None and plans.is_converted(model):
        raise ValueError("model is converted already; pass one as it was before, or restore(model) it first")
    if (folder / PLAN_FILE).is_file():
        known = read_json(folder / PLAN_FILE)
        header = read_header(folder / WEIGHTS_FILE)
        made = model if model is not None else _made(folder, known, kw)
        # A model that was made here takes the precision of the weights; one that was given keeps its own.
        made.load_state_dict(load_file(folder / WEIGHTS_FILE), assign=model is None)
        remember(made, header)
        stored, whole = known["layers"], len(known["layers"]) == plans.count_own(made)
    else:
        made, stored, whole = _from_pretrained(folder, model, kw)
    plan = {name: Choice.from_json(values) for name, values in stored.items()}
    names = {name for name, _ in made.named_modules()}
    missing = sorted(set(plan) - names)
    if missing:
        raise ValueError(f"{folder} replaces layers that {type(made).__name__} does not have: {', '.join(missing)}")
    full = dict(plan)
    if plans.library_of(made) == plans.TRANSFORMERS:
        full = {**dict.fromkeys(attention_layers(made), KEPT), **plan}
    undo = plans.apply(made, full)
    plans.remember(made, plan, undo, whole=whole)
    if check:
        count_calls(made, example if example is not None else example_for(made), plan)
    return made


def attention_layers(model: nn.Module) -> list[str]:
    """Modules of a transformers model that may ask for attention: those that hold a config and know their heads."""
    return [name for name, module in model.named_modules() if "Attention" in type(module).__name__]


def _made(folder: Path, known: dict[str, Any], kw: dict[str, Any]) -> nn.Module:
    if known["library"] == plans.OURS:
        from ..models import create_model

        if known.get("config") is None:
            raise ValueError(f"{folder} does not say how to make the model; pass it as model=...")
        return create_model(**{**known["config"], **kw})
    if known.get("architecture") is None:
        raise ValueError(f"{folder} does not name a timm architecture; pass the model as model=...")
    with needed(f"{folder} needs timm and torchvision", "timm"):
        import timm
    return timm.create_model(known["architecture"], **{"num_classes": known["num_classes"], **kw})


def _from_pretrained(
    folder: Path, model: nn.Module | None, kw: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any], bool]:
    """The model with its weights, its plan, and whether the plan leaves no layer softmax."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds neither {PLAN_FILE} nor a config.json")
    config = read_json(folder / "config.json")
    stored = config.get("cumulant")
    if not stored:
        raise ValueError(f"{folder}/config.json has no field 'cumulant': this model was not converted before saving")
    whole = config.get("attn_implementation") != hf.MIXED
    if (folder / WEIGHTS_FILE).is_file():
        read_header(folder / WEIGHTS_FILE)  # a damaged file is told by its name
    if model is not None:
        _fill(model, folder)
        return model, stored["layers"], whole
    hf.register_transformers()
    import transformers

    kind = getattr(transformers, (config.get("architectures") or ["AutoModel"])[0])
    made = kind.from_pretrained(folder, **kw)
    plans.set_implementation(made, "sdpa")  # what `restore` goes back to
    return made, stored["layers"], whole


def _fill(model: nn.Module, folder: Path) -> None:
    """Weights of one safetensors file into a model; tied weights, which are stored once, may be missing."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise ValueError(f"{folder} keeps its weights in several files; leave out model= to load it")
    missing, unexpected = model.load_state_dict(load_file(file), strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise ValueError(f"{file} does not fit {type(model).__name__}: missing {missing}, unexpected {unexpected}")
