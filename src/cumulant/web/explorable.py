"""Models with all that is needed to show them a picture or a clip, and the pictures offered on the page.

Shape legend: C channels, T frames, S side of the model's images.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.decode import IMAGE_SUFFIXES, fit, pillow_image, to_tensor
from ..data.video import CONTAINERS
from .footage import evenly
from .limits import Limits
from .problems import UploadError
from .uploads import read_upload

if TYPE_CHECKING:
    from PIL.Image import Image

    from .photographs import Painter


def frames_of(shown: Image | Sequence[Image]) -> tuple[Image, ...]:
    """A picture as a clip of one frame; the frames of a clip as they are."""
    return tuple(shown) if isinstance(shown, Sequence) else (shown,)


@dataclass(frozen=True)
class Explorable:
    """A model of images or clips and its preprocessing: centre square, S x S, (pixel - mean) / std per channel."""

    model: nn.Module
    classes: tuple[str, ...]
    """Names of the classes; none for a model without a classifier."""
    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    accuracy: float | None = None
    """Top-1 of the test part, where it is known."""
    title: str = ""
    """What the model is, in a few words."""
    frames: int | None = None
    """Frames of a clip, for a model of videos."""
    time_first: bool = False
    """Whether clips are (1, T, C, S, S), as in transformers, and not (1, C, T, S, S)."""
    collection: str = ""
    """Which examples are made for it; "" where all are for all."""
    painter: Painter | None = field(default=None, repr=False)
    """What makes pixels of the model's tokens, of one that paints hidden patches."""

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"mean and std must have 1 or 3 channels each, got {self.mean} and {self.std}")
        self.model.eval().requires_grad_(False)
        for module in self.model.modules():
            if hasattr(module, "sparse"):  # rows and tokens that are left out have maps too; the answer is the same
                setattr(module, "sparse", False)  # noqa: B010  # not a parameter

    def seen(self, shown: Image | Sequence[Image]) -> tuple[Image, ...]:
        """The frames as the model sees them: S x S, grey for a model of one channel; T of them spread evenly over the
        clip (a picture that stands still is repeated), or the first for a model of pictures."""
        frames = frames_of(shown)
        chosen = frames[:1] if self.frames is None else evenly(frames, self.frames)
        mode = "RGB" if len(self.mean) == 3 else "L"
        squares = {id(frame): fit(frame, self.size).convert(mode) for frame in chosen}
        return tuple(squares[id(frame)] for frame in chosen)

    def images(self, shown: Image | Sequence[Image]) -> Tensor:
        """The model's input: (1, C, S, S) of a picture, (1, C, T, S, S) or (1, T, C, S, S) of a clip."""
        frames = [to_tensor(frame.convert("RGB"))[: len(self.mean)] for frame in self.seen(shown)]
        mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (self.mean, self.std))
        clip = (torch.stack(frames, 1).float() / 255 - mean) / std
        if self.frames is None:
            clip = clip[:, 0]
        elif self.time_first:
            clip = clip.transpose(0, 1)
        return clip.unsqueeze(0).to(next(self.model.parameters()))

    def blank(self) -> Tensor:
        """An input of grey, to ask the model how its tokens lie."""
        return self.images(pillow_image().new("RGB", (self.size, self.size), "grey"))


@dataclass(frozen=True)
class Example:
    """A picture, or the frames of a clip, offered on the page."""

    picture: Image | tuple[Image, ...] = field(repr=False)
    label: str = ""
    collection: str = ""


def _shown(files: Sequence[Path]) -> Iterator[Example]:
    """The files that can be shown; the others are named in a warning."""
    for file in files:
        try:
            yield Example(read_upload(file.read_bytes(), Limits()), file.stem)
        except UploadError as error:
            warnings.warn(f"{file} is left out: {error}", stacklevel=2)


def examples_of(data: str, count: int, size: int, **options: Any) -> list[Example]:
    """Pictures and short videos of a folder, or test items of a data set, spread over its classes; the digits at
    their own 8 x 8. `options` go to `cumulant.data.open_source`."""
    from ..data import open_source
    from ..data.part import DecodeError

    folder, known = Path(data), {*IMAGE_SUFFIXES, *CONTAINERS["mp4"], *CONTAINERS["matroska"]}
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in known) if folder.is_dir() else []
    if files:
        return list(islice(_shown(files), count))

    source = open_source(data, **options)
    size = 8 if data == "digits" else size
    pillow, examples = pillow_image(), []
    classes = len(source.classes)
    for turn in range(count):
        label = turn * classes // count if count < classes else turn % classes
        places = (source.test.labels == label).nonzero().flatten()
        if not len(places):
            continue
        try:
            pixels = source.test.decode(int(places[(turn // classes) % len(places)]), size)
        except DecodeError:
            continue
        frames = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels  # (3, T, size, size)
        pictures = [pillow.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames.unbind(1)]
        examples.append(Example(tuple(pictures), source.classes[label]))
    return examples
