"""k-means of the keys as the queries see them.

Shape legend: B batch, H key heads, R queries of a key head, L keys, D width, K clusters.

Two keys are as far apart as their logits are on average over the queries: |k - k'|^2 = <(q.(k - k'))^2>, which is
(k - k')^T M (k - k') with their second moment M = <q q^T>; "diagonal" keeps only <q_i^2>. Means do not depend on a
metric, so that the nearest centre c of a key is that of least c^T M c / 2 - k^T M c: no root of M is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import check_choice, whole

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
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed of KMeans must be a whole number, got {self.seed!r}")
        check_choice("metric of KMeans", self.metric, METRICS)
        check_choice("start of KMeans", self.start, STARTS)

    def step(self, L: int) -> int:
        """Centres are fitted on every so-many-th of L keys."""
        return min(self.sample, max(1, L // self.count))

    def multiply_adds(self, L: int, D: int) -> float:
        """Multiply-adds for L keys of width D: the second moment of the queries, the steps."""
        metric = {"full": L * D * D, "diagonal": L * D, "none": 0}[self.metric]
        return metric + (self.iterations / self.sample + 1) * L * min(self.count, L) * D


@torch.no_grad()
def kmeans(query: Tensor, key: Tensor, weights: Tensor | None, options: KMeans) -> Tensor:
    """Cluster ids (B, H, L) of key (B, H, L, D) under the metric of query (B, H, R, D); weights (B, 1, L) or None.

    Keys of weight 0 move no centre. Cost: R D^2 + (iterations / sample + 1) L K D.
    """
    metric = second_moment(query, options.metric)
    fitted = slice(None, None, options.step(key.shape[-2]))
    x = key[..., fitted, :]
    w = x.new_ones(x.shape[:-1]) if weights is None else weights[..., fitted].to(x.dtype).expand(x.shape[:-1])
    centres = first_centres(x, None if weights is None else w, options)
    for _ in range(options.iterations):
        ids = _nearest(x, centres, metric)
        mass = w.new_zeros(*ids.shape[:-1], centres.shape[-2]).scatter_add(-1, ids, w).unsqueeze(-1)
        index = ids.unsqueeze(-1).expand(x.shape)
        sums = torch.zeros_like(centres).scatter_add(-2, index, w.unsqueeze(-1) * x)
        centres = torch.where(mass > 0, sums / torch.where(mass > 0, mass, 1), centres)
    return _nearest(key, centres, metric)


def second_moment(query: Tensor, metric: str) -> Tensor | None:
    """M (B, H, D, D) of query (B, H, R, D); None: plain distances."""
    if metric == "none" or query.shape[-2] == 0:
        return None
    diagonal = metric == "diagonal"
    second = query.square().mean(-2).diag_embed() if diagonal else query.mT @ query / query.shape[-2]
    # A query that is no number: its head measures plain distances.
    known = second.isfinite().flatten(-2).all(-1)[..., None, None]
    return torch.where(known, second, torch.eye(second.shape[-1], dtype=second.dtype, device=second.device))


def first_centres(x: Tensor, w: Tensor | None, options: KMeans) -> Tensor:
    """(B, H, K, D) of keys x (B, H, L, D), those with w (B, H or 1, L) above 0."""
    L, K = x.shape[-2], min(options.count, x.shape[-2])
    if options.start == "even" and w is None:
        return x[..., torch.arange(K, device=x.device) * L // K, :]
    w = x.new_ones(1).expand(x.shape[:-1]) if w is None else w.expand(x.shape[:-1])
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


def _nearest(x: Tensor, centres: Tensor, metric: Tensor | None, chunk: int = 1 << 22) -> Tensor:
    """Index of the nearest centre of each row, in pieces so that no more than `chunk` distances are held at once."""
    seen = centres if metric is None else centres @ metric
    half = 0.5 * (centres * seen).sum(-1).unsqueeze(-2)
    rows = max(1, chunk // max(1, half.numel()))
    parts = [(half - part @ seen.mT).argmin(-1) for part in x.split(rows, dim=-2)]
    return torch.cat(parts, -1) if parts else x.new_zeros(x.shape[:-1], dtype=torch.long)
