"""Weights to start a run from: a checkpoint of ours or of timm, put into a model by name, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..data.part import shorten
from ..models import Backbone, create_model
from ..models.backbone import join
from ..models.tubelet import load_image_weights
from ..models.vit import VisionTransformer
from ..models.vivit import ViViT
from ..optional import needed
from ..zoo.grid import square_grid
from .checkpoint import read_header, weights_file

HEADS = ("head.", "head_dist.")  # for other classes these are made anew
WRAPPERS = ("model.", "module.", "_orig_mod.")  # what trainers put before every name
OF_ATTENTION = ".attn"  # parameters that a mechanism has beside its projections start as they are made


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
        raise ValueError(f"init={word!r} is no plain vision transformer: {error}") from error
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
