"""Tar shards in the layout of WebDataset, read at random: an index says where each member lies.

A sample is all members with one name up to its first dot: 000.jpg and 000.cls, or 000.json with the label inside.
N: samples of a part.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .clips import ClipPart, ClipSampling
from .decode import IMAGE_SUFFIXES
from .identity import file_contents
from .images import Images
from .part import DataError, DecodeError, Part, Source, shorten
from .rows import cache_folder
from .tables import named_shards, numbered_labels, pick_parts
from .video import VIDEO_SUFFIXES, EncodedVideos

LABEL_MEMBERS = ("cls", "json", "txt")
LABEL_KEYS = ("label", "cls", "class", "fine_label")
KEPT_SAMPLES = 1000  # from here on the index of a shard is kept in the cache


class Member(NamedTuple):
    """Where the bytes of a member begin in its tar, and how many there are."""

    offset: int
    size: int


class Samples(NamedTuple):
    """The samples of a shard: names, label as written, suffix and place of the picture or video."""

    keys: list[str]
    labels: list[str]
    suffixes: list[str]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


def find_tars(folder: Path) -> dict[str, list[Path]]:
    """Part name -> tar files: train-*.tar, set-train-*.tar or train/*.tar, and so on, in the folder or its data/."""
    return named_shards(
        folder, "*.tar*", lambda part, file: re.search(rf"(^|[-_.]){part}([-_.]|$)", file.name.split(".tar")[0])
    )


def tar_source(
    name: str,
    shards: Mapping[str, list[Path]],
    sampling: ClipSampling,
    *,
    test_part: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: Sequence[str] | None = None,
) -> Source:
    """Two parts out of named shards. `image_column`, `label_column`: the member that holds the picture and the label
    (its name after the first dot), or for the label the key in a .json."""
    from tqdm import tqdm

    read: dict[str, list[Samples]] = {}
    chosen = pick_parts(name, shards, test_part)
    total = sum(len(shards[part]) for part in chosen)
    with tqdm(total=total, desc="indexing shards", unit=" tars", delay=2, disable=None) as bar:
        for part in chosen:
            read[part] = []
            for file in shards[part]:
                read[part].append(shard_samples(file, image_column, label_column))
                bar.update()
    texts = [[label for one in read[part] for label in one.labels] for part in chosen]
    every = [label for labels in texts for label in labels]
    whole = bool(every) and all(re.fullmatch(r"-?\d+", label) for label in every)
    given: list[list[Any]] = [[int(label) for label in labels] if whole else labels for labels in texts]
    labels, classes = numbered_labels(name, given[0], given[1], class_names)
    suffixes = {suffix for part in chosen for one in read[part] for suffix in one.suffixes}
    kinds = {suffix in VIDEO_SUFFIXES for suffix in suffixes}
    if len(kinds) > 1:
        raise DataError(f"{name}: images and videos in one set of shards ({shorten(sorted(suffixes))})")

    def made(part: str, chosen: NDArray[np.int64], training: bool) -> Part:
        items, numbers = Members(shards[part], read[part]), torch.from_numpy(chosen)
        if kinds == {True}:
            return ClipPart(EncodedVideos(items, numbers), sampling, jitter=training)
        return Images(items, numbers)

    first = len(given[0])
    parts = made(chosen[0], labels[:first], True), made(chosen[1], labels[first:], False)
    return Source(name, "video" if kinds == {True} else "image", *parts, classes)


class Members:
    """Items that are members of tars, one shard after the other; `shard_of` (N,) is the number of each one's shard."""

    def __init__(self, files: Sequence[Path], samples: Sequence[Samples]) -> None:
        self.files, self.keys = list(files), [key for one in samples for key in one.keys]
        self.shard_of = np.repeat(np.arange(len(samples)), [len(one.keys) for one in samples])
        self.offsets, self.sizes = (np.concatenate([getattr(s, k) for s in samples]) for k in ("offsets", "sizes"))
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # another process opens the files itself

    def __del__(self) -> None:
        for handle in getattr(self, "_open", {}).values():
            os.close(handle)

    def name(self, index: int) -> str:
        return f"{self.files[self.shard_of[index]].name}/{self.keys[index]}"

    def encoded(self, index: int) -> bytes:
        shard, size = int(self.shard_of[index]), int(self.sizes[index])
        try:
            if shard not in self._open:
                self._open[shard] = os.open(self.files[shard], os.O_RDONLY | getattr(os, "O_BINARY", 0))
            content = read_at(self._open[shard], Member(int(self.offsets[index]), size))
        except OSError as error:
            raise DecodeError.of(self.name(index), error) from error
        if len(content) < size:
            raise DecodeError(
                self.name(index), f"only {len(content)} of {size} bytes are there: the shard is cut short"
            )
        return content

    def contents(self) -> Iterable[bytes]:
        yield from file_contents(self.files[0].parent, [file.name for file in self.files])
        yield "\n".join(self.keys).encode(errors="surrogateescape")
        yield self.sizes.tobytes()


def read_at(handle: int, member: Member) -> bytes:
    """The bytes of a member; threads and forked processes may share the handle."""
    if hasattr(os, "pread"):
        return os.pread(handle, member.size, member.offset)
    with os.fdopen(os.dup(handle), "rb") as file:
        file.seek(member.offset)
        return file.read(member.size)


def shard_samples(file: Path, image: str | None, label: str | None) -> Samples:
    """The samples of a shard, from the cache where they were read before."""
    status = file.stat()
    key = f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}:{image}:{label}"
    kept = cache_folder() / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    if kept.is_file():
        with np.load(kept) as known:
            lists = (known[name].tolist() for name in Samples._fields[:3])
            return Samples(*lists, *(known[name] for name in Samples._fields[3:]))
    samples = read_samples(file, image, label)
    if len(samples.keys) >= KEPT_SAMPLES:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}.partial.npz")
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in samples._asdict().items()}
        np.savez(partial, **arrays)
        partial.replace(kept)
    return samples


def read_samples(file: Path, image: str | None, label: str | None) -> Samples:
    """The samples of a shard, by its headers; of its contents only the labels are read."""
    groups: dict[str, dict[str, Member]] = {}
    if not file.name.endswith(".tar"):
        raise DataError(f"{file}: compressed tars have no random access; unpack it to {file.name.split('.tar')[0]}.tar")
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if member.isfile() and stem and extension and not stem.startswith("__"):
                    key = f"{folder}/{stem}" if folder else stem
                    groups.setdefault(key, {})[extension.lower()] = Member(member.offset_data, member.size)
            size = file.stat().st_size
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{file}: not an uncompressed tar, or cut short: {error}") from error
    if not groups:
        raise DataError(f"{file}: no samples; expected members like 000.jpg and 000.cls")
    if max(member.offset + member.size for members in groups.values() for member in members.values()) > size:
        raise DataError(f"{file}: cut short: its last member ends behind the end of the file")
    samples = Samples([], [], [], np.empty(0, np.int64), np.empty(0, np.int64))
    places = []
    with file.open("rb") as content:
        for key, members in groups.items():
            chosen = picture_of(file, key, members, image)
            samples.keys.append(key)
            samples.suffixes.append("." + chosen.rpartition(".")[2])
            samples.labels.append(label_of(file, key, members, content.fileno(), label))
            places.append(members[chosen])
    offsets, sizes = np.asarray(places, dtype=np.int64).T
    return samples._replace(offsets=offsets.copy(), sizes=sizes.copy())


def picture_of(file: Path, key: str, members: Mapping[str, Member], wanted: str | None) -> str:
    """The member of a sample that is its picture or video."""
    kinds = IMAGE_SUFFIXES | VIDEO_SUFFIXES
    found = [name for name in members if (name == wanted if wanted else "." + name.rpartition(".")[2] in kinds)]
    if len(found) == 1:
        return found[0]
    there = f"sample {key!r} has {shorten(sorted(members))}"
    if found:
        raise DataError(f"{file}: {there}: several pictures; choose one with image_column={found[0]!r}")
    raise DataError(f"{file}: {there}, and no {wanted or 'picture or video, like jpg, png, webp or mp4'}")


def label_of(file: Path, key: str, members: Mapping[str, Member], handle: int, wanted: str | None) -> str:
    """The label of a sample as it is written: in .cls, under a key of .json, or in .txt."""
    accepted = LABEL_MEMBERS if wanted is None or wanted not in members else (wanted,)
    where = f"{file}: sample {key!r}"
    for name in accepted:
        if name not in members:
            continue
        text = read_at(handle, members[name]).decode(errors="replace").strip()
        if name.rpartition(".")[2] != "json":
            if wanted is not None and name != wanted:
                continue
            return text
        try:
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"{where}: its .{name} is damaged: {error}") from error
        keys = LABEL_KEYS if wanted is None or wanted == name else (wanted,)
        found = next((values[one] for one in keys if isinstance(values, dict) and one in values), None)
        if isinstance(found, int | str) and not isinstance(found, bool):
            return str(found)
    expected = wanted or "a .cls, a .txt, or a .json with one of " + ", ".join(LABEL_KEYS)
    raise DataError(f"{where} has no label: expected {expected}, found {shorten(sorted(members))}")
