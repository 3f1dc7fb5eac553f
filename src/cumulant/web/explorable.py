"""Models with all that is needed to show them a picture: from checkpoints, or trained on the digits here and now.

Shape legend: C channels, S side of the model's images.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.decode import IMAGE_SUFFIXES, fit, pillow_image, to_tensor
from .limits import Limits
from .uploads import read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..train import TrainRecipe

EPOCHS = 8  # of the digits models: 88 (linear) to 96 % of the test images; 20 to 27 s each on a busy core


@dataclass(frozen=True)
class Explorable:
    """A model of images and its preprocessing: centre square, S x S, (pixel - mean) / std per channel."""

    model: nn.Module
    classes: tuple[str, ...]
    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    accuracy: float | None = None
    """Top-1 of the test part, where it is known."""
    title: str = ""
    """What the model is, in a few words."""

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"mean and std must have 1 or 3 channels each, got {self.mean} and {self.std}")
        self.model.eval().requires_grad_(False)

    def seen(self, picture: Image) -> Image:
        """The picture as the model sees it: S x S, grey for a model of one channel."""
        return fit(picture, self.size).convert("RGB" if len(self.mean) == 3 else "L")

    def images(self, picture: Image) -> Tensor:
        """The model's input, (1, C, S, S)."""
        pixels = to_tensor(self.seen(picture).convert("RGB"))[: len(self.mean)].float() / 255
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((pixels - mean) / std).unsqueeze(0).to(next(self.model.parameters()).device)


@dataclass(frozen=True)
class Example:
    """A picture offered on the page."""

    picture: Image = field(repr=False)
    label: str = ""


def open_checkpoint(path: str | Path, device: str = "cpu") -> tuple[Explorable, TrainRecipe]:
    """A checkpoint of `cumulant train` (a file, or the folder of a run: its best weights) and its recipe."""
    from ..train import load
    from ..train.checkpoint import read_header
    from ..train.recipe_files import from_json

    path = Path(path)
    if path.is_dir():
        names = ("best.safetensors", "last.safetensors")
        path = next((path / name for name in names if (path / name).is_file()), path / names[-1])
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}; expected a file or folder that `cumulant train` wrote")
    try:
        header = read_header(path)
    except Exception as error:  # safetensors has its own kinds
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if "recipe" not in header:
        raise ValueError(f"{path} has no recipe inside: it must be one that `cumulant train` wrote")
    recipe = from_json(header["recipe"])
    model = load(path, device=device)
    if not hasattr(model, "patch_embed") or len(getattr(model, "grid_size", ())) != 2:
        raise ValueError(f"{path} holds {recipe.model}; the explorer shows models of images, not of videos")
    channels = int(model.patch_embed.in_chans)  # type: ignore[union-attr, arg-type]
    return (
        Explorable(
            model,
            tuple(json.loads(header["classes"])),
            recipe.image_size,
            recipe.mean[:channels],
            recipe.std[:channels],
            accuracy=_accuracy(path),
            title=f"{recipe.model} on {Path(recipe.data).name}",
        ),
        recipe,
    )


