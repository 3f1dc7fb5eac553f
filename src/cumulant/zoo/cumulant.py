"""Cumulant attention of order 1, 2 and 3 as mechanisms; the mathematics is in `cumulant.attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attention import attention, attention_varlen, scores
from ..streaming import Stream
from .registry import Mechanism, register

SUMMARIES = {
    1: "the mean of the values: no query takes part, the floor for the others",
    2: "softmax to second order: one covariance of keys and values",
    3: "softmax to third order, diagonal in the key coordinates",
}
COSTS = {1: "L E", 2: "L D E", 3: "2 L D E"}


def _mechanism(order: int) -> Mechanism:
    def function(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        full: bool = False,
        normalization: str = "mean",
        backend: str = "auto",
        **shared: Any,
    ) -> Tensor:
        return attention(
            query, key, value, order=order, full=full, normalization=normalization, backend=backend, **shared
        )

    def weights(
        query: Tensor, key: Tensor, *, full: bool = False, normalization: str = "mean", **shared: Any
    ) -> Tensor:
        return scores(query, key, order=order, full=full, normalization=normalization, **shared)

    return Mechanism(
        name=f"cumulant{order}",
        summary=SUMMARIES[order],
        paper="Cumulant Attention in ViT",
        year=2026,
        cost=COSTS[order],
        function=function,
        scores=weights,
        stream=partial(Stream, order=order),
        varlen=partial(attention_varlen, order=order),
        causal=True,
        cross=True,
        causal_cross=True,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        streaming=True,
        ragged=True,
        key_shift=True,
    )


for _order in (1, 2, 3):
    register(_mechanism(_order))
