"""What a model is called with, and which of its answers counts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any  # a tensor, a tuple of arguments, or a mapping of keyword arguments
ANSWERS = ("logits", "logits_per_image", "last_hidden_state", "prediction_logits", "image_embeds", "pooler_output")


def check_model(model: object) -> None:
    """TypeError for a name, a class or anything else that is no model."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} {model!r:.60}"
        raise TypeError(
            f"model must be a torch.nn.Module, got {got}; open it first: cumulant.create_model(name), "
            "timm.create_model(name) or transformers.AutoModel.from_pretrained(name)"
        )


def call(model: nn.Module, batch: Batch) -> Any:
    """model(batch), with tuples as positional and mappings as keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def tensors(output: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor of numbers in a model's output, by name; those by which models are compared first."""
    if isinstance(output, Tensor):
        return {name or "output": output} if output.is_floating_point() else {}
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        first = [key for key in ANSWERS if key in output]
        inner = [(key, output[key]) for key in (*first, *(key for key in output if key not in first))]
    elif isinstance(output, tuple | list):
        inner = enumerate(output)
    found: dict[str, Tensor] = {}
    for key, value in inner:
        found |= tensors(value, f"{name}.{key}" if name else str(key))
    return found


def answer(output: Any, batch: Batch = None, name: str | None = None) -> Tensor:
    """The tensor by which two models are compared: logits if there are any, else hidden states; padding set to 0.

    `name` is that of another one, as `tensors` names it.
    """
    there = tensors(output)
    found = next(iter(there.values()), None) if name is None else there.get(name)
    if found is None:
        raise ValueError(f"no tensor in the model's output of type {type(output).__name__}; pass output=function")
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None and found.ndim == 3 and found.shape[:2] == mask.shape:
        found = found * mask.unsqueeze(-1).to(found.dtype)
    return found


def answers(
    model: nn.Module, batches: Iterable[Batch], output: Callable[[Any, Batch], Tensor] | None = None
) -> list[Tensor]:
    """What the model says to each batch, without gradients; one that draws, as ViTMAE does, draws the same again."""
    said = []
    for batch in batches:
        with torch.no_grad(), same_draws(model):
            found = (output or answer)(call(model, batch), batch)
        if not isinstance(found, Tensor):
            raise TypeError(f"output must be a function(output, batch) -> tensor, got one that gives {found!r:.60}")
        said.append(found.double())
    return said


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Within this, random numbers are those of seed 0; afterwards the generators are as they were."""
    devices = list({p.device for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield


def relative_error(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """||found - wanted|| / ||wanted|| over all batches together; infinite where something is NaN."""
    difference, size = 0.0, 0.0
    for a, b in zip(found, wanted, strict=True):
        difference += float((a - b).square().sum())
        size += float(b.square().sum())
    if size == 0 or math.isnan(difference):
        return 0.0 if difference == 0 else math.inf
    return (difference / size) ** 0.5


def check_numbers(model: nn.Module, said: Iterable[Tensor]) -> None:
    """Refuse a model that says NaN: nothing can be measured against that."""
    if any(bool(x.isnan().any()) for x in said):
        raise ValueError(
            f"{type(model).__name__} gives NaN before anything is replaced; check its weights and the data"
        )


def some(data: Iterable[Batch] | Batch, batches: int, model: nn.Module) -> list[Batch]:
    """The first few batches, on the model's device. A tensor or a mapping is one batch."""
    check_model(model)
    _check_batch(
        data, "a batch that the model is called with (a tensor, tuple or mapping), or a list or loader of such"
    )
    several = data if isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping | tuple) else [data]
    kept = list(islice(several, batches))
    if not kept:
        raise ValueError("data holds no batch")
    for batch in kept:
        _check_batch(batch, "of batches that the model is called with (tensors, tuples or mappings)")
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    return [to_device(without_labels(batch, model), place) for batch in kept]


def _check_batch(batch: Any, wanted: str) -> None:
    if batch is None or isinstance(batch, str | bool | int | float):
        raise TypeError(f"data and example must be {wanted}, got {batch!r:.60}")


def without_labels(batch: Batch, model: nn.Module) -> Batch:
    """The batch without class numbers at its end, as (images, labels) of a loader has them, unless the model asks."""
    if not isinstance(batch, tuple | list) or len(batch) < 2 or not isinstance(batch[0], Tensor):
        return batch
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    last = batch[-1]
    labels = isinstance(last, Tensor) and last.shape == batch[0].shape[:1] and not last.is_floating_point()
    asked = parameters[len(batch) - 1] if len(batch) <= len(parameters) else None
    wanted = asked is not None and (asked.default is asked.empty or asked.name in ("labels", "label", "target"))
    if not labels or wanted:
        return batch
    return batch[0] if len(batch) == 2 else tuple(batch[:-1])


def to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    return tuple(to_device(x, device) for x in batch) if isinstance(batch, tuple | list) else batch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while."""
    modes = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        yield
    finally:
        for name, module in model.named_modules():  # by name: a layer may have been replaced in between, or have parts
            module.training = modes.get(name, modes.get(name.rpartition(".")[0], module.training))


def placed(model: nn.Module, made: Batch) -> Batch:
    """On the device of the model, numbers that are not whole of the dtype of its weights."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def place(x: Tensor) -> Tensor:
        return x.to(device, dtype if x.is_floating_point() else x.dtype)

    return place(made) if isinstance(made, Tensor) else {name: place(x) for name, x in made.items()}
