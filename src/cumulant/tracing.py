"""What stands around a call: compiler, transforms, tensor subclasses and autocast. Below every other room."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

Method = TypeVar("Method", bound=Callable[..., Any])
T = TypeVar("T")


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor and nothing watches: no compiler, transform, tensor subclass or dispatch mode.

    Then kernels may be called directly; through the dispatcher a custom op costs up to 0.1 ms of Python each time.
    """
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def may_keep(x: Tensor) -> bool:
    """Whether what is made for a call of x may be kept for later ones: nothing watches, nor records operations."""
    return is_plain(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def transformed() -> bool:
    """Inside torch.func transforms or forward-mode differentiation, which need plain operations."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def can_be_read(x: Tensor) -> bool:
    """Whether its numbers can be looked at for nothing: on a CPU, untraced, of no class that stands for other tensors.

    Elsewhere that would wait for a device, ask other workers, or break a graph.
    """
    itself = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transformed()
    return x.device.type == "cpu" and itself and not traced


def constant(function: Callable[..., T]) -> Callable[..., T]:
    """Kept, and to torch.compile a constant; given and returned are numbers, words, devices and tuples of these.

    `torch.compiler.assume_constant_result` does the latter, but imports the compiler first, for a second.
    """
    kept = functools.lru_cache(64)(function)

    @functools.wraps(function)
    def constant(*arguments: Any) -> T:
        return kept(*arguments)

    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return constant


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context without autocast; entering torch's own costs as much as launching a kernel, so only where one is on."""
    active = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, inputs take its dtype, as those of scaled_dot_product_attention do."""
    for name, x in zip(("query", "key", "value"), tensors, strict=False):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return tensors


def outside_autocast(method: Method) -> Method:
    """A method of tensors, run without autocast: in 16 bits, the sums that a stream keeps would soon stand still."""

    @functools.wraps(method)
    def run(self: Any, *given: Any, **named: Any) -> Any:
        place = next((x.device.type for x in (*given, *named.values()) if isinstance(x, Tensor)), "cpu")
        with without_autocast(place):
            return method(self, *given, **named)

    return cast(Method, run)
