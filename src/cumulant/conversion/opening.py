"""Models and batches by what a user writes on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import open_source
from ..data.augmentation import Augment, Augmentation
from ..inspect.batches import Batch, example_for
from ..optional import needed
from ..train.checkpoint import read_header
from ..train.files import read_json
from ..train.processes import chosen_device
from ..train.recipe_files import from_json
from ..train.train_recipe import IMAGENET_MEAN, IMAGENET_STD, TrainRecipe
from .distill_data import USUAL, Batches, Images, shown, texts
from .saving import PLAN_FILE

LENGTH = 256  # tokens of a text, at most
TEXTS = (".txt", ".parquet")


def open_model(name: str, device: str | None = None) -> nn.Module:
    """The model called `name`: timm:NAME, a folder of transformers, or weights or a run of `cumulant train`."""
    place = chosen_device(device)
    path = Path(name)
    if (path / PLAN_FILE).is_file():
        raise ValueError(f"{name} holds a converted model already: name the model that it was made from")
    if name.startswith("timm:"):
        with needed(f"{name} needs timm and torchvision", "timm"):
            import timm
        return timm.create_model(name.removeprefix("timm:"), pretrained=True).to(place).eval()
    if (path / "config.json").is_file():
        with needed(f"{name} needs transformers", "transformers"):
            import transformers
            from transformers import PreTrainedModel  # noqa: F401  # a torchvision that does not fit shows here
        stated = read_json(path / "config.json")
        if "cumulant" in stated:
            raise ValueError(f"{name} holds a converted model already: name the model that it was made from")
        kinds = stated.get("architectures") or ["AutoModel"]
        if not hasattr(transformers, kinds[0]):
            raise ValueError(f"{name} holds a {kinds[0]}, which transformers {transformers.__version__} does not have")
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
    """A few batches as the model takes them: the first texts of a file, or items spread evenly over the test part."""
    path = Path(data)
    if path.suffix in TEXTS:
        return _texts(name, path, batches, batch_size)
    seen = _Seen(model, name)
    part = open_source(data, frames=seen.frames).test
    made = []
    count = min(batches * batch_size, len(part))
    augment = seen.augment(Augmentation(), 1)
    for start in range(0, count, batch_size):
        chosen = torch.linspace(0, len(part) - 1, count).long()[start : start + batch_size]
        items = torch.stack([part.decode(int(index), seen.size) for index in chosen])
        made.append(shown(augment.evaluate(items).to(seen.example), seen.channels, seen.key))
    return made


def open_training(
    model: nn.Module, name: str, data: str, batch_size: int, *, items: int = 0, seed: int = 0
) -> Batches | list[Batch]:
    """The training part of a data set as the model takes it, images augmented as they were when it was trained."""
    path = Path(data)
    if path.suffix in TEXTS:
        return texts(_tokenizer(name), _lines(path, items or None), batch_size, LENGTH)
    seen = _Seen(model, name)
    source = open_source(data, frames=seen.frames)
    return Images(
        source,
        min(batch_size, len(source.train)),
        size=seen.size,
        augmentation=USUAL if seen.recipe is None else seen.recipe.augmentation,
        mean=seen.mean,
        std=seen.std,
        channels=seen.channels,
        key=seen.key,
        seed=seed,
        device=seen.example.device,
    )


class _Seen:
    """How a model sees pixels: size, channels, frames, statistics, and under which keyword it takes them."""

    def __init__(self, model: nn.Module, name: str) -> None:
        example = example_for(model)
        self.key = "pixel_values" if isinstance(example, dict) else None
        if isinstance(example, dict) and "pixel_values" not in example:
            raise ValueError(
                f"{name} takes {', '.join(example)} and no pixels: data must be a {' or '.join(TEXTS)} file"
            )
        self.example: Tensor = example[self.key] if self.key is not None else example
        clip = self.example.ndim == 5
        self.size = self.example.shape[-1]
        self.channels = self.example.shape[-3 if self.key is not None or not clip else 1]
        self.frames = self.example.shape[2 if self.key is None else 1] if clip else 16
        self.recipe = _recipe(name)
        self.mean, self.std = _statistics(model, name, self.recipe)

    def augment(self, settings: Augmentation, classes: int) -> Augment:
        return Augment(settings, size=self.size, classes=classes, mean=self.mean, std=self.std)


def _recipe(name: str) -> TrainRecipe | None:
    """The recipe of a run of `cumulant train`."""
    path = Path(name)
    weights = path if path.is_file() else path / "last.safetensors"
    header = read_header(weights) if weights.is_file() else {}
    return from_json(header["recipe"]) if "recipe" in header else None


def _statistics(model: nn.Module, name: str, recipe: TrainRecipe | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that pixels are normalised with: the model's own, or ImageNet's."""
    if recipe is not None:
        return recipe.mean, recipe.std
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    file = Path(name) / "preprocessor_config.json"
    if file.is_file():
        stored = read_json(file)
        config = {"mean": stored.get("image_mean"), "std": stored.get("image_std")}
    return tuple(config.get("mean") or IMAGENET_MEAN), tuple(config.get("std") or IMAGENET_STD)


def _texts(name: str, path: Path, batches: int, batch_size: int) -> list[Batch]:
    lines, tokenizer = _lines(path, batches * batch_size), _tokenizer(name)
    made = []
    for start in range(0, len(lines), batch_size):
        part = lines[start : start + batch_size]
        made.append(dict(tokenizer(part, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")))
    return made


def _lines(path: Path, count: int | None) -> list[str]:
    """The first texts of a file."""
    if path.suffix == ".txt":
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from error
        return [line for line in lines if line][:count]
    import pyarrow.parquet as pq

    return pq.read_table(path, columns=["text"]).column("text").slice(0, count).to_pylist()


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(name)
    if len(found) <= len(found.all_special_tokens):
        # transformers makes an empty one where the folder has none, and every word would be unknown.
        raise ValueError(f"{name} has no tokenizer, which texts need: save it there with tokenizer.save_pretrained")
    return found
