"""MALA, magnitude-aware linear attention: scale and offset instead of a division, so that the length of a query acts.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, N keys that count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call, check_scale
from ..tensors import repeat_heads, wide
from .lepe_gate import LepeGate, rotated
from .linear import feature_map
from .products import TINY, dot_with_one, factor, feature_product, one_hot_weights, ones_for, sums_seen
from .registry import can, options_of, register
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
    tokens = weights, wide(value) * weights, features_k
    count, values, keys = sums_seen(tokens, query.shape[-2], is_causal)
    count, keys = count.clamp(min=TINY), repeat_heads(keys, heads)
    mean = values / count
    # What s_ij has before phi(q_i).phi(k_j).
    scale = call.softmax_scale / count if scaled else (1.0 if call.scale is None else call.scale)
    total = (features_q * keys).sum(-1, keepdim=True) if is_causal else dot_with_one(features_q, keys)
    total = total * scale
    gain = scale * (1 + 1 / (total + eps))
    out = gain * feature_product(turned_q, turned_k, wide(value), dtype, is_causal=is_causal, chunk=chunk, centred=True)
    return out - total * repeat_heads(mean, heads)


class MalaStream(FeatureStream):
    """Causal MALA (without rotary turns) token by token."""

    def __init__(self, *, scaled: bool = True, eps: float = EPS, scale: float | None = None) -> None:
        super().__init__()
        check_scale(scale)
        self.scaled, self.eps, self.own_scale = scaled, eps, scale  # which multiplies products, not the query

    phi = staticmethod(feature_map)

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
        "causal cross causal_cross key_mask grouped_queries subquadratic streaming ragged wants_grid wants_input "
        "mergeable"
    ),
)
