"""Operators of this folder without torch's dispatcher, for ordinary tensors in eager mode (see `tracing.is_plain`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor | None, ...]


def direct(
    run_forward: Callable[..., tuple[Tensor, ...]],
    setup_context: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
    gradients: Callable[[Any, Tensor], Gradients],
    *last: Any,
) -> Any:
    """apply(*inputs) is the first output of run_forward(*inputs, *last), with the gradients of the custom operator.

    Gradients of `last`, which the operator counts among its inputs, are None and may stand at the end here too.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            arguments = (*inputs, *last)
            output = run_forward(*arguments)
            setup_context(ctx, arguments, output)
            return output[0]

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Gradients:
            return gradients(ctx, grad)

    return Direct
