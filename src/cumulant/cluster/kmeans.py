"""k-means of the keys as the queries see them.

Shape legend: B batch, H key heads, R queries of a key head, L keys, D width, K clusters.

Two keys are as far apart as their logits are on average over the queries: |k - k'|^2 = <(q.(k - k'))^2>. With the
second moment <q q^T> = C C^T that is the plain distance of k C and k' C; "diagonal" keeps only <q_i^2>.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import check_choice
from .layout import whole

METRICS = ("full", "diagonal", "none")
STARTS = ("even", "random")


@dataclass(frozen=True)
class KMeans:
    """Clusters found by k-means in the queries' metric, for each head of each sequence.

    Args:
        count: how many clusters; some may stay empty.
        iterations: Lloyd steps. Three come within a few percent of convergence.
        sample: fit on every `sample`-th key and assign all of them once; the cost of a step falls by that factor.
        metric: "full" <q q^T>, "diagonal" <q_i^2>, or "none" for plain distances (then no query is looked at).
        start: "even", every L/K-th key, or "random", keys drawn with `seed`.
    """

    count: int
    iterations: int = 5
    sample: int = 1
    metric: str = "full"
    start: str = "even"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("iterations", 0), ("sample", 1)):
            number = getattr(self, name)
            if not whole(number, least):
                raise ValueError(f"{name} of KMeans must be an integer of at least {least}, got {number!r}")
        check_choice("metric of KMeans", self.metric, METRICS)
        check_choice("start of KMeans", self.start, STARTS)

    def multiply_adds(self, L: int, D: int) -> float:
        """Multiply-adds for L keys of width D: the second moment of the queries, the change of metric, the steps."""
        metric = {"full": 2 * L * D * D, "diagonal": 2 * L * D, "none": 0}[self.metric]
        return metric + (self.iterations / self.sample + 1) * L * min(self.count, L) * D


@torch.no_grad()
def kmeans(query: Tensor, key: Tensor, weights: Tensor | None, options: KMeans) -> Tensor:
    """Cluster ids (B, H, L) of key (B, H, L, D) under the metric of query (B, H, R, D); weights (B, 1, L) or None.

    Keys of weight 0 move no centre. Cost: R D^2 + L D^2 + (iterations / sample + 1) L K D.
    """
    key = _in_metric(query, key, options.metric)
    L = key.shape[-2]
    fitted = slice(None, None, min(options.sample, max(1, L // options.count)))
    x = key[..., fitted, :]
    w = x.new_ones(x.shape[:-1]) if weights is None else weights[..., fitted].to(x.dtype).expand(x.shape[:-1])
    centres = _start(x, w, options)
    for _ in range(options.iterations):
        ids = _nearest(x, centres)
        mass = w.new_zeros(*ids.shape[:-1], centres.shape[-2]).scatter_add(-1, ids, w).unsqueeze(-1)
        index = ids.unsqueeze(-1).expand(x.shape)
        sums = torch.zeros_like(centres).scatter_add(-2, index, w.unsqueeze(-1) * x)
        centres = torch.where(mass > 0, sums / torch.where(mass > 0, mass, 1), centres)
    return _nearest(key, centres)


def _in_metric(query: Tensor, key: Tensor, metric: str) -> Tensor:
    if metric == "none" or query.shape[-2] == 0:
        return key
    if metric == "diagonal":
        return key * query.square().mean(-2, keepdim=True).sqrt()
    second = query.mT @ query / query.shape[-2]
    # A query that is no number would stop the search for all sequences: its head measures plain distances.
    known = second.isfinite().flatten(-2).all(-1)[..., None, None]
    second = torch.where(known, second, torch.eye(second.shape[-1], dtype=second.dtype, device=second.device))
    # Rounding may take the smallest eigenvalues below 0; a direction that no query looks along has no length.
    values, vectors = torch.linalg.eigh(second)
    return key @ (vectors * values.clamp(min=0).sqrt().unsqueeze(-2))


def _start(x: Tensor, w: Tensor, options: KMeans) -> Tensor:
    """The first centres, keys that take part: (B, H, K, D)."""
    L, K = x.shape[-2], min(options.count, x.shape[-2])
    present = torch.argsort((w == 0).to(torch.int8), dim=-1, stable=True)  # those that take part, in their order
    number = (w > 0).sum(-1, keepdim=True).clamp(min=1)
    if options.start == "even":
        place = torch.arange(K, device=x.device) * number // K
    else:
        generator = torch.Generator().manual_seed(options.seed)
        draws = torch.rand(*x.shape[:-2], L, generator=generator, dtype=torch.float64).to(x.device)
        place = draws.masked_fill(torch.arange(L, device=x.device) >= number, 2.0).argsort(-1)[..., :K]
    index = present.gather(-1, place)
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def _nearest(x: Tensor, centres: Tensor, chunk: int = 1 << 22) -> Tensor:
    """Index of the nearest centre of each row, in pieces so that no more than `chunk` distances are held at once."""
    half = 0.5 * centres.square().sum(-1).unsqueeze(-2)
    rows = max(1, chunk // max(1, half.numel()))
    parts = [(half - part @ centres.mT).argmin(-1) for part in x.split(rows, dim=-2)]
    return torch.cat(parts, -1) if parts else x.new_zeros(x.shape[:-1], dtype=torch.long)
