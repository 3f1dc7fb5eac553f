"""Learning a class for every pixel: the task of scenes, and what is counted of a test part.

Shape legend: b scenes of one batch, K classes, S x S pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.augmentation import Augmentation
from ..data.part import Source
from .predictions import Scores, answers
from .processes import Processes
from .train_recipe import TrainRecipe


class Segmentation:
    """Cross entropy of every pixel; mean intersection over union."""

    def __init__(self, recipe: TrainRecipe, source: Source) -> None:
        if recipe.augmentation != Augmentation():
            raise ValueError(f"{source.name} has a class for every pixel, and augmentation moves none: leave it out")
        self.precision, self.smoothing, self.classes = recipe.precision, recipe.label_smoothing, len(source.classes)
        self.mean, self.std = (torch.tensor(one).reshape(-1, 1, 1) * 255 for one in recipe.colours)

    def split(self, team: Processes) -> AbstractContextManager[Any]:
        return team.split()

    def own(self, x: Tensor) -> Tensor:
        return x

    def prepare(self, batch: Tensor, labels: Tensor, **drawn: Any) -> tuple[Tensor, Tensor]:
        """Scenes uint8 (b, 4, S, S), the mask behind the colours, to normalised colours and class numbers (b, S, S)."""
        self.mean, self.std = self.mean.to(batch.device), self.std.to(batch.device)
        return (batch[:, :-1] - self.mean) / self.std, batch[:, -1].long()

    def loss(self, answer: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(answer.float(), targets, label_smoothing=self.smoothing)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, loader: Any, team: Processes, on_batch: Callable[[int], None] | None = None
    ) -> PixelScores:
        device, K = team.device, self.classes
        confusion = torch.zeros(K, K, dtype=torch.int64, device=device)
        among = torch.zeros((), dtype=torch.int64, device=device)
        for answer, masks, _ in answers(model, loader, self.prepare, device, self.precision, on_batch):
            pairs = masks * K + answer.argmax(1)
            confusion += torch.bincount(pairs.flatten(), minlength=K * K).reshape(K, K)
            own = answer.gather(1, masks.unsqueeze(1))
            among += ((answer > own).sum(1) < 5).sum()
        for found in (confusion, among):
            team.sum(found)
        return PixelScores(confusion.cpu(), among.cpu())


@dataclass(frozen=True)
class PixelScores(Scores):
    """Counts (K, K) of the pixels of a test part, row the class and column the answer; and of those whose class is
    among the five likeliest."""

    confusion: Tensor
    among_five: Tensor

    @property
    def unions(self) -> Tensor:
        """Intersection over union of every class, (K,); NaN for one that is neither there nor answered."""
        right, table = self.confusion.diagonal(), self.confusion
        return right / (table.sum(0) + table.sum(1) - right)

    @property
    def miou(self) -> float:
        """Mean intersection over union of the classes."""
        return self.unions.nanmean().item()

    def top(self, k: int) -> float:
        """Share of the pixels that are right (1), or whose class is among the five likeliest (5)."""
        right = self.confusion.diagonal().sum() if k == 1 else self.among_five
        return (right / self.confusion.sum()).item()

    @property
    def score(self) -> float:
        """Of two evaluations the better one has more: mIoU."""
        return self.miou

    def told(self) -> dict[str, float]:
        """What a log says of it."""
        return {"miou": self.miou, "top1": self.top(1), "top5": self.top(5)}

    def shown(self) -> dict[str, str]:
        """What a progress bar says of it."""
        return {"mIoU": f"{self.miou:.2%}"}

    def summary(self) -> str:
        return f"mIoU {self.miou:.2%}  pixels {self.top(1):.2%}"

    def __len__(self) -> int:
        return int(self.confusion.sum())
