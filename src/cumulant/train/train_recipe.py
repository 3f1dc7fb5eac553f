"""The recipe of a training run from data on disk: one typed value to read from a file, print, change and compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

from ..command import check_choices, check_least
from ..data.augmentation import Augmentation
from ..grammar import json_or_word, read_blocks, says_none, write_blocks
from ..kinds import check_kinds

OPTIONS = ("data_options", "model_options", "attention_options", "attention_extras")
LUMA = (0.299, 0.587, 0.114)  # shares of the colours in a grey image
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _options(words: list[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    for key, sign, _ in pairs:
        if not key or not sign:
            raise ValueError(f"options are written key=value, got {' '.join(words)}")
    return {key: None if says_none(value) else json_or_word(value) for key, _, value in pairs}


# A dictionary on the command line: `--model-options pool=gap depth=6`.
Options = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE ...",
        instance_from_str=_options,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{key}={json.dumps(one)}" for key, one in value.items()],
    ),
]


@dataclass(frozen=True)
class TrainRecipe:
    """All that decides a training run. AdamW (or Muon), linear warm-up, cosine decay, soft-target cross entropy."""

    data: str = "digits"
    """Name of a data set, or a folder: parquet shards, one sub-folder per class, UCF-101."""
    data_options: Options = field(default_factory=dict)
    """How to read it, added to that of the recipe: test_part=test image_column=img label_column=fine_label."""
    image_size: int = 224
    """Side of the images that the model sees."""
    decode_size: int = 0
    """Side to which images are decoded before augmentation. 0: image_size."""
    frames: int = 16
    """Video: frames in a clip."""
    stride: int = 2
    """Video: distance of these frames in the source."""
    views: int = 1
    """Video: clips per video in evaluation; their softmax outputs are averaged."""
    crops: int = 1
    """Video: squares along the long side of each of these clips; they are views too."""
    split: int = 1
    """Video: number of the official split."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of the colour channels, for pixels from 0 to 1; one number: images are made grey."""
    std: tuple[float, ...] = IMAGENET_STD
    """Their standard deviation."""
    holdout: float = 0.0
    """Share of every class of the training part that is not trained on but chooses the weights in best.safetensors.
    0: all is trained on, and the last weights are the only ones."""

    model: str = "vit_tiny_patch16_224"
    """Name of a model, see cumulant.models.names()."""
    model_options: Options = field(default_factory=dict)
    """Further arguments of the model, added to those of the recipe: pool=gap depth=6. key=none takes one away."""
    attention: str = "softmax"
    """Attention mechanism, by a name that `cumulant list` prints; one for each block: 4xagent,8xsoftmax."""
    attention_options: Options = field(default_factory=dict)
    """Options of that mechanism, added to those of the recipe: full=true."""
    attention_extras: Options = field(default_factory=dict)
    """What goes around any mechanism, added to that of the recipe: v_conv=true gate=true temperature=head."""
    init: str | None = None
    """Weights to start from: a file or folder of `cumulant train`, a file of timm's weights, or timm:NAME."""
    drop_path: float = 0.0
    """Stochastic depth of the last block; it grows linearly from 0 at the first."""

    epochs: int = 100
    """Passes over the training part."""
    batch_size: int = 1024
    """Samples per step, over all processes and accumulated parts together."""
    lr: float = 1e-3
    """Highest learning rate."""
    lr_batch: int = 0
    """Scale lr linearly: it is meant for this batch size and multiplied by batch_size / lr_batch. 0: as it is."""
    min_lr: float = 1e-5
    """Learning rate at the end."""
    warmup_epochs: float = 5.0
    """Epochs in which the rate rises linearly from 0."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: matrices of the blocks move along orthogonalised momentum, at the same rate; the rest is AdamW."""
    weight_decay: float = 0.05
    """Of matrices and convolutions; biases, norms, tokens and positions do not decay."""
    beta2: float = 0.999
    """Second moment decay of AdamW; the first is 0.9."""
    label_smoothing: float = 0.0
    """Part of the target that is spread over all classes."""
    clip: float | None = None
    """Largest norm of the gradient. None: no clipping."""
    ema: float = 0.0
    """Decay of the average of the weights that is evaluated and saved; 0: no average. It starts lower, as
    (1 + step) / (10 + step)."""
    accumulate: int = 1
    """Cut every batch into this many parts and add up their gradients: less memory, same step."""
    repeats: int = 1
    """Repeated augmentation: how often an image follows in a row of batches, each time augmented differently."""
    augmentation: Augmentation = field(default_factory=Augmentation)

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast; weights and optimizer stay in float32. What a GPU still multiplies in float32 may be TF32."""
    compile: bool = False
    """torch.compile the augmentation and the blocks of the model, or all of it where it has none."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """How long torch.compile may look for quick kernels; see its own documentation."""
    cuda_graph: bool = True
    """On one GPU, without accumulation: record a step and replay it, so that the host is not in the way."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: whole copies of the model, or FSDP2 shards of it."""
    context_parallel: int = 1
    """Under torchrun: how many processes share the tokens of each image, clip or text. For a ViT or ViViT at high
    resolution, or a language model with a long context, with a mechanism that merges (cumulant1 to cumulant3)."""
    seed: int = 0
    """Initial weights, order, augmentation and dropout."""
    workers: int | None = None
    """Processes that decode; 0: none beside this one, None: one per core where that pays."""
    in_memory: Literal["auto", "yes", "no"] = "auto"
    """Keep the decoded data on the device."""
    shard_window: int = 0
    """Data in tar or parquet shards: shuffle this many of them at a time, so that only these are read. 0: over all."""
    shard_lanes: int = 1
    """With shard_window: number of readers, each with shards of its own, so that a process reads only its part of them.
    Take a multiple of every number of processes that the run may have; it must divide batch_size."""
    max_bad: int | None = None
    """How many damaged images or videos of a part may be skipped. None: 1 %, at least 10, at most half."""
    eval_epochs: int = 1
    """Evaluate every this many epochs, and after the last."""
    checkpoint_epochs: int = 1
    """Save the state every this many epochs, to continue from; 0: never by epochs."""
    checkpoint_steps: int = 0
    """Save it every this many steps too; 0: never by steps."""
    log_steps: int = 0
    """Log the loss every this many steps and at the end of an epoch; 0: at the end of an epoch."""
    tensorboard: bool = False
    """Write the log for TensorBoard too."""
    wandb: bool = False
    """Send the log to Weights & Biases too; WANDB_MODE=offline keeps it in the folder of the run."""

    def __post_init__(self) -> None:
        if not isinstance(self.attention, str):  # a list, one name for each block
            object.__setattr__(self, "attention", write_blocks(read_blocks(self.attention)))
        least = {
            **dict.fromkeys(("image_size", "frames", "stride", "views", "crops", "split"), 1),
            **dict.fromkeys(("epochs", "batch_size", "accumulate", "repeats", "eval_epochs"), 1),
            **dict.fromkeys(("shard_lanes", "context_parallel"), 1),
            **dict.fromkeys(("decode_size", "lr", "lr_batch", "min_lr", "warmup_epochs", "weight_decay"), 0),
            **dict.fromkeys(("checkpoint_epochs", "checkpoint_steps", "log_steps", "seed", "shard_window"), 0),
        }
        check_least(self, **least)
        check_kinds(type(self), vars(self))
        for name in OPTIONS:
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"{name} must be a mapping of names to values, got {getattr(self, name)!r}")
        for name in ("label_smoothing", "drop_path", "ema", "beta2", "holdout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("workers", "max_bad"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be 0 or more, or None, got {value}")
        check_choices(self)
        for name in ("mean", "std"):
            colours = getattr(self, name)
            numbers = isinstance(colours, Sequence) and all(isinstance(one, int | float) for one in colours)
            if not numbers or not all(one > 0 or (name == "mean" and one == one) for one in colours):
                said = "" if name == "mean" else "positive "
                raise ValueError(f"{name} must be {said}numbers, one for each colour, got {colours!r}")
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"mean and std must have 1 or 3 numbers each, got mean={self.mean}, std={self.std}")
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise ValueError(
                'optimizer="muon" turns whole matrices, which parallel="fsdp" cuts into shards: use parallel="ddp", or '
                'optimizer="adamw"'
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size must be a multiple of accumulate, got batch_size={self.batch_size}, "
                f"accumulate={self.accumulate}"
            )

    @property
    def channels(self) -> int:
        """Channels of the images that the model sees: 1 for grey ones."""
        return int(self.model_options.get("in_chans") or len(self.mean))

    @property
    def colours(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of these channels; of grey images made of colours, those of the colours."""
        if self.channels not in (1, 3):
            raise ValueError(f"in_chans in model_options must be 3, or 1 for grey images, got {self.channels}")
        if self.channels == len(self.mean):
            return self.mean, self.std
        if self.channels == 3:
            return self.mean * 3, self.std * 3
        grey = (sum(weight * one for weight, one in zip(LUMA, values, strict=True)) for values in (self.mean, self.std))
        return (next(grey),), (next(grey),)

    @property
    def loaded_size(self) -> int:
        """Side to which the loader decodes."""
        return self.decode_size or self.image_size

    def scaled(self) -> TrainRecipe:
        """The same recipe with lr as it is for its own batch size."""
        if not self.lr_batch:
            return self
        return replace(self, lr=self.lr * self.batch_size / self.lr_batch, lr_batch=0)

    def lasting(self, epochs: int) -> TrainRecipe:
        """The same recipe for another number of epochs; a warm-up that would outlast them shortens with them."""
        warmup = self.warmup_epochs if self.warmup_epochs <= epochs else self.warmup_epochs * epochs / self.epochs
        return replace(self, epochs=epochs, warmup_epochs=warmup)

    def check_schedule(self) -> None:
        """Refuse to train with a rate that never reaches its height, or ends above it; old recipes may have it."""
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"warmup_epochs must not exceed epochs, got a warm-up of {self.warmup_epochs:g} in a training of "
                f"{self.epochs} epochs: the rate would never reach lr={self.lr:g}"
            )
        if self.min_lr > self.lr:
            raise ValueError(
                f"min_lr must not exceed lr, got min_lr={self.min_lr:g}, lr={self.lr:g}: the rate would rise to the end"
            )

    def merged(self, given: TrainRecipe) -> TrainRecipe:
        """`given`, with the options of this recipe kept where `given` does not name them; None takes one away."""
        tables: dict[str, Any] = {}
        for name in OPTIONS:
            both = {**getattr(self, name), **getattr(given, name)}
            tables[name] = {key: value for key, value in both.items() if value is not None}
        return replace(given, **tables)
