"""The dial, automatic: for an error target, the cheapest clusters and near field of each head, by measured error.

Shape legend: B batch, H heads, L tokens, D, E widths, R sampled queries, C candidates.

For each candidate the output on sampled queries is compared with exact softmax on them. The layer's error is
sqrt(sum_h e_h / sum_h n_h), with e_h = ||out - softmax||^2 and n_h = ||softmax - <v>||^2 of head h; of all ways to give
each head a candidate, those that minimise cost + lambda e_h head by head are the cheapest for their error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call import Call, whole
from ..moments import ratio, statistics_dtype
from .asked import check_form
from .attention import cluster_attention, kmeans_assignment
from .backend import Case, Form
from .build import Clusters, Field, check_clusters, pack
from .cost import multiply_adds, softmax_multiply_adds
from .fields import Seen, mix
from .kmeans import KMeans
from .near import heaviest
from .statistics import origin


@dataclass(frozen=True)
class Choice:
    """Arguments of `cluster_attention` for a head, with what they gave: its relative error and share of softmax's cost.

    `clusters=1, near=1` is softmax itself.
    """

    clusters: int | KMeans
    near: int = 0
    response: int | str | None = None
    rank: str = "error"
    closure: str = "tanh"
    error: float = float("nan")
    cost: float = float("nan")

    def __post_init__(self) -> None:
        check_clusters(self.clusters)
        if not isinstance(self.clusters, int | KMeans):
            raise TypeError(f"clusters of a Choice must be an int or KMeans, got {type(self.clusters).__name__}")
        if isinstance(self.near, str):
            raise ValueError(f"near of a Choice must be a number of clusters, got {self.near!r}")
        _ = self.form  # raises for options that do not exist

    @property
    def form(self) -> Form:
        return check_form(self.near, self.closure, self.rank, "diagonal", self.response)

    def options(self) -> dict[str, Any]:
        names = ("clusters", "near", "response", "rank", "closure")
        return {name: getattr(self, name) for name in names} | {"near_rows": 1}  # as it was measured


def _candidates() -> tuple[Choice, ...]:
    found = [Choice(1), Choice(1, near=1)]
    for count in (32, 64, 128):
        for near in (n for n in (0, 1, 2, 4, 6, 8, 16, 32) if 4 * n <= count):
            found += [Choice(KMeans(count, 3, 4), near, r) for r in (0, "pooled", 8)]
    return tuple(found)


CANDIDATES = _candidates()


@dataclass(frozen=True)
class Dial:
    """A choice for each head, and what was measured with them: error of the layer, mean share of softmax's cost.

    Called like `cluster_attention` without its options: query, key, value (..., H, L, width) with the same H heads.
    """

    choices: tuple[Choice, ...]
    error: float
    cost: float

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **shared: Any) -> Tensor:
        call = Call(query, key, value).checked()
        if query.shape[-3] != len(self.choices):
            raise ValueError(f"query has {query.shape[-3]} heads, but the dial was set for {len(self.choices)}")
        kinds = [replace(choice, error=0.0, cost=0.0) for choice in self.choices]

        def run(kind: Choice, own: Call) -> Tensor:
            return cluster_attention(own.query, own.key, own.value, **kind.options(), **shared)

        return call.by_heads(kinds, run)


def check_target(target: float, name: str = "target") -> None:
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < math.inf:
        raise ValueError(f"{name} must be a positive relative error, got {target!r}")


def check_counts(**counts: int) -> None:
    """Raises for what is no whole number, 1 or more, naming it."""
    for name, number in counts.items():
        if not whole(number, 1):
            raise ValueError(f"{name} must be a whole number, 1 or more, got {number!r}")


@torch.no_grad()
def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    target: float = 0.15,
    candidates: Sequence[Choice] = CANDIDATES,
    samples: int = 64,
    length: int | None = None,
    scale: float | None = None,
) -> Dial:
    """The cheapest choice of each head of query, key, value (B, H, L, width) for a layer error of at most `target`.

    `samples` queries, evenly spaced, are compared with softmax; costs are those at `length` tokens (L unless given),
    with clusters and near field in proportion. Raises if no candidate is good enough: `Choice(1, near=1)` always is.
    Cost: (samples L + candidates samples K) D E, and one search for each kind of clusters.
    """
    query, key, value = Call(query, key, value, scale=scale).checked()[:3]
    if query.shape[:2] != key.shape[:2]:
        both = f"{tuple(query.shape)} and {tuple(key.shape)}"
        raise ValueError(f"query and key must have the same batch and heads, each head chooses for itself, got {both}")
    if query.ndim != 4 or not query.numel() or not key.numel():
        raise ValueError(f"query must be (batch, heads, tokens, width) and not empty, got {tuple(query.shape)}")
    if not all(bool(x.isfinite().all()) for x in (query, key, value)):
        raise ValueError("query, key and value must be finite: errors are measured on them")
    check_target(target)
    length = key.shape[-2] if length is None else length
    check_counts(samples=samples, length=length)
    if not isinstance(candidates, Sequence) or not candidates or not all(isinstance(c, Choice) for c in candidates):
        raise ValueError(f"candidates must be a sequence of Choice, at least one, got {candidates!r}")
    step = max(1, query.shape[-2] // samples)
    rows = query[..., step // 2 :: step, :]
    error, cost, size = _measure(rows, Call(query, key, value, scale=scale), candidates, length)
    which = cheapest(error, cost, target**2 * size.sum())
    heads = torch.arange(error.shape[1], device=error.device)
    relative, share = ratio(error[which, heads], size).sqrt().tolist(), cost[which, heads].tolist()
    chosen = tuple(
        replace(candidates[c], error=e, cost=s) for c, e, s in zip(which.tolist(), relative, share, strict=True)
    )
    layer = ratio(error[which, heads].sum(), size.sum()).sqrt().item()
    return Dial(chosen, layer, sum(share) / len(share))


@torch.no_grad()
def measure(
    rows: Tensor, query: Tensor, key: Tensor, value: Tensor, candidates: Sequence[Choice], scale: float | None = None
) -> list[Choice]:
    """The candidates with the error and cost of the whole layer, for rows (B, H, R, D) of query (B, H, L, D)."""
    error, cost, size = _measure(rows, Call(query, key, value, scale=scale), candidates, key.shape[-2])
    layer = (error.sum(1) / size.sum()).sqrt().tolist()
    return [replace(c, error=e, cost=s) for c, e, s in zip(candidates, layer, cost.mean(1).tolist(), strict=True)]


def _measure(rows: Tensor, call: Call, candidates: Sequence[Choice], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Squared errors (C, H), shares of softmax's cost (C, H) and the size of what is approximated (H,)."""
    (query, key, value), scale = call[:3], call.scale
    # One cluster that is near is softmax, also of these rows.
    exact = cluster_attention(rows, key, value, clusters=1, near=1, scale=scale, backend="reference").double()
    size = (exact - value.double().mean(-2, keepdim=True)).square().sum((0, 2, 3))
    q = _scaled(rows, scale)
    fields: dict[int | KMeans, Field] = {}
    tokens: dict[Choice, Tensor] = {}
    errors, costs = [], []
    for choice in candidates:
        if choice.clusters not in fields:
            clusters: Clusters = choice.clusters
            if isinstance(clusters, KMeans):
                clusters = kmeans_assignment(query, key, clusters)
            fields[choice.clusters] = _field(q, key, value, clusters)
        field = fields[choice.clusters]
        out = _answer(q, field, choice)
        errors.append(size * 0 if out is None else (out.double() - exact).square().sum((0, 2, 3)))
        seen = replace(choice, response=None)  # what answers does not change which tokens are near
        if seen not in tokens:
            tokens[seen] = _near_tokens(q, field, choice.near, choice.rank, choice.closure)
        at_length = tokens[seen] * (length / key.shape[-2])
        costs.append(_share_of_softmax(at_length, choice, length, key.shape[-1], value.shape[-1]))
    return torch.stack(errors), torch.stack(costs), size


