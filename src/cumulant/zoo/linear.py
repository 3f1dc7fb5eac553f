"""Linear attention with the feature map elu(x) + 1.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, C tokens in a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..inputs import without_autocast
from .inputs import fold_groups, outside_autocast, prepare, weights_of, wide
from .products import fraction, multiplies_narrow
from .ragged import padded
from .registry import Mechanism, register

EPS = 1e-6


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1: x + 1 above zero, exp(x) below (taken directly, so that it never rounds to 0)."""
    return F.relu(x) + x.clamp(max=0).exp()


class LinearState(NamedTuple):
    """What linear attention keeps of the keys and values it has seen: KV = sum phi(k) v^T and z = sum phi(k).

    `of` a set of tokens, `append` more of them, `read` with queries: constant memory, in at least float32. For
    decoding against a fixed memory (cross attention), make it once and `read` it for each query.
    """

    KV: Tensor  # (..., D, E)
    z: Tensor  # (..., D)

    @classmethod
    @outside_autocast
    def of(cls, key: Tensor, value: Tensor) -> LinearState:
        """State of key (..., L, D) and value (..., L, E). Cost: L D E."""
        features, value = feature_map(wide(key)), wide(value)
        return cls(features.mT @ value, features.sum(-2))

    def append(self, key: Tensor, value: Tensor) -> LinearState:
        """State after more tokens; this one stays as it is."""
        other = LinearState.of(key, value)
        return LinearState(self.KV + other.KV, self.z + other.z)

    @outside_autocast
    def read(self, query: Tensor, *, eps: float = EPS) -> Tensor:
        """phi(q) KV / (phi(q).z + eps) for query (..., L, D). Cost: L D E."""
        features = feature_map(wide(query))
        return (features @ self.KV / (features @ self.z.unsqueeze(-1) + eps)).to(query.dtype)


class LinearStream:
    """Causal linear attention token by token: `step` takes one in and answers its query. Cost: 2 D E a token."""

    def __init__(self, *, eps: float = EPS) -> None:
        self.eps = eps
        self.state: LinearState | None = None

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (..., H, 1, D), key (..., Hk, 1, D), value (..., Hk, 1, E) -> (..., H, 1, E)."""
        self.state = LinearState.of(key, value) if self.state is None else self.state.append(key, value)
        out = self.state.read(fold_groups(query, key.shape[-3]), eps=self.eps)
        return out.reshape(*query.shape[:-1], value.shape[-1])


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
    Cost: 2 L D E, and L C (D + E) more for the causal form in chunks of C tokens.
    """
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        features_q, features_k = _features(_for_map(query), _for_map(key), key_mask, scale)
        sums, total = fraction(features_q, features_k, value, query.dtype, is_causal=is_causal, chunk=chunk)
        return (sums / (total + eps)).to(query.dtype)


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
    """The weights w_l phi(q_i).phi(k_l) / (their sum + eps), (..., H, Lq, Lk). Cost: Lq Lk D."""
    query, key, _, key_mask = prepare(query, key, key, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        features_q, features_k = _features(wide(query), wide(key), key_mask, scale)
        weights = fold_groups(features_q, key.shape[-3]) @ features_k.mT
        weights = weights.reshape(*query.shape[:-1], key.shape[-2])
        if is_causal:
            weights = weights.tril()
        return (weights / (weights.sum(-1, keepdim=True) + eps)).to(query.dtype)


def _for_map(x: Tensor) -> Tensor:
    """x in the dtype of its features: its own where products round to that anyway, as the map rounds but once."""
    return x if multiplies_narrow(x, x.dtype) else wide(x)


def _features(query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """phi(scale q) and w phi(k). The weight comes after the map: phi of a key set to 0 would be 1."""
    features_q = feature_map(query if scale is None else query * scale)
    weights = weights_of(key_mask, key)
    return features_q, feature_map(key) if weights is None else feature_map(key) * weights


LINEAR = register(
    Mechanism(
        name="linear",
        summary="kernel attention with the feature map elu + 1",
        paper="Transformers are RNNs (Katharopoulos et al.)",
        year=2020,
        arxiv="2006.16236",
        cost="2 L D E",
        function=linear_attention,
        scores=linear_scores,
        stream=LinearStream,
        varlen=padded(linear_attention),
        causal=True,
        cross=True,
        causal_cross=True,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        streaming=True,
        ragged=True,
    )
)
