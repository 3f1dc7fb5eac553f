"""What is learned from the data: classes of images and videos, of pixels, or the next token of a text.

Shape legend: b items of one batch in this process, T tokens of a window, N windows, V symbols; of scenes K classes, S x
S pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .. import shards
from ..data.augmentation import Augmentation
from ..data.part import Source
from ..data.text import TextPart
from .build import augment_of
from .predictions import Predictions, Scores, answers, predict
from .processes import Processes
from .train_recipe import TrainRecipe

OnBatch = Callable[[int], None]


class Task(ABC):
    """How batches become inputs and targets, what is lost by an answer, and what a test part says of a model."""

    prepare: Callable[..., tuple[Tensor, Tensor]]  # of a batch, its labels, and `seed`, `rank`, `world`, `ratio`

    def split(self, team: Processes) -> AbstractContextManager[Any]:
        """While this is held, the processes that share a sequence see all of it."""
        return team.split()

    def own(self, x: Tensor) -> Tensor:
        """What of inputs or targets goes into this process's model while they are split: all, where the model cuts the
        tokens that it makes, and every process has the answer."""
        return x

    @abstractmethod
    def loss(self, answer: Tensor, targets: Tensor) -> Tensor:
        """Its mean over all processes is the loss of the batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, loader: Any, team: Processes, on_batch: OnBatch | None = None) -> Any: ...


class Classification(Task):
    """Soft-target cross entropy on augmented pixels; top-1 and top-5."""

    def __init__(self, recipe: TrainRecipe, source: Source) -> None:
        self.classes, self.precision = len(source.classes), recipe.precision
        self.prepare = self.augment = augment_of(recipe, self.classes)

    def loss(self, answer: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(answer.float(), targets)

    def evaluate(self, model: nn.Module, loader: Any, team: Processes, on_batch: OnBatch | None = None) -> Predictions:
        how: dict[str, Any] = {"team": team, "precision": self.precision, "on_batch": on_batch}
        return predict(model, loader, self.augment, classes=self.classes, **how)


class Language(Task):
    """Cross entropy of the next token; nats a token, bits a byte, and how often it is the most probable one."""

    def __init__(self, recipe: TrainRecipe, source: Source) -> None:
        if recipe.augmentation != Augmentation():
            raise ValueError(f"{source.name} is a text, and augmentation is for images: leave it out")
        if recipe.repeats != 1:
            raise ValueError(f"{source.name} is a text: repeats must be 1, got {recipe.repeats}")
        self.precision, self.smoothing = recipe.precision, recipe.label_smoothing
        assert isinstance(source.train, TextPart)
        self.context = source.train.context

    def split(self, team: Processes) -> AbstractContextManager[Any]:
        if self.context < team.context:
            raise ValueError(
                f"context_parallel={team.context} processes cannot share {self.context} tokens: each needs one at least"
            )
        return team.split(self.context)

    def own(self, x: Tensor) -> Tensor:
        return shards.cut(x)

    def prepare(self, batch: Tensor, labels: Tensor, **drawn: Any) -> tuple[Tensor, Tensor]:
        return batch, labels

    def loss(self, answer: Tensor, targets: Tensor) -> Tensor:
        mean = F.cross_entropy(answer.float().flatten(0, -2), targets.flatten(), label_smoothing=self.smoothing)
        _, whole = shards.place(targets.shape[1])
        return mean * (targets.shape[1] * shards.count() / whole)  # parts may differ by a token

    @torch.no_grad()
    def evaluate(self, model: nn.Module, loader: Any, team: Processes, on_batch: OnBatch | None = None) -> TokenScores:
        part, device = loader.part, team.device
        nats, rank = (torch.zeros(len(part), part.context, device=device) for _ in range(2))

        def own_part(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return self.own(tokens), self.own(targets)

        for answer, targets, places in answers(model, loader, own_part, device, self.precision, on_batch):
            logs = answer.float().log_softmax(-1)
            own = logs.gather(-1, targets[..., None])
            start, _ = shards.place(targets.shape[1])
            here = slice(start, start + targets.shape[1])
            nats[places, here] = -own[..., 0]
            rank[places, here] = (logs > own).sum(-1).to(rank.dtype)
        for found in (nats, rank):
            team.sum(found)
        return TokenScores(nats.cpu(), rank.to(torch.int32).cpu(), torch.tensor(part.bytes_per_token))


@dataclass(frozen=True)
class TokenScores(Scores):
    """Of every window and token of the test part, (N, T): -log of the probability that it was given, and how many
    others were given a higher one."""

    nats_each: Tensor
    rank: Tensor
    bytes_per_token: Tensor

    @property
    def nats(self) -> float:
        """Mean loss of a token."""
        return self.nats_each.double().mean().item()

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes_per_token.item()

    def top(self, k: int) -> float:
        """Share of the tokens that are among the k most probable ones."""
        return (self.rank < k).double().mean().item()

    @property
    def score(self) -> float:
        """Of two evaluations the better one has more: exp(-nats)."""
        return math.exp(-self.nats)

    def told(self) -> dict[str, float]:
        """What a log says of it."""
        return {"nats": self.nats, "bits_per_byte": self.bits_per_byte, "top1": self.top(1), "top5": self.top(5)}

    def shown(self) -> dict[str, str]:
        """What a progress bar says of it."""
        return {"nats": f"{self.nats:.4f}"}

    def summary(self) -> str:
        return f"{self.nats:.4f} nats a token, {self.bits_per_byte:.4f} bits a byte, top-1 {self.top(1):.2%}"

    def __len__(self) -> int:
        return self.rank.numel()


class Segmentation(Task):
    """Cross entropy of every pixel; mean intersection over union."""

    def __init__(self, recipe: TrainRecipe, source: Source) -> None:
        if recipe.augmentation != Augmentation():
            raise ValueError(f"{source.name} has a class for every pixel, and augmentation moves none: leave it out")
        self.precision, self.smoothing, self.classes = recipe.precision, recipe.label_smoothing, len(source.classes)
        self.mean, self.std = (torch.tensor(one).reshape(-1, 1, 1) * 255 for one in recipe.colours)

    def prepare(self, batch: Tensor, labels: Tensor, **drawn: Any) -> tuple[Tensor, Tensor]:
        """Scenes uint8 (b, 4, S, S), the mask behind the colours, to normalised colours and class numbers (b, S, S)."""
        self.mean, self.std = self.mean.to(batch.device), self.std.to(batch.device)
        return (batch[:, :-1] - self.mean) / self.std, batch[:, -1].long()

    def loss(self, answer: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(answer.float(), targets, label_smoothing=self.smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, loader: Any, team: Processes, on_batch: OnBatch | None = None) -> PixelScores:
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


Found = Predictions | TokenScores | PixelScores


def task_of(recipe: TrainRecipe, source: Source) -> Task:
    """What a recipe learns from that data."""
    kinds: dict[str, Callable[[TrainRecipe, Source], Task]] = {"text": Language, "scene": Segmentation}
    return kinds.get(source.kind, Classification)(recipe, source)


def load_predictions(path: str | Path) -> Found:
    """What a run said of its test part."""
    held = load_file(path)
    return (TokenScores if "rank" in held else PixelScores if "confusion" in held else Predictions).load(path)
