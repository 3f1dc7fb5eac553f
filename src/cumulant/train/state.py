"""The state from which a run goes on: one safetensors file with a checksum, and the one before it beside it."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .average import Average
from .checkpoint import read_header
from .files import write_atomically
from .meter import Meter
from .processes import like, put, whole

STATE, BEFORE = "state.safetensors", "state-before.safetensors"
FRESH = "choose another folder with --out, or start afresh with --fresh, which deletes that run"
UNCHECKED = {"format", "progress", "torch"}  # all that the header of a state had before there were checksums


@dataclass
class Progress:
    """How far a run is: steps done; best accuracy on the hold-out so far, its epoch, and what those weights reached on
    the test part; seconds of work."""

    step: int = 0
    best: float = -1.0
    best_epoch: int = 0
    best_top1: float = -1.0
    best_nats: float | None = None
    seconds: float = 0.0
    loss_steps: int = 0  # steps in the loss that is added up and not yet logged


def bytes_needed(model: nn.Module, averaged: bool, held: int = 0) -> int:
    """Room on the disk for the states (two old ones and a new one at the moment of saving), the best and the last
    weights; what a run that goes on holds of these already is not needed again."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    return max(weights * (3 * (4 if averaged else 3) + 2) - held, 0) + (1 << 20)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU, whole in every process. Every process must ask at the same time."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    meter: Meter,
    progress: Progress,
    *,
    write: bool,
) -> None:
    """Gather everything (all processes together) and, if `write`, put it into one file; the last one is kept too."""
    tensors = {f"model.{name}": tensor for name, tensor in whole_weights(model).items()}
    if average is not None:
        with average.in_place():
            tensors |= {f"average.{name}": tensor for name, tensor in whole_weights(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = whole(value)
    tensors["loss"] = whole(meter.processes.sum(meter.total.detach().clone()) / meter.processes.world)
    progress.loss_steps = meter.steps
    if write:
        header = {"format": "pt", "progress": json.dumps(asdict(progress)), "torch": torch.__version__}
        header["checksum"] = checksum(tensors, header)
        content = to_bytes(tensors, metadata=header)
        write_atomically(folder / STATE, content, before=folder / BEFORE)


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """Digest of all tensors and of the other entries of the header."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in sorted(header.items()) if k != "checksum"}).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def mend_state(folder: Path) -> None:
    """See to it that the state in the folder is whole: where the last one is damaged, or missing because a process was
    killed between two renamings, the one before it takes its place. Only for the owner of the folder."""
    newest, older = folder / STATE, folder / BEFORE
    why = damage(newest)
    if why is None or not (newest.is_file() or older.is_file()):
        return
    also = damage(older)
    if also is not None:
        raise ValueError(
            f"{newest} is no state that this run can go on from ({why}), nor is {older.name} ({also}): {FRESH}"
        )
    told = newest.is_file()
    os.replace(older, newest)
    if told:
        step = read_progress(newest).step
        warnings.warn(f"{newest} is damaged ({why}): going on from the one before it, after step {step}", stacklevel=3)


def damage(path: Path) -> str | None:
    """Why nothing can go on from the state in that file; None for one that is whole."""
    if not path.is_file():
        return "missing"
    try:
        header, tensors = read_header(path), load_file(path)
    except (safetensors.SafetensorError, ValueError) as error:
        return str(error)
    if "checksum" not in header:
        return None if header.keys() == UNCHECKED else "no checksum"
    return None if header["checksum"] == checksum(tensors, header) else "its contents do not have its checksum"


def remove_states(folder: Path) -> None:
    """Of a run that is finished."""
    for name in (STATE, BEFORE):
        (folder / name).unlink(missing_ok=True)


def read_progress(path: Path) -> Progress:
    """How far the run was whose state this is; what another version stored beside that is passed over."""
    values = json.loads(read_header(path)["progress"])
    return Progress(**{"step": values["step"]} | {f.name: values[f.name] for f in fields(Progress) if f.name in values})


def load_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None, meter: Meter
) -> Progress:
    """Put everything back and say how far the run was. Without a file it has not begun."""
    if not path.is_file():
        return Progress()
    try:
        tensors, progress = load_file(path), read_progress(path)
        _check_fit(tensors, model, average is not None)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no state that this run can go on from ({error}): {FRESH}") from error
    if average is not None:
        put(model, _under("average.", tensors))
        average.take()
    put(model, _under("model.", tensors))
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            full = tensors.get(f"optimizer.{key}.{name}")
            if full is not None:
                # The step counter is one number, never cut into shards.
                placed = full.to(parameter.device) if key == "step" else like(full, parameter)
                optimizer.state[parameter][key] = placed
    meter.total.copy_(tensors["loss"])
    meter.steps = progress.loss_steps
    return progress


def _check_fit(tensors: Mapping[str, Tensor], model: nn.Module, averaged: bool) -> None:
    """Refuse the tensors of another model: each must have its place and its shape."""
    own = model.state_dict()
    wanted = {"loss": torch.Size()} | {f"model.{name}": one.shape for name, one in own.items()}
    wanted |= {f"average.{name}": one.shape for name, one in own.items()} if averaged else {}
    found = {name: one.shape for name, one in tensors.items() if not name.startswith("optimizer.")}
    for name in wanted | found:
        if found.get(name) != wanted.get(name):
            got, want = (f"shape {tuple(of[name])}" if name in of else "nothing" for of in (found, wanted))
            raise ValueError(f"{name}: {got} in the file, {want} in the model")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
