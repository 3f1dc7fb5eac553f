"""Whether a plan pays: seconds of a forward pass, and of its attention layers, before and after on this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from ..inspect.batches import Batch, call

clock: Callable[[], float] = time.perf_counter  # looked up at each use, so that a test can put an even one here
REPEATS, ENOUGH = 3, 2.0  # passes of which the fastest counts; seconds after which no further one is made
CLEAR = 2.0  # a first call on a CPU that takes longer than so many times softmax's is asked no more
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
        said = f"{_written(self.before)} before, {_written(self.after)} after"
        if self.slower:
            return f"{said}: {self.after / max(self.before, 1e-12):.3g} times as long"
        if self.before > NOISE * self.after:
            return f"{said}: {self.before / max(self.after, 1e-12):.3g} times as fast"
        return f"{said}: as fast as before"


def _written(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


Recorded = dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]  # arguments of every call of a module


@torch.no_grad()
def recorded(model: nn.Module, batches: Sequence[Batch], names: Iterable[str]) -> Recorded | None:
    """What the named modules are called with in one pass over the batches: enough to ask them again without the model.

    None where that cannot be repeated: arguments that are more than tensors and numbers, a cache say, may have changed.
    """
    found: Recorded = {name: [] for name in names}
    with ExitStack() as stack:
        for name, calls in found.items():

            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], calls: Any = calls) -> None:
                calls.append((args, kwargs))

            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for batch in batches:
            call(model, batch)
    return found if all(_plain(x) for calls in found.values() for x in calls) else None


def _plain(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return all(map(_plain, x))
    if isinstance(x, dict):
        return all(map(_plain, x.values()))
    return x is None or isinstance(x, torch.Tensor | bool | int | float | str)


@torch.no_grad()
def seconds_of(
    model: nn.Module,
    batches: Sequence[Batch],
    names: Iterable[str] = (WHOLE,),
    calls: Recorded | None = None,
    beside: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Seconds that the named modules take in one pass over the batches, the fastest of a few after a warm-up.

    With `calls` that were recorded before, without the rest of the model; one that is clearly slower than `beside` is
    then asked once, on a CPU.
    """
    device = device_of(model)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    if calls is not None:
        return {
            name: _fastest(model.get_submodule(name), calls[name], now, device, (beside or {}).get(name))
            for name in names
        }
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


def _fastest(
    module: nn.Module, calls: list[Any], now: Callable[[], float], device: torch.device, beside: float | None
) -> float:
    """Seconds of all calls of a module, one after the other."""

    def once() -> float:
        start = now()
        for args, kwargs in calls:
            module(*args, **kwargs)
        return now() - start

    first = once()
    if device.type == "cpu" and beside is not None and first > CLEAR * beside:
        return first
    start, spent = now(), []
    for _ in range(REPEATS):
        spent.append(once())
        if now() - start > ENOUGH:
            break
    return min(spent)


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def sizes(batches: Sequence[Batch]) -> str:
    """Shape of what a pass was measured on: of the first tensor of each batch, without repeats."""

    def first(batch: Batch) -> Any:
        values = batch.values() if hasattr(batch, "values") and not isinstance(batch, torch.Tensor) else batch
        found = [batch] if isinstance(batch, torch.Tensor) else [x for x in values if isinstance(x, torch.Tensor)]
        return tuple(found[0].shape) if found else ()

    return " and ".join(dict.fromkeys(str(first(batch)) for batch in batches))
