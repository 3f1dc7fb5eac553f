"""Multiply-adds of cluster attention and of softmax, for one head of one sequence.

Shape legend: L queries and keys, D key width, E value width, K clusters.
"""

from __future__ import annotations

from .kmeans import KMeans


def softmax_multiply_adds(L: int, D: int, E: int) -> float:
    return float(L) * L * (D + E)


def multiply_adds(
    L: int,
    D: int,
    E: int,
    K: int,
    *,
    near_tokens: float = 0,
    response: int | str | None = None,
    variance: str = "diagonal",
    asking: float = 1.0,
    kmeans: KMeans | None = None,
) -> float:
    """L (K D + K D or K D^2 + K E + r D E + near_tokens (D + E)), statistics and the search for clusters included.

    `near_tokens` is the mean number of tokens that a query treats exactly, `response` the number r of clusters that
    answer with their covariance (None: all; "pooled": one for all). Statistics: L (D E + D), without D E if r = 0, with
    D^2 if "full". `asking` is the share of queries that ask: K / L with queries="mean".
    """
    r = K if response is None else 1 if isinstance(response, str) else min(response, K)
    spread = D if variance == "diagonal" else D * D
    query = K * D + K * spread + K * E + r * D * E + near_tokens * (D + E)
    statistics = spread + (D * E if r else 0)
    return L * (asking * query + statistics) + (0 if kmeans is None else kmeans.multiply_adds(L, D))
