"""MALA, magnitude-aware linear attention: scale and offset instead of a division, so that the length of a query acts.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, N keys that count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call import Call, check_scale
from ..tensors import fold_groups, repeat_heads, wide
from ..tracing import transformed
from .lepe_gate import LepeGate, rotated
from .linear import feature_map
from .products import (
    TINY,
    dot_with_one,
    factor,
    feature_product,
    multiplies_narrow,
    one_hot_weights,
    ones_for,
    sum_of_tokens,
    sums_seen,
)
from .registry import Mechanism, can, options_of, register
from .streams import FeatureStream, Sums

EPS = 1e-6


def mala_attention(
    call: Call, *, use_rope: bool = False, scaled: bool = True, chunk: int = 128, eps: float = EPS
) -> Tensor:
    """out_i = sum_j ((1 + 1/(S_i + eps)) s_ij - S_i / N) v_j, s_ij = (scale / N) phi(q_i).phi(k_j), S_i = sum_j s_ij.

    phi = elu + 1, `scale` defaults to D**-0.5, N is the sum of the key weights. Rows of weights sum to 1; single
    weights may be negative. The factor scale / N is that of the released code; `scaled=False` is the printed form
    without it (`scale` 1), with weights about N times as large. `use_rope` turns phi(q) and phi(k) by their place on
    the grid where they meet the values, not in S (as released; rows then no longer sum to 1). Causal rows take N, S
    and the means over the keys up to their index. A row without any key gives 0. Cost: 2 L D E.
    """
    query, value, is_causal = call.query, call.value, call.is_causal
    heads = query.shape[-3]
    # The causal products are wide whatever the inputs: the terms of the formula are large and nearly cancel.
    dtype = torch.float32 if is_causal else query.dtype
    features_q, features_k = (wide(factor(feature_map(wide(x)), dtype)) for x in call[:2])
    weights = call.key_weights(features_k.dtype)
    weights = ones_for(features_k) if weights is None else weights
    features_k = features_k * weights
    turned_q, turned_k = rotated(features_q, features_k, call) if use_rope else (features_q, features_k)
    count, values, keys = (
        sums_seen(x, query.shape[-2], is_causal) for x in (weights, wide(value) * weights, features_k)
    )
    count, keys = count.clamp(min=TINY), repeat_heads(keys, heads)
    mean = values / count
    # What s_ij has before phi(q_i).phi(k_j).
    scale = call.softmax_scale / count if scaled else (1.0 if call.scale is None else call.scale)
    total = (features_q * keys).sum(-1, keepdim=True) if is_causal else dot_with_one(features_q, keys)
    total = total * scale
    gain = scale * (1 + 1 / (total + eps))
    if is_causal or not multiplies_narrow(query, dtype) or transformed():
        out = gain * feature_product(turned_q, turned_k, wide(value), dtype, is_causal=is_causal, chunk=chunk)
    else:
        out = _centred_product(turned_q, turned_k, value, weights, count, mean.detach(), gain)
    return out - total * repeat_heads(mean, heads)


def _centred_product(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor, count: Tensor, mean: Tensor, gain: Tensor
) -> Tensor:
    """gain_i q_i (sum_j k_j v_j^T), with narrow products of the values less their mean (..., Hk, 1, E), added last.

    The mean of the values is most of the sum and is nearly taken off after it: rounded, it would be most of the error.
    What is added is the mean of what was taken off: v - mean rounds to v again where the mean is below its last digit.
    """
    near = (value - mean).to(value.dtype)
    centre = mean - sum_of_tokens(wide(near.detach()) * weights) / count
    rows, gain = (fold_groups(x, key.shape[-3]) for x in (query, gain))
    along = dot_with_one(rows, sum_of_tokens(key))
    out = _Centred.apply(rows.to(value.dtype), key.to(value.dtype), near, gain, centre, along)
    return out.reshape(*query.shape[:-1], value.shape[-1])


class _Centred(torch.autograd.Function):
    """g (q (k^T n) + s c) in float32, of narrow q, k, n = v - c and s = q.(sum k), with whose share of the gradients
    those of g and of what is taken off later nearly cancel: it stays wide."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, n: Tensor, gain: Tensor, c: Tensor, s: Tensor) -> Tensor:
        KV = k.mT @ n
        part = q @ KV
        ctx.save_for_backward(q, k, n, gain, c, s, KV, part)
        return gain * (wide(part) + s * c)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, n, gain, c, s, KV, part = ctx.saved_tensors
        d_part, along = (grad * gain).to(n.dtype), (grad * c).sum(-1, keepdim=True)
        d_KV = q.mT @ d_part
        d_gain = (grad * wide(part)).sum(-1, keepdim=True) + s * along
        return d_part @ KV.mT, n @ d_KV.mT, k @ d_KV, d_gain, None, gain * along


class MalaStream(FeatureStream):
    """Causal MALA (without rotary turns) token by token."""

    def __init__(self, *, scaled: bool = True, eps: float = EPS, scale: float | None = None) -> None:
        super().__init__()
        check_scale(scale)
        self.scaled, self.eps, self.own_scale = scaled, eps, scale  # which multiplies products, not the query

    def phi(self, x: Tensor) -> Tensor:
        return feature_map(x)

    def rows(self, features: Tensor, sums: Sums) -> Tensor:
        given, plain = self.own_scale, features.shape[-1] ** -0.5 if self.scaled else 1.0
        scale = (plain if given is None else given) / (sums.tokens if self.scaled else 1.0)
        total = features @ sums.K * scale
        return features @ sums.KV * scale * (1 + 1 / (total + self.eps)) - total * (sums.V / sums.tokens)


@options_of(mala_attention)
class MagnitudeAwareAttention(LepeGate):
    """MALA as published in a layer; options are those of `LepeGate` and of `mala_attention`."""

    mechanism = "mala"


MALA = register(
    Mechanism(
        name="mala",
        summary="linear attention in which the length of a query sharpens its weights",
        paper="Rectifying Magnitude Neglect in Linear Attention (Fan et al.)",
        year=2025,
        arxiv="2507.00698",
        cost="2 L D E",
        function=mala_attention,
        row_weights=one_hot_weights(mala_attention),
        module=MagnitudeAwareAttention,
        stream=MalaStream,
        pattern_options={"causal": {"use_lepe": False}, "cross": {"use_lepe": False, "use_rope": False}},
        **can(
            "causal cross causal_cross key_mask grouped_queries subquadratic streaming ragged wants_grid wants_input"
        ),
    )
)
