"""Models and batches by what a user writes on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import open_source
from ..train.train_recipe import IMAGENET_MEAN, IMAGENET_STD
from .inputs import Batch, example_for

LENGTH = 256  # tokens of a text, at most


def open_model(name: str, device: str | None = None) -> nn.Module:
    """The model called `name`: timm:NAME, a folder of transformers, or weights or a run of `cumulant train`."""
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = Path(name)
    if name.startswith("timm:"):
        try:
            import timm
        except ImportError as error:
            raise ImportError('timm models need: pip install "cumulant[timm]"') from error
        return timm.create_model(name.removeprefix("timm:"), pretrained=True).to(place).eval()
    if (path / "config.json").is_file():
        try:
            import transformers
        except ImportError as error:
            raise ImportError('this folder needs: pip install "cumulant[transformers]"') from error
        kinds = json.loads((path / "config.json").read_text()).get("architectures") or ["AutoModel"]
        return getattr(transformers, kinds[0]).from_pretrained(path).to(place).eval()
    weights = path if path.is_file() else path / "last.safetensors"
    if weights.is_file():
        from ..train import load

        return load(weights, device=place).eval()
    raise ValueError(
        f"no model {name!r}: give timm:NAME, a folder with a config.json of transformers, or weights or a run of "
        "cumulant train"
    )


def open_batches(model: nn.Module, name: str, data: str, batches: int, batch_size: int) -> list[Batch]:
    """The first batches of a data set, as the model takes them."""
    path = Path(data)
    if path.suffix in (".txt", ".parquet"):
        return _texts(name, path, batches, batch_size)
    example = example_for(model)
    key = "pixel_values" if isinstance(example, dict) else None
    wanted: Tensor = example[key] if key is not None else example
    frames = wanted.shape[2 if key is None else 1] if wanted.ndim == 5 else 16
    part = open_source(data, frames=frames).test
    mean, std = _statistics(model, name)
    made = []
    count = min(batches * batch_size, len(part))
    for start in range(0, count, batch_size):
        chosen = torch.linspace(0, len(part) - 1, count).long()[start : start + batch_size]
        items = torch.stack([part.decode(int(index), wanted.shape[-1]) for index in chosen]).float() / 255
        channels = wanted.shape[-3 if key is not None or wanted.ndim == 4 else 1]
        if items.shape[1] != channels:
            items = items.mean(1, keepdim=True).expand(-1, channels, *items.shape[2:])
        shape = (1, -1) + (1,) * (items.ndim - 2)
        items = (items - torch.tensor(mean[:channels]).view(shape)) / torch.tensor(std[:channels]).view(shape)
        items = items.to(wanted)
        made.append(items if key is None else {key: items.transpose(1, 2) if wanted.ndim == 5 else items})
    return made


def _statistics(model: nn.Module, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that pixels are normalised with: the model's own, or ImageNet's."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    file = Path(name) / "preprocessor_config.json"
    if file.is_file():
        stored = json.loads(file.read_text())
        config = {"mean": stored.get("image_mean"), "std": stored.get("image_std")}
    return tuple(config.get("mean") or IMAGENET_MEAN), tuple(config.get("std") or IMAGENET_STD)


def _texts(name: str, path: Path, batches: int, batch_size: int) -> list[Batch]:
    from transformers import AutoTokenizer

    count = batches * batch_size
    if path.suffix == ".txt":
        lines = [line.strip() for line in path.read_text().splitlines()]
        texts = [line for line in lines if line][:count]
    else:
        import pyarrow.parquet as pq

        texts = pq.read_table(path, columns=["text"]).column("text").slice(0, count).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(name)
    made = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        made.append(dict(tokenizer(part, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")))
    return made
