"""What a layer can carry besides its mechanism: a convolution on the values, a gate, learned temperatures, rotary
positions (Su et al. 2021: queries and keys turned by their place, so that their product sees distances).

Shape legend: ... leading dimensions, H heads, L = prefix + patches tokens, C width, D = C / H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import shards
from ..attention import attend
from ..call import Call, is_finite
from ..expansion import Form, expand
from ..tensors import repeat_heads, wide
from ..tracing import is_plain, transformed
from ..zoo.grid import convolved

GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu}
TEMPERATURES = (None, "head", "order")
CONV_INITS = ("default", "zero")
BASE = 10_000.0  # of rotary angles
ORDERS = {"cumulant2": 2, "cumulant3": 3}  # mechanisms whose terms can be weighted one by one


class ValueConv(nn.Module):
    """Depthwise convolution of the values on the grid of patches, with zeros at its border and at prefix tokens.

    A kernel of two numbers moves within a frame, for images and for each frame of a clip alike; one of three
    (frames, rows, columns) also over time. Cost: L C times the size of the kernel.
    """

    def __init__(self, dim: int, kernel: tuple[int, ...], init: str = "default", **place: Any) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(dim, 1, *kernel, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's default for a convolution, uniform within 1/sqrt(kernel size); or zero."""
        if self.init == "zero":
            nn.init.zeros_(self.weight)
        else:
            bound = math.prod(self.weight.shape[2:]) ** -0.5
            nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, tokens: Tensor, grid: tuple[int, ...], prefix: int = 0) -> Tensor:
        """tokens (..., L, C) with `prefix` tokens before the patches of `grid` -> (..., L, C)."""
        kernel = self.weight.shape[2:]
        if len(kernel) > len(grid):
            raise ValueError(f"v_conv={tuple(kernel)} moves over frames, rows and columns, got grid={grid}")
        how: dict[str, Any] = {"padding": [size // 2 for size in kernel], "groups": self.weight.shape[0]}
        convolution = partial(F.conv2d if len(kernel) == 2 else F.conv3d, weight=self.weight, **how)
        return convolved(convolution, tokens, grid[len(grid) - len(kernel) :], prefix)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel={tuple(self.weight.shape[2:])}"


def conv_kernel(v_conv: bool | int | Sequence[int]) -> tuple[int, ...] | None:
    """The kernel that `v_conv` asks for: True is 3 x 3, an odd number k is k x k, 2 or 3 odd numbers are themselves."""
    if not isinstance(v_conv, int | Sequence) or isinstance(v_conv, str | bytes):
        raise TypeError(f"v_conv must be a bool, an odd number, or 2 or 3 odd numbers, got {v_conv!r}")
    if isinstance(v_conv, int):
        kernel: tuple[int, ...] = (3, 3) if v_conv is True else (v_conv, v_conv)
    else:
        kernel = tuple(v_conv)
    if kernel == (0, 0):  # False is 0
        return None
    if len(kernel) not in (2, 3) or any(not isinstance(k, int) or k < 1 or k % 2 == 0 for k in kernel):
        raise ValueError(f"v_conv must be a bool, an odd number, or 2 or 3 odd numbers, got {v_conv!r}")
    return kernel


def gate_name(gate: bool | str) -> str | None:
    """The activation that `gate` asks for: True is "sigmoid"."""
    if gate is False or gate is None:
        return None
    name = "sigmoid" if gate is True else gate
    if not isinstance(name, str) or name not in GATES:
        raise ValueError(f"gate must be a bool or one of {', '.join(map(repr, GATES))}, got {gate!r}")
    return name


def check_temperature(temperature: str | None, mechanism: str, around: str = "zero") -> None:
    if not isinstance(temperature, str | None) or temperature not in TEMPERATURES:
        raise ValueError(f'temperature must be None, "head" or "order", got {temperature!r}')
    if temperature == "order" and mechanism not in ORDERS:
        raise ValueError(
            f'temperature="order" weights the terms of {", ".join(map(repr, ORDERS))}, got attention={mechanism!r}; '
            'use temperature="head"'
        )
    if temperature == "order" and around == "mean":
        raise ValueError(
            'temperature="order" mixes the mean of the values into an expansion around 0, got around="mean"; '
            'use temperature="head"'
        )


class Temperature(nn.Module):
    """Learned positive factors, one per head and, with `orders` 2, one per head for each order; 1 at first.

    Per head, the query is multiplied by exp(second). Per order, with a = exp(second) and b = exp(third),

        <v> + a S^T q + b/2 T^T q^2  =  g out3(t q) + (1 - g) <v>,   t = b / a,  g = a^2 / b

    so that the kernels stay as they are: one scaled query, and a mean of the values mixed into the output.
    Both parameters are vectors (H,) of logarithms. Cost: L C, and a sum over the values per order.
    """

    def __init__(self, num_heads: int, orders: int = 1, **place: Any) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.zeros(num_heads, **place))
        self.third = nn.Parameter(torch.zeros(num_heads, **place)) if orders == 2 else None

    def reset_parameters(self) -> None:
        for factor in self.parameters():
            nn.init.zeros_(factor)

    def scale(self, query: Tensor) -> Tensor:
        """Query (..., H, L, D) times t: in float32 before it is rounded back."""
        t = (self.second if self.third is None else self.third - self.second).exp()
        return (query * t[:, None, None]).to(query.dtype)

    def mean_in(
        self, out: Tensor, call: Call, normalization: str, heads: slice, what: Callable[..., Tensor] = expand
    ) -> Tensor:
        """g out + (1 - g) <v> of some heads, the mean over the same keys as `out` (..., h, L, D); `out` per head.

        With `what=weigh` the same for weights (..., h, L, M).
        """
        if self.third is None:
            return out
        gain, value = (2 * self.second - self.third).exp()[heads, None, None], call.value
        everything = call.key_mask is None and not call.is_causal and normalization == "mean" and value.shape[-2]
        if what is expand and everything and shards.answerer() is None:
            mean = repeat_heads(wide(value).mean(-2, keepdim=True), out.shape[-3])
        else:
            mean = attend(call, Form(1, normalization=normalization), what)
        return (gain * out + (1 - gain) * mean).to(out.dtype)


def rotary_base(rotary: bool | float) -> float | None:
    """The base that an argument `rotary` stands for: True is 10,000, False none."""
    if isinstance(rotary, bool):
        return BASE if rotary else None
    if not (is_finite(rotary) and rotary > 1):
        raise ValueError(f"rotary must be True, False or a base above 1, got {rotary!r}")
    return float(rotary)


def rotate(x: Tensor, base: float, start: int = 0) -> Tensor:
    """x (..., L, D) from place `start` on: channels i and i + D/2 are turned by place * base^(-2i/D).

    The last channel of an odd width stays as it is. Cost: 3 L D.
    """
    half = x.shape[-1] // 2
    if not half:
        return x
    X = wide(x)
    cos, sin = turns(X, half, base, start)[1:]
    a, b, rest = X.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1).to(x.dtype)


def turns(x: Tensor, half: int, base: float, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Angles place * base^(-i/half) of the tokens of x (..., L, D), (L, half), and their cosines and sines."""
    asked = x.shape[-2], half, base, start, x.device, x.dtype
    steady = is_plain(x) and not transformed() and not torch.compiler.is_compiling()
    if not steady or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _turns(*asked)
    return _kept_turns(*asked)


def _turns(
    length: int, half: int, base: float, start: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.arange(start, start + length, device=device, dtype=dtype)
    angles = places[:, None] * base ** (-torch.arange(half, device=device, dtype=dtype) / half)
    return angles, angles.cos(), angles.sin()


@lru_cache(8)  # every layer of a model asks for the same: eight small kernels, twice a layer
def _kept_turns(*asked: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):  # what is kept may meet gradients later
        return _turns(*asked)