def near_tokens(
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    clusters: Clusters,
    near: int,
    rank: str = "mass",
    closure: str = "tanh",
    scale: float | None = None,
) -> Tensor:
    """Mean number of tokens (H,) that rows (B, H, R, D) treat exactly, with arguments as of `cluster_attention`."""
    q = _scaled(rows, scale)
    return _near_tokens(q, _field(q, key, value, clusters), near, rank, closure)


def _scaled(rows: Tensor, scale: float | None) -> Tensor:
    return rows.to(statistics_dtype(rows.dtype)) * (rows.shape[-1] ** -0.5 if scale is None else scale)


def _field(q: Tensor, key: Tensor, value: Tensor, clusters: Clusters) -> Field:
    """Clusters of the keys with their tokens at hand, for all near fields and responses."""
    check_clusters(clusters)
    k, v = key.to(q.dtype), value.to(q.dtype)
    form = Form(near="any", closure="tanh", rank="mass", full=False, response=None, near_rows=1)
    case = Case(Call(q, key, value), clusters, form, least=1)
    packed = pack(q.unsqueeze(2), k - origin(k, None, False), v, None, case)
    return Field.of(packed, form)


def _answer(q: Tensor, field: Field, choice: Choice) -> Tensor | None:
    """Output of a choice for rows q (B, H, R, D), as `cluster_attention` gives it; None for softmax."""
    if choice.near >= field.layout.clusters:
        return None
    far, form = field.far, choice.form
    if form.pooled:
        far = far.pooled()
    elif form.response == 0:
        far = far._replace(response=None)
    return mix(q.unsqueeze(-2), far, field.tokens, Seen(near=choice.near), form).squeeze(-2)


