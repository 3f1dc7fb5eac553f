"""Multiply-adds of cluster attention and of softmax, for one head of one sequence.

Shape legend: L queries and keys, D key width, E value width, K clusters.
"""

from __future__ import annotations

from .kmeans import KMeans
from .layout import Blocks
from .tree import Tree


def softmax_multiply_adds(L: int, D: int, E: int, is_causal: bool = False) -> float:
    return (L * (L + 1) / 2 if is_causal else float(L) * L) * (D + E)


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
    kmeans: KMeans | Tree | None = None,
) -> float:
    """L (K D + K D or K D^2 + K E + r D E + near_tokens (D + E)), statistics and the search for clusters included.

    `near_tokens` is the mean number of tokens that a query treats exactly, `response` the number r of clusters that
    answer with their covariance (None: all; "pooled": one for all). Statistics: L (D E + D), without D E if r = 0, with
    D^2 if "full". `asking` is the share of queries that ask: K / L with queries="mean". `kmeans` is the search for
    clusters, k-means or a tree; of a tree with leaves, K clusters and the leaves of those that a query opens, with its
    width in place of D but for near tokens; of these, where only so many are `exact`, the others take that width alone.
    """
    far, projected, near = D, 0, near_tokens * (D + E)
    if isinstance(kmeans, Tree):
        kmeans = kmeans.for_tokens(L)
        K = kmeans.count + kmeans.opened * kmeans.leaves
        if kmeans.opened and kmeans.narrow(D):  # the keys' product is counted with the search
            far, projected = kmeans.width, D * kmeans.width
        if 0 < kmeans.exact < near_tokens:  # with all directions their logits are known already
            near = near_tokens * far + kmeans.exact * (E if far == D else D + E)
    r = K if response is None else 1 if isinstance(response, str) else min(response, K)
    spread = far if variance == "diagonal" else far * far
    query = projected + K * far + K * spread + K * E + r * far * E + near
    statistics = spread + (far * E if r else 0)
    return L * (asking * query + statistics) + (0 if kmeans is None else kmeans.multiply_adds(L, D))


def causal_multiply_adds(
    L: int,
    D: int,
    E: int,
    blocks: Blocks,
    *,
    response: int | str | None = None,
    variance: str = "diagonal",
    sinks: int = 0,
) -> float:
    """Of causal attention: a row's own block of C tokens and `recent` ones exact, C (D + E) each, `sinks` (D + E), and
    of the A clusters that are left of its past, A (D + D or D^2 + E) + r D E; statistics as of `multiply_adds`.
    "pooled": r = 1, and A D E once for each block of rows."""
    C = min(blocks.size, L)
    spread = D if variance == "diagonal" else D * D
    total = float(L) * (spread + (0 if response == 0 else D * E))
    for block in range(-(-L // C)):
        rows, recent = min(C, L - block * C), min(blocks.recent, block)
        A = clusters_left(block - recent, blocks.keep)
        r = A if response is None else min(1 if isinstance(response, str) else response, A)
        total += A * D * E if isinstance(response, str) else 0
        exact = (recent + 1) * C + min(sinks, (block - recent) * C)
        total += rows * (exact * (D + E) + A * (D + spread + E) + r * D * E)
    return total


def clusters_left(past: int, keep: int | None) -> int:
    """Clusters that so many past blocks are kept in: see `causal.merged_lists`."""
    if keep is None:
        return past
    left = 0
    while past:
        later = max(0, (past - keep) // 2)
        left, past = left + past - 2 * later, later
    return left
