"""Cumulant attention of order 1, 2 and 3 as mechanisms; the mathematics is in `cumulant.attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import shards
from ..attention import attend, attention_varlen
from ..call import Call
from ..expansion import Form, weigh
from ..streaming import Stream
from ..tensors import repeat_heads, wide
from ..tracing import transformed
from .options import CHECKS
from .products import for_every_token, sum_of_tokens
from .registry import Mechanism, can, options_of, register

SUMMARIES = {
    1: "the mean of the values: no query takes part, the floor for the others",
    2: "softmax to second order: one covariance of keys and values",
    3: "softmax to third order, diagonal in the key coordinates",
}
COSTS = {1: "L E", 2: "2 L D E", 3: "4 L D E"}


def mean_of_values(call: Call) -> Tensor:
    """The first order over all keys, `attention(order=1)`, which looks at no query and no key. Cost: L E."""
    query, key, value = call.prepared()[:3]
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
    def check(name: str, given: Any) -> None:
        Form(order, **{name: given}).checked()

    @options_of(partial(Form, order))
    def function(call: Call, **options: Any) -> Tensor:
        form = Form(order, **options).checked()
        whole = not transformed() and shards.answerer() is None
        if form == Form(1) and call.key_mask is None and not call.is_causal and whole:
            return mean_of_values(call)
        return attend(call, form)

    @options_of(partial(Form, order))
    def weights(call: Call, **options: Any) -> Tensor:
        return attend(call, Form(order, **options | {"backend": "auto"}), weigh)

    return Mechanism(
        name=f"cumulant{order}",
        summary=SUMMARIES[order],
        paper="Cumulant Attention in ViT",
        year=2026,
        cost=COSTS[order],
        function=function,
        row_weights=weights,
        stream=partial(Stream, order=order),
        packed=partial(attention_varlen, order=order),
        checks={**CHECKS, **dict.fromkeys(Form._fields[1:], check)},
        wants_query_mask=True,  # for around="mean": padded queries are not in the mean
        **can(
            "causal cross causal_cross key_mask grouped_queries subquadratic streaming ragged raw key_shift mergeable"
        ),
    )


for _order in (1, 2, 3):
    register(_mechanism(_order))
