"""What a recipe stands for: its data, its model, its loaders and its augmentation."""

from __future__ import annotations

from typing import IO, Any

import torch
from torch import nn

from .. import zoo
from ..data.augment import Augment
from ..data.digits import ScenePart
from ..data.loader import Loader
from ..data.order import mix
from ..data.part import Part, Source
from ..data.source import open_source
from ..data.text import TextLoader, TextPart
from ..grammar import parse, read_blocks, suggest
from ..models import LanguageModel, VisionTransformer, ViViT, create_model, names
from ..models.registry import input_kind, model_arguments
from .optimise import Muon, adamw, decay_groups, muon_groups, set_drop_path
from .processes import Processes
from .train_recipe import TrainRecipe

INITIAL, AUGMENT, DROPOUT = -1, -2, -3  # streams of random numbers; the order of the data has those of its epochs
DATA_OPTIONS = (
    "test_part",
    "image_column",
    "label_column",
    "tokens",
    "context",
    "size",
)  # of `open_source`, beside what the recipe says of videos


def open_recipe_source(recipe: TrainRecipe, data: str | None = None) -> Source:
    """The data of a recipe, or other data read in the same way."""
    unknown = [key for key in recipe.data_options if key not in DATA_OPTIONS]
    if unknown:
        raise ValueError(f"unknown data option {unknown[0]!r}; {suggest(unknown[0], list(DATA_OPTIONS))}")
    video = {name: getattr(recipe, name) for name in ("frames", "stride", "views", "crops", "split")}
    side = {"size": recipe.image_size} if (data or recipe.data) == "scenes" else {}
    return open_source(data or recipe.data, **{**video, **side, **recipe.data_options})


def build_model(recipe: TrainRecipe, source: Source) -> nn.Module:
    """The model of a recipe for the classes and the kind of that data; its weights come from the recipe's seed."""
    if recipe.model in names() and input_kind(recipe.model) != source.kind:
        fitting = [name for name in names() if input_kind(name) == source.kind]
        raise ValueError(f"{source.name} holds {source.kind}s, model {recipe.model} is not for them; take one of "
                         f"{', '.join(fitting)}")  # fmt: skip
    options: dict[str, Any] = text_options(source) if source.kind == "text" else {"img_size": recipe.image_size}
    if recipe.model in names() and "in_chans" in model_arguments(recipe.model):
        options["in_chans"] = len(recipe.colours[0])
    if source.kind == "video":
        options["frames"] = recipe.frames
    options |= {name: given for name in ("attention_options", "attention_extras") if (given := getattr(recipe, name))}
    options |= recipe.model_options
    torch.manual_seed(int(mix(recipe.seed, INITIAL)))
    try:
        model = create_model(recipe.model, attention=recipe.attention, num_classes=len(source.classes), **options)
    except TypeError as error:  # a word where the model wants a number
        raise ValueError(f"{recipe.model} cannot be built with {options}: {error}") from error
    if getattr(model, "distilled_training", False):
        raise ValueError("distilled_training=true in model_options answers with a pair, of which no recipe trains the "
                         "second; leave it out to train the mean of both heads")  # fmt: skip
    if recipe.drop_path:
        set_drop_path(model, recipe.drop_path)
    return model


def text_options(source: Source) -> dict[str, Any]:
    """What a language model is told of its text: the window, and the characters unless it is read as bytes."""
    assert isinstance(source.train, TextPart)
    chars = "".join(source.classes)
    return {"context": source.train.context, **({"vocabulary": chars} if len(chars) == len(source.classes) else {})}


def check_split(model: nn.Module, recipe: TrainRecipe) -> None:
    """Refuse what would not be the same with its tokens on several processes."""
    asked = f"context_parallel={recipe.context_parallel}"
    if type(model) not in (VisionTransformer, ViViT, LanguageModel):
        raise ValueError(f"{asked} splits the tokens of vit_*, vivit_* and lm_* models, got model={recipe.model!r}")
    for block in read_blocks(recipe.attention):
        zoo.get(parse(block)[0]).require("mergeable", asked)
    layer = recipe.model_options.get("layer") or "multihead"
    if layer != "multihead":
        raise ValueError(f"{asked} splits plain attention layers, got layer={layer!r} in model_options")
    dropped = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    if dropped and recipe.drop_path:
        raise ValueError(f"{asked}: drop_rate and drop_path cannot both be drawn right for split tokens; set one to 0")
    if recipe.compile:
        raise ValueError(f"{asked} is not for compiled models: set compile=false")


def build_optimizer(model: nn.Module, recipe: TrainRecipe, recordable: bool) -> torch.optim.Optimizer:
    """The optimizer of a recipe; `recordable` as of `adamw`."""
    muon = recipe.optimizer == "muon"
    groups = (muon_groups if muon else decay_groups)(model, recipe.weight_decay)
    how = {"kind": Muon} if muon else {}
    return adamw(groups, lr=recipe.lr, beta2=recipe.beta2, recordable=recordable, **how)


def loader_of(
    recipe: TrainRecipe, part: Part, team: Processes, screen: IO[str] | None, *, training: bool = False
) -> Loader | TextLoader:
    """Batches of a part: in training shuffled, to be augmented anew each time, otherwise each item once."""
    if isinstance(part, TextPart):
        where: dict[str, Any] = {"rank": team.data_rank, "world": team.data_world, "device": team.device}
        return TextLoader(
            part, recipe.batch_size, seed=recipe.seed, shuffle=training, drop_last=training, **where
        )  # fmt: skip
    return Loader(
        part,
        recipe.batch_size,
        size=part.size if isinstance(part, ScenePart) else recipe.loaded_size,
        seed=recipe.seed,
        shuffle=training,
        drop_last=training,
        repeats=recipe.repeats if training else 1,
        rank=team.data_rank,
        world=team.data_world,
        device=team.device,
        workers=recipe.workers,
        in_memory="auto" if recipe.in_memory == "auto" else recipe.in_memory == "yes",
        max_bad=recipe.max_bad,
        progress=None if screen is not None and screen.isatty() else False,
        shard_window=recipe.shard_window if training else 0,
        shard_lanes=recipe.shard_lanes if training else 1,
        whole=training and recipe.augmentation.crops,
    )


def augment_of(recipe: TrainRecipe, classes: int) -> Augment:
    """The augmentation of a recipe; its `evaluate` only normalises."""
    mean, std = recipe.colours
    return Augment(
        recipe.augmentation,
        size=recipe.image_size,
        classes=classes,
        mean=mean,
        std=std,
        label_smoothing=recipe.label_smoothing,
        compile=recipe.compile,
    )
