"""Models by the words of the command line: checkpoints of `cumulant train`, models of timm and of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..optional import needed
from .explorable import Explorable

if TYPE_CHECKING:
    from ..train import TrainRecipe

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_models(words: Sequence[str], device: str = "cpu") -> tuple[dict[str, Explorable], TrainRecipe | None]:
    """Models by a short name each, and the recipe of the first checkpoint.

    A word is a checkpoint, `timm:NAME`, a folder that `save_pretrained` wrote or `transformers:NAME`; `@cumulant3`
    after either of the last three swaps the attention of that model first, to be compared with the original.
    """
    opened: list[tuple[str, str, Explorable]] = []
    recipe: TrainRecipe | None = None
    for word in words:
        place, _, swapped = word.partition("@") if not Path(word).exists() else (word, "", "")
        kind, _, name = place.partition(":")
        if kind in ("timm", "transformers") and name:
            one = open_timm(name, device) if kind == "timm" else open_transformers(name, device)
            short = name.rstrip("/").rsplit("/", 1)[-1]
        elif is_transformers(Path(place)):
            one, short = open_transformers(place, device), Path(place).resolve().name
        else:
            if swapped:
                raise ValueError(f"{word}: only models of timm and transformers can be swapped to {swapped} here")
            one, own = open_checkpoint(place, device)
            recipe = recipe or own
            path = Path(place)
            if path.is_file():  # a run is known by its folder, a file on its own by its name
                path = path.parent if path.stem in ("best", "last") else path.with_suffix("")
            opened.append((own.attention, path.resolve().name, one))
            continue
        if swapped:
            swap(one.model, swapped)
            short = f"{short} {swapped}"
        opened.append((short, short, one))
    names = [mechanism for mechanism, _, _ in opened]
    models: dict[str, Explorable] = {}
    for mechanism, longer, one in opened:
        name = unique = mechanism if names.count(mechanism) == 1 else longer
        while unique in models:
            unique = f"{name} ({len(models) + 1})"
        models[unique] = one
    return models, recipe


def swap(model: nn.Module, attention: str) -> None:
    """Another attention with the weights of this one, untrained: what `cumulant convert` begins with."""
    from ..conversion import convert

    convert(model, attention)


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
        raise FileNotFoundError(
            f"no checkpoint at {path}; expected a file or folder that `cumulant train` wrote, a folder of "
            "save_pretrained, timm:NAME or transformers:NAME"
        )
    try:
        header = read_header(path)
    except Exception as error:  # safetensors has its own kinds
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if "recipe" not in header:
        raise ValueError(f"{path} has no recipe inside: it must be one that `cumulant train` wrote")
    recipe = from_json(header["recipe"])
    model: Any = load(path, device=device).float()  # weights may have been kept in half precision
    if not hasattr(model, "patch_embed") or not hasattr(model, "grid_size"):
        raise ValueError(f"{path} holds {recipe.model}; the explorer shows models of images and videos")
    channels = int(model.patch_embed.in_chans)
    return (
        Explorable(
            model,
            tuple(json.loads(header["classes"])),
            recipe.image_size,
            recipe.mean[:channels],
            recipe.std[:channels],
            accuracy=_accuracy(path),
            title=f"{recipe.model} on {Path(recipe.data).name}",
            frames=recipe.frames if len(model.grid_size) == 3 else None,
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
    with needed(f"timm:{name} needs timm and torchvision", "timm"):
        import timm
        from timm.data import ImageNetInfo, resolve_model_data_config
    model: Any = timm.create_model(name, pretrained=pretrained).to(device)
    config = resolve_model_data_config(model)
    side = config["input_size"]
    if side[1] != side[2]:
        raise ValueError(f"timm:{name} takes images of {side[1]} x {side[2]}; the explorer shows square ones")
    info = ImageNetInfo()
    known = model.num_classes == info.num_classes()
    classes = [info.index_to_description(i) if known else str(i) for i in range(model.num_classes)]
    return Explorable(model, tuple(classes), side[1], config["mean"], config["std"], title=f"timm's {name}")


def is_transformers(place: Path) -> bool:
    """Whether a folder holds a model of transformers: its config names the kind."""
    try:
        return "model_type" in json.loads((place / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def open_transformers(name: str, device: str = "cpu") -> Explorable:
    """A model of images or videos of transformers: a folder that `save_pretrained` wrote, or a name of the Hub.

    Weights are safetensors (nothing is unpickled, no code of the model's own is run). The preprocessing is that of the
    preprocessor_config.json beside the model, or ImageNet's. Models without a classifier show maps and no prediction.
    """
    with needed(f"{name} needs transformers", "transformers"):
        import transformers
        from transformers import PreTrainedModel  # noqa: F401  # a torchvision that does not fit shows here
    config = transformers.AutoConfig.from_pretrained(name)
    side, frames = getattr(config, "image_size", None), getattr(config, "num_frames", None)
    if not isinstance(side, int) or getattr(config, "num_channels", 3) not in (1, 3):
        raise ValueError(f"{name} holds {config.model_type}; the explorer shows models of square images or videos")
    architecture = (config.architectures or [""])[0]
    kind = next((k for k in ("ForImageClassification", "ForVideoClassification") if k in architecture), None)
    auto = getattr(transformers, f"AutoModel{kind or ''}")
    if kind and hasattr(transformers, architecture):  # DeiT's two heads have a class that no automatic one finds
        auto = getattr(transformers, architecture)
    model: Any = auto.from_pretrained(name, attn_implementation="sdpa", use_safetensors=True).to(device).float()
    given = _preprocessing(name)
    # DINOv2 was trained at 518 pixels and is used at 224; models that do not resize their positions keep their size.
    wanted = given.get("crop_size") or given.get("size") or {}
    asked = wanted.get("height") or wanted.get("shortest_edge") if isinstance(wanted, dict) else wanted
    if str(config.model_type).startswith("dino") and isinstance(asked, int):
        side = asked
    labels = getattr(config, "id2label", None) or {}
    channels = getattr(config, "num_channels", 3)
    return Explorable(
        model,
        tuple(str(labels.get(i, i)) for i in range(config.num_labels)) if kind else (),
        side,
        tuple(given.get("image_mean") or IMAGENET_MEAN)[:channels],
        tuple(given.get("image_std") or IMAGENET_STD)[:channels],
        title=f"{config.model_type} of transformers",
        frames=frames if isinstance(frames, int) else None,
        time_first=isinstance(frames, int),
    )


def _preprocessing(name: str) -> dict[str, Any]:
    """What preprocessor_config.json says, or nothing."""
    from transformers.utils import cached_file

    try:
        found = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
        return json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
    except (OSError, ValueError):
        return {}
