"""Who makes which run, where several machines share a folder: a file for each claim, with the pulse of its owner.

A claim is made by creating its file, which only one can do. Its owner touches it every `BEAT` seconds. One that nobody
has touched for `LEASE` seconds, by the clock of whoever looks, is of a lost machine: the next one makes a file of the
following number, which again only one can do. Clocks of different machines are never compared.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BEAT, LEASE = 10.0, 60.0


class Claims:
    """Claims in `folder`, which is made if need be; those that are held are given back at the end of a `with`."""

    def __init__(
        self, folder: Path, beat: float = BEAT, lease: float = LEASE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.beat, self.lease, self.clock = folder, beat, lease, clock
        self.held: dict[str, Path] = {}
        self.seen: dict[Path, tuple[int, float]] = {}  # when it was touched last, and since when we know
        self.over = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Claims:
        threading.Thread(target=self._pulse, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        for name in list(self.held):
            self.give_back(name)

    def take(self, name: str) -> bool:
        """Claim what has that name; False where another holds it."""
        numbers = {path: path.name[len(name) + 1 : -len(".claim")] for path in self.folder.glob(f"{name}.*.claim")}
        there = sorted((int(number), path) for path, number in numbers.items() if number.isdigit())
        if there and not self._lost(there[-1][1]):
            return False
        path = self.folder / f"{name}.{there[-1][0] + 1 if there else 1}.claim"
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"place": place(), "process": os.getpid()}, file)
        for _, older in there:
            older.unlink(missing_ok=True)
        self.held[name] = path
        return True

    def give_back(self, name: str) -> None:
        """It is done, or left to others."""
        self.held.pop(name).unlink(missing_ok=True)

    def _pulse(self) -> None:
        while not self.over.wait(self.beat):
            for path in list(self.held.values()):
                with suppress(OSError):  # it is asked for again at the next beat
                    os.utime(path)

    def _lost(self, path: Path) -> bool:
        """Whether the owner of a claim is gone: its process, where that can be known here, or else its pulse."""
        try:
            with path.open(encoding="utf-8") as file:  # opening it makes a network file system look anew
                touched, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except OSError:  # given back at this moment
            return False
        with suppress(ValueError):  # one that is being written is not lost
            owner = json.loads(content)
            if owner["place"] == place() and not alive(owner["process"]):
                return True
        before, since = self.seen.setdefault(path, (touched, self.clock()))
        if before != touched:
            self.seen[path] = touched, self.clock()
            return False
        return self.clock() - since > self.lease


def place() -> str:
    """Where numbers of processes mean the same: the machine and, in containers, their own numbering."""
    numbering = ""
    with suppress(OSError):
        numbering = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {numbering}"


def alive(process: int) -> bool:
    """Whether a process of that number runs here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
