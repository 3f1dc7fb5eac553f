"""What a user may choose for `cumulant diagnose` and `cumulant convert`. No heavy import: help is shown from this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..train.train_recipe import check_choices

# Mechanisms among which layers="auto" chooses.
CANDIDATES = ("cumulant2", "cumulant3", "cumulant2+around=mean", "cumulant3+around=mean")


def check_least(settings: Any, least: dict[str, int]) -> None:
    """Refuse a number below the least that its field may have; None stands for a default."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= low:
            raise ValueError(f"{name} must be {low} or more, got {value}")


@dataclass(frozen=True)
class DistillRecipe:
    """Training of a converted model on what the model before said: layers first, then answers. AdamW, bit-exact resume.

    The first part of the steps trains only the replaced layers, each to give what its softmax original gives for the
    same input; the rest trains all weights to give the original model's answers.
    """

    epochs: int = 5
    """Passes over the data, both parts together."""
    layer_share: float = 0.25
    """Share of the steps for the first part."""
    layer_lr: float = 1e-3
    """Highest learning rate of the first part."""
    lr: float = 5e-4
    """Highest learning rate of the second part."""
    min_lr: float = 1e-6
    """Learning rate at the end of each part."""
    warmup: float = 0.1
    """Share of each part in which the rate rises linearly from 0; then it falls like a cosine."""
    weight_decay: float = 0.0
    """Of matrices; the weights are those of a trained model, so there is little reason to shrink them."""
    clip: float | None = 1.0
    """Largest norm of the gradient. None: no clipping."""
    loss: Literal["auto", "kl", "mse", "cosine"] = "auto"
    """Between answers: kl of softmax outputs for logits; mse relative to the variance, or 1 - cosine, for vectors."""
    temperature: float = 1.0
    """Of the softmax in kl."""
    layer_weight: float = 0.1
    """Weight of the replaced layers' outputs in the loss of the second part."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast; weights and optimizer stay in float32."""
    seed: int = 0
    """Order of the data and augmentation."""
    checkpoint_steps: int = 100
    """Save the state to go on from after every so many steps; 0: only when the run is stopped."""

    def __post_init__(self) -> None:
        check_least(self, {"epochs": 1, "layer_lr": 0, "lr": 0, "min_lr": 0, "weight_decay": 0, "layer_weight": 0,
                           "checkpoint_steps": 0, "seed": 0})  # fmt: skip
        check_choices(self)
        for name in ("layer_share", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")


@dataclass(frozen=True)
class Diagnose:
    """Measure where a trained model can do without softmax: logit spread and error of each order by layer and head.

    Prints the layers, the safest first, with a proposal; writes diagnosis.json and a heat map.

    Example: cumulant diagnose runs/digits-softmax-0 digits

    Example: cumulant diagnose path/to/sentence-encoder texts.txt --heads

    Example: cumulant diagnose timm:vit_small_patch16_224 path/to/imagenet-100 --budget 0.1 --dial 0.15
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run of `cumulant train` or its weights, a folder of transformers, or timm:NAME."""
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]")] = None
    """Data set or folder of images or videos; a .txt or .parquet file of texts. Without it, noise."""
    attention: tuple[str, ...] = CANDIDATES
    """Mechanisms whose effect on the output is measured, with options: cumulant3+around=mean."""
    budget: float = 0.05
    """Relative change of the output that the proposal may cause."""
    batches: int = 2
    """Batches of the data to look at."""
    batch_size: int = 16
    """Items of each."""
    queries: int = 64
    """Queries sampled in each layer and batch."""
    heads: bool = False
    """Also measure the effect of replacing single heads."""
    dial: float | None = None
    """Also choose clusters for every layer, and the heads that take them, by the error of its own output: say 0.15."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    out: Path = Path("runs/diagnosis")
    """Folder for diagnosis.json and diagnosis.svg."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        check_least(self, {"batches": 1, "batch_size": 1, "queries": 1, "budget": 0})
        if self.dial is not None and not self.dial > 0:
            raise ValueError(f"dial must be a positive relative error, got {self.dial}")


@dataclass(frozen=True)
class Convert:
    """Put attention of linear cost into a trained model and save it; `load(FOLDER)` of cumulant.convert loads it.

    With --distill it is then trained, without labels, to say what the model said before. A stopped command goes on
    where it was when it is given again.

    Example: cumulant convert runs/digits-softmax-0 --data digits --layers auto --budget 0.1

    Example: cumulant convert path/to/sentence-encoder --data texts.txt --layers 3 4 5 --around mean

    Example: cumulant convert path/to/sentence-encoder --data texts.txt --layers dial --target 0.15

    Example: cumulant convert runs/digits-softmax-0 --data digits --distill --epochs 5 --items-a-step 64
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run of `cumulant train` or its weights, a folder of transformers, or timm:NAME."""
    data: str | None = None
    """Data to measure the change on and to distil with, as for `cumulant diagnose`; needed with --layers auto and
    dial."""
    attention: str | None = None
    """Mechanism (cumulant3), by the name that `cumulant list` prints, with options: cumulant3+around=mean."""
    around: Literal["zero", "mean"] | None = None
    """Query around which cumulant mechanisms expand softmax: 0, or the mean of a sequence, which is closer and not for
    causal or cross attention. By default 0, and with --layers auto whichever changes the output less."""
    layers: tuple[str, ...] = ("all",)
    """all; auto, to choose by diagnosis; dial, to choose clusters by --target; or numbers, or patterns of names, of
    layers."""
    budget: float | None = None
    """With --layers auto, the relative change of the output to accept (0.05)."""
    target: float | None = None
    """With --layers dial, the relative error of a layer's own output to accept (0.15)."""
    heads: bool = False
    """With --layers auto, also replace single heads."""
    batches: int = 4
    """Batches of the data that the change is measured on."""
    batch_size: int = 16
    """Items of each."""
    distill: bool = False
    """Train the converted model on what the model said before."""
    distillation: DistillRecipe = DistillRecipe()
    items_a_step: int = 64
    """With --distill, images, clips or texts of a step."""
    items: int = 0
    """With --distill, at most so many texts of the data. 0: all."""
    fresh: bool = False
    """With --distill, begin anew and delete an earlier distillation in the folder."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    out: Path = Path("runs/converted")
    """Folder for the converted model and conversion.json."""
    json: bool = False
    """Print JSON instead of the report."""

    def __post_init__(self) -> None:
        if self.distill and self.data is None:
            raise ValueError("--distill needs --data: inputs like those that the model will see; no labels are used")
        if self.layers != ("auto",) and (self.budget is not None or self.heads):
            raise ValueError(f"--budget and --heads go with --layers auto, got --layers {' '.join(self.layers)}")
        if self.layers == ("dial",):
            if self.data is None:
                raise ValueError("--layers dial needs --data: inputs like those that the model will see, and as long")
            if self.attention is not None or self.around is not None:
                raise ValueError("--layers dial chooses the mechanisms itself: leave --attention and --around out")
        elif self.target is not None:
            raise ValueError(f"--target goes with --layers dial, got --layers {' '.join(self.layers)}")
        if self.target is not None and not self.target > 0:
            raise ValueError(f"target must be a positive relative error, got {self.target}")
        check_least(self, {"batches": 1, "batch_size": 1, "items_a_step": 1, "items": 0, "budget": 0})
