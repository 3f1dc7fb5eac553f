"""Files that are whole or not there, room on the disk before it is needed, and one trainer to a folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


def read_json(path: Path) -> dict[str, Any]:
    """The table that a JSON file holds; a ValueError that names it where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no table of names and values")
    return found


@contextmanager
def arriving(path: Path) -> Iterator[Path]:
    """A place beside `path` for a new file: it takes its place at the end, and after an error, a kill or a full disk in
    the middle what was there before is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def filling(folder: Path, stale: Iterable[str] = (), last: Sequence[str] = ()) -> Iterator[Path]:
    """An empty folder for new files of `folder`: they move there at the end, and after an error or a full disk in the
    middle what was there before is still there, and nothing where nothing was.

    Old files of the `stale` patterns go then. Those of the names `last` say what the others are: they go first and
    arrive last, so that a kill among the moves leaves no mixture that looks whole.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".saving.", dir=folder))
    try:
        yield temporary
        files = [path.relative_to(temporary) for path in temporary.rglob("*") if not path.is_dir()]
        for name in last:
            (folder / name).unlink(missing_ok=True)
        for old in (path for pattern in stale for path in folder.glob(pattern)):
            if old.relative_to(folder) not in files:
                old.unlink()
        for file in sorted(files, key=lambda file: str(file) in last):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / file, folder / file)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # which has files in it
            for path in missing:
                path.rmdir()


def write_atomically(path: Path, content: bytes, *, before: Path | None = None) -> None:
    """Either the whole file or what was there before, also after a kill or a full disk in the middle.

    With `before` the old file is kept under that name; a kill at the right moment leaves it there alone.
    """
    with arriving(path) as temporary:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if before is not None and path.exists():
            os.replace(path, before)


def remove_leftovers(folder: Path) -> None:
    """Delete the unfinished files of processes that were killed while writing. Only for the owner of the folder."""
    for pattern in (".*.safetensors.*", ".*.json.*", ".*.jsonl.*", ".room"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    for path in folder.glob(".saving.*"):
        shutil.rmtree(path, ignore_errors=True)


def claim_room(folder: Path, size: int) -> None:
    """Prove that `size` bytes can be written into the folder, which is made if need be; OSError if they cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".room"
        try:
            with probe.open("wb") as file:
                _fill(file.fileno(), size)
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        what = f"the {size / 1e6:,.1f} MB that the checkpoints need" if size else "files"
        advice = "free some space or choose another folder with --out" if size else "choose another folder"
        raise OSError(error.errno, f"cannot write {what} into {folder}: {error.strerror}; {advice}") from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """A failed write within is told with what could not be written and how to go on."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {what}: {error.strerror or error}; what was saved before is whole: free some space and "
            "give the same command again to go on from there",
        ) from error


LOCKS: set[IO[str]] = set()  # open in this process


def _let_go() -> None:
    """In a forked process: a decoding worker would keep the lock of a trainer that was killed until it notices."""
    while LOCKS:
        LOCKS.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def sole_owner(folder: Path) -> Iterator[None]:
    """While this is held, no other process trains into the folder. A killed process holds nothing."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):  # some network file systems have no locks
                why = f"{folder} cannot be locked ({error.strerror}): see to it that no other process trains into it"
                warnings.warn(why, stacklevel=4)
            else:
                another = f"another process is training into {folder}; wait for it or choose another --out"
                raise OSError(another) from error
        LOCKS.add(file)
        try:
            yield
        finally:
            LOCKS.discard(file)


def _fill(handle: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, max(size, 1))
        return
    block = bytes(1 << 20)
    while size > 0:
        size -= os.write(handle, block[: min(size, len(block))])
