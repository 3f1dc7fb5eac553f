"""Export of converted models: torch.export, and ONNX that was run and compared."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.batches import Batch, answer, call, evaluating
from ..nn.fold import unfolded
from ..optional import needed

TOLERANCE = 1e-4


class _Answer(nn.Module):
    """A model with tensors in and one tensor out, which is what an exported graph has."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.names:
            return answer(self.model(**dict(zip(self.names, inputs, strict=True))))
        return answer(call(self.model, inputs))


def _flat(example: Batch) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    if isinstance(example, Mapping):
        return tuple(example), tuple(example.values())
    return (), tuple(example) if isinstance(example, tuple | list) else (example,)


def export_program(model: nn.Module, example: Batch, *, dynamic_shapes: Any = None) -> torch.export.ExportedProgram:
    """`torch.export` of the model as tensors to one tensor (logits or hidden states).

    `dynamic_shapes` has one entry for each input, e.g. ({0: Dim("batch"), 1: Dim("length")},).
    """
    names, inputs = _flat(example)
    with evaluating(model), unfolded(), torch.no_grad():
        wrapped = _Answer(model, names).eval()
        shapes = None if dynamic_shapes is None else (tuple(dynamic_shapes),)
        return torch.export.export(wrapped, inputs, dynamic_shapes=shapes)


def export_onnx(
    model: nn.Module,
    example: Batch,
    path: str | Path,
    *,
    dynamic_shapes: Any = None,
    others: tuple[Batch, ...] = (),
    tolerance: float = TOLERANCE,
) -> float:
    """Write the model as ONNX, run it in ONNX Runtime, and return the largest difference from torch.

    Compared on the example and on `others` (other sizes, where `dynamic_shapes` allows them), relative to the largest
    number of the answer; above `tolerance` it is an error and no file is left. Needs onnx, onnxscript and onnxruntime.
    """
    with needed("ONNX export needs onnx, onnxscript and onnxruntime", "export"):
        onnxruntime = import_module("onnxruntime")
        import_module("onnxscript")
    path = Path(path)
    names, inputs = _flat(example)
    program = export_program(model, example, dynamic_shapes=dynamic_shapes)
    torch.onnx.export(program, inputs, path, dynamo=True, external_data=False, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    keys = [entry.name for entry in session.get_inputs()]
    worst = 0.0
    for batch in (example, *others):
        _, tensors = _flat(batch)
        with evaluating(model), torch.no_grad():
            wanted = _Answer(model, names)(*tensors)
        feed = {key: x.detach().cpu().numpy() for key, x in zip(keys, tensors, strict=True)}
        try:
            found = torch.from_numpy(session.run(None, feed)[0])
        except Exception as error:  # ONNX Runtime has classes of its own for each status
            path.unlink()
            shapes = [tuple(x.shape) for x in tensors]
            raise RuntimeError(
                f"ONNX Runtime cannot run the exported model on inputs of shape {shapes}: {error}"
            ) from error
        difference = float((found - wanted.cpu()).abs().max() / wanted.abs().max().clamp(min=1e-12))
        if not difference <= tolerance:  # also where it is NaN
            path.unlink()
            raise RuntimeError(f"ONNX Runtime differs from torch by {difference:.1e}, more than {tolerance:.0e}")
        worst = max(worst, difference)
    return worst
