"""Cluster attention with 4, 16 and 64 blocks as mechanisms; the mathematics is in `cumulant.cluster`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..cluster import Blocks, ClusterStream, cluster_attention, cluster_scores
from .grid import Grid
from .ragged import padded
from .registry import Mechanism, register

COUNTS = (4, 16, 64)
# A block of one token is softmax at more than its price: the mechanisms make blocks of two tokens at least.
LEAST = 2
BLOCK = 64  # tokens of a block in causal attention


def past_blocks(count: int, *, block: int = BLOCK, recent: int = 0) -> Blocks:
    """The blocks of causal attention and of streams."""
    return Blocks(block, keep=count, recent=recent)


def _stream(count: int, *, block: int = BLOCK, recent: int = 0, **options: Any) -> ClusterStream:
    return ClusterStream(past_blocks(count, block=block, recent=recent), **options)


def _arguments(
    count: int, query: Tensor, key: Tensor, grid: Grid | None, prefix: int, block: int, recent: int, is_causal: bool
) -> dict[str, Any]:
    """What the blocks are: a grid's, a sequence's, or past ones; a grid is that of the queries when keys are others."""
    if is_causal:
        return {"clusters": past_blocks(count, block=block, recent=recent), "is_causal": True}
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor) and query.ndim > 1 and key.ndim > 1
    if not tensors or query.shape[-2] != key.shape[-2]:  # what is no tensor is named by the function
        return {"clusters": count, "least": LEAST}
    return {"clusters": count, "least": LEAST, "grid": grid, "prefix": prefix}


def _mechanism(count: int) -> Mechanism:
    def function(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        grid: Grid | None = None,
        prefix: int = 0,
        near: int | str = 0,
        closure: str = "tanh",
        variance: str = "diagonal",
        response: int | str | None = None,
        near_rows: int = 1,
        rank: str = "mass",
        block: int = BLOCK,
        recent: int = 0,
        **shared: Any,
    ) -> Tensor:
        chosen = _arguments(count, query, key, grid, prefix, block, recent, is_causal)
        chosen |= {"near": near, "near_rows": near_rows, "rank": rank}
        chosen |= {"closure": closure, "variance": variance, "response": response}
        return cluster_attention(query, key, value, **chosen, **shared)

    def weights(
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool = False,
        grid: Grid | None = None,
        prefix: int = 0,
        near: int | str = 0,
        closure: str = "tanh",
        variance: str = "diagonal",
        response: int | str | None = None,
        near_rows: int = 1,
        rank: str = "mass",
        block: int = BLOCK,
        recent: int = 0,
        **shared: Any,
    ) -> Tensor:
        chosen = _arguments(count, query, key, grid, prefix, block, recent, is_causal)
        chosen |= {"near": near, "near_rows": near_rows, "rank": rank}
        chosen |= {"closure": closure, "variance": variance, "response": response}
        return cluster_scores(query, key, **chosen, **shared)

    return Mechanism(
        name=f"cluster{count}",
        summary=f"softmax expanded inside {count} blocks of keys: second order in each, the right masses between them",
        paper="Local cumulants (this library)",
        year=2026,
        cost=f"{count + 1} L D E + {count} L (2 D + E)",
        function=function,
        scores=weights,
        stream=partial(_stream, count),
        varlen=padded(function),
        causal=True,
        cross=True,
        causal_cross=True,
        offset=True,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        ragged=True,
        order_free=False,
        key_shift=True,
        wants_grid=True,
    )


for _count in COUNTS:
    register(_mechanism(_count))
