"""Softmax attention: the exact form that all others are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import shards
from ..call import Call, check_packed
from ..tensors import in_line, log_weights, nothing, wide
from ..tracing import is_plain, transformed
from .fused import fused_softmax
from .products import pair_weights
from .ragged import padded
from .registry import can, register


def softmax_attention(call: Call) -> Tensor:
    """out_i = sum_l w_l exp(q_i.k_l) v_l / sum_l w_l exp(q_i.k_l), the query scaled by `scale` (D**-0.5).

    Key weights w are 1 unless the call has a key mask. A row without any key gives 0. Cost: Lq Lk (D + E).
    """
    query, key, value = call[:3]
    across = shards.answerer()
    if across is not None:
        out: Tensor = across.softmax(call)
        return out
    if 0 in query.shape[:-1] or 0 in key.shape[:-1]:
        return nothing((*query.shape[:-1], value.shape[-1]), query, key, value, call.key_mask)
    shared = {"scale": call.scale, "enable_gqa": call.enable_gqa, "dropout_p": call.dropout_p}
    if call.key_mask is None:
        return fused_softmax(query, key, value, is_causal=call.is_causal, **shared)
    bias, empty = _logit_bias(call, query)
    return fused_softmax(query, key, value, attn_mask=bias, **shared).masked_fill(empty, 0)


def softmax_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int | None = None,
    max_k: int | None = None,
    **arguments: Any,
) -> Tensor:
    """Sequences end to end, (T, H, D) -> (T, H, E): by flash attention on a GPU where it takes them, else padded."""
    check_packed(query, key, value, cu_seq_q, cu_seq_k)
    plain = {name: value for name, value in arguments.items() if name not in ("is_causal", "scale") and value}
    own = is_plain(query) and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not transformed()
    known = not plain and max_q is not None and max_k is not None and cu_seq_q.is_cuda
    shapes = query.shape[1:] == key.shape[1:] == value.shape[1:] and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    if not (own and known and shapes) or (arguments.get("is_causal") and cu_seq_q is not cu_seq_k):
        return padded(SOFTMAX, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **arguments)
    rows = map(in_line, (query, key, value))
    causal, scale = bool(arguments.get("is_causal")), arguments.get("scale")
    found = torch.ops.aten._flash_attention_forward(
        *rows, cu_seq_q.int(), cu_seq_k.int(), max_q, max_k, 0.0, causal, False, scale=scale
    )
    return found[0]


def softmax_weights(call: Call) -> Tensor:
    """The probabilities, (..., H, Lq, Lk). Rows sum to 1, or are 0 where they see no key. Cost: Lq Lk D."""
    if call.key_mask is None:
        key = call.key
        every = torch.ones((), dtype=torch.bool, device=key.device).expand(*key.shape[:-3], key.shape[-2])
        call = call._replace(key_mask=every)
    query = wide(call.query) * call.softmax_scale
    bias, empty = _logit_bias(call, query)
    hidden = bias == float("-inf")  # what is no number there stays so when -inf is added
    logits = (pair_weights(query, wide(call.key)) + bias).masked_fill(hidden, float("-inf"))
    return logits.softmax(-1).masked_fill(empty, 0)


def _logit_bias(call: Call, like: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to the logits, (..., 1, 1 or Lq, Lk), and which rows see no key, (..., 1, 1 or Lq, 1).

    Rows that see no key get no bias at all: softmax over -inf alone would be NaN, in the gradient too.
    """
    key_mask, bias = call.key_mask, log_weights(call.key_mask, like)
    assert key_mask is not None
    assert bias is not None
    seen = (key_mask != 0)[..., None, None, :]
    if call.is_causal:
        seen = seen & torch.ones(like.shape[-2], key_mask.shape[-1], dtype=torch.bool, device=like.device).tril()
    empty = ~seen.any(-1, keepdim=True)
    return bias.unsqueeze(-3).masked_fill(~seen, float("-inf")).masked_fill(empty, 0), empty


SOFTMAX = register(
    name="softmax",
    summary="exact softmax attention by PyTorch's fused kernels",
    paper="Attention Is All You Need (Vaswani et al.)",
    year=2017,
    arxiv="1706.03762",
    cost="L^2 (D + E)",
    function=softmax_attention,
    row_weights=softmax_weights,
    packed=softmax_packed,
    **can("causal cross causal_cross key_mask grouped_queries ragged dropout key_shift mergeable"),
)
