"""The log of a run: one JSON object per line, each with its step; it survives kills and never tells a step twice."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .files import write_atomically
from .train_recipe import TrainRecipe


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
    """Appends records to log.jsonl and, if asked, to files for TensorBoard and to Weights & Biases, which is told the
    values of the recipe, `wandb`."""

    def __init__(
        self, folder: Path, *, after: int = 0, tensorboard: bool = False, wandb: TrainRecipe | None = None
    ) -> None:
        self.path = folder / "log.jsonl"
        cut(self.path, after)
        self.board = _board(folder, after) if tensorboard else None
        self.run = None if wandb is None else _wandb(folder, wandb)
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """One line; numbers that are no numbers are refused."""
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        if self.board is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{record['kind']}/{key}", value, record["step"])
        if self.run is not None:
            values = {f"{record['kind']}/{key}": value for key, value in record.items() if isinstance(value, float)}
            self.run.log({**values, "step": record["step"]})

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
        if self.run is not None:
            self.run.finish(exit_code=0 if error is None else 1)


def _board(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard=true needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)


def _wandb(folder: Path, recipe: TrainRecipe) -> Any:
    """A run of Weights & Biases in the folder; one that goes on is found by the name that was kept there.

    Values are told with the step of training beside them, not as the step of wandb, which takes none twice and none
    that is before the last: a run that goes on from its state tells some steps again.
    """
    try:
        import wandb
    except ImportError as error:
        raise ImportError("wandb=true needs the package wandb: pip install wandb") from error
    known = folder / "wandb" / "run-id"
    if not known.is_file():
        write_atomically(known, uuid.uuid4().hex[:8].encode())
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "cumulant"),
        name=folder.name,
        id=known.read_text(),
        resume="allow",
        dir=str(folder),
        config=asdict(recipe),
    )
    run.define_metric("*", step_metric="step")
    return run
