"""A few directions that hold nearly all of every logit: where clusters are found and far ones are met.

Shape legend: N heads of all sequences, R queries, L keys, D width, S of each sampled, r directions.

    A = <q q^T> = C C^T,  B = cov(k),  C^T B C = U diag U^T           q.k = (q C^-T U) . (k C U) with all of U
    with the r largest: the r numbers a token whose products miss least of the logits' variance, S times S of them

Queries are white there: the plain distance of two keys is how far apart their logits are. 24 of SAM 2's 96 directions
leave out 2 % of that variance or less.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..tracing import may_keep

SAMPLED = 512  # queries, and as many keys
LEAST = 1e-5  # of the mean of A's diagonal, added to it: queries of fewer directions than D


def basis_work(R: int, L: int, D: int) -> float:
    """Multiply-adds of `logit_basis`: two products of samples, 12 D^3 for what is done with D x D matrices."""
    return (min(SAMPLED, R) + min(SAMPLED, L) + 12.0 * D) * D * D


@torch.no_grad()
def logit_basis(looking: Tensor, tokens: Tensor, width: int, absent: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(N, D, width) for queries and for keys, from looking (N, R, D) and tokens (N, L, D) that are not `absent` (N, L).

    In float32 or float64.
    """
    q = spread_out(looking, SAMPLED).nan_to_num(0.0, 0.0, 0.0)
    k = spread_out(tokens, SAMPLED).nan_to_num(0.0, 0.0, 0.0)
    if absent is None:
        k = k - k.mean(-2, keepdim=True)
    else:
        there = 1.0 - spread_out(absent.unsqueeze(-1), SAMPLED).to(k.dtype)
        k = (k - (k * there).sum(-2, keepdim=True) / there.sum(-2, keepdim=True).clamp(min=1)) * there
    # Only directions matter: of numbers near 1 nothing overflows.
    q, k = (x / x.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) for x in (q, k))
    A, D = q.mT @ q, q.shape[-1]
    A = A + (LEAST * A.diagonal(dim1=-2, dim2=-1).mean(-1) + torch.finfo(A.dtype).tiny)[:, None, None] * torch.eye(
        D, dtype=A.dtype, device=A.device
    )
    C = torch.linalg.cholesky_ex(A)[0]
    U = torch.linalg.eigh((C.mT @ (k.mT @ k) @ C).nan_to_num(0.0, 0.0, 0.0))[1][..., -width:]
    return torch.linalg.solve_triangular(C.mT, U, upper=True), C @ U


def spread_out(x: Tensor, count: int) -> Tensor:
    """`count` rows of x (..., R, D) at places that follow the golden ratio: no grid has its period."""
    return x if count >= x.shape[-2] else x.index_select(-2, sampled(count, x))


def sampled(count: int, x: Tensor) -> Tensor:
    """These places: (count,) int64, or all R."""
    return (_kept_places if may_keep(x) else _places)(count, x.shape[-2], x.device)


def _places(count: int, R: int, device: torch.device) -> Tensor:
    if count >= R:
        return torch.arange(R, device=device)
    return ((torch.arange(count, dtype=torch.float64, device=device) * 0.6180339887498949) % 1 * R).long()


@lru_cache(64)
@torch.inference_mode(False)  # what is kept from a call under inference_mode serves training too
def _kept_places(count: int, R: int, device: torch.device) -> Tensor:
    """The same for calls that follow: five short launches on a GPU."""
    return _places(count, R, device)
