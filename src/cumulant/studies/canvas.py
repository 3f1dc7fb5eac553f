"""Handwritten digits somewhere on an empty canvas: small enough for a laptop, and no place tells the class alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.data import digits_source

SIDE = 10  # of the canvas; digits have 8 x 8 pixels


@dataclass(frozen=True)
class Settings:
    """Of a small transformer that learns them, and of the mechanisms and seeds of a study that compares some."""

    width: int = 32
    heads: int = 4
    depth: int = 4
    patch: int = 2
    steps: int = 600
    batch: int = 32
    lr: float = 0.003
    attention: tuple[str, ...] = ("linear", "cumulant2", "cumulant3", "cluster4")
    seeds: int = 3


@lru_cache(1)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (B, 1, 8, 8) from 0 to 1 with their labels, and those for tests."""
    source: Any = digits_source()
    train, test = ((part.images[:, :1] / 255.0, part.labels) for part in (source.train, source.test))
    return *train, *test


def placed(images: Tensor, generator: torch.Generator, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Each image at a random place on its canvas, (B, 1, side, side), and where: rows and columns (B, 2)."""
    room = side - images.shape[-1] + 1
    places = torch.randint(room, (len(images), 2), generator=generator)
    canvas = F.pad(images, (0, side - images.shape[-1]) * 2)
    rows, columns = ((torch.arange(side)[None] - places[:, i, None]) % side for i in (0, 1))
    moved = canvas[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None]]
    return moved[:, None], places


def fit(model: nn.Module, steps: int, batch: int, lr: float, seed: int, device: str) -> nn.Module:
    """Train on fresh places of random digits: AdamW, warm-up over a tenth of the steps, then a cosine to 0."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits()[:2]
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, fused=True)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimiser,
        [torch.optim.lr_scheduler.LinearLR(optimiser, 0.05, total_iters=warm),
         torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps - warm))],
        [warm],
    )  # fmt: skip
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        shown, _ = placed(images[chosen], generator)
        loss = F.cross_entropy(model(shown.to(device)), labels[chosen].to(device))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


def examination(repeats: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """All test digits at `repeats` places each, the same for everyone: canvases, labels, places."""
    images, labels = digits()[2:]
    shown, places = placed(images.repeat(repeats, 1, 1, 1), torch.Generator().manual_seed(4321))
    return shown, labels.repeat(repeats), places


@torch.no_grad()
def accuracy(model: nn.Module, device: str) -> float:
    """Share of the examination that is recognised."""
    shown, labels, _ = examination()
    right = sum(
        int((model(part.to(device)).argmax(-1).cpu() == truth).sum())
        for part, truth in zip(shown.split(360), labels.split(360), strict=True)
    )
    return right / len(labels)
