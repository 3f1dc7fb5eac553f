"""Texts as windows of tokens: a file or a folder of them, as characters or as bytes, in an order that the seed decides.

Shape legend: N tokens of a part, T tokens of a window (`context`), B global batch, b the share of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..models.vocabulary import Vocabulary
from .order import epoch_order, mix, rank_slice
from .part import DataError, Source

TEST_SHARE = 10  # one in so many characters, the last ones, where a text has no test part of its own
PARTS = ("validation", "val", "test")
PEOPLE = ("Ann", "Bob", "Cid", "Dora", "Eve", "Finn", "Gus", "Hana")
THINGS = ("ball", "book", "coin", "drum", "fork", "kite", "lamp", "rope")
ASIDES = ("It rains.", "The sun is out.", "A dog barks.", "All is quiet.")


class TextPart:
    """Tokens (N,) in a row; item i is the window of T + 1 of them from i T on: T inputs, and each one's next token."""

    views = 1

    def __init__(self, tokens: Tensor, context: int, size: int, title: str) -> None:
        if context < 1:
            raise DataError(f"{title}: context must be at least 1 token, got {context}")
        if len(tokens) <= context:
            raise DataError(f"{title}: {len(tokens)} tokens do not make a window of context={context} and the next one")
        self.tokens, self.context, self.title = tokens, context, title
        self.labels = tokens[1:]  # what is predicted
        self.bytes_per_token = size / len(tokens)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def name(self, index: int) -> str:
        return f"{self.title}[{index * self.context}:]"

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        return self.tokens[index * self.context :][: self.context + 1]


class TextLoader:
    """Steps through a text; arguments and order are those of `Loader`. In training each window starts up to T tokens
    later, drawn anew in each epoch, so that no token is always the first."""

    def __init__(
        self,
        part: TextPart,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.part, self.batch_size, self.seed, self.shuffle, self.drop_last = part, batch_size, seed, shuffle, drop_last
        self.rank, self.world = rank, world
        self.tokens = part.tokens.to(device)

    def __len__(self) -> int:
        """Steps per epoch."""
        return len(self.part) // self.batch_size if self.drop_last else -(-len(self.part) // self.batch_size)

    def ratios_of(self, positions: Tensor) -> None:
        """A text has no pictures that were stretched."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """From step `first_step` on: tokens (b, T), the token after each (b, T), and the number of each window (b,)."""
        T = self.part.context
        order, seeds = epoch_order(
            len(self.part), self.batch_size, seed=self.seed, epoch=epoch, shuffle=self.shuffle, repeats=1,
            drop_last=self.drop_last,
        )  # fmt: skip
        starts = order * T if seeds is None else np.minimum(order * T + seeds % T, len(self.tokens) - T - 1)
        for first in range(first_step * self.batch_size, len(order), self.batch_size):
            share = rank_slice(min(self.batch_size, len(order) - first), self.rank, self.world)
            here = slice(first + share.start, first + share.stop)
            at, places = (torch.from_numpy(x[here]).to(self.tokens.device) for x in (starts, order))
            windows = self.tokens[at[:, None] + torch.arange(T + 1, device=at.device)]
            yield windows[:, :-1], windows[:, 1:], places


def text_source(
    path: Path, *, tokens: str | None = None, context: int | None = None, test_part: str | None = None
) -> Source:
    """A text file, of which the last tenth is the test part, or a folder with such a file or with one for each part.

    `tokens` is "chars" (the default: the vocabulary is that of the text) or "bytes"; `context` the tokens of a window.
    """
    if path.is_file():
        return _split(path.name, path.read_bytes(), tokens, context)
    files = {file.stem: file for file in text_files(path)}
    named = [part for part in PARTS if part in files]
    if "train" in files and named:
        part = named[0] if test_part is None else test_part
        if part not in files:
            raise DataError(f"{path}: no file {part}.txt; test_part is one of {', '.join(named)}")
        return _source(path.name, files["train"].read_bytes(), files[part].read_bytes(), tokens, context)
    if test_part is not None:
        raise DataError(f"{path}: test_part={test_part!r} needs the files train.txt and {test_part}.txt")
    (only,) = files.values()
    return _split(path.name, only.read_bytes(), tokens, context)


def text_files(folder: Path) -> list[Path]:
    """The text files of a folder that is a text: train.txt and a test part, or a single one; else none."""
    files = sorted(file for file in folder.glob("*.txt") if file.is_file())
    names = {file.stem for file in files}
    return files if len(files) == 1 or ("train" in names and names & {*PARTS}) else []


def sentences_source(*, tokens: str | None = None, context: int | None = None) -> Source:
    """Generated stories of who has what, each with a question whose answer stands before it; no file is needed."""
    return _split("sentences", "".join(map(story, range(1200))).encode(), tokens, context)


def story(number: int) -> str:
    """The story of that number: three people, their things, an aside and a question."""

    def some(names: tuple[str, ...], salt: int) -> list[str]:
        return [names[i] for i in np.argsort(mix(number, salt, np.arange(len(names))))[:3]]

    who, what = some(PEOPLE, 1), some(THINGS, 2)
    asked = int(mix(number, 3)) % 3
    told = [f"{person} has the {thing}." for person, thing in zip(who, what, strict=True)]
    told.insert(int(mix(number, 4)) % 4, ASIDES[int(mix(number, 5)) % len(ASIDES)])
    return f"{' '.join(told)} Who has the {what[asked]}? {who[asked]}.\n"


def _split(name: str, text: bytes, tokens: str | None, context: int | None) -> Source:
    cut = len(text) - len(text) // TEST_SHARE
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # not within a character of UTF-8
        cut += 1
    return _source(name, text[:cut], text[cut:], tokens, context)


def _source(name: str, train: bytes, test: bytes, tokens: str | None, context: int | None) -> Source:
    tokens, context = tokens or "chars", 256 if context is None else context
    if tokens == "bytes":
        words, parts = Vocabulary(), [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, test)]
    else:
        try:
            texts = [text.decode() for text in (train, test)]
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not UTF-8 text ({error}); read it with tokens=bytes") from error
        words = Vocabulary.of("".join(texts), tokens)
        parts = [torch.tensor(words.encode(text), dtype=torch.int64) for text in texts]
    made = [
        TextPart(part.long(), context, len(text), f"{name} {title}")
        for part, text, title in zip(parts, (train, test), ("train", "test"), strict=True)
    ]
    return Source(name, "text", made[0], made[1], words.names)
