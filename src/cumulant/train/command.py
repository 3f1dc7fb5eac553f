"""`cumulant train` and `cumulant evaluate`: what a user may choose, and what happens then."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, get_type_hints

import tyro

from ..command import failed, show, stopped
from .recipe_files import read_recipe, recipe_head, recipe_names
from .train_recipe import Options, TrainRecipe

RECIPE = TrainRecipe()
BRIEF = ("data", "image_size", "model", "attention", "layer", "init", "epochs", "batch_size", "lr", "precision", "seed")


@dataclass(frozen=True)
class Train:
    """Train a classifier of images or videos, or a language model, from a recipe: a built-in name or a TOML file.

    Every value of the recipe can be given as an option. A stopped run goes on exactly where it was when the same
    command is given again. On several GPUs: torchrun --nproc-per-node 8 -m cumulant.cli train RECIPE

    Example: cumulant train digits

    Example: cumulant train tiny-imagenet-100 --data path/to/tiny-imagenet-100 --attention cumulant3 --seed 1
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """One of digits, tiny-imagenet-100, tiny-imagenet-100-patch4, cifar10, ucf101, imagenet-100, imagenet-1k,
    scenes, sentences, shakespeare, shakespeare-bytes; or a TOML file."""
    settings: TrainRecipe = field(default_factory=TrainRecipe)
    out: Path | None = None
    """Folder of the run: weights, log, result. By default runs/RECIPE-ATTENTION-SEED."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    fresh: bool = False
    """Delete an earlier run in the folder and start again."""
    json: bool = False
    """Print the result as JSON."""

    @classmethod
    def with_recipe(cls, words: Sequence[str]) -> Train | None:
        """For the words `RECIPE ...`: the command with the values of that recipe, on which the options then act."""
        if not words or words[0].startswith("-"):
            if any(word in ("-h", "--help") for word in words):
                return None
            raise ValueError(
                f"name the recipe first: cumulant train RECIPE [--key value]; known: {', '.join(recipe_names())}"
            )
        settings = read_recipe(words[0])
        made: Any = cls.__dataclass_fields__["settings"].default_factory
        kind = type(made())  # that of `brief` has hidden fields
        return cls(words[0], settings if kind is TrainRecipe else kind(**vars(settings)))

    @staticmethod
    def brief() -> type[Train]:
        """This command with the options that most runs need, for a help of one page."""
        hints = get_type_hints(TrainRecipe, include_extras=True)
        hidden = [
            (
                one.name,
                Annotated[hints[one.name], tyro.conf.Suppress],
                field(default_factory=partial(getattr, RECIPE, one.name)),
            )
            for one in fields(TrainRecipe)
            if one.name not in BRIEF
        ]
        settings = make_dataclass("Settings", hidden, bases=(TrainRecipe,), frozen=True)
        settings.__doc__ = "What most runs choose; all options: cumulant train RECIPE --help-all"
        made = field(default_factory=settings)
        kind = make_dataclass("Train", [("settings", settings, made)], bases=(Train,), frozen=True)
        kind.__doc__ = inspect.cleandoc(Train.__doc__ or "")
        return kind

    @property
    def description(self) -> str:
        """What the help says: how to train, and the head of the recipe, with its command, time and expected figure."""
        head = indent(recipe_head(self.recipe), "  ")  # lines that are not indented would be joined
        return f"{inspect.cleandoc(Train.__doc__ or '')}\n\nThe recipe {self.recipe}:\n{head}"

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        name = f"{Path(self.recipe).stem}-{self.settings.attention}-{self.settings.seed}"
        return self.out or Path("runs") / name

    def run(self) -> int:
        from torch import OutOfMemoryError

        from .. import train as room
        from .state import STATE

        finished = (self.folder / "result.json").is_file() and not self.fresh
        try:
            result = room.train(self.settings, self.folder, device=self.device, fresh=self.fresh, progress=sys.stderr)
        except OutOfMemoryError as error:
            advice = "cut every batch into parts with --accumulate, or lower --batch-size"
            return failed(RuntimeError(f"{str(error).splitlines()[0]} To take less: {advice}"))
        except KeyboardInterrupt:
            kept = f"The state is kept in {self.folder}" if (self.folder / STATE).is_file() else "Nothing was saved yet"
            return stopped(f". {kept}; give the same command again to go on.") if speaks() else 130
        if not speaks():
            return 0
        if finished:
            print("this run is finished already (--fresh trains it again)", file=sys.stderr)
        text = (
            f"{result.summary}  {result.parameters:,} parameters  {result.seconds:.0f} s\n"
            f"weights, log and result are in {self.folder}"
        )
        show(asdict(result), text, self.json)
        return 0


@dataclass(frozen=True)
class Evaluate:
    """Print the top-1 and top-5 accuracy of a checkpoint that `cumulant train` wrote; for a text, bits per byte.

    Example: cumulant evaluate runs/digits-softmax-0 digits

    Example: cumulant evaluate runs/ucf101-cumulant3-0 path/to/ucf101 --views 4 --json
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """File of weights, folder of a run (then its last.safetensors), or what `cumulant convert` made of one."""
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]")] = None
    """Name of a data set, or a folder; by default that of the recipe."""
    data_options: Options = field(default_factory=dict)
    """How to read it, added to that of the recipe: test_part=test label_column=fine_label. key=none takes one away."""
    views: int | None = None
    """Video: clips per video, whose softmax outputs are averaged; by default as in the recipe."""
    crops: int | None = None
    """Video: squares per clip; by default as in the recipe."""
    batch_size: int | None = None
    """Items at a time; by default as in the recipe."""
    workers: int | None = None
    """Processes that decode; by default one per core where that pays."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    predictions: Path | None = None
    """Write class probabilities and labels of all items to this safetensors file."""
    per_class: bool = False
    """Print the accuracy of every class too."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> int:
        from . import evaluate_checkpoint
        from .files import claim_room

        if self.predictions is not None:
            if self.predictions.is_dir():
                raise ValueError(f"--predictions must be a file to write, got the folder {self.predictions}")
            claim_room(self.predictions.parent, 0)
        names = ("data_options", "views", "crops", "batch_size", "workers", "device")
        options = {name: getattr(self, name) for name in names}
        found, classes = evaluate_checkpoint(self.checkpoint, self.data, progress=sys.stderr, **options)
        if not speaks():
            return 0
        if self.predictions is not None:
            found.save(self.predictions)
        if self.per_class and not hasattr(found, "per_class"):
            raise ValueError("--per-class is for classes of images and videos; this is a text")
        each = dict(zip(classes, found.per_class().tolist(), strict=True)) if self.per_class else {}
        values: dict[str, Any] = {**found.told(), "items": len(found)}
        if self.per_class:
            values["per_class"] = {name: None if math.isnan(value) else value for name, value in each.items()}
        lines = [
            f"{'no items' if math.isnan(value) else format(value, '.2%'):>8}  {name}"
            for name, value in sorted(each.items(), key=lambda pair: (math.isnan(pair[1]), -pair[1]))
        ]
        lines.append(f"{found.summary()}  ({len(found):,} items)")
        show(values, "\n".join(lines), self.json)
        return 0


def speaks() -> bool:
    """Whether this process tells the result: one of torchrun's does for all."""
    return os.environ.get("RANK", "0") == "0"
