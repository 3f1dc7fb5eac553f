"""Kernels, and a few mechanisms, have first derivatives only. Who differentiates these once more is told so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

KERNEL = (
    "the gradient of a kernel is differentiated again (create_graph=True), and kernels have first derivatives only; "
    'plain torch has all of them: backend="reference" of the call, or, in a layer or model, tokens in float64'
)


def once_differentiable(backward: Callable[..., Any], told: str = KERNEL) -> Callable[..., Any]:
    """torch's decorator for `backward(ctx, *grads)`, which answers a second derivative with an error that says `told`.

    torch's own leaves what it returns without a path to the inputs: asked for their gradient it says that they were
    not used or, where the incoming gradient is a constant, lets the second derivative be 0 in silence.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled code refuses by itself
            return backward(ctx, *grads)
        kept = _Kept(ctx)
        with torch.no_grad():
            found = backward(kept, *grads)
        reached = [x for x in (*grads, *kept.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        if not reached:
            return found
        answers = [x for x in found if isinstance(x, Tensor)]
        tied = iter(_Last.apply(told, len(answers), *answers, *reached))
        return tuple(next(tied) if isinstance(x, Tensor) else x for x in found)

    return once


class _Kept:
    """A context whose tensors are unpacked once, as checkpoints demand, and read twice."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class _Last(torch.autograd.Function):
    """The first `count` tensors, on a graph that leads to the others and cannot be followed."""

    @staticmethod
    def forward(ctx: Any, told: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.told = told
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.told)