def _accuracy(path: Path) -> float | None:
    """Top-1 that the run of a checkpoint reached, from the result beside it."""
    try:
        result = json.loads((path.parent / "result.json").read_text(encoding="utf-8"))["result"]
        return float(result["best_top1" if path.name.startswith("best") else "top1"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_timm(name: str, device: str = "cpu", *, pretrained: bool = True) -> Explorable:
    """A classifier of timm with the preprocessing it was trained with; its weights come from timm's own cache."""
    try:
        import timm
        from timm.data import ImageNetInfo, resolve_model_data_config
    except ImportError as error:
        raise ImportError(f"timm:{name} needs timm: pip install 'cumulant[timm]'") from error
    model: Any = timm.create_model(name, pretrained=pretrained).to(device)
    config = resolve_model_data_config(model)
    side = config["input_size"]
    if side[1] != side[2]:
        raise ValueError(f"timm:{name} takes images of {side[1]} x {side[2]}; the explorer shows square ones")
    info = ImageNetInfo()
    known = model.num_classes == info.num_classes()
    classes = [info.index_to_description(i) if known else str(i) for i in range(model.num_classes)]
    return Explorable(model, tuple(classes), side[1], config["mean"], config["std"], title=f"timm's {name}")


def open_models(words: Sequence[str], device: str = "cpu") -> tuple[dict[str, Explorable], TrainRecipe | None]:
    """Models by a short name each, from checkpoints or `timm:NAME`, and the recipe of the first checkpoint."""
    opened: list[tuple[str, str, Explorable]] = []
    recipe: TrainRecipe | None = None
    for word in words:
        kind, _, name = word.partition(":")
        if kind == "timm" and name:
            opened.append((name, name, open_timm(name, device)))
            continue
        one, own = open_checkpoint(word, device)
        recipe = recipe or own
        path = Path(word)
        opened.append((own.attention, path.parent.name if path.is_file() else path.name, one))
    short = [mechanism for mechanism, _, _ in opened]
    models: dict[str, Explorable] = {}
    for mechanism, longer, one in opened:
        name = unique = mechanism if short.count(mechanism) == 1 else longer
        while unique in models:
            unique = f"{name} ({len(models) + 1})"
        models[unique] = one
    return models, recipe


def digits_recipe(attention: str, epochs: int = EPOCHS) -> TrainRecipe:
    """A ViT with 6 x 6 patches on the embedded digits: enough patches to see a map, few enough to train in seconds.

    The 8 x 8 images are enlarged to 12 x 12, so that each patch holds a piece of stroke and not one grey level.
    """
    from ..train import read_recipe

    recipe = read_recipe("digits")
    return replace(
        recipe,
        attention=attention,
        epochs=epochs,
        image_size=12,
        lr=3e-3,
        warmup_epochs=1.0,
        eval_epochs=epochs,
        checkpoint_epochs=0,
        model_options={**recipe.model_options, "patch_size": 2},
    )


def digits_models(
    mechanisms: Sequence[str],
    cache: Path,
    *,
    fresh: bool = False,
    epochs: int = EPOCHS,
    device: str = "cpu",
    progress: IO[str] | None = None,
) -> dict[str, Explorable]:
    """Digits models of these mechanisms: read from the folder `cache`, or trained into it with a progress bar."""
    from ..train import RecipeError, train

    models = {}
    for number, name in enumerate(mechanisms, start=1):
        folder, recipe = cache / f"digits-{name}", digits_recipe(name, epochs)
        if not (folder / "result.json").is_file() and progress is not None:
            print(f"training a small digits model with {name} ({number} of {len(mechanisms)})", file=progress)
        try:
            train(recipe, folder, device=device, fresh=fresh, progress=progress)
        except RecipeError:  # made by another version with another recipe
            train(recipe, folder, device=device, fresh=True, progress=progress)
        models[name] = open_checkpoint(folder / "last.safetensors", device)[0]
    return models


def examples_of(data: str, count: int, size: int, **options: Any) -> list[Example]:
    """Pictures of a folder, or test images of a data set, spread over its classes; the digits at their own 8 x 8."""
    from ..data import open_source
    from ..data.part import DecodeError

    folder = Path(data)
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in IMAGE_SUFFIXES) if folder.is_dir() else []
    if files:
        return [Example(read_picture(file.read_bytes(), Limits()), file.stem) for file in files[:count]]

    source = open_source(data, **options)
    if source.kind != "image":
        raise ValueError(f"{data} holds videos; the explorer shows images")
    size = 8 if data == "digits" else size
    pillow, examples = pillow_image(), []
    classes = len(source.classes)
    for turn in range(count):
        label = turn * classes // count if count < classes else turn % classes
        places = (source.test.labels == label).nonzero().flatten()
        if not len(places):
            continue
        try:
            pixels = source.test.decode(int(places[(turn // classes) % len(places)]), size)
        except DecodeError:
            continue
        picture = pillow.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        examples.append(Example(picture, source.classes[label]))
    return examples
