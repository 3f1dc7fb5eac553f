"""What a data set holds, wherever it lies: counts, classes and a digest that a second look can be compared with.

A digest takes in all labels and names but only some of the bytes, so that it is quick for a set of any size: it tells
items that were added, removed, renamed, relabelled or replaced, not a single pixel that was changed in place.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .part import shorten, spread

if TYPE_CHECKING:
    from .part import Source

SCHEME = 1  # of the digest: those of different schemes cannot be compared
ENTRIES = {"kind", "classes", "train", "test", "digest"}  # of an identity, beside its scheme
SIZED_FILES = 100_000  # of so many files the size is asked for
SAMPLES = 32  # of so many files or rows the beginning is read
BLOCK = 1 << 16
TENSOR_BYTES = 1 << 26


def identify(source: Source) -> dict[str, Any]:
    """Kind, classes, items per class of both parts, and a digest; plain values for JSON."""
    digest = hashlib.sha256()
    found: dict[str, Any] = {"scheme": SCHEME, "kind": source.kind, "classes": list(source.classes)}
    _add(digest, [source.kind.encode(), *(name.encode(errors="surrogateescape") for name in source.classes)])
    for name, part in (("train", source.train), ("test", source.test)):
        labels = part.labels[:: part.views].cpu()
        found[name] = torch.bincount(labels, minlength=len(source.classes)).tolist()
        contents = getattr(part, "contents", tuple)  # a part of one's own is known by its labels
        _add(digest, [labels.numpy().tobytes(), *contents()])
    return {**found, "digest": digest.hexdigest()[:16]}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What became another between two identities, in words; empty for the same data."""
    if old.get("scheme") == new["scheme"] and old["digest"] == new["digest"]:
        return []
    told = [f"kind: {old['kind']} -> {new['kind']}"] if old["kind"] != new["kind"] else []
    names, now = old["classes"], new["classes"]
    if names != now:
        gone, added = ([name for name in a if name not in set(b)] for a, b in ((names, now), (now, names)))
        what = [f"{word} {shorten(some)}" for word, some in (("without", gone), ("with", added)) if some]
        told.append(f"classes: {len(names)} -> {len(now)}, {', '.join(what) or 'in another order'}")
    for part in ("train", "test"):
        before, after = (dict(zip(one["classes"], one[part], strict=True)) for one in (old, new))
        moved = [f"{name} {before.get(name, 0)} -> {after.get(name, 0)}"
                 for name in before | after if before.get(name, 0) != after.get(name, 0)]  # fmt: skip
        if moved:
            total = f"{sum(before.values()):,} -> {sum(after.values()):,}"
            told.append(f"{part} items: {total} ({shorten(moved)})")
    if not told and old.get("scheme") == new["scheme"]:
        told.append("as many items of every class as before, but other names, sizes or contents")
    return told


def file_contents(folder: Path, files: Sequence[str]) -> Iterator[bytes]:
    """All names, the sizes of up to `SIZED_FILES` files, the beginnings of a few: what tells files in folders apart."""
    yield "\n".join(files).replace(os.sep, "/").encode(errors="surrogateescape")
    yield repr([_size(folder / files[i]) for i in spread(len(files), SIZED_FILES)]).encode()
    for i in spread(len(files), SAMPLES):
        yield beginning(folder / files[i])


def beginning(file: Path) -> bytes:
    """The first bytes of a file; none of one that is missing or no plain file, which could keep its reader waiting."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return b""
        with file.open("rb") as content:
            return content.read(BLOCK)
    except OSError:
        return b""


def tensor_contents(items: Sequence[Tensor] | Tensor) -> Iterator[bytes]:
    """Shapes, and the bytes of as many items, spread evenly, as make up about `TENSOR_BYTES`."""
    yield repr(items.shape if isinstance(items, Tensor) else [item.shape for item in items]).encode()
    size = items[0].nbytes if len(items) else 0
    for i in spread(len(items), max(1, TENSOR_BYTES // max(size, 1))):
        yield items[i].cpu().contiguous().numpy().tobytes()


def _size(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return -1


def _add(digest: Any, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece)
