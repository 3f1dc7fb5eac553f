"""Evaluation of a classifier: probabilities of every test item, and all that is counted from them.

Shape legend: N items, K classes, b items of one batch in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..data.augment import Augment
from ..data.jobs import telling_of_killed_workers
from ..data.loader import Loader
from ..data.part import Source, shorten
from .build import augment_of, loader_of, open_recipe_source
from .checkpoint import load, read_header, weights_file
from .files import write_atomically
from .processes import Processes, processes
from .progress import Bar
from .recipe_files import from_json


@dataclass(frozen=True)
class Predictions:
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

    def confusion(self) -> Tensor:
        """Counts (K, K): row the label, column the prediction."""
        count = self.probabilities.shape[-1]
        return torch.bincount(self.labels * count + self.classes, minlength=count * count).reshape(count, count)

    def per_class(self) -> Tensor:
        """Share of the items of every class that are predicted as such, (K,); NaN for a class without items."""
        table = self.confusion()
        return table.diagonal() / table.sum(1)

    def save(self, path: str | Path) -> None:
        """Write everything as safetensors."""
        content = {"probabilities": self.probabilities, "labels": self.labels, "positions": self.positions}
        write_atomically(Path(path), to_bytes({key: value.contiguous() for key, value in content.items()}))

    @staticmethod
    def load(path: str | Path) -> Predictions:
        """What `save` wrote."""
        return Predictions(**load_file(path))


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
    `on_batch` hears how many items were done. Nothing waits for the device before the end.
    """
    part = loader.part
    device = team.device if team else next(model.parameters()).device
    total = torch.zeros(len(part) // part.views, classes, device=device)
    seen = torch.zeros(len(total), device=device)
    was_training = model.training
    model.eval()
    try:
        for pixels, _, positions in loader.epoch(0):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(normalise.evaluate(pixels))
            rows = positions.to(device) // part.views
            total.index_add_(0, rows, logits.float().softmax(-1))
            seen.index_add_(0, rows, torch.ones_like(rows, dtype=seen.dtype))
            if on_batch is not None:
                on_batch(len(pixels))
    finally:
        model.train(was_training)
    if team is not None:
        team.sum(total)
        team.sum(seen)
    done = seen.cpu().nonzero().flatten()
    if not len(done):
        raise ValueError("the test part must not be empty, got 0 items that can be decoded")
    return Predictions((total / seen.clamp(min=1)[:, None]).cpu()[done], part.labels[:: part.views][done], done)


def evaluate_checkpoint(
    checkpoint: str | Path,
    data: str | None = None,
    *,
    source: Source | None = None,
    data_options: Mapping[str, Any] | None = None,
    views: int | None = None,
    crops: int | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    device: torch.device | str | None = None,
    progress: IO[str] | None = None,
) -> tuple[Predictions, tuple[str, ...]]:
    """Predictions of saved weights for the test part of `data` (by default that of the recipe), and the class names.

    `checkpoint` is a file that `train` wrote, or its folder (then last.safetensors), or a folder with what
    `cumulant.convert` made of one. Image size, precision and the way of reading are those of the recipe in the file;
    `data_options` are added to the latter.
    """
    path = weights_file(checkpoint)
    header = read_header(path)
    if "recipe" not in header:
        raise ValueError(f"{path} has no recipe inside: it must come from `cumulant train`")
    recipe, names = from_json(header["recipe"]), tuple(json.loads(header["classes"]))
    given = {"views": views, "crops": crops, "batch_size": batch_size}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    recipe = replace(recipe, workers=workers, accumulate=1, compile=False, **changes)
    recipe = recipe.merged(replace(recipe, data_options=dict(data_options or {})))
    source = source or open_recipe_source(recipe, data)
    check_classes(path, names, source)
    with processes(device) as team, telling_of_killed_workers():
        screen = progress if team.first else None
        loader = loader_of(recipe, source, "test", team, screen)
        with Bar(screen, len(source.test), 0, 1) as bar:
            found = predict(
                load(checkpoint, device=team.device),
                loader,
                augment_of(recipe, len(names)),
                classes=len(names),
                team=team,
                precision=recipe.precision,
                on_batch=lambda items: bar.update(items * team.world),
            )
    return found, names


def check_classes(path: Path, trained: tuple[str, ...], source: Source) -> None:
    """Refuse data whose labels mean something else than they did in training; the first that differ are named."""
    if source.classes == trained:
        return
    pairs = zip_longest(trained, source.classes)
    first = next(number for number, (known, found) in enumerate(pairs) if known != found)
    known, found = (shorten(classes[first:], 3) or "none" for classes in (trained, source.classes))
    raise ValueError(
        f"{path} was trained for {len(trained)} classes, but {source.name} has {len(source.classes)}, other ones from "
        f"number {first + 1} on: {found} in place of {known}"
    )
