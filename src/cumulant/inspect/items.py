"""A few items of a data set as an opened model takes them."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import open_source
from ..data.augment import Augment
from ..data.augmentation import Augmentation
from ..data.decode import IMAGE_SUFFIXES, decode_image
from ..data.part import DataError, DecodeError, Source, shorten
from ..train.build import augment_of, open_recipe_source
from .batches import Batch
from .examples import expected_input
from .opening import Opened, Pixels

LENGTH = 256  # tokens of a text, at most
TEXTS = (".txt", ".parquet")
EXAMPLES = 4  # texts of an example, at most


class Items(NamedTuple):
    """Normalised images (N, 3, H, W) or clips (N, 3, T, H, W), their labels (N,), and where they come from."""

    pixels: Tensor
    labels: Tensor
    source: Source


def labelled_items(opened: Opened, data: str | None = None, count: int = 32) -> Items:
    """`count` labelled test items, prepared as in evaluation, of `data` or of what the model's recipe names.

    They are evenly spaced: the items of a folder may stand class by class.
    """
    if count < 1:
        raise ValueError(f"images must be 1 or more, got {count}")
    source = source_of(opened, data)
    seen, recipe = pixels_of(opened), opened.recipe
    size = seen.size if recipe is None else recipe.loaded_size
    augment = augmented(opened, Augmentation(), source) if recipe is None else augment_of(recipe, len(source.classes))
    chosen, items, bad = [], [], []
    for index in torch.linspace(0, len(source.test) - 1, min(count, len(source.test))).long().tolist():
        try:
            items.append(source.test.decode(index, size))
            chosen.append(index)
        except DecodeError as error:
            bad.append(f"{error.name} ({error.why})")
    if not items:
        raise DataError(f"none of the {len(bad)} test items that were looked at can be decoded: {shorten(bad)}")
    if bad:
        warnings.warn(f"{len(bad)} test items cannot be decoded, left out: {shorten(bad)}", stacklevel=2)
    return Items(augment.evaluate(torch.stack(items)), source.test.labels[chosen], source)


def source_of(opened: Opened, data: str | None) -> Source:
    """A data set read as the model takes it: as in its recipe, where it has one."""
    if opened.recipe is not None:
        return open_recipe_source(opened.recipe, data)
    if data is None:
        raise ValueError(f"{opened.place} has no recipe inside, so its data is not known: name the data")
    return open_source(data, frames=pixels_of(opened).frames or 16)


def pixels_of(opened: Opened) -> Pixels:
    """How the model sees pixels; an error for one that takes none."""
    if opened.pixels is None:
        takes = expected_input(opened.model)
        if takes is None:
            raise ValueError(f"cannot tell what {opened.place} takes: pass --example FILE in place of data")
        if isinstance(takes, Tensor):
            raise ValueError(f"{opened.place} takes {tuple(takes.shape[1:])}; data is read as square images and clips")
        raise ValueError(
            f"{opened.place} takes {', '.join(takes)} and no pixels: data must be a {' or '.join(TEXTS)} file"
        )
    return opened.pixels


def augmented(opened: Opened, settings: Augmentation, source: Source) -> Augment:
    """Augmentation, or for evaluation none, to what the model takes, before `Pixels.batch`."""
    seen = pixels_of(opened)
    return Augment(settings, size=seen.size, classes=len(source.classes), mean=seen.mean, std=seen.std)


def open_batches(opened: Opened, data: str | None, batches: int, batch_size: int) -> list[Batch]:
    """A few batches as the model takes them: the first texts of a file, or items spread evenly over the test part."""
    if data is not None and Path(data).suffix in TEXTS:
        tokenizer, lines = tokenizer_of(opened), read_lines(Path(data), batches * batch_size)
        if not lines:
            raise ValueError(f"{data} holds no text: expected one text a line")
        how: dict[str, Any] = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        return [dict(tokenizer(lines[at : at + batch_size], **how)) for at in range(0, len(lines), batch_size)]
    items = labelled_items(opened, data, batches * batch_size).pixels.to(example_dtype(opened))
    return [pixels_of(opened).batch(part) for part in items.split(batch_size)]


def open_example(opened: Opened, file: str | Path) -> Batch:
    """One batch from a file: an image; a .txt of texts; a .npy array; a .npz of arrays, each under the name of the
    argument that it is for, as numpy.savez(file, input_ids=...) writes it."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no example {str(path)!r}: expected an image, or a .txt, .npy or .npz file")
    if path.suffix in (".npy", ".npz"):
        return _arrays(path, opened)
    if path.suffix == ".txt":
        return open_batches(opened, str(path), 1, EXAMPLES)[0]
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(f"example must be an image, or a .txt, .npy or .npz file, got {path.name}")
    seen = pixels_of(opened)
    image = decode_image(path, seen.size, path.name)[None] / 255
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (seen.mean, seen.std))
    image = ((image - mean) / std).to(example_dtype(opened))
    return seen.batch(image if seen.frames is None else image[:, :, None].expand(-1, -1, seen.frames, -1, -1))


def _arrays(path: Path, opened: Opened) -> Batch:
    import numpy as np

    def tensor(array: Any) -> Tensor:
        made = torch.from_numpy(np.array(array))
        return made.to(example_dtype(opened)) if made.is_floating_point() else made

    try:
        stored = np.load(path, allow_pickle=False)
        if path.suffix == ".npy":
            return tensor(stored)
        with stored:
            made = {name: tensor(stored[name]) for name in stored.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} cannot be read as arrays of numbers: {error}") from error
    unnamed = all(name.startswith("arr_") for name in made)
    return tuple(made[f"arr_{i}"] for i in range(len(made))) if unnamed else made


def example_dtype(opened: Opened) -> torch.dtype:
    """In which precision the model takes pixels: that of its weights."""
    return next((p.dtype for p in opened.model.parameters() if p.is_floating_point()), torch.float32)


def read_lines(path: Path, count: int | None) -> list[str]:
    """The first texts of a file."""
    if path.suffix == ".txt":
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        return [line for line in lines if line][:count]
    import pyarrow.parquet as pq

    return pq.read_table(path, columns=["text"]).column("text").slice(0, count).to_pylist()


def tokenizer_of(opened: Opened) -> Any:
    """The tokenizer beside a model of transformers."""
    takes = expected_input(opened.model)
    if opened.pixels is not None and not (isinstance(takes, dict) and "input_ids" in takes):
        raise ValueError(f"{opened.place} takes pixels and no texts: data must be a data set or a folder of images")
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(opened.place)
    if len(found) <= len(found.all_special_tokens):
        # transformers makes an empty one where the folder has none, and every word would be unknown.
        where = f"{opened.place} has no tokenizer, which texts need"
        raise ValueError(f"{where}: save it there with tokenizer.save_pretrained")
    return found
