"""Checkpoints: one safetensors file with the weights and, in its header, what rebuilds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import nn

from ..models import create_model
from .files import write_atomically

TRAINED = ("recipe", "classes")  # entries of the header that say how the weights came about


def save(model: nn.Module, path: str | Path, *, notes: dict[str, str] | None = None) -> Path:
    """Write the model's weights and its `config` to `path`, whole or not at all; `notes` join the header.

    Recipe and classes of a model that was loaded stay with it.
    """
    path = Path(path)
    known = {**getattr(model, "trained", {}), **(notes or {})}
    header = {**known, "format": "pt", "config": json.dumps(getattr(model, "config", None))}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(path, to_bytes(tensors, metadata=header))
    return path


def load(path: str | Path, *, model: nn.Module | None = None, device: torch.device | str = "cpu") -> nn.Module:
    """The model saved at `path`, rebuilt from its config; or `model` with the saved weights put in."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    header = read_header(path)
    if model is None:
        config = json.loads(header["config"]) if header.get("config") else None
        if config is None:
            raise ValueError(f"{path} does not say which model it holds; pass that model as model=...")
        model = create_model(**config)
    model.load_state_dict(load_file(path), assign=True)
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
