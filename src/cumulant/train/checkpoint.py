"""Checkpoints: one safetensors file with the weights and, in its header, what rebuilds the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..models import create_model
from ..nn.swapped.plan import count_own, put_back
from .files import read_json, write_atomically

PLAN_FILE, WEIGHTS_FILE = "cumulant.json", "model.safetensors"  # of a folder with a converted model
TRAINED = ("recipe", "classes")  # entries of the header that say how the weights came about


def save(
    model: nn.Module,
    path: str | Path,
    *,
    notes: Mapping[str, str] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the model's weights and its `config` to `path`, whole or not at all; `notes` join the header.

    Recipe and classes of a model that was loaded stay with it. `tensors`: its weights, where they are at hand.
    """
    path = Path(path)
    known = {**getattr(model, "trained", {}), **(notes or {})}
    header = {**known, "format": "pt", "config": json.dumps(getattr(model, "config", None))}
    weights = model.state_dict() if tensors is None else tensors
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(path, to_bytes(content, metadata=header))
    return path


def weights_file(path: str | Path) -> Path:
    """The weights that a path stands for: a file is itself; of a run's folder the last ones, also where those that were
    best on a hold-out are kept beside them; of a converted model its own."""
    path = Path(path)
    if path.is_dir():
        path = path / (WEIGHTS_FILE if (path / PLAN_FILE).is_file() else "last.safetensors")
    if not path.is_file():
        best = path.with_name("best.safetensors")
        unfinished = f"; the run is not finished, its best weights so far are {best}" if best.is_file() else ""
        raise FileNotFoundError(f"no checkpoint at {path}{unfinished}")
    return path


def load(
    path: str | Path, *, model: nn.Module | None = None, device: torch.device | str = "cpu", assign: bool = True
) -> nn.Module:
    """The model saved at `path` (see `weights_file`), rebuilt from its config; or `model` with those weights put in.

    `assign=False` lets that model keep its own precision. What was converted is converted again.
    """
    plan = Path(path) / PLAN_FILE
    path = weights_file(path)
    header = read_header(path)
    known = read_json(plan) if plan.is_file() else None
    if model is None:
        config = json.loads(header.get("config") or "null") if known is None else known.get("config")
        if config is None:
            raise ValueError(f"{path} does not say which model it holds; pass that model as model=...")
        model = create_model(**config)
    if known is not None:  # first: layers that were put in have weights of their own
        put_back(model, known["layers"], whole=len(known["layers"]) == count_own(model))
    model.load_state_dict(load_file(path), assign=assign)
    remember(model, header)
    return model.to(device)


def remember(model: nn.Module, header: dict[str, str]) -> None:
    """Let the model carry what the header of its weights says of their training, for `save`."""
    cast(Any, model).trained = {name: header[name] for name in TRAINED if name in header}


def read_header(path: str | Path) -> dict[str, str]:
    """The text entries stored with the weights."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or cut short: {error}") from error
