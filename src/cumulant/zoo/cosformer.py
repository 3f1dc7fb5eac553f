"""cosFormer: ReLU features, re-weighted by the cosine of the distance between two positions.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, M longest length.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shards
from ..call import Call, check_count
from ..held import check_tokens
from ..tensors import fold_groups, repeat_heads, wide
from .products import (
    about_mean,
    dot_with_one,
    factor,
    fraction,
    one_hot_weights,
    product,
    recorded,
    sum_of_tokens,
    sums_of_products,
    weighted,
    written_down,
)
from .registry import can, register
from .streams import FeatureStream, Sums

EPS = 1e-6


def cosformer_attention(
    call: Call, *, max_len: int | Tensor | None = None, chunk: int = 128, eps: float = EPS
) -> Tensor:
    """out_i = sum_j w_ij v_j / max(sum_j w_ij, eps), w_ij = relu(q_i).relu(k_j) cos(pi (i - j) / (2 M)).

    Positions i, j count from 1 on both sides; M = max(Lq, Lk) as published, or `max_len` (a number, or one for each
    leading index). The cosine splits into sines and cosines of each position, so it is linear attention with features
    of width 2 D. Since M enters every angle, the published causal form of a prefix is not the prefix of the causal
    form: fix `max_len` for that, and for streaming. There is no scaling: `scale` multiplies the query before the ReLU.
    A row without any key, or whose ReLU is 0, gives 0. Cost: 4 L D E.
    """
    query, key, dtype = wide(call.query), wide(call.key), call.query.dtype
    (after_q, all_q), (after_k, all_k) = (shards.place(x.shape[-2]) for x in (query, key))
    longest = max(all_q, all_k)
    if max_len is None:
        max_len = max(1, longest)
    elif not isinstance(max_len, Tensor) and max_len < longest:
        raise ValueError(f"max_len must be at least the number of tokens, {longest}, got {max_len}")
    rows = F.relu(query if call.scale is None else query * call.scale)
    columns = weighted(F.relu(key), call.key_weights(key.dtype))
    turn_q, turn_k = (_turns(_angles(x, max_len, after)) for x, after in ((query, after_q), (key, after_k)))
    if not call.is_causal:
        return _over_all_keys(rows, columns, call.value, turn_q, turn_k, eps, dtype)
    rows, columns = _turned(rows, turn_q, dtype), _turned(columns, turn_k, dtype)
    sums, total = fraction(rows, columns, call.value, dtype, is_causal=True, chunk=chunk)
    return sums / total.clamp(min=eps)


class CosformerStream(FeatureStream):
    """Causal cosFormer token by token, for at most `max_len` of them."""

    def __init__(self, *, max_len: int, eps: float = EPS, scale: float | None = None) -> None:
        super().__init__(scale=scale)
        check_count("max_len", max_len)
        self.max_len, self.eps, self.seen = max_len, eps, 0

    def append(self, key: Tensor, value: Tensor) -> None:
        """Takes in the next tokens; what is read then stands where they stand."""
        check_tokens(key, value, self.held)
        if self.seen + key.shape[-2] > self.max_len:
            raise ValueError(f"the stream was made for max_len={self.max_len} tokens and has seen them all")
        self.turn = _turns(_angles(wide(key), self.max_len, self.seen))
        self.seen += key.shape[-2]
        super().append(key, value)

    def read(self, query: Tensor) -> Tensor:
        """Answers queries that stand where the tokens stand that were taken in last."""
        last = None if self.state is None else self.turn.shape[-2]
        if last is not None and isinstance(query, Tensor) and query.ndim > 1 and query.shape[-2] != last:
            raise ValueError(f"query must hold as many tokens as were taken in last, {last}, got {query.shape[-2]}")
        return super().read(query)

    def phi(self, x: Tensor) -> Tensor:
        return _turned(F.relu(x), self.turn, torch.float32)

    def rows(self, features: Tensor, sums: Sums) -> Tensor:
        return features @ sums.KV / (features @ sums.K).clamp(min=self.eps)


def _angles(x: Tensor, max_len: int | Tensor, after: int = 0) -> Tensor:
    """pi i / (2 M) for i = 1 ... L, (L,) or (..., 1, L), or for the places that come `after` others."""
    position = torch.arange(after + 1, after + x.shape[-2] + 1, device=x.device, dtype=x.dtype)
    return position * (math.pi / 2 / (max_len.to(x.dtype)[..., None, None] if isinstance(max_len, Tensor) else max_len))


def _turns(angle: Tensor) -> Tensor:
    """Sines and cosines of angles (..., L), (..., L, 2)."""
    return written_down(torch.stack((angle.sin(), angle.cos()), -1))


def _turned(x: Tensor, turn: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., L, D) times its sine, then times its cosine, (..., L, 2 D), as a factor of `product`."""
    return factor(x.unsqueeze(-2) * turn.unsqueeze(-1), dtype).flatten(-2)


def _over_all_keys(
    rows: Tensor, columns: Tensor, value: Tensor, turn_q: Tensor, turn_k: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """sum_j w_ij v_j / max(sum_j w_ij, eps) for rows relu(q) and columns relu(k), (..., H, Lq, E). Cost: 4 L D E.

    A row's sine and cosine, and the sum of its weights, are factors of all of it. So it is divided by that sum before
    the products and turned after them, q_i (sum_j sin_j k_j v_j^T) beside the same with cosines: a compiler then takes
    the sum of the weights where it makes the factor, which is of width D, and no gradient needs the products.
    """
    D, E = columns.shape[-1], value.shape[-1]
    near, centre = about_mean(value, dtype) if recorded(rows, columns) else (value, None)
    KV = sums_of_products(_turned(columns, turn_k, dtype), near, dtype)  # (..., Hk, 2 D, E)
    sums_k = [sum_of_tokens(columns * turn_k[..., i : i + 1]) for i in range(2)]
    if shards.answerer() is not None:
        KV = KV if centre is None else KV + torch.cat(sums_k, -1).mT @ centre
        KV, *sums_k = shards.summed(KV, *sums_k)
        centre = None
    parts = [dot_with_one(rows, repeat_heads(K, rows.shape[-3])) * turn_q[..., i : i + 1] for i, K in enumerate(sums_k)]
    total = parts[0] + parts[1]
    rows = factor(rows / total.clamp(min=eps), dtype)
    KV = KV.unflatten(-2, (2, D)).transpose(-3, -2).flatten(-2)  # (..., Hk, D, 2 E)
    sums = product(fold_groups(rows, columns.shape[-3]), KV, dtype).reshape(*rows.shape[:-1], 2, E)
    out = (sums * turn_q.unsqueeze(-1)).sum(-2)
    return out if centre is None else out + total / total.clamp(min=eps) * repeat_heads(centre, rows.shape[-3])


COSFORMER = register(
    name="cosformer",
    summary="ReLU features re-weighted by the cosine of the distance",
    paper="cosFormer: Rethinking Softmax in Attention (Qin et al.)",
    year=2022,
    arxiv="2202.08791",
    cost="4 L D E",
    function=cosformer_attention,
    row_weights=one_hot_weights(cosformer_attention),
    stream=CosformerStream,
    length_option="max_len",
    order_free=False,
    **can("causal cross causal_cross key_mask grouped_queries subquadratic streaming ragged mergeable"),
)
