"""The state from which a run goes on: a safetensors file with a checksum, and the one before it beside it.

Of several processes each writes a part of its own (`shards`); the file names them, and all are one state or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .checkpoint import read_header
from .files import write_atomically
from .optimise import Average
from .processes import whole
from .progress import Meter, undisturbed

STATE, BEFORE = "state.safetensors", "state-before.safetensors"
PART = "state-*-*.safetensors"  # of a state of several processes
PARTS, CUT = "parts", "cut"  # entries of a header: names and checksums of parts; of pieces, their place in the whole
FRESH = "choose another folder with --out, or start afresh with --fresh, which deletes that run"
UNCHECKED = {"format", "progress", "torch"}  # all that the header of a state had before there were checksums


@dataclass
class Progress:
    """How far a run is: steps and epochs done; best accuracy on the hold-out so far, its epoch, and what those weights
    reached on the test part; seconds of work."""

    step: int = 0
    epochs: float = 0.0
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
) -> None:
    """Save everything, all processes together, each its own part; the last state is kept too."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if average is not None:
        with average.in_place():
            tensors |= {f"average.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    tensors["loss"] = meter.shared()
    progress.loss_steps = meter.steps
    header = {"format": "pt", "progress": json.dumps(asdict(progress)), "torch": torch.__version__}
    if meter.processes.world == 1:
        write_state(folder, {name: whole(tensor) for name, tensor in tensors.items()}, {}, header, {})
        return
    from .shards import save_shards

    save_shards(folder, tensors, header)


def write_state(
    folder: Path,
    tensors: Mapping[str, Tensor],
    cut: Mapping[str, Any],
    header: Mapping[str, str],
    parts: Mapping[str, str],
) -> None:
    """The first file of a state, the only one of one process, takes its place. `parts`: the others' with checksums."""
    more = {PARTS: json.dumps(parts)} if parts else {}
    write_part(folder / STATE, tensors, cut, {**header, **more}, before=folder / BEFORE)
    remove_parts(folder)


def write_part(
    path: Path,
    tensors: Mapping[str, Tensor],
    cut: Mapping[str, Any],
    header: Mapping[str, str] | None = None,
    before: Path | None = None,
) -> str:
    """Tensors, or pieces of them, as one file; its checksum. `cut`: where a piece begins, and the whole shape."""
    own = {"format": "pt", **(header or {}), **({CUT: json.dumps(cut)} if cut else {})}
    own["checksum"] = checksum(tensors, own)
    write_atomically(path, to_bytes(dict(tensors), metadata=own), before=before)
    return own["checksum"]


def parts_of(path: Path) -> list[Path]:
    """All files of the state whose first one this is."""
    return [path, *(path.with_name(name) for name in json.loads(read_header(path).get(PARTS, "{}")))]


def remove_parts(folder: Path) -> None:
    """Delete parts that belong to neither of the two states: of older ones, or of one that was never finished."""
    kept: set[Path] = set()
    for name in (STATE, BEFORE):
        with suppress(OSError, ValueError, safetensors.SafetensorError):  # a damaged one is seen to elsewhere
            kept.update(parts_of(folder / name))
    for path in folder.glob(PART):
        if path not in kept:
            path.unlink(missing_ok=True)


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """Digest of all tensors and of the other entries of the header."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in sorted(header.items()) if k != "checksum"}).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@undisturbed()
def mend_state(folder: Path) -> None:
    """See to it that the state in the folder is whole: where the last one is damaged, or missing because a process was
    killed between two renamings, the one before it takes its place. Only for the owner of the folder."""
    newest, older = folder / STATE, folder / BEFORE
    why = damage(newest)
    if why is None or not (newest.is_file() or older.is_file()):
        remove_parts(folder)
        return
    also = damage(older)
    if also is not None:
        raise ValueError(
            f"{newest} is not a state that this run can continue from ({why}), nor is {older.name} ({also}): {FRESH}"
        )
    told = newest.is_file()
    os.replace(older, newest)
    if told:
        step = read_progress(newest).step
        warnings.warn(f"{newest} is damaged ({why}): going on from the one before it, after step {step}", stacklevel=4)


def damage(path: Path) -> str | None:
    """Why nothing can go on from the state in that file; None for one that is whole."""
    why = _damage(path)
    if why is not None:
        return why
    for name, known in json.loads(read_header(path).get(PARTS, "{}")).items():
        part = path.with_name(name)
        why = _damage(part) or (None if read_header(part).get("checksum") == known else "of another state")
        if why is not None:
            return f"its part {name}: {why}"
    return None


def _damage(path: Path) -> str | None:
    """The same of one file."""
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
    for path in (folder / STATE, folder / BEFORE, *folder.glob(PART)):
        path.unlink(missing_ok=True)


def read_progress(path: Path) -> Progress:
    """How far the run was whose state this is; what another version stored beside that is passed over."""
    values = json.loads(read_header(path)["progress"])
    return Progress(**{"step": values["step"]} | {f.name: values[f.name] for f in fields(Progress) if f.name in values})


@undisturbed()
def load_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None, meter: Meter
) -> Progress:
    """Put everything back and say how far the run was. Without a file it has not begun."""
    if not path.is_file():
        return Progress()
    from .shards import load_shards

    try:
        shapes, progress = shapes_of(path), read_progress(path)
        _check_fit(shapes, model, average is not None)
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a state that this run can continue from ({error}): {FRESH}") from error
    weights = model.state_dict()
    if average is not None:
        load_shards(path, {f"average.{name}": tensor for name, tensor in weights.items()})
        average.take()
    wanted = {f"model.{name}": tensor for name, tensor in weights.items()} | {"loss": meter.total}
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"optimizer.{key}.{name}" in shapes:
                # The step counter is one number, never cut into shards.
                one = (
                    torch.zeros((), device=parameter.device) if key == "step" else torch.zeros_like(parameter.detach())
                )
                optimizer.state[parameter][key] = wanted[f"optimizer.{key}.{name}"] = one
    load_shards(path, wanted)
    meter.steps = progress.loss_steps
    return progress


def shapes_of(path: Path) -> dict[str, torch.Size]:
    """The shape of every tensor of a state, those that were cut whole again."""
    found: dict[str, torch.Size] = {}
    for file in parts_of(path):
        with safetensors.safe_open(file, framework="pt") as content:
            cut = json.loads((content.metadata() or {}).get(CUT, "{}"))
            for name in content.keys():  # noqa: SIM118
                found[name] = torch.Size(cut[name][1] if name in cut else content.get_slice(name).get_shape())
    return found


def _check_fit(shapes: Mapping[str, torch.Size], model: nn.Module, averaged: bool) -> None:
    """Refuse the tensors of another model: each must have its place and its shape."""
    own = model.state_dict()
    wanted = {"loss": torch.Size()} | {f"model.{name}": one.shape for name, one in own.items()}
    wanted |= {f"average.{name}": one.shape for name, one in own.items()} if averaged else {}
    found = {name: shape for name, shape in shapes.items() if not name.startswith("optimizer.")}
    for name in wanted | found:
        if found.get(name) != wanted.get(name):
            got, want = (f"shape {tuple(of[name])}" if name in of else "nothing" for of in (found, wanted))
            raise ValueError(f"{name}: {got} in the file, {want} in the model")
