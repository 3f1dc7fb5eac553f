"""What of a model's output its attention layers reach, and which of its layers a batch reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batch, answer, call, relative_error, same_draws, tensors
from .sites import Site

SEEN = 1e-6  # relative change of an output above rounding


def comparing(model: nn.Module, found: Sequence[Site], batch: Batch) -> partial[Tensor] | None:
    """Which output shows what replacing these layers does: the usual one if they reach it, else the first that they do
    (of MaskFormer the decoder's, not the backbone's); None if they reach none. Cost: two forward passes."""
    with torch.no_grad():
        with same_draws(model):
            before = tensors(call(model, batch))
        with ExitStack() as stack, same_draws(model):
            for site in found:
                if site.obstacle is None:
                    stack.callback(model.get_submodule(site.name).register_forward_hook(_louder).remove)
            after = tensors(call(model, batch))
    for name, x in before.items():
        other = after.get(name)
        if other is None or other.shape != x.shape or relative_error([other.double()], [x.double()]) > SEEN:
            return partial(answer, name=name)
    return None


def _louder(module: nn.Module, _: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_louder(module, _, output[0]), *output[1:])
    return output * 1.5 if isinstance(output, Tensor) else output


def running(model: nn.Module, batch: Batch, names: Iterable[str]) -> set[str]:
    """Those of the named modules that this batch passes through."""
    ran: set[str] = set()
    with ExitStack() as stack, torch.no_grad():
        for name in names:
            note = partial(_note, ran, name)
            stack.callback(model.get_submodule(name).register_forward_pre_hook(note).remove)
        call(model, batch)
    return ran


def _note(ran: set[str], name: str, *_: Any) -> None:
    ran.add(name)
