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
    """Base of the modules with parameters, which stand around the operator of their `mechanism`.

    A layer tells its width and heads, the grid and prefix to expect, which hold for calls that name no grid, and the
    `place` where parameters are made. All other `options` are the operator's.
    """

    mechanism: str

    def __init__(
        self,
        dim: int = 0,
        num_heads: int = 1,
        *,
        grid_size: Grid | None = None,
        prefix: int = 0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.grid_size, self.prefix = dim, num_heads, grid_size, prefix
        self.place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.options = options
        self.register_load_state_dict_pre_hook(_fit_loaded)

    def fit_loaded(self, state: dict[str, Any], name: str) -> None:
        """Before loading: fit the tables of a checkpoint made for another grid, under names that begin with `name`."""

    @property
    def operator(self) -> Mechanism:
        from .registry import get  # which imports this file

        return get(self.mechanism)

    def asked(self, call: Call, x: Tensor | None) -> tuple[Call, dict[str, Any]]:
        """What the operator gets for a call of the layer, and with which options."""
        return self.on_grid(call), self.options

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        call, options = self.asked(call, x)
        return self.operator.run(call, **options)

    def weigh(self, call: Call, x: Tensor | None = None) -> Tensor:
        call, options = self.asked(call, x)
        return self.operator.weigh(call, **options)

    def on_grid(self, call: Call) -> Call:
        """The call with the layer's grid where it names none."""
        return call._replace(grid=self.grid_size) if call.grid is None else call

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, x: Tensor | None = None, **fields: Any) -> Tensor:
        """query (..., H, Lq, D), key and value (..., H, Lk, D) and fields of `Call` -> (..., H, Lq, D)."""
        return self.run(Call(query, key, value, **{"prefix": self.prefix, **fields}), x)

    def scores(self, query: Tensor, key: Tensor, *, x: Tensor | None = None, **fields: Any) -> Tensor:
        """The weights with which the operator mixes the values, (..., H, Lq, Lk); what comes after is not in them."""
        return self.weigh(Call(query, key, **{"value": key, "prefix": self.prefix, **fields}), x)


def _fit_loaded(mixer: Mixer, state: dict[str, Any], name: str, *_: Any) -> None:
    if mixer.grid_size is not None:
        mixer.fit_loaded(state, name)
