"""What every reader hands over: a `Source` of two `Part`s, checked so that training cannot fail late on bad labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

GROUP_IN_NAME = re.compile(r"_g(\d+)_c\d+")
"""UCF-101: clips of one group come from one video."""


class DataError(ValueError):
    """A data set that cannot be used as it is: the message names the file or folder and what was expected."""


class DecodeError(ValueError):
    """One image or clip that cannot be decoded: `name` of the item and `why`."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(name, why)  # both as arguments, so that it survives pickling between processes
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"

    @classmethod
    def of(cls, name: str, error: Exception) -> DecodeError:
        """What a codec said of the item, without the file name and the number of the error that some add."""
        return cls(name, f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}")


@runtime_checkable
class Part(Protocol):
    """The training or the test part of a data set. Picklable; files are opened in the process that decodes.

    `labels` (N,) int64. `views` items in a row show the same image or video (1 but for multi-view evaluation).
    """

    labels: Tensor
    views: int

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """File name, or parquet file and row: what an error shows."""
        ...

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        """uint8 image (3, size, size) or clip (3, T, size, size); raises DecodeError.

        `seed` chooses where a training clip starts (None: in the middle); images do not depend on it. A part may have
        `decode_whole` with the same arguments: the whole picture stretched to the square, and its width / height.
        """
        ...


@dataclass(frozen=True)
class Source:
    """A data set: two parts with the same classes. Label i means `classes[i]`."""

    name: str
    kind: Literal["image", "video", "text", "scene"]
    train: Part
    test: Part
    classes: tuple[str, ...]
    known: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    """Its identity where that is known already: of what was decoded from files, that of the files."""

    def __post_init__(self) -> None:
        if self.kind not in ("text", "scene"):  # there classes are of symbols or pixels: a part need not have all
            check_labels(self.name, self.train.labels, self.test.labels, self.classes)

    def identity(self) -> Mapping[str, Any]:
        """What it holds, wherever it lies: kind, classes, items per class and a short "digest" of its contents."""
        if self.known is None:
            from .identity import identify

            object.__setattr__(self, "known", identify(self))
        assert self.known is not None
        return self.known

    def __repr__(self) -> str:
        counts = f"{len(self.train):,} train, {len(self.test) // self.test.views:,} test"
        counts += f" in {self.test.views} views each" if self.test.views > 1 else ""
        return f"Source({self.name!r}, {self.kind}s, {len(self.classes)} classes, {counts})"

    def __str__(self) -> str:
        if self.kind == "text":
            count = f"{len(self.train.labels):,} train and {len(self.test.labels):,} test tokens"
            return f"{self.name}: {count} of {len(self.classes)} kinds"
        tested = len(self.test) // self.test.views
        return f"{self.name}: {len(self.train):,} train and {tested:,} test {self.kind}s of {len(self.classes)} classes"

    def untested(self) -> list[str]:
        """Classes without items in the test part."""
        count = torch.bincount(self.test.labels, minlength=len(self.classes))
        return [self.classes[label] for label in (count == 0).nonzero().flatten().tolist()]


def check_labels(name: str, train: Tensor, test: Tensor, classes: tuple[str, ...]) -> None:
    """Every class has training items, and the test part has no others."""
    for part, labels in (("train", train), ("test", test)):
        if not len(labels):
            raise DataError(f"{name}: the {part} part is empty")
        if labels.min() < 0:
            raise DataError(
                f"{name}: the {part} part has label {int(labels.min())}: unlabelled items cannot be used "
                "(choose another part with test_part=)"
            )
    if train.max() >= len(classes):
        raise DataError(f"{name}: train label {int(train.max())}, but only {len(classes)} classes are named")
    count = torch.bincount(train, minlength=len(classes))
    unknown = sorted({int(label) for label in test.unique() if label >= len(count) or not count[label]})
    if unknown:
        shown = shorten(classes[label] if label < len(classes) else str(label) for label in unknown)
        raise DataError(f"{name}: unknown class in the test part, without training items: {shown}")
    empty = [classes[label] for label in (count == 0).nonzero().flatten().tolist()]
    if empty:
        raise DataError(f"{name}: empty class, no training items: {shorten(empty)}")


def check_groups(name: str, train: Iterable[tuple[int, int]], test: Iterable[tuple[int, int]]) -> None:
    """Clips of one group (class, group) come from one video: a group on both sides would leak the answer."""
    mixed = sorted(set(train) & set(test))
    if mixed:
        shown = shorten(f"class {label} g{group:02d}" for label, group in mixed)
        raise DataError(f"{name}: mixed groups, clips of the same video in train and test: {shown}")


def shorten(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, and how many more there are; between them semicolons where a name has a comma of its own."""
    every = list(names)
    shown = every[:limit]
    more = [f"and {len(every) - limit} more"] if len(every) > limit else []
    if any("," in name for name in shown):
        return "; ".join([*shown, *more])
    return " ".join([", ".join(shown), *more])


def spread(count: int, most: int) -> list[int]:
    """At most `most` places, evenly from the first of `count` to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist() if count else []
