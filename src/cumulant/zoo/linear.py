"""Linear attention with the feature map elu(x) + 1.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, n chunks of C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import fold_groups, prepare
from .registry import Mechanism, register

EPS = 1e-6


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1: x + 1 above zero, exp(x) below (taken directly, so that it never rounds to 0)."""
    return F.relu(x) + x.clamp(max=0).exp()


class LinearState(NamedTuple):
    """What linear attention keeps of the keys and values it has seen: KV = sum phi(k) v^T and z = sum phi(k).

    `of` a set of tokens, `append` more of them, `read` with queries: constant memory, in at least float32.
    """

    KV: Tensor  # (..., D, E)
    z: Tensor  # (..., D)

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> LinearState:
        """State of key (..., L, D) and value (..., L, E). Cost: L D E."""
        features, value = feature_map(_wide(key)), _wide(value)
        return cls(features.mT @ value, features.sum(-2))

    def append(self, key: Tensor, value: Tensor) -> LinearState:
        """State after more tokens; this one stays as it is."""
        other = LinearState.of(key, value)
        return LinearState(self.KV + other.KV, self.z + other.z)

    def read(self, query: Tensor, *, eps: float = EPS) -> Tensor:
        """phi(q) KV / (phi(q).z + eps) for query (..., L, D). Cost: L D E."""
        return _divide(feature_map(_wide(query)), self.KV, self.z, eps).to(query.dtype)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    chunk: int = 128,
    eps: float = EPS,
) -> Tensor:
    """out_i = phi(q_i) (sum_l w_l phi(k_l) v_l^T) / (phi(q_i).(sum_l w_l phi(k_l)) + eps), phi = elu + 1.

    query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E).
    As published there is no scaling: `scale=None` means 1, another value multiplies the query before the map.
    key_mask (..., Lk) is bool, or weights w >= 0; a row without any key gives 0. Causal rows see the keys up
    to their own index. Sums are kept in at least float32.
    Cost: L D E, and L C (D + E) more for the causal form in chunks of C tokens.
    """
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    with torch.autocast(query.device.type, enabled=False):
        features_q, features_k = _features(query, key, key_mask, scale)
        value = _wide(value)
        if is_causal:
            out = _causal(features_q, features_k, value, chunk, eps)
        else:
            rows = fold_groups(features_q, key.shape[-3])
            out = _divide(rows, features_k.mT @ value, features_k.sum(-2), eps)
    return out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)


def linear_scores(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    eps: float = EPS,
) -> Tensor:
    """The weights w_l phi(q_i).phi(k_l) / (their sum + eps), (..., H, Lq, Lk), Cost: Lq Lk D."""
    query, key, _, key_mask = prepare(query, key, key, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with torch.autocast(query.device.type, enabled=False):
        features_q, features_k = _features(query, key, key_mask, scale)
        weights = fold_groups(features_q, key.shape[-3]) @ features_k.mT
        weights = weights.reshape(*query.shape[:-1], key.shape[-2])
        if is_causal:
            weights = weights.tril()
        return (weights / (weights.sum(-1, keepdim=True) + eps)).to(query.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _features(query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """phi(scale q) and w phi(k). The weight comes after the map: phi of a key set to 0 would be 1."""
    query, key = _wide(query), _wide(key)
    features_q = feature_map(query if scale is None else query * scale)
    if key_mask is None:
        return features_q, feature_map(key)
    return features_q, feature_map(key) * key_mask.to(key.dtype)[..., None, :, None]


def _divide(features: Tensor, KV: Tensor, z: Tensor, eps: float) -> Tensor:
    return (features @ KV) / (features @ z.unsqueeze(-1) + eps)


def _causal(features_q: Tensor, features_k: Tensor, value: Tensor, chunk: int, eps: float) -> Tensor:
    """Sums over earlier chunks, plus a masked C x C product within each: memory L (D + E) + (L/C) D E."""
    length, key_heads = features_q.shape[-2], features_k.shape[-3]
    chunk = max(1, min(chunk, length))
    count = max(1, -(-length // chunk))
    # Keys that no row may see are cut off; missing ones are padded with features of 0.
    features_k, value = (_chunks(x[..., :length, :], count, chunk) for x in (features_k, value))
    groups = features_q.shape[-3] // max(1, key_heads)
    features_q = _chunks(features_q.unflatten(-3, (key_heads, groups)), count, chunk)  # (..., Hk, G, n, C, D)
    rows = features_q.transpose(-4, -3).flatten(-3, -2)  # (..., Hk, n, G C, D)

    KV, z = features_k.mT @ value, features_k.sum(-2)
    # Shift before summing: taking the own chunk off again would let the future in through rounding.
    KV, z = F.pad(KV, (0, 0, 0, 0, 1, -1)).cumsum(-3), F.pad(z, (0, 0, 1, -1)).cumsum(-2)
    weights = (rows @ features_k.mT).unflatten(-2, (-1, chunk)).tril().flatten(-3, -2)
    numerator = rows @ KV + weights @ value
    denominator = rows @ z.unsqueeze(-1) + weights.sum(-1, keepdim=True)
    out = (numerator / (denominator + eps)).unflatten(-2, (-1, chunk)).transpose(-4, -3)
    return out.flatten(-3, -2)[..., :length, :]


def _chunks(x: Tensor, count: int, chunk: int) -> Tensor:
    """(..., L, D) padded with zeros to (..., n, C, D)."""
    return F.pad(x, (0, 0, 0, count * chunk - x.shape[-2])).unflatten(-2, (count, chunk))


register(
    Mechanism(
        name="linear",
        summary="kernel attention with the feature map elu + 1",
        paper="Transformers are RNNs (Katharopoulos et al.)",
        year=2020,
        cost="L D E",
        function=linear_attention,
        scores=linear_scores,
        causal=True,
        cross=True,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        streaming=True,
    )
)
