"""Checkpoints: one safetensors file with the weights and, in its header, what rebuilds the model; and weights to start
a run from, a checkpoint of ours or of timm, put into a model by name, or refused by name."""

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

from ..data.part import shorten
from ..models import Backbone, create_model
from ..models.backbone import join
from ..models.tubelet import load_image_weights
from ..models.vit import VisionTransformer
from ..models.vivit import ViViT
from ..nn.swapped.plan import count_own, put_back
from ..optional import needed
from ..zoo.grid import square_grid
from .files import read_json, write_atomically

HEADS = ("head.", "head_dist.")  # for other classes these are made anew
WRAPPERS = ("model.", "module.", "_orig_mod.")  # what trainers put before every name
OF_ATTENTION = ".attn"  # parameters that a mechanism has beside its projections start as they are made
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
        raise ValueError(f"{path} is not a safetensors file, or is cut short: {error}") from error


def start_from(model: nn.Module, word: str) -> list[str]:
    """Put the weights that `word` names into the model; the names of what it has beside them, which stays as made.

    Every tensor of the file must have a place of its shape, but for: tables of positions, which are resized; the head,
    where there are other classes; kernels and positions of an image model, which start a model of videos. Of the
    model's parameters only the head and what a mechanism has beside its projections may be missing in the file.
    """
    tensors, config = read_weights(word)
    kernel = tensors.get("patch_embed.proj.weight")
    if isinstance(model, ViViT) and kernel is not None and kernel.ndim == 4:
        return _video(model, tensors, config, word)
    if isinstance(model, Backbone):
        join(tensors, model.timm_parts())
    own, misfit = model.state_dict(), f"init={word!r} does not fit {_called(model)}"
    heads = [name for name in tensors if name.startswith(HEADS)]
    if any(name in own and own[name].shape != tensors[name].shape for name in heads):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in heads}
    unknown = [name for name in tensors if name not in own]
    if unknown:
        raise ValueError(
            f"{misfit}, which has no {shorten(unknown)}: give the model the options that those weights have "
            "(model_options, attention, attention_extras), or take others"
        )
    try:
        missing, _ = model.load_state_dict(tensors, strict=False)  # which resizes tables of positions
    except RuntimeError as error:
        wrong = [line.strip().rstrip(".") for line in str(error).splitlines() if "size mismatch" in line]
        raise ValueError(f"{misfit}: {shorten(wrong, 2) or error}") from error
    lost = [name for name in missing if not name.startswith(HEADS) and OF_ATTENTION not in name]
    projections = (".qkv.weight", ".proj.weight")
    lost += [name for name in missing if OF_ATTENTION in name and name.endswith(projections)]
    if lost:
        raise ValueError(f"{misfit}: it has nothing for {shorten(lost)}")
    return missing


def read_weights(word: str) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors by name, and how to make the model that they are of, where that is known."""
    kind, _, name = word.partition(":")
    if kind == "timm" and name:
        return _timm(name), None
    path = Path(word).expanduser()
    if not path.is_dir() and path.suffix in (".pt", ".pth", ".bin"):
        return _pickled(path), None
    path = weights_file(path)
    header = read_header(path)
    return load_file(path), json.loads(header.get("config") or "null")


def _timm(name: str) -> dict[str, Tensor]:
    with needed(f"init='timm:{name}' needs timm and torchvision", "timm"):
        import timm
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except (RuntimeError, ValueError, OSError) as error:  # no such model, no weights of it, no network
        told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"timm does not give the weights of {name!r} ({told}); give a file of them, init=PATH"
        ) from error


def _pickled(path: Path) -> dict[str, Tensor]:
    """A state dict that torch.save wrote, by itself or under "model" or "state_dict"; no code in it is run."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle has many ways to fail
        raise ValueError(f"{path} holds no plain tensors that torch.load(weights_only=True) reads: {error}") from error
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(one, Tensor) for one in content.values()):
        raise ValueError(f"{path} holds no table of tensors by name, as a state dict is")
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in content):
            content = {name.removeprefix(wrapper): tensor for name, tensor in content.items()}
    return content


def _video(model: ViViT, tensors: dict[str, Tensor], config: dict[str, Any] | None, word: str) -> list[str]:
    """An image model that starts a model of videos; its own attention stays that of the video model."""
    image = create_model(**(config or _config_of(model, tensors)))
    if not isinstance(image, VisionTransformer):
        raise ValueError(f"init={word!r} is a {type(image).__name__}; videos start from a VisionTransformer")
    try:
        image.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"init={word!r} is not a plain vision transformer: {error}") from error
    return load_image_weights(model, image)


def _config_of(model: ViViT, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A vision transformer of the width and depth of the video model, with the patches and classes of the weights."""
    side, prefix = tensors["patch_embed.proj.weight"].shape[-1], int("cls_token" in tensors)
    return {
        "name": "vit_tiny_patch16_224",
        "img_size": side * square_grid(tensors["pos_embed"].shape[1], prefix)[0],
        "patch_size": side,
        "in_chans": model.patch_embed.in_chans,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": cast(Any, model.blocks[0]).attn.num_heads,
        "pool": "cls" if prefix else "gap",
        "num_classes": len(tensors["head.weight"]) if "head.weight" in tensors else 0,
    }


def _called(model: nn.Module) -> str:
    config = getattr(model, "config", None) or {}
    return f"{config.get('name', type(model).__name__)} with {config.get('attention', 'its attention')}"
