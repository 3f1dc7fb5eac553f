"""Cumulant attention of order 1, 2 and 3 as mechanisms; the mathematics is in `cumulant.attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import attention, attention_varlen, scores
from ..inputs import transformed
from ..streaming import Stream
from .inputs import prepare, wide
from .masking import repeat_heads
from .products import for_every_token, sum_of_tokens
from .registry import Mechanism, register
from .tilted import around_mean, check_around

SUMMARIES = {
    1: "the mean of the values: no query takes part, the floor for the others",
    2: "softmax to second order: one covariance of keys and values",
    3: "softmax to third order, diagonal in the key coordinates",
}
COSTS = {1: "L E", 2: "2 L D E", 3: "4 L D E"}


def mean_of_values(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """The first order over all keys, `attention(order=1)`, which looks at no query and no key. Cost: L E."""
    query, key, value, _ = prepare(query, key, value, key_mask=None, scale=scale, enable_gqa=enable_gqa)
    mean = repeat_heads(sum_of_tokens(wide(value)) / max(1, key.shape[-2]), query.shape[-3])
    return _Unused.apply(query, key, for_every_token(mean, query.shape[-2]))


class _Unused(torch.autograd.Function):
    """x in the dtype of the query. The gradients of query and key, which play no part, are zeros that nobody writes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, x: Tensor) -> Tensor:
        ctx.query, ctx.key, ctx.dtype = query.shape, key.shape, x.dtype
        return x.to(query.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        zero = grad.new_zeros(())
        return zero.expand(ctx.query), zero.expand(ctx.key), grad.to(ctx.dtype)


def _mechanism(order: int) -> Mechanism:
    def function(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        full: bool = False,
        normalization: str = "mean",
        backend: str = "auto",
        around: str = "zero",
        apart: int = 0,
        query_mask: Tensor | None = None,
        **shared: Any,
    ) -> Tensor:
        check_around(around, bool(shared.get("is_causal")))
        own: dict[str, Any] = {"order": order, "full": full, "normalization": normalization}
        if around == "mean":
            own |= {"apart": apart, "query_mask": query_mask}
            return around_mean(attention, query, key, value, backend=backend, **own, **shared)
        others = {name: x for name, x in shared.items() if name not in ("key_mask", "is_causal")}
        plain = (backend, normalization, full) == ("auto", "mean", False) and not transformed()
        if order == 1 and plain and shared.get("key_mask") is None and not shared.get("is_causal"):
            return mean_of_values(query, key, value, **others)
        return attention(query, key, value, backend=backend, **own, **shared)

    def weights(
        query: Tensor,
        key: Tensor,
        *,
        full: bool = False,
        normalization: str = "mean",
        around: str = "zero",
        apart: int = 0,
        query_mask: Tensor | None = None,
        **shared: Any,
    ) -> Tensor:
        check_around(around, bool(shared.get("is_causal")))
        own: dict[str, Any] = {"order": order, "full": full, "normalization": normalization}
        if around == "mean":
            return around_mean(scores, query, key, apart=apart, query_mask=query_mask, **own, **shared)
        return scores(query, key, **own, **shared)

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
        wants_query_mask=True,  # for around="mean": padded queries are not in the mean
    )


for _order in (1, 2, 3):
    register(_mechanism(_order))
