"""Predictions of a classifier: probabilities of every test item, and all that is counted from them.

Shape legend: N items, K classes, b items of one batch in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..data.augment import Augment
from ..data.loader import Loader
from .files import write_atomically
from .processes import Processes


class Scores:
    """What was found of a test part: a dataclass of tensors, which are kept as safetensors."""

    def save(self, path: str | Path) -> None:
        """Write everything as safetensors."""
        write_atomically(Path(path), to_bytes({name: value.contiguous() for name, value in vars(self).items()}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote."""
        return cls(**load_file(path))


@dataclass(frozen=True)
class Predictions(Scores):
    """Class probabilities (N, K) of the test items that could be decoded, their labels (N,) and places in the part.

    Where a video was shown in several views, its row is the mean of their softmax outputs.
    """

    probabilities: Tensor
    labels: Tensor
    positions: Tensor

    @property
    def classes(self) -> Tensor:
        """The most probable class of every item, (N,)."""
        return self.probabilities.argmax(-1)

    def top(self, k: int) -> float:
        """Share of the items whose label is among the k most probable classes."""
        best = self.probabilities.topk(min(k, self.probabilities.shape[-1])).indices
        return (best == self.labels[:, None]).any(-1).double().mean().item()

    @property
    def score(self) -> float:
        """Of two evaluations the better one has more: top-1."""
        return self.top(1)

    def told(self) -> dict[str, float]:
        """What a log says of it."""
        return {"top1": self.top(1), "top5": self.top(5)}

    def shown(self) -> dict[str, str]:
        """What a progress bar says of it."""
        return {"top1": f"{self.top(1):.2%}"}

    def summary(self) -> str:
        return f"top-1 {self.top(1):.2%}  top-5 {self.top(5):.2%}"

    def __len__(self) -> int:
        return len(self.labels)

    def confusion(self) -> Tensor:
        """Counts (K, K): row the label, column the prediction."""
        count = self.probabilities.shape[-1]
        return torch.bincount(self.labels * count + self.classes, minlength=count * count).reshape(count, count)

    def per_class(self) -> Tensor:
        """Share of the items of every class that are predicted as such, (K,); NaN for a class without items."""
        table = self.confusion()
        return table.diagonal() / table.sum(1)


def answers(
    model: nn.Module,
    loader: Any,
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    device: torch.device,
    precision: str,
    on_batch: Callable[[int], None] | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What the model, in `eval` until all is done, answers to each batch, the targets, and the places of the items.

    `on_batch` hears how many items were done. Nothing waits for the device.
    """
    was_training = model.training
    model.eval()
    try:
        for batch, labels, places in loader.epoch(0):
            inputs, targets = prepare(batch, labels)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                answer = model(inputs)
            yield answer, targets, places
            if on_batch is not None:
                on_batch(len(batch))
    finally:
        model.train(was_training)


@torch.no_grad()
def predict(
    model: nn.Module,
    loader: Loader,
    normalise: Augment,
    *,
    classes: int,
    team: Processes | None = None,
    precision: str = "fp32",
    on_batch: Callable[[int], None] | None = None,
) -> Predictions:
    """The model's probabilities for the part that `loader` goes through, the same in every process.

    Of `normalise` only `evaluate` is used, which makes of uint8 pixels what the model takes.
    """
    part = loader.part
    device = team.device if team else next(model.parameters()).device
    total = torch.zeros(len(part) // part.views, classes, device=device)
    seen = torch.zeros(len(total), device=device)

    def normalised(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return normalise.evaluate(pixels), labels

    for logits, _, positions in answers(model, loader, normalised, device, precision, on_batch):
        rows = positions.to(device) // part.views
        total.index_add_(0, rows, logits.float().softmax(-1))
        seen.index_add_(0, rows, torch.ones_like(rows, dtype=seen.dtype))
    if team is not None:
        team.sum(total)
        team.sum(seen)
    done = seen.cpu().nonzero().flatten()
    if not len(done):
        raise ValueError("the test part must not be empty, got 0 items that can be decoded")
    return Predictions((total / seen.clamp(min=1)[:, None]).cpu()[done], part.labels[:: part.views][done], done)
