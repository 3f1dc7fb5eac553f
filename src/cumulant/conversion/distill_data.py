"""Training inputs for distillation. What comes at a step is a function of seed, epoch and step, of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..data.augment import Augment
from ..data.augmentation import Augmentation
from ..data.loader import Loader
from ..data.order import epoch_order, mix
from ..data.part import Source
from ..inspect.batches import Batch, to_device
from ..inspect.items import LENGTH, TEXTS, pixels_of, read_lines, source_of, tokenizer_of
from ..inspect.opening import Opened, Pixels

AUGMENT = -2  # stream of random numbers, as in training
USUAL = Augmentation(crop_scale=(0.35, 1.0), flip=0.5, randaugment_ops=2, mixup=0.2, eval_crop=1.0)


@runtime_checkable
class Batches(Protocol):
    """Steps of an epoch: the same epoch and first step give the same batches again."""

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]: ...


class Listed:
    """Batches that are kept in memory, in a new order each epoch."""

    def __init__(self, batches: Sequence[Batch], *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        if not batches:
            raise ValueError("data holds no batch")
        place = torch.device(device)
        self.batches, self.seed = [to_device(batch, place) for batch in batches], seed

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        count = len(self.batches)
        order, _ = epoch_order(count, 1, seed=self.seed, epoch=epoch, shuffle=True, repeats=1, drop_last=False)
        for index in order[first_step:]:
            yield self.batches[int(index)]


class Images:
    """The training part of a data set as a model sees it: decoded once, kept on the device, augmented anew each time.

    Labels are not used: the teacher says what is right, for mixed images too.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        seen: Pixels,
        augmentation: Augmentation = USUAL,
        seed: int = 0,
        device: torch.device | str = "cpu",
        workers: int | None = None,
    ) -> None:
        self.loader = Loader(
            source.train, batch_size, size=seen.size, seed=seed, shuffle=True, drop_last=True, device=device,
            workers=workers, progress=False, whole=augmentation.crops,
        )  # fmt: skip
        self.augment = Augment(augmentation, size=seen.size, classes=len(source.classes), mean=seen.mean, std=seen.std)
        self.seed, self.seen = seed, seen

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        start = epoch * len(self) + first_step
        for step, (pixels, labels, positions) in enumerate(self.loader.epoch(epoch, first_step), start):
            ratio = self.loader.ratios_of(positions)
            images, _ = self.augment(pixels, labels, seed=int(mix(self.seed, AUGMENT, step)), ratio=ratio)
            yield self.seen.batch(images)


def texts(tokenizer: Any, lines: Sequence[str], batch_size: int, longest: int) -> list[Batch]:
    """Texts as batches of token ids; those of like length stand together, so that little is padding."""
    ids = tokenizer(list(lines), truncation=True, max_length=longest)
    keys = [key for key in ids if isinstance(ids[key], list)]
    order = sorted(range(len(lines)), key=lambda i: (len(ids["input_ids"][i]), i))
    made = []
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        made.append(dict(tokenizer.pad({key: [ids[key][i] for i in part] for key in keys}, return_tensors="pt")))
    return made


def open_training(
    opened: Opened, data: str, batch_size: int, *, items: int = 0, seed: int = 0
) -> Batches | list[Batch]:
    """The training part of a data set as the model takes it, images augmented as they were when it was trained."""
    if Path(data).suffix in TEXTS:
        return texts(tokenizer_of(opened), read_lines(Path(data), items or None), batch_size, LENGTH)
    seen, source = pixels_of(opened), source_of(opened, data)
    augmentation = USUAL if opened.recipe is None else opened.recipe.augmentation
    size = min(batch_size, len(source.train))
    return Images(source, size, seen=seen, augmentation=augmentation, seed=seed, device=opened.device)


def as_batches(data: Any, model: nn.Module, seed: int) -> Batches:
    """What a user gave as `Batches`: it is some already, or batches in a list or iterable, or one batch."""
    if isinstance(data, Batches):
        return data
    several = data if isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping | tuple) else [data]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return Listed(list(several), seed=seed, device=device)
