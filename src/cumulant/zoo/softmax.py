"""Softmax attention: the exact form that all others are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import without_autocast
from .fused import fused_softmax
from .inputs import fold_groups, prepare, wide
from .masking import log_weights
from .ragged import padded
from .registry import Mechanism, register


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """out_i = sum_l w_l exp(q_i.k_l) v_l / sum_l w_l exp(q_i.k_l), the query scaled by `scale` (D**-0.5).

    query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E).
    key_mask (..., Lk): bool, or weights w >= 0. A row without any key gives 0. Cost: Lq Lk (D + E).
    """
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    if key.shape[-2] == 0:
        return query.new_zeros((*query.shape[:-1], value.shape[-1]))
    if key_mask is None:
        return fused_softmax(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p
        )
    bias, empty = _logit_bias(query, key, key_mask, is_causal)
    out = fused_softmax(query, key, value, attn_mask=bias, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p)
    return out.masked_fill(empty, 0)


def softmax_scores(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The probabilities, (..., H, Lq, Lk). Rows sum to 1, or are 0 where they see no key. Cost: Lq Lk D."""
    query, key, _, key_mask = prepare(query, key, key, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    if key_mask is None:
        key_mask = torch.ones((), dtype=torch.bool, device=key.device).expand(*key.shape[:-3], key.shape[-2])
    dtype = query.dtype
    with without_autocast(query.device.type):
        query, key = wide(query) * (query.shape[-1] ** -0.5 if scale is None else scale), wide(key)
        logits = fold_groups(query, key.shape[-3]) @ key.mT
        bias, empty = _logit_bias(query, key, key_mask, is_causal)
        logits = logits.reshape(*query.shape[:-1], key.shape[-2]) + bias
        return logits.softmax(-1).masked_fill(empty, 0).to(dtype)


def _logit_bias(query: Tensor, key: Tensor, key_mask: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """What is added to the logits, (..., 1, 1 or Lq, Lk), and which rows see no key, (..., 1, 1 or Lq, 1).

    Rows that see no key get no bias at all: softmax over -inf alone would be NaN, in the gradient too.
    """
    seen = (key_mask != 0)[..., None, None, :]
    if is_causal:
        triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        seen = seen & triangle
    empty = ~seen.any(-1, keepdim=True)
    bias = log_weights(key_mask, query)
    assert bias is not None  # there is a mask
    return bias.unsqueeze(-3).masked_fill(~seen, float("-inf")).masked_fill(empty, 0), empty


SOFTMAX = register(
    Mechanism(
        name="softmax",
        summary="exact softmax attention by PyTorch's fused kernels",
        paper="Attention Is All You Need (Vaswani et al.)",
        year=2017,
        arxiv="1706.03762",
        cost="L^2 (D + E)",
        function=softmax_attention,
        scores=softmax_scores,
        varlen=padded(softmax_attention),
        causal=True,
        cross=True,
        causal_cross=True,
        key_mask=True,
        grouped_queries=True,
        ragged=True,
        dropout=True,
        key_shift=True,
    )
)
