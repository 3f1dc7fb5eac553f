"""The log of a run: one JSON object per line, each with its step; it survives kills and never tells a step twice."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from .files import write_atomically


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log, or of log.jsonl in a folder. Half a line at the end, from a killed process, is left out."""
    path = Path(path)
    content = (path / "log.jsonl" if path.is_dir() else path).read_bytes()
    return [record for record, _ in _complete(content)]


def cut(path: Path, step: int) -> None:
    """Keep what was logged up to that step: the state to go on from knows nothing of the rest."""
    if not path.exists():
        return
    content = path.read_bytes()
    kept = b"".join(line for record, line in _complete(content) if record["step"] <= step)
    if kept != content:
        write_atomically(path, kept)


def _complete(content: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """Records with their lines, up to the first line that is not whole."""
    records = []
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(record, dict) or "step" not in record:
            break
        records.append((record, line))
    return records


class Log:
    """Appends records to log.jsonl and, if asked, to files for TensorBoard."""

    def __init__(self, folder: Path, *, after: int = 0, tensorboard: bool = False) -> None:
        self.path = folder / "log.jsonl"
        cut(self.path, after)
        self.board = _board(folder, after) if tensorboard else None
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """One line; numbers that are no numbers are refused."""
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        if self.board is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def settle(self) -> None:
        """Until all lines are on the disk: a state that is saved now finds them when it goes on."""
        os.fsync(self.file.fileno())

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # What the disk had no room for is still in the buffer: that it has none now either is told already.
        with nullcontext() if error is None else suppress(OSError):
            self.file.close()
        if self.board is not None:
            self.board.close()


def _board(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard=true needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)
