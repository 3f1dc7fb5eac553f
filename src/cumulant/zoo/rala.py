"""RALA, rank-augmented linear attention: key-value pairs weighted by a global softmax before they are summed.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import shards
from ..call import Call
from ..tensors import wide
from .lepe_gate import LepeGate, rotated
from .linear import feature_map
from .products import (
    count_of,
    dot_with_one,
    factor,
    feature_product,
    one_hot_weights,
    peak,
    sum_of_tokens,
    weighted,
    written_down,
)
from .registry import can, options_of, register

EPS = 1e-6


def rala_attention(call: Call, *, use_alpha: bool = True, use_rope: bool = False, eps: float = EPS) -> Tensor:
    """out_i = phi(q_i) (sum_j alpha_j phi(k_j) v_j^T) / (phi(q_i).(sum_j alpha_j phi(k_j)) + eps), phi = elu + 1.

    alpha = softmax_j(scale phi(k_j).mean_i phi(q_i)), `scale` defaults to D**-0.5; the query mask says which queries
    enter the mean. `use_alpha=False` is plain linear attention. `use_rope` turns phi(q) and alpha phi(k) by their
    place on the grid where they meet the values, not in the denominator (as released; rows of weights then no longer
    sum to 1). A row without any key gives 0. Cost: 2 L D E.
    """
    dtype = call.query.dtype
    query, w_q = call.present_queries()
    features_q, features_k = (wide(factor(feature_map(wide(x)), dtype)) for x in (query, call.key))
    w_k, mass = call.key_weights(features_k.dtype), features_k.new_ones(())
    if use_alpha:
        # The sum over alpha, a factor above the fraction and below it, is left there: the gradient of alpha then has no
        # sum over all keys to wait for, so that a compiler takes it, and that of the keys, with that of the features.
        kernel, mass = alpha(features_q, features_k, w_q, w_k, call.softmax_scale)
        features_k = features_k * kernel
    else:
        features_k = weighted(features_k, w_k) / count_of(features_k, w_k)
    total = dot_with_one(features_q, *shards.summed(sum_of_tokens(features_k))) + eps * mass
    if use_rope:
        features_q, features_k = rotated(features_q, features_k, call, dtype)
    return feature_product(features_q, features_k, call.value, dtype) / total


def alpha(
    features_q: Tensor, features_k: Tensor, w_q: Tensor | None, w_k: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """w_j exp(scale k_j.mean(q)) up to a factor, (..., H, Lk, 1), and its sum (..., H, 1, 1), 1 without any key.

    Queries enter the mean by their weights. Cost: L D.
    """
    (total,) = shards.summed(sum_of_tokens(weighted(features_q, w_q)))
    mean = total / count_of(features_q, w_q)
    logits = dot_with_one(features_k, mean) * scale
    if w_k is not None:
        logits = logits.masked_fill(w_k == 0, torch.finfo(logits.dtype).min)
    logits = logits - peak(logits)
    kernel = written_down(weighted(logits.exp(), w_k))
    (mass,) = shards.summed(kernel.sum(-2, keepdim=True))
    return kernel, torch.where(mass > 0, mass, 1.0)


@options_of(rala_attention)
class RankAugmentedAttention(LepeGate):
    """RALA as published in a layer; options are those of `LepeGate` and of `rala_attention`."""

    mechanism = "rala"


RALA = register(
    name="rala",
    summary="linear attention with key-value pairs weighted by a global softmax, and a gate",
    paper="Breaking the Low-Rank Dilemma of Linear Attention (Fan et al.)",
    year=2025,
    arxiv="2411.07635",
    cost="2 L D E",
    function=rala_attention,
    row_weights=one_hot_weights(rala_attention),
    module=RankAugmentedAttention,
    pattern_options={"cross": {"use_lepe": False, "use_rope": False}},
    independent_rows=False,
    **can("cross key_mask subquadratic ragged wants_grid wants_input wants_query_mask mergeable"),
)
