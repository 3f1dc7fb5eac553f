"""Evaluation of saved weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import torch

from ..data.jobs import telling_of_killed_workers
from ..data.part import Source, shorten
from .build import loader_of, open_recipe_source
from .checkpoint import load, read_header, weights_file
from .processes import processes
from .progress import Bar
from .recipe_files import from_json
from .tasks import task_of


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
) -> tuple[Any, tuple[str, ...]]:
    """What saved weights say of the test part of `data` (by default that of the recipe), and the class names.

    `Predictions` of classes, `TokenScores` of a text, whose classes are the symbols of its vocabulary.

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
        loader = loader_of(recipe, source.test, team, screen)
        with Bar(screen, len(source.test), 0, 1) as bar:
            model = load(checkpoint, device=team.device)
            found = task_of(recipe, source).evaluate(
                model, loader, team, on_batch=lambda items: bar.update(items * team.world)
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
