"""Cluster attention as the page has it, slow and in float64: a loop over heads and clusters, sharing no code with it.

Shape legend: n rows, L keys, D, E widths, K clusters. Everything is differentiable but the choice of clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

NONE = float("-inf")


def closures(variance: Tensor, closure: str) -> tuple[Tensor, Tensor]:
    """phi and f of s^2, as printed; two terms of their series where s is tiny."""
    if closure == "gauss":
        return variance / 2, torch.ones_like(variance)
    tiny = variance < 1e-6
    s = torch.where(tiny, 1, variance).sqrt()
    if closure == "tanh":
        phi, f, second, slope = s.cosh().log(), s.tanh() / s, 1 / 12, 1 / 3
    else:
        y = math.sqrt(3) * s
        phi, f, second, slope = (y.sinh() / y).log(), 3 * (1 / y.tanh() - 1 / y) / y, 1 / 20, 1 / 5
    return (torch.where(tiny, variance / 2 - second * variance**2, phi), torch.where(tiny, 1 - slope * variance, f))


class Margin:
    """The smallest distance of a score that was taken from one that was not: below rounding, either may be taken."""

    def __init__(self) -> None:
        self.least = float("inf")

    def top(self, score: Tensor, count: int) -> list[int]:
        order = score.argsort(descending=True).tolist()
        taken = [c for c in order[:count] if score[c] > NONE]
        left = [c for c in order[count:] if score[c] > NONE]
        if taken and left:
            self.least = min(self.least, float(score[taken[-1]] - score[left[0]]))
        return taken


def rows_over(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    ids: Tensor,
    seen: Tensor,
    margin: Margin,
    *,
    near: int | list[list[int]] = 0,
    closure: str = "tanh",
    rank: str = "mass",
    variance: str = "diagonal",
    response: int | str | None = None,
    near_rows: int = 1,
) -> Tensor:
    """Rows q (n, D), scaled, over k (L, D), v (L, E): clusters `ids` (L,), -1 for tokens exact where seen (n, L).

    `near` is a number, or for each row the ids of its near clusters.
    """
    n, present = len(q), weight > 0
    names = sorted({int(c) for c in ids[present & (ids >= 0)]})
    K = len(names)
    at = [present & (ids == c) for c in names]
    W = torch.stack([weight[x].sum() for x in at]) if K else q.new_zeros(0)
    shares = [(weight[x] / weight[x].sum()).unsqueeze(-1) for x in at]
    k_mean = [(p * k[x]).sum(0) for p, x in zip(shares, at, strict=True)]
    v_mean = [(p * v[x]).sum(0) for p, x in zip(shares, at, strict=True)]
    dk = [k[x] - m for m, x in zip(k_mean, at, strict=True)]
    S = [(p * d).T @ (v[x] - m) for p, d, x, m in zip(shares, dk, at, v_mean, strict=True)]
    cov = [(p * d).T @ d for p, d in zip(shares, dk, strict=True)]
    if variance == "diagonal":
        cov = [c.diagonal().diag() for c in cov]
    columns = [W[c].log() + q @ k_mean[c] for c in range(K)]
    spreads = [((q @ cov[c]) * q).sum(-1).clamp(min=0) for c in range(K)]
    s2 = torch.stack(spreads, -1) if K else q.new_zeros(n, 0)
    phi, f = closures(s2, closure)
    log_Z = (torch.stack(columns, -1) if K else q.new_zeros(n, 0)) + phi

    is_near = torch.zeros(n, K, dtype=torch.bool)
    groups = [list(range(a, min(a + near_rows, n))) for a in range(0, n, near_rows)]
    plain, spread = log_Z.detach(), s2.detach()
    if isinstance(near, list):
        for row, own in enumerate(near):
            is_near[row, [c for c, name in enumerate(names) if name in own]] = True
    elif near >= K:
        is_near[:] = True
    elif near:
        for rows in groups:
            if rank == "mean" and len(rows) > 1:
                means, var = q[rows].detach().mean(0), q[rows].detach().var(0, correction=0)
                centre = sum(W[c] * k_mean[c] for c in range(K)).detach() / W.sum()
                score = torch.stack(
                    [
                        W[c].log()
                        + means @ k_mean[c].detach()
                        + 0.5 * var @ (k_mean[c].detach() - centre) ** 2
                        + closures((means @ cov[c] @ means + var @ cov[c].diagonal()).detach(), closure)[0]
                        for c in range(K)
                    ]
                )
            else:
                share = plain[rows] - plain[rows].logsumexp(-1, keepdim=True)
                if rank == "error":
                    # Without spread a cluster is exact as it is, unless it borrows a response: then it comes last.
                    share = share + (spread[rows].clamp(min=1e-300) if response == "pooled" else spread[rows]).log()
                score = share.logsumexp(0)
            is_near[torch.tensor(rows)[:, None], margin.top(score, near)] = True

    token = q @ k.T + torch.where(present, weight, 1).log()
    inside = torch.zeros(n, len(k), dtype=torch.bool)
    for c in range(K):
        inside |= is_near[:, c : c + 1] & at[c]
    shown = (inside | (seen & (ids < 0))) & present
    logits = torch.cat((log_Z.masked_fill(is_near, NONE), token.masked_fill(~shown, NONE)), -1)
    alive = (logits > NONE).any(-1, keepdim=True)
    w = torch.where(alive, logits.masked_fill(~alive, 0).softmax(-1), 0)
    far, exact = w[:, :K], w[:, K:]
    out = exact @ torch.where(present.unsqueeze(-1), v, 0)
    if not K:
        return out
    out = out + far @ torch.stack(v_mean)
    if response == "pooled":
        pool = sum(W[c] * S[c] for c in range(K)) / W.sum()
        return out + (far * f).sum(-1, keepdim=True) * (q @ pool)
    answers = torch.ones(n, K, dtype=torch.bool)
    if isinstance(response, int) and response < K:
        answers[:] = False
        for rows in groups:
            score = (plain[rows].softmax(-1) * f[rows].detach()).sum(0).log()
            score = score.masked_fill(is_near[rows].all(0), NONE)
            answers[torch.tensor(rows)[:, None], margin.top(score, response)] = True
    for c in range(K):
        out = out + (far[:, c] * f[:, c] * answers[:, c]).unsqueeze(-1) * (q @ S[c])
    return out


def heads(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, scale: float | None
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
    """For every sequence and query head: its number, that of the key head, scaled queries, keys, values, weights."""
    (B, H, _, D), (Hk, Lk) = query.shape, key.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    weights = key.new_ones(B, Lk) if weights is None else weights
    for b in range(B):
        for h in range(H):
            g = h // (H // Hk)
            yield b, g, scale * query[b, h], key[b, g], value[b, g], weights[b]


def noncausal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    *,
    weights: Tensor | None = None,
    prefix: int = 0,
    scale: float | None = None,
    near: int | str = 0,
    touching: Callable[[int], list[int]] | None = None,
    standing: Tensor | None = None,
    queries: str = "each",
    margin: Margin | None = None,
    **options: Any,
) -> Tensor:
    """query (B, H, Lq, D), key and value (B, Hk, Lk, ...), ids (B, Hk, Lk - prefix), weights (B, Lk).

    For near="neighbours", touching(c) are the clusters beside c, and standing (B, Lk - prefix) the cluster in which a
    query stands; for queries="mean" too.
    """
    B, H, Lq, D = query.shape
    Lk = key.shape[2]
    margin = margin or Margin()
    outs = []
    for b, g, q, k, v, mass in heads(query, key, value, weights, scale):
        all_ids = torch.cat((torch.full((prefix,), -1), ids[b, g]))
        where = None
        if queries == "mean":
            assert standing is not None
            found, there = [], mass[prefix:]
            for c in range(int(standing.max()) + 1):
                inside = (ids[b, g] == c) & (there > 0)
                total = there[inside].sum()
                rows = q[prefix:][inside]
                found.append((there[inside].unsqueeze(-1) * rows).sum(0) / total if total > 0 else q.new_zeros(D))
            where = standing[b]
            q = torch.cat((q[:prefix], torch.stack(found)))
        seen = torch.ones(len(q), Lk, dtype=torch.bool)
        chosen: Any = near
        if near == "neighbours":
            assert touching is not None
            assert standing is not None
            chosen = [[]] * prefix + [touching(int(c)) for c in standing[b]]
        out = rows_over(q, k, v, mass, all_ids, seen, margin, near=chosen, **options)
        outs.append(out if where is None else torch.cat((out[:prefix], out[prefix:][where])))
    return torch.stack(outs).view(B, H, Lq, value.shape[-1])


def lists(blocks: int, keep: int | None) -> list[list[int]]:
    """Clusters of so many past blocks: oldest pairs of a size merge when more than keep + 1 would stand apart."""
    if keep is None:
        return [[b] for b in range(blocks)]
    levels: list[list[list[int]]] = [[]]
    for block in range(blocks):
        moved, level = [block], 0
        while True:
            if level == len(levels):
                levels.append([])
            levels[level].append(moved)
            if len(levels[level]) < keep + 2:
                break
            moved, level = levels[level].pop(0) + levels[level].pop(0), level + 1
    return [x for level in levels for x in level]


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    size: int,
    keep: int | None = None,
    recent: int = 0,
    prefix: int = 0,
    weights: Tensor | None = None,
    scale: float | None = None,
    margin: Margin | None = None,
    **options: Any,
) -> Tensor:
    """Row by row: whole blocks before the `recent` ones and the own are clusters, what follows is exact, and so are the
    first `prefix` tokens that are there."""
    B, H, Lq, _ = query.shape
    Lk = key.shape[2]
    margin = margin or Margin()
    outs = []
    for _, _, q, k, v, mass in heads(query, key, value, weights, scale):
        for i in range(Lq):
            past = max(0, i // size - recent)
            ids = torch.full((Lk,), -1)
            for c, members in enumerate(lists(past, keep)):
                for block in members:
                    ids[block * size : (block + 1) * size] = c
            ids[torch.nonzero(mass > 0).flatten()[:prefix]] = -1
            seen = (torch.arange(Lk) <= i)[None]
            outs.append(rows_over(q[i : i + 1], k, v, mass, ids, seen, margin, **options))
    return torch.cat(outs).view(B, H, Lq, value.shape[-1])
