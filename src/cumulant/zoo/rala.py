"""RALA, rank-augmented linear attention: key-value pairs weighted by a global softmax before they are summed.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..inputs import without_autocast
from .inputs import prepare, prepare_queries, wide
from .lepe_gate import LepeGate, rotated
from .linear import feature_map
from .products import dot_with_one, factor, feature_product, sum_of_tokens, written_down
from .ragged import padded
from .registry import Mechanism, register

EPS = 1e-6


def rala_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_mask: Tensor | None = None,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    use_alpha: bool = True,
    use_rope: bool = False,
    eps: float = EPS,
) -> Tensor:
    """out_i = phi(q_i) (sum_j alpha_j phi(k_j) v_j^T) / (phi(q_i).(sum_j alpha_j phi(k_j)) + eps), phi = elu + 1.

    alpha = softmax_j(scale phi(k_j).mean_i phi(q_i)), `scale` defaults to D**-0.5. query (..., H, Lq, D),
    key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E). `use_alpha=False` is plain linear attention.
    `use_rope` turns phi(q) and alpha phi(k) by their place on the grid where they meet the values, not in the
    denominator (as released; rows of weights then no longer sum to 1). key_mask is bool or weights, query_mask
    (..., Lq) says which queries enter the mean. A row without any key gives 0. Cost: 2 L D E.
    """
    if is_causal or enable_gqa:
        raise ValueError("rala has neither a causal form nor grouped queries")
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=False)
    with without_autocast(query.device.type):
        features_q, features_k, mass = _features(query, key, key_mask, query_mask, scale, use_alpha, query.dtype)
        turned_q, turned_k = features_q, features_k
        if use_rope:
            turned_q, turned_k = rotated(features_q, features_k, grid, prefix, query.dtype)
        total = _row_sums(features_q, features_k) + eps * mass
        out = feature_product(turned_q, turned_k, value, query.dtype) / total
    return out.to(query.dtype)


def rala_scores(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_mask: Tensor | None = None,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    use_alpha: bool = True,
    use_rope: bool = False,
    eps: float = EPS,
) -> Tensor:
    """The weights alpha_j phi(q_i).phi(k_j) / (their sum + eps), (..., H, Lq, Lk). Cost: Lq Lk D."""
    if is_causal or enable_gqa:
        raise ValueError("rala has neither a causal form nor grouped queries")
    query, key, _, key_mask = prepare(query, key, key, key_mask=key_mask, scale=scale, enable_gqa=False)
    with without_autocast(query.device.type):
        features_q, features_k, mass = _features(query, key, key_mask, query_mask, scale, use_alpha, torch.float32)
        turned_q, turned_k = rotated(features_q, features_k, grid, prefix) if use_rope else (features_q, features_k)
        total = _row_sums(features_q, features_k) + eps * mass
        return (turned_q @ turned_k.mT / total).to(query.dtype)


def alpha(
    features_q: Tensor, features_k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, scale: float | None
) -> Tensor:
    """w_j exp(scale k_j.mean(q)), normalised over the keys, (..., H, Lk, 1); queries by weight. Cost: L D."""
    kernel, mass = _kernel(features_q, features_k, key_mask, query_mask, scale)
    return kernel / mass


def _kernel(
    features_q: Tensor, features_k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """w_j exp(scale k_j.mean(q)) up to a factor, (..., H, Lk, 1), and its sum (..., H, 1, 1), 1 without any key."""
    if query_mask is None:
        mean = sum_of_tokens(features_q) / max(1, features_q.shape[-2])
    else:
        mean = sum_of_tokens(features_q * query_mask) / query_mask.sum(-2, keepdim=True).clamp(min=1e-30)
    logits = dot_with_one(features_k, mean) * (features_k.shape[-1] ** -0.5 if scale is None else scale)
    weights = None if key_mask is None else key_mask.to(logits.dtype)[..., None, :, None]
    if weights is not None:
        logits = logits.masked_fill(weights == 0, torch.finfo(logits.dtype).min)
    if logits.shape[-2]:
        logits = logits - logits.amax(-2, keepdim=True).detach()
    kernel = written_down(logits.exp() if weights is None else weights * logits.exp())
    mass = kernel.sum(-2, keepdim=True)
    return kernel, torch.where(mass > 0, mass, 1.0)


def _row_sums(features_q: Tensor, features_k: Tensor) -> Tensor:
    """sum_j q_i.k_j, (..., H, Lq, 1). As a sum and not a product of matrices, so that a compiler fuses it."""
    return dot_with_one(features_q, sum_of_tokens(features_k))


def _features(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    scale: float | None,
    use_alpha: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | float]:
    """phi(q), c alpha phi(k) and the c of each head; `dtype` as in `product`.

    The factor c is in the sums above the fraction and below it. Left there, the gradient of alpha has no sum over all
    keys to wait for, so that a compiler takes it, and that of the keys, where it has the gradient of the features.
    """
    query, rows = prepare_queries(query, query_mask)
    features_q, features_k = (wide(factor(feature_map(wide(x)), dtype)) for x in (query, key))
    if use_alpha:
        kernel, mass = _kernel(features_q, features_k, key_mask, rows, scale)
        return features_q, features_k * kernel, mass
    if key_mask is None:
        return features_q, features_k / max(1, key.shape[-2]), 1.0
    weights = key_mask.to(features_k.dtype)[..., None, :, None]
    return features_q, features_k * (weights / weights.sum(-2, keepdim=True).clamp(min=1e-30)), 1.0


class RankAugmentedAttention(LepeGate):
    """RALA as published in a layer: (attention with rotary turns + LePE(v)) * (W_g x + b_g), then the projection.

    The released code takes q, k, v and the gate from one projection C -> 4 C; here the gate is a Linear of its own.

    Args:
        use_alpha: weights of the key-value pairs; False: plain linear attention in their place.
        use_rope: 2-D rotary positions; needs a head width that is a multiple of 4. Off for cross attention.
        use_lepe: depthwise 5 x 5 convolution of the values on the patch grid. Off for cross attention.
        use_gate: the gate, a Linear of the layer's input without activation.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: tuple[int, ...] | None = None,
        prefix: int = 0,
        use_alpha: bool = True,
        use_rope: bool = True,
        use_lepe: bool = True,
        use_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, RALA.name, grid_size, prefix, use_rope, use_lepe, use_gate, device, dtype)
        self.operator_options = {"use_alpha": use_alpha}


RALA = register(
    Mechanism(
        name="rala",
        summary="linear attention with key-value pairs weighted by a global softmax, and a gate",
        paper="Breaking the Low-Rank Dilemma of Linear Attention (Fan et al.)",
        year=2025,
        arxiv="2411.07635",
        cost="2 L D E",
        function=rala_attention,
        scores=rala_scores,
        module=RankAugmentedAttention,
        varlen=padded(rala_attention, query_mask=True),
        cross=True,
        independent_rows=False,
        key_mask=True,
        subquadratic=True,
        ragged=True,
        wants_grid=True,
        wants_input=True,
        wants_query_mask=True,
        pattern_options={"cross": {"use_lepe": False, "use_rope": False}},
    )
)
