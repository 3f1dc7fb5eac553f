"""Export of converted models: torch.export, and ONNX that was run and compared."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.batches import Batch, answer, call, evaluating
from ..nn.fold import unfolded
from ..optional import needed
from ..train.files import arriving

TOLERANCE = 1e-4


class _Answer(nn.Module):
    """A model with tensors in and one tensor out, or with `every` all that it says: what an exported graph has."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], every: bool = False) -> None:
        super().__init__()
        self.model, self.names, self.every = model, names, every

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        said = self.said(*inputs)
        return tuple(_outputs(said).values()) if self.every else answer(said)

    def said(self, *inputs: Tensor) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True))) if self.names else call(self.model, inputs)


def _flat(example: Batch) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    if isinstance(example, Mapping):
        return tuple(example), tuple(example.values())
    return (), tuple(example) if isinstance(example, tuple | list) else (example,)


def _input_names(model: nn.Module, example: Batch) -> list[str]:
    """What the model calls its inputs: keywords, or the parameters of its forward."""
    names, inputs = _flat(example)
    if names:
        return list(names)
    known = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    called = [p.name for p in known if p.kind is not p.VAR_POSITIONAL][: len(inputs)]
    return called + [f"input_{n}" for n in range(len(called), len(inputs))]


def _outputs(said: Any) -> dict[str, Tensor]:
    """Tensors of an output by the names that the model gives them, the one that models are compared by first."""
    if isinstance(said, Tensor):
        return {"output": said}
    named = said.items() if isinstance(said, Mapping) else ((f"output_{n}", x) for n, x in enumerate(said))
    found = {name: x for name, x in named if isinstance(x, Tensor)}
    first = answer(said)
    return dict(sorted(found.items(), key=lambda item: item[1] is not first))


def export_program(model: nn.Module, example: Batch, *, dynamic_shapes: Any = None) -> torch.export.ExportedProgram:
    """`torch.export` of the model as tensors to one tensor (logits or hidden states).

    `dynamic_shapes` has one entry for each input, e.g. ({0: Dim("batch"), 1: Dim("length")},).
    """
    return _exported(model, example, dynamic_shapes, every=False)


def _exported(model: nn.Module, example: Batch, dynamic_shapes: Any, every: bool) -> torch.export.ExportedProgram:
    names, inputs = _flat(example)
    with evaluating(model), unfolded(), torch.no_grad():
        wrapped = _Answer(model, names, every).eval()
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

    Inputs and outputs have the model's names: `input_ids`, `last_hidden_state`; a tensor without a name is `output`,
    what the model calls as one of its inputs `NAME_out`. Compared on the example and on `others` (other sizes, where
    `dynamic_shapes` allows them), relative to the largest number of an output; above `tolerance` it is an error, and a
    file that was at `path` before stays. Needs onnx, onnxscript and onnxruntime.
    """
    with needed("ONNX export needs onnx, onnxscript and onnxruntime", "export"):
        onnxruntime = import_module("onnxruntime")
        import_module("onnxscript")
    names, inputs = _flat(example)
    model_of = _Answer(model, names, every=True)

    def wanted_for(tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        with evaluating(model), torch.no_grad():
            return _outputs(model_of.said(*tensors))

    keys, said = _input_names(model, example), list(wanted_for(inputs))
    called = [f"{name}_out" if name in keys else name for name in said]  # a name stands for one thing in a graph
    program = _exported(model, example, dynamic_shapes, every=True)
    named: dict[str, Any] = {"input_names": keys, "output_names": called}
    worst = 0.0
    with arriving(Path(path)) as part:
        torch.onnx.export(program, inputs, part, dynamo=True, external_data=False, verbose=False, **named)
        session = onnxruntime.InferenceSession(part, providers=["CPUExecutionProvider"])
        taken = {entry.name for entry in session.get_inputs()}
        for batch in (example, *others):
            _, tensors = _flat(batch)
            feed = {k: x.detach().cpu().numpy() for k, x in zip(keys, tensors, strict=True) if k in taken}
            try:
                found = dict(zip(said, session.run(called, feed), strict=True))
            except Exception as error:  # ONNX Runtime has classes of its own for each status
                shapes = [tuple(x.shape) for x in tensors]
                raise RuntimeError(
                    f"ONNX Runtime cannot run the exported model on inputs of shape {shapes}: {error}"
                ) from error
            for name, wanted in wanted_for(tensors).items():
                difference = _difference(torch.from_numpy(found[name]), wanted.cpu())
                if not difference <= tolerance:  # also where it is NaN
                    what = f"{name} of ONNX Runtime differs from torch by {difference:.1e}"
                    raise RuntimeError(f"{what}, more than {tolerance:.0e}")
                worst = max(worst, difference)
    return worst


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest number; of flags and numbers of classes how many differ."""
    if not wanted.is_floating_point():
        return float((found != wanted).double().mean())
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
