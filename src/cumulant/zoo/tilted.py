"""Cumulant attention expanded around the mean query instead of around 0.

Shape legend: ... leading dimensions, H heads, L queries, S keys, D, E widths.

Softmax at q = q0 + d is softmax at d under the weights w = softmax(scale K q0) of the keys: exp(q.k) = exp(q0.k)
exp(d.k). Its cumulants in d are those of the tilted measure w, so that

    order 2   <v>_w + scale Cov_w(v, k) (q - q0)          q0 = the mean of the queries

is exact at q0 and to first order around it, where the expansion around 0 begins with equal weights for all keys. One
more softmax, of one query a head: cost S D beside that of the order. Weights differ from head to head, so heads go to
`cumulant.attention` as sequences of their own, with w as weights of their keys; kernels included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .inputs import prepare, wide
from .masking import log_weights, repeat_heads, softmax_or_zero

AROUND = ("zero", "mean")


def check_around(around: str, is_causal: bool) -> None:
    if around not in AROUND:
        raise ValueError(f"around must be one of {', '.join(map(repr, AROUND))}, got {around!r}")
    if around == "mean" and is_causal:
        raise ValueError('around="mean" has no causal form: the mean would know later queries; pass around="zero"')


def around_mean(
    call: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    *values: Tensor,
    apart: int = 0,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """call(query - q0, key, *values, key_mask=w, ...), `cumulant.attention` or `scores`, for q0 the mean query.

    The first `apart` queries, class tokens say, have a mean of their own: they ask for something else than the others.
    """
    check_around("mean", is_causal)
    value = values[0] if values else key
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    heads, (L, D), lead = query.shape[-3], query.shape[-2:], query.shape[:-3]
    if not 0 <= apart <= L:
        raise ValueError(f"apart must lie between 0 and the {L} queries, got {apart}")
    scale = D**-0.5 if scale is None else scale
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    if not (L and key.shape[-2]):
        return call(query, key, *((value,) if values else ()), scale=scale, **options)
    added = log_weights(key_mask, wide(key[..., 0]))
    folded = [_fold(x) for x in ((key, value) if values else (key,))]
    outs = []
    for part in query.split([n for n in (apart, L - apart) if n], -2):
        mean = wide(part).mean(-2, keepdim=True)
        logits = scale * (mean * wide(key)).sum(-1)
        w = softmax_or_zero(logits if added is None else logits + added)
        rows = _fold((wide(part) - mean).to(part.dtype))
        out = call(rows, *folded, key_mask=w.reshape(-1, key.shape[-2]), scale=scale, **options)
        outs.append(out.reshape(*lead, heads, *out.shape[-2:]))
    return torch.cat(outs, -2)


def _fold(x: Tensor) -> Tensor:
    """(..., H, L, W) as (N H, 1, L, W)."""
    return x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:])
