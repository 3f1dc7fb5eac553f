"""What a user may choose for `cumulant train` and `cumulant evaluate`. No heavy import: the help is shown from this."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Annotated

import tyro

from cumulant.train.recipe_files import read_recipe, recipe_head, recipe_names
from cumulant.train.train_recipe import Options, TrainRecipe


@dataclass(frozen=True)
class Train:
    """Train a classifier of images or videos from a recipe: a built-in name, or the path of a TOML file.

    Every value of the recipe can be given as an option. A stopped run goes on exactly where it was when the same
    command is given again. On several GPUs: torchrun --nproc-per-node 8 -m cumulant.cli train RECIPE

    Example: cumulant train digits

    Example: cumulant train tiny-imagenet-100 --data path/to/tiny-imagenet-100 --attention cumulant3 --seed 1
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """One of digits, tiny-imagenet-100, tiny-imagenet-100-patch4, cifar10, ucf101, imagenet-100; or a TOML file."""
    settings: TrainRecipe = field(default_factory=TrainRecipe)
    out: Path | None = None
    """Folder of the run: weights, log, result. By default runs/RECIPE-ATTENTION-SEED."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    fresh: bool = False
    """Delete an earlier run in the folder and start anew."""
    json: bool = False
    """Print the result as JSON."""

    @property
    def description(self) -> str:
        """What the help says: how to train, and the head of the recipe, with its command, time and expected figure."""
        head = indent(recipe_head(self.recipe), "  ")  # lines that are not indented would be joined
        return f"{inspect.cleandoc(type(self).__doc__ or '')}\n\nThe recipe {self.recipe}:\n{head}"

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        name = f"{Path(self.recipe).stem}-{self.settings.attention}-{self.settings.seed}"
        return self.out or Path("runs") / name


@dataclass(frozen=True)
class Evaluate:
    """Print the top-1 and top-5 accuracy of a checkpoint that `cumulant train` wrote.

    Example: cumulant evaluate runs/digits-softmax-0/best.safetensors digits

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
    """Processes that decode; by default one a core where that pays."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    predictions: Path | None = None
    """Write class probabilities and labels of all items to this safetensors file."""
    per_class: bool = False
    """Print the accuracy of every class too."""
    json: bool = False
    """Print JSON instead of text."""


def train_with_recipe(words: Sequence[str]) -> Train | None:
    """For the words `RECIPE ...`: the command with the values of that recipe, on which the options then act."""
    if not words or words[0].startswith("-"):
        if any(word in ("-h", "--help") for word in words):
            return None
        raise ValueError(
            f"name the recipe first: cumulant train RECIPE [--key value]; known: {', '.join(recipe_names())}"
        )
    return Train(words[0], read_recipe(words[0]))
