"""What a distillation may be told, and what diagnosis tries. No heavy import: the command line shows help from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..command import check_choices, check_least
from ..kinds import check_kinds

# Mechanisms among which layers="auto" chooses.
CANDIDATES = ("cumulant2", "cumulant3", "cumulant2+around=mean", "cumulant3+around=mean")


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
    frozen: tuple[str, ...] = ()
    """Beginnings of the names of weights that stay as they are, e.g. of the layers before the first replaced one."""
    seed: int = 0
    """Order of the data and augmentation."""
    checkpoint_steps: int = 100
    """Save the state every this many steps, to continue from; 0: only when the run is stopped."""

    def __post_init__(self) -> None:
        check_least(self, epochs=1, layer_lr=0, lr=0, min_lr=0, weight_decay=0, layer_weight=0)
        check_least(self, checkpoint_steps=0, seed=0)
        check_kinds(type(self), vars(self))
        check_choices(self)
        for name in ("layer_share", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")
