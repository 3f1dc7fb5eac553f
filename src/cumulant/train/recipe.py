"""Recipes: all that decides how a model is trained, as one value to print, store and change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """AdamW with warm-up and cosine decay. The defaults are `DIGITS`, below; change one with `replace`.

    epochs, batch_size: passes over the training part, images per step.
    lr, min_lr, warmup_epochs: linear from 0 to lr over the warm-up, then a cosine to min_lr.
    weight_decay, beta2: of AdamW; only matrices decay, not biases, norms, class token and positions.
    label_smoothing: part of the target spread over all classes.
    drop_path: stochastic depth of the last block; None leaves the model as it is.
    clip: largest norm of the gradient; None for no clipping.
    shift: training images are moved by up to so many pixels.
    seed: order of the images, augmentation and dropout. The initial weights are the caller's.
    """

    epochs: int = 20
    batch_size: int = 64
    lr: float = 2e-3
    min_lr: float = 1e-5
    warmup_epochs: float = 2.0
    weight_decay: float = 0.05
    beta2: float = 0.999
    label_smoothing: float = 0.1
    drop_path: float | None = None
    clip: float | None = 1.0
    shift: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "min_lr", "warmup_epochs", "weight_decay", "shift"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")


# For create_model("vit_nano_patch2_8", num_classes=10, init_std=0.1): 10 to 14 s on one core (CPU time, one thread).
# Test accuracy to expect, mean of 2 splits x 3 seeds: softmax 97.3 %, linear 96.5, cumulant2 97.5, cumulant3 97.5.
# Single runs spread over about 2 points and one of the 450 images is 0.2, so this does not rank the mechanisms; the
# final training loss sets linear apart (0.521 against 0.505 to 0.507). With DeiT's init_std of 0.02 the same budget
# ends at 90 to 93 %; with shift=1 softmax ends at 92 %, far from converged. Chosen by softmax's accuracy on split 0.
DIGITS = Recipe()
