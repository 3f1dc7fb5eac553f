"""Linear attention with the feature map elu(x) + 1.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, C tokens in a chunk.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..call import Call
from ..tensors import wide
from .products import fraction, multiplies_narrow, pair_weights, weighted
from .registry import can, register
from .streams import FeatureStream, Sums

EPS = 1e-6


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1: x + 1 above zero, exp(x) below (taken directly, so that it never rounds to 0)."""
    return F.relu(x) + x.clamp(max=0).exp()


class LinearStream(FeatureStream):
    """Linear attention token by token."""

    def __init__(self, *, eps: float = EPS, scale: float | None = None) -> None:
        super().__init__(scale=scale)
        self.eps = eps

    phi = staticmethod(feature_map)

    def rows(self, features: Tensor, sums: Sums) -> Tensor:
        return features @ sums.KV / (features @ sums.K + self.eps)


def linear_attention(call: Call, *, chunk: int = 128, eps: float = EPS) -> Tensor:
    """out_i = phi(q_i) (sum_l w_l phi(k_l) v_l^T) / (phi(q_i).(sum_l w_l phi(k_l)) + eps), phi = elu + 1.

    As published there is no scaling: `scale=None` means 1, another value multiplies the query before the map. A row
    without any key gives 0. Sums are kept in at least float32.
    Cost: 2 L D E, and L C (D + E) more for the causal form in chunks of C tokens.
    """
    dtype = call.query.dtype
    # The map takes what products will round anyway in its own dtype: it is then rounded but once.
    query, key = (x if multiplies_narrow(x, dtype) else wide(x) for x in call[:2])
    features_q, features_k = _features(call, query, key)
    sums, total = fraction(features_q, features_k, call.value, dtype, is_causal=call.is_causal, chunk=chunk)
    return sums / (total + eps)


def linear_weights(call: Call, *, eps: float = EPS) -> Tensor:
    """The weights w_l phi(q_i).phi(k_l) / (their sum + eps), (..., H, Lq, Lk). Cost: Lq Lk D."""
    weights = pair_weights(*_features(call, wide(call.query), wide(call.key)), call.is_causal)
    return weights / (weights.sum(-1, keepdim=True) + eps)


def _features(call: Call, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """phi(scale q) and w phi(k). The weight comes after the map: phi of a key set to 0 would be 1."""
    features_q = feature_map(query if call.scale is None else query * call.scale)
    return features_q, weighted(feature_map(key), call.key_weights(key.dtype))


LINEAR = register(
    name="linear",
    summary="kernel attention with the feature map elu + 1",
    paper="Transformers are RNNs (Katharopoulos et al.)",
    year=2020,
    arxiv="2006.16236",
    cost="2 L D E",
    function=linear_attention,
    row_weights=linear_weights,
    stream=LinearStream,
    **can("causal cross causal_cross key_mask grouped_queries subquadratic streaming ragged mergeable"),
)
