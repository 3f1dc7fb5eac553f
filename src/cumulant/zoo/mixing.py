"""What a layer holds between its projections: a mechanism with its options, or a module with parameters.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D width, C = H D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..call import Call, Grid

if TYPE_CHECKING:
    from .registry import Mechanism


class Mix(Protocol):
    """`run` gives the output of a call, (..., H, Lq, E), `weigh` its weights; x (..., Lq, C) is the layer's input."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor: ...

    def run(self, call: Call, x: Tensor | None = None) -> Tensor: ...

    def weigh(self, call: Call, x: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Bound:
    """A mechanism without parameters, with its options."""

    mechanism: Mechanism
    options: Mapping[str, Any]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return self.mechanism(query, key, value, **{**self.options, **arguments})

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        return self.mechanism.run(call, **self.options)

    def weigh(self, call: Call, x: Tensor | None = None) -> Tensor:
        return self.mechanism.weigh(call, **self.options)


class Mixer(nn.Module):
    """Base of the modules with parameters: they define `run(call, x)` and `weigh(call, x)` around their mechanism.

    A layer tells its width and heads, the grid and prefix to expect, which hold for calls that name no grid, and the
    `place` where parameters are made.
    """

    def __init__(
        self,
        dim: int = 0,
        num_heads: int = 1,
        *,
        grid_size: Grid | None = None,
        prefix: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.grid_size, self.prefix = dim, num_heads, grid_size, prefix
        self.place: dict[str, Any] = {"device": device, "dtype": dtype}

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def weigh(self, call: Call, x: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def on_grid(self, call: Call) -> Call:
        """The call with the layer's grid where it names none."""
        return call._replace(grid=self.grid_size) if call.grid is None else call

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        x: Tensor | None = None,
        prefix: int | None = None,
        **arguments: Any,
    ) -> Tensor:
        """query (..., H, Lq, D), key and value (..., H, Lk, D) and fields of `Call` -> (..., H, Lq, D)."""
        prefix = self.prefix if prefix is None else prefix
        return self.run(Call(query, key, value, prefix=prefix, **arguments), x)

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        *,
        value: Tensor | None = None,
        x: Tensor | None = None,
        prefix: int | None = None,
        **arguments: Any,
    ) -> Tensor:
        """The weights with which the operator mixes the values, (..., H, Lq, Lk); what comes after is not in them."""
        prefix = self.prefix if prefix is None else prefix
        return self.weigh(Call(query, key, key if value is None else value, prefix=prefix, **arguments), x)