def _near_tokens(q: Tensor, field: Field, near: int, rank: str, closure: str) -> Tensor:
    sizes = field.far.log_weight.exp().double()  # (B, H, K)
    if near >= field.layout.clusters:
        return sizes.sum(-1).mean(0)
    if not near:
        return torch.zeros_like(sizes[0, :, 0])
    log_Z, variance = field.far.masses(q, closure)
    which = heaviest(log_Z.unsqueeze(-2), variance.unsqueeze(-2), near, rank, None, False)  # (B, H, R, t)
    taken = sizes.unsqueeze(2).expand(*which.shape[:3], -1).gather(-1, which.clamp(min=0))
    return taken.masked_fill(which < 0, 0).sum(-1).mean((0, 2))


def _share_of_softmax(tokens: Tensor, choice: Choice, L: int, D: int, E: int) -> Tensor:
    """Multiply-adds of a choice for each head, (H,), as a share of softmax's; tokens (H,) are its near tokens."""
    kmeans = choice.clusters if isinstance(choice.clusters, KMeans) else None
    K = choice.clusters if isinstance(choice.clusters, int) else choice.clusters.count
    if choice.near >= K:
        return torch.ones_like(tokens)
    rest = multiply_adds(L, D, E, min(K, L), response=choice.response, kmeans=kmeans)
    return (rest + L * tokens * (D + E)) / softmax_multiply_adds(L, D, E)


def cheapest(error: Tensor, cost: Tensor, allowed: Tensor) -> Tensor:
    """For each head the candidate (H,) so that the errors add up to at most `allowed`, at the smallest cost found."""
    if error.min(0).values.sum() > allowed:
        raise ValueError("no candidate meets the target; add Choice(1, near=1), which is softmax, to the candidates")
    best = error.argmin(0)
    low, high = 0.0, 1.0
    scale = cost.max() / error.max().clamp(min=1e-300)

    def at(price: float) -> Tensor:
        return (cost + price * scale * error).argmin(0)

    def total(which: Tensor) -> Tensor:
        return error.gather(0, which[None]).sum()

    if total(at(low)) <= allowed:
        return at(low)  # the cheapest of each head
    while total(at(high)) > allowed and high < 1e15:
        high *= 4
    for _ in range(60):
        middle = (low + high) / 2
        which = at(middle)
        if total(which) <= allowed:
            high, best = middle, which
        else:
            low = middle
    heads = torch.arange(error.shape[1], device=error.device)
    found = [_without_slack(x, error, cost, allowed) for x in (best, _upgraded(at(low), error, cost, allowed))]
    return min(found, key=lambda which: float(cost[which, heads].sum()))


def _upgraded(which: Tensor, error: Tensor, cost: Tensor, allowed: Tensor) -> Tensor:
    """Better candidates for one head after the other, the most error for its cost first, until the errors fit."""
    which, heads = which.clone(), torch.arange(error.shape[1], device=error.device)
    while error[which, heads].sum() > allowed:
        gain, price = error[which, heads] - error, (cost - cost[which, heads]).clamp(min=1e-12)
        candidate, head = divmod(int((gain / price).argmax()), error.shape[1])
        which[head] = candidate
    return which


def _without_slack(which: Tensor, error: Tensor, cost: Tensor, allowed: Tensor) -> Tensor:
    """Cheaper candidates for one head after the other, the largest saving first, as long as the errors allow it.

    A price per error finds only choices on the convex hull, and the last of them may be far better than was asked for.
    """
    which, heads = which.clone(), torch.arange(error.shape[1], device=error.device)
    while True:
        own_error, own_cost = error[which, heads], cost[which, heads]
        fits = (error - own_error <= allowed - own_error.sum()) & (cost < own_cost)
        if not fits.any():
            return which
        saving = torch.where(fits, own_cost - cost, 0)
        candidate, head = divmod(int(saving.argmax()), error.shape[1])
        which[head] = candidate
