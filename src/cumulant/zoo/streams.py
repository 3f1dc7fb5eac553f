"""Attention by features, token by token: sums of constant size that queries read.

Shape legend: ... leading dimensions, H heads, Hk key heads, L tokens, D width of the features, E value width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..call import check_scale
from ..held import Held, check_rows, check_step, check_tokens, statistics_dtype
from ..tensors import fold_groups, wide
from ..tracing import outside_autocast


class Sums(NamedTuple):
    """Over the tokens so far, in at least float32: phi(k) v^T, phi(k) and v, and their number."""

    KV: Tensor  # (..., D, E)
    K: Tensor  # (..., D, 1)
    V: Tensor  # (..., 1, E)
    tokens: Tensor  # ()


class FeatureStream:
    """Attention by features `phi` from sums: `append` takes tokens in, `read` answers queries, `step` does both.

    Steps of one token are causal attention. For decoding against a fixed memory (cross attention), append it once and
    read it for each query. `scale` multiplies the query before `phi`, 1 unless given. Cost: D E for each token and for
    each query.
    """

    state: Sums | None = None
    widths: tuple[int, int] = (0, 0)  # D and E of the tokens

    def __init__(self, *, scale: float | None = None) -> None:
        check_scale(scale)
        self.scale = scale

    @property
    def held(self) -> Held | None:
        """What new tokens must agree with."""
        if self.state is None:
            return None
        return Held(self.state.V.shape[:-2], *self.widths, self.state.V.dtype, self.state.V.device)

    def phi(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def rows(self, features: Tensor, sums: Sums) -> Tensor:
        """The output (..., L, E) for features of queries (..., L, D)."""
        raise NotImplementedError

    @outside_autocast
    def append(self, key: Tensor, value: Tensor) -> None:
        """Takes in key (..., Hk, L, D) and value (..., Hk, L, E)."""
        check_tokens(key, value, self.held)
        features, values = self.phi(wide(key)), wide(value)
        K, V = features.sum(-2).unsqueeze(-1), values.sum(-2, keepdim=True)
        new = Sums(features.mT @ values, K, V, values.new_full((), key.shape[-2]))
        self.state = new if self.state is None else Sums(*(a + b for a, b in zip(self.state, new, strict=True)))
        self.widths = key.shape[-1], value.shape[-1]

    @outside_autocast
    def read(self, query: Tensor) -> Tensor:
        """query (..., H, L, D) -> (..., H, L, E)."""
        held = self.held
        if held is None or self.state is None:
            raise ValueError("there is nothing to read yet: append keys and values first")
        check_rows(query, held)
        if statistics_dtype(query.dtype) != held.dtype:
            raise TypeError(f"query must be as the tokens before it, kept in {held.dtype}, got {query.dtype}")
        scaled = wide(query) if self.scale is None else wide(query) * self.scale
        out = self.rows(fold_groups(self.phi(scaled), held.lead[-1]), self.state)
        return out.reshape(*query.shape[:-1], held.value_width).to(query.dtype)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (..., H, 1, D), key (..., Hk, 1, D), value (..., Hk, 1, E) -> (..., H, 1, E)."""
        check_step(query, key, value, self.held)
        self.append(key, value)
        return self.read(query)
