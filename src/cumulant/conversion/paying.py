"""Whether a plan pays: seconds of a forward pass, and of its attention layers, before and after on this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from ..inspect.batches import Batch, call

clock: Callable[[], float] = time.perf_counter  # looked up at each use, so that a test can put an even one here
REPEATS, ENOUGH = 3, 2.0  # passes of which the fastest counts; seconds after which no further one is made
NOISE = 1.05  # what takes longer by less than this is not called slower: two runs of one model differ by as much
WHOLE = ""  # the name of the model among its own modules


class SlowerError(RuntimeError):
    """A plan that was measured to be slower than the model as it is; `force=True` converts anyway."""


class Times(NamedTuple):
    """Seconds of the same work before and after a plan."""

    before: float
    after: float

    @property
    def slower(self) -> bool:
        return self.after > NOISE * self.before

    def __str__(self) -> str:
        said = f"{self.before * 1e3:.3g} ms before, {self.after * 1e3:.3g} ms after"
        if self.slower:
            return f"{said}: {self.after / max(self.before, 1e-12):.3g} times as long"
        if self.before > NOISE * self.after:
            return f"{said}: {self.before / max(self.after, 1e-12):.3g} times as fast"
        return f"{said}: as fast as before"


@torch.no_grad()
def seconds_of(model: nn.Module, batches: Sequence[Batch], names: Iterable[str] = (WHOLE,)) -> dict[str, float]:
    """Seconds that the named modules take in one pass over the batches, the fastest of a few after a warm-up."""
    device = device_of(model)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    spent: dict[str, float] = {}
    began: dict[str, float] = {}
    passed: dict[str, float] = {}

    def begin(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            began[name] = now()

        return hook

    def end(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            passed[name] = passed.get(name, 0.0) + now() - began[name]

        return hook

    call(model, batches[0])
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(begin(name)).remove)
            stack.callback(module.register_forward_hook(end(name)).remove)
        first = now()
        for _ in range(REPEATS):
            passed.clear()
            for batch in batches:
                call(model, batch)
            spent = {name: min(spent.get(name, seconds), seconds) for name, seconds in passed.items()}
            if now() - first > ENOUGH:
                break
    return spent


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def sizes(batches: Sequence[Batch]) -> str:
    """Shape of what a pass was measured on: of the first tensor of each batch, without repeats."""

    def first(batch: Batch) -> Any:
        values = batch.values() if hasattr(batch, "values") and not isinstance(batch, torch.Tensor) else batch
        found = [batch] if isinstance(batch, torch.Tensor) else [x for x in values if isinstance(x, torch.Tensor)]
        return tuple(found[0].shape) if found else ()

    return " and ".join(dict.fromkeys(str(first(batch)) for batch in batches))
