"""Kernels as one operator of torch: registered, differentiable, and called directly where nothing watches.

An operator has a NamedTuple of its inputs, query, key and value first, then other tensors, then numbers, and three
functions of such a call:

    forward(call, keep) -> (out, *state)         the state is for a backward pass; without one, `keep` is False
    backward(call, grad, *state) -> gradients    of the differentiable inputs
    empty(call, keep) -> (out, *state)           memory for what `forward` gives, whose shapes a compiler asks for

Their query, key, value and grad have contiguous rows, and the device is that of the tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from ..tracing import is_plain
from . import replay
from .launch import like_rows, on_device, rows
from .once import once_differentiable

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


class Operator:
    """Calling it gives `out`; torch.ops.cumulant.NAME_forward and NAME_backward are `forward` and `backward`.

    It is called as the NamedTuple `call` is made, or as `make`, which returns one. These two operators take its fields
    one by one: (*call, keep), and (grad, *tensors, *state, *numbers). `states`: how many tensors a state has;
    `reads_out`: the backward pass is given (out, *state) as its state.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], run: Function, back: Function, empty: Function,
        *, states: int, make: Callable[..., Any] | None = None, reads_out: bool = False,
        differentiable: Sequence[int] = (0, 1, 2),
    ) -> None:  # fmt: skip
        fields = get_type_hints(call)
        self.call, self.make, self.run, self.back, self.differentiable = call, make or call, run, back, differentiable
        self.first, self.tensors = int(not reads_out), sum(Tensor in (x, *get_args(x)) for x in fields.values())
        self.kept = self.tensors + states + reads_out
        inputs = list(fields.items())
        state = [(f"state{i}", Tensor) for i in range(self.kept - self.tensors)]
        saved = [("grad", Tensor), *inputs[: self.tensors], *state, *inputs[self.tensors :]]
        self.forward = _registered(f"{name}_forward", self._forward, [*inputs, ("keep", bool)], states + 1)
        self.backward = _registered(f"{name}_backward", self._backward, saved, len(differentiable))
        self.forward.register_fake(lambda *inputs: empty(self._call(inputs[:-1]), inputs[-1]))
        self.backward.register_fake(lambda grad, *saved: tuple(like_rows(rows(saved[i])) for i in differentiable))
        self.forward.register_autograd(partial(self._gradients, self.backward), setup_context=self._setup_context)
        self.direct = _direct(self)

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        call = self.make(*inputs, **options)
        wanted = False
        if torch.is_grad_enabled():
            for i in self.differentiable:
                wanted = wanted or call[i].requires_grad
        if not is_plain(call[0]):
            out: Tensor = self.forward(*call, wanted)[0]
            return out
        return self.direct.apply(*call) if wanted else self._forward(*call, False)[0]

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        return self.call(rows(inputs[0]), rows(inputs[1]), rows(inputs[2]), *inputs[3:])

    def _forward(self, *inputs: Any) -> Tensors:
        call, lesson = self._call(inputs[:-1]), replay.lesson()
        with on_device(inputs[0].device):
            return self.run(call, inputs[-1]) if lesson is None else replay.watched(self, lesson, call, inputs[-1])

    def _backward(self, grad: Tensor, *saved: Any) -> Tensors:
        call = self._call((*saved[: self.tensors], *saved[self.kept :]))
        with on_device(grad.device):
            return self.back(call, rows(grad), *saved[self.tensors : self.kept])

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.numbers = inputs[self.tensors : -1]
        ctx.save_for_backward(*inputs[: self.tensors], *output[self.first :])

    def _gradients(self, back: Function, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        found = back(grad, *ctx.saved_tensors, *ctx.numbers)
        every: list[Tensor | None] = [None] * (self.tensors + len(ctx.numbers) + 1)
        for i, x in zip(self.differentiable, found, strict=True):
            every[i] = x
        return tuple(every)


def _registered(name: str, run: Function, inputs: list[tuple[str, Any]], outputs: int) -> Any:
    """A custom operator with inputs of these names and types, and so many tensors for outputs."""

    def function(*given: Any) -> Any:
        return run(*given)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in inputs]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters,
        return_annotation=tuple[(Tensor,) * outputs],  # type: ignore[misc]
    )
    return torch.library.custom_op(f"cumulant::{name}", function, mutates_args=())


def _direct(operator: Operator) -> Any:
    """The operator without torch's dispatcher, which costs up to 0.1 ms of Python each time."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            outputs = operator._forward(*inputs, True)
            operator._setup_context(ctx, (*inputs, True), outputs)
            return outputs[0]

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return operator._gradients(operator._backward, ctx, grad)

    return Direct
