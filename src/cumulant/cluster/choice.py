"""Which clusters of a block of queries are near, and which respond.

Shape legend: B batch, H key heads, N query blocks of n rows, K clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..closures import gain
from ..tensors import ABSENT, softmax_or_zero

RANKS = ("mass", "error", "mean")


def heaviest(
    log_Z: Tensor, variance: Tensor, count: int, rank: str, rows: Tensor | None, by_row: bool, pooled: bool = False
) -> Tensor:
    """The `count` clusters of largest mass, or of largest mass times s^2, for each block or each row of it.

    log_Z, variance (B, H, N, n, K) -> (B, H, N, count) or, by row, (B, H, N, n, count). A block adds up the
    probabilities of its rows. -1 where fewer clusters hold anything: an empty one is exact already, and so, ranked by
    "error", is one without spread, unless a `pooled` response lends it that of others: then it comes last.
    """
    score = log_Z
    if rank == "error":
        least = torch.finfo(variance.dtype).tiny if pooled else 0
        score = log_Z + torch.where(variance > least, variance, least).log()
    if not by_row and score.shape[-2] > 1:
        share = score - log_Z.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        if rows is not None:
            share = share.masked_fill(~rows.unsqueeze(-1), ABSENT)
        score = share.logsumexp(-2)
    elif not by_row:
        score = score.squeeze(-2)
    return largest(score, count)


def largest(score: Tensor, count: int) -> Tensor:
    """Numbers of the `count` largest scores (..., K), -1 in place of those that are -inf."""
    top, which = score.topk(min(count, score.shape[-1]), -1)
    return which.masked_fill(top == ABSENT, -1)


def responding(
    log_Z: Tensor, variance: Tensor, count: int, closure: str, rows: Tensor | None, taken: Tensor | None
) -> Tensor:
    """The `count` clusters (B, H, N, count) with the largest sum over a block's rows of probability times f.

    log_Z, variance (B, H, N, n, K); near clusters, `taken` (B, H, N, K), come last.
    """
    share = softmax_or_zero(log_Z) * gain(variance, closure)
    if rows is not None:
        share = share.masked_fill(~rows.unsqueeze(-1), 0)
    score = share.sum(-2)
    if taken is not None:
        score = score.masked_fill(taken, -1)
    return score.topk(count, -1).indices
