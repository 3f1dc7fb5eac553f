"""The training loop for data that fits in memory: deterministic for a seed, no workers, no files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Split, random_shift
from .optimise import adamw, decay_groups, learning_rate, set_drop_path, step
from .recipe import Recipe

__all__ = ["History", "decay_groups", "evaluate", "fit", "learning_rate"]


@dataclass
class History:
    """One entry per epoch: mean training loss, seconds of training, accuracy on the test part (0 to 1)."""

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)


def fit(
    model: nn.Module, split: Split, recipe: Recipe, *, on_epoch: Callable[[int, History], None] | None = None
) -> History:
    """Train the model in place. `on_epoch(epoch, history)` is called after each epoch, counted from 1.

    Same weights, split, recipe and thread count give the same result, bit for bit; the caller's random state
    is left alone. A loss that is not finite raises FloatingPointError.
    """
    device = next(model.parameters()).device
    split = split.to(device)
    if recipe.drop_path is not None:
        set_drop_path(model, recipe.drop_path)
    optimizer = adamw(model, lr=recipe.lr, weight_decay=recipe.weight_decay, beta2=recipe.beta2)
    generator = torch.Generator(device).manual_seed(recipe.seed)
    count = len(split.train_images)
    steps_per_epoch = math.ceil(count / recipe.batch_size)
    history = History()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        for epoch in range(recipe.epochs):
            start = time.perf_counter()
            model.train()
            order = torch.randperm(count, generator=generator, device=device)
            total = torch.zeros((), device=device)
            for index, batch in enumerate(order.split(recipe.batch_size)):
                images = random_shift(split.train_images[batch], recipe.shift, generator)
                rate = learning_rate(recipe, (epoch * steps_per_epoch + index + 1) / steps_per_epoch)
                loss = _step(model, optimizer, images, split.train_labels[batch], rate, recipe)
                total += loss * len(batch)
            history.loss.append(_finite(total.item() / count, epoch + 1, recipe))
            history.seconds.append(time.perf_counter() - start)
            history.test_accuracy.append(evaluate(model, split.test_images, split.test_labels))
            if on_epoch is not None:
                on_epoch(epoch + 1, history)
    return history


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, *, batch_size: int = 512) -> float:
    """Share of the images that the model classifies correctly, in evaluation mode."""
    if len(images) == 0:
        raise ValueError("images must not be empty, got 0 of them")
    was_training = model.training
    model.eval()
    try:
        pairs = zip(images.split(batch_size), labels.split(batch_size), strict=True)
        correct = sum(int((model(x).argmax(-1) == y).sum()) for x, y in pairs)
    finally:
        model.train(was_training)
    return correct / len(images)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, rate: float, recipe: Recipe
) -> Tensor:
    loss = F.cross_entropy(model(images), labels, label_smoothing=recipe.label_smoothing)
    loss.backward()
    step(optimizer, model.parameters(), rate, recipe.clip)
    return loss.detach()


def _finite(loss: float, epoch: int, recipe: Recipe) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the training loss became {loss} in epoch {epoch}; lower lr (now {recipe.lr:g}) or set clip "
            f"(now {recipe.clip}), and look for non-finite values in the images"
        )
    return loss
