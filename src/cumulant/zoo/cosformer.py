"""cosFormer: ReLU features, re-weighted by the cosine of the distance between two positions.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, M longest length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import without_autocast
from .inputs import fold_groups, outside_autocast, prepare, weights_of, wide
from .masking import repeat_heads
from .products import dot_with_one, factor, fraction, product, sum_of_tokens, sums_of_products, with_ones, written_down
from .ragged import padded
from .registry import Mechanism, register

EPS = 1e-6


def cosformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    max_len: int | Tensor | None = None,
    chunk: int = 128,
    eps: float = EPS,
) -> Tensor:
    """out_i = sum_j w_ij v_j / max(sum_j w_ij, eps), w_ij = relu(q_i).relu(k_j) cos(pi (i - j) / (2 M)).

    query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E). Positions i, j count from
    1 on both sides; M = max(Lq, Lk) as published, or `max_len` (a number, or one for each leading index). The
    cosine splits into sines and cosines of each position, so it is linear attention with features of width 2 D.
    Since M enters every angle, the published causal form of a prefix is not the prefix of the causal form: fix
    `max_len` for that, and for streaming. There is no scaling: `scale` multiplies the query before the ReLU.
    key_mask is bool or weights; a row without any key, or whose ReLU is 0, gives 0. Cost: 4 L D E.
    """
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        rows, columns, turn_q, turn_k = _parts(query, key, key_mask, scale, max_len)
        if is_causal:
            rows, columns = _turned(rows, turn_q, query.dtype), _turned(columns, turn_k, query.dtype)
            sums, total = fraction(rows, columns, value, query.dtype, is_causal=True, chunk=chunk)
            out = sums / total.clamp(min=eps)
        else:
            out = _over_all_keys(rows, columns, value, turn_q, turn_k, eps, query.dtype)
        return out.to(query.dtype)


def cosformer_scores(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    max_len: int | Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """The weights w_ij / max(sum_j w_ij, eps), (..., H, Lq, Lk). Cost: 2 Lq Lk D."""
    query, key, _, key_mask = prepare(query, key, key, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        rows, columns, turn_q, turn_k = _parts(query, key, key_mask, scale, max_len)
        features_q, features_k = _turned(rows, turn_q, torch.float32), _turned(columns, turn_k, torch.float32)
        weights = fold_groups(features_q, key.shape[-3]) @ features_k.mT
        weights = weights.reshape(*query.shape[:-1], key.shape[-2])
        if is_causal:
            weights = weights.tril()
        return (weights / weights.sum(-1, keepdim=True).clamp(min=eps)).to(query.dtype)


class CosformerState(NamedTuple):
    """Sums over the tokens so far, and how many there were."""

    KV: Tensor  # (..., 2 D, E + 1), the last column is the sum of the features
    position: Tensor  # ()


class CosformerStream:
    """Causal cosFormer token by token, for at most `max_len` of them. Cost: 4 D E a token."""

    def __init__(self, *, max_len: int, eps: float = EPS) -> None:
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1, got {max_len}")
        self.max_len, self.eps, self.seen = max_len, eps, 0
        self.state: CosformerState | None = None

    @outside_autocast
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (..., H, 1, D), key (..., Hk, 1, D), value (..., Hk, 1, E) -> (..., H, 1, E)."""
        if self.seen >= self.max_len:
            raise ValueError(f"the stream was made for max_len={self.max_len} tokens and has seen them all")
        self.seen += 1
        position = torch.tensor([float(self.seen)], device=query.device, dtype=wide(query).dtype)
        turn = _turns(position * (math.pi / 2 / self.max_len))
        KV = _turned(F.relu(wide(key)), turn, torch.float32).mT @ with_ones(wide(value))
        self.state = CosformerState(KV if self.state is None else self.state.KV + KV, position)
        rows = fold_groups(_turned(F.relu(wide(query)), turn, torch.float32), key.shape[-3])
        sums = rows @ self.state.KV
        out = sums[..., :-1] / sums[..., -1:].clamp(min=self.eps)
        return out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)


def _parts(
    query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float | None, max_len: int | Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """relu(q), w relu(k), and for each the sines and cosines of its positions, (L, 2) or (..., 1, L, 2)."""
    query, key = wide(query), wide(key)
    longest = max(query.shape[-2], key.shape[-2])
    if max_len is None:
        max_len = max(1, longest)
    elif not isinstance(max_len, Tensor) and max_len < longest:
        raise ValueError(f"max_len must be at least the number of tokens, {longest}, got {max_len}")
    rows, weights = F.relu(query if scale is None else query * scale), weights_of(key_mask, key)
    columns = F.relu(key) if weights is None else F.relu(key) * weights
    return rows, columns, _turns(_angles(query, max_len)), _turns(_angles(key, max_len))


def _angles(x: Tensor, max_len: int | Tensor) -> Tensor:
    """pi i / (2 M) for i = 1 ... L, (L,) or (..., 1, L)."""
    position = torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=x.dtype)
    if isinstance(max_len, Tensor):
        return position * (math.pi / 2 / max_len.to(x.dtype)[..., None, None])
    return position * (math.pi / 2 / max_len)


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
    parts = []
    for i in range(2):
        K = repeat_heads(sum_of_tokens(columns * turn_k[..., i : i + 1]), rows.shape[-3])
        parts.append(dot_with_one(rows, K) * turn_q[..., i : i + 1])
    rows = factor(rows / (parts[0] + parts[1]).clamp(min=eps), dtype)
    KV = sums_of_products(_turned(columns, turn_k, dtype), value, dtype)  # (..., Hk, 2 D, E)
    KV = KV.unflatten(-2, (2, D)).transpose(-3, -2).flatten(-2)  # (..., Hk, D, 2 E)
    sums = product(fold_groups(rows, columns.shape[-3]), KV, dtype).reshape(*rows.shape[:-1], 2, E)
    return (sums * turn_q.unsqueeze(-1)).sum(-2)


COSFORMER = register(
    Mechanism(
        name="cosformer",
        summary="ReLU features re-weighted by the cosine of the distance",
        paper="cosFormer: Rethinking Softmax in Attention (Qin et al.)",
        year=2022,
        arxiv="2202.08791",
        cost="4 L D E",
        function=cosformer_attention,
        scores=cosformer_scores,
        stream=CosformerStream,
        varlen=padded(cosformer_attention, lengths_option="max_len"),
        causal=True,
        cross=True,
        causal_cross=True,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        streaming=True,
        ragged=True,
        order_free=False,
        length_option="max_len",
    )
)
