"""Numbers that describe a head by its maps: how far, how spread, how much on the class token, how negative.

Shape legend: B images, H heads, n rows asked for, L tokens, P patches, K + 1 distances.
Formulas marked (ours) in the study's specification are named so in docs/explain.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import check_choice
from ..inspect.tokens import TokenLayout
from ..kinds import kinds_checked
from .capture import Captured
from .flow import SIGNS, unsigned

METRICS = ("hop", "euclidean")
SINK_SHARE = 0.3


@dataclass(frozen=True)
class Profile:
    """Attention by distance: `per_neighbour` R(k) and `mass` C(k), (..., K + 1), and `uniform`, what R(k) is then."""

    per_neighbour: Tensor
    mass: Tensor
    neighbours: Tensor  # (K + 1,), mean number of patches at each distance
    uniform: float


@kinds_checked
def patch_distances(grid: tuple[int, ...], metric: str = "hop", axes: str = "all") -> Tensor:
    """Distance of every two patches (P, P): hops, max over axes of the difference, or Euclidean.

    axes: "all", "space" (rows and columns alone) or "time" (frames alone) of a clip.
    """
    check_choice("metric", metric, METRICS)
    places = torch.cartesian_prod(*(torch.arange(side) for side in grid)).reshape(-1, len(grid))
    if axes != "all":
        if axes not in ("space", "time") or (axes == "time" and len(grid) < 3):
            raise ValueError(f'axes must be "all", "space" or, for clips, "time"; got {axes!r} for grid={grid}')
        places = places[:, -2:] if axes == "space" else places[:, :1]
    difference = (places[:, None] - places[None]).abs()
    return difference.amax(-1) if metric == "hop" else difference.double().square().sum(-1).sqrt().float()


def patch_rows(maps: Tensor, tokens: TokenLayout, queries: list[int] | None) -> tuple[Tensor, Tensor]:
    """The rows of patches alone, (..., n', L), and which patches they are, (n',). queries: None for all tokens."""
    queries = list(range(tokens.count)) if queries is None else queries
    if maps.shape[-2] != len(queries):
        raise ValueError(f"queries must name the {maps.shape[-2]} rows of the maps, got {len(queries)}")
    kept = [i for i, q in enumerate(queries) if q >= tokens.prefix]
    if not kept:
        raise ValueError(f"no row of a patch is among queries={queries}; the first {tokens.prefix} are not patches")
    return maps[..., kept, :], torch.tensor([queries[i] - tokens.prefix for i in kept], device=maps.device)


@kinds_checked
def ring_profile(maps: Tensor, tokens: TokenLayout, queries: list[int] | None = None, axes: str = "all") -> Profile:
    """R(k) and C(k) of maps (..., n, L): mean weight per neighbour at hop k, and weight of the whole ring, mean over
    patch queries. A ring that no query has is nan in R and 0 in C. Uniform maps have R(k) = 1 / L. Cost: n L K."""
    rows, patches = patch_rows(maps, tokens, queries)
    hops = patch_distances(tokens.grid, "hop", axes).to(maps.device)
    rings = torch.arange(int(hops.max()) + 1, device=maps.device)
    member = (hops[patches, None] == rings[:, None]).to(maps.dtype)  # (n, K + 1, P)
    sums = torch.einsum("...np,nkp->...nk", rows[..., tokens.prefix :], member)
    counts = member.sum(-1)
    some = counts > 0
    per = (sums / counts.clamp(min=1)).masked_fill(~some, 0).sum(-2) / some.sum(0)
    return Profile(per, sums.mean(-2), counts.mean(0), 1 / tokens.count)


@kinds_checked
def mean_distance(
    maps: Tensor,
    tokens: TokenLayout,
    queries: list[int] | None = None,
    *,
    sign: str = "absolute",
    metric: str = "hop",
    axes: str = "all",
) -> Tensor:
    """sum_k k C(k) / sum_k C(k) over patch to patch entries, (..., n, L) -> (...).

    sign="signed" is that formula with the weights as they are: a net distance, which negative far weights shorten and
    which has no bounds. "absolute" and "positive" take the sizes, or the positive part, and lie within the grid.
    """
    check_choice("sign", sign, SIGNS)
    rows, patches = patch_rows(maps, tokens, queries)
    rows = rows[..., tokens.prefix :]
    rows = {"signed": rows, "absolute": rows.abs(), "positive": rows.clamp(min=0)}[sign]
    distance = patch_distances(tokens.grid, metric, axes).to(rows)[patches]
    return (rows * distance).sum((-1, -2)) / rows.sum((-1, -2))


@kinds_checked
def uniform_distance(grid: tuple[int, ...], metric: str = "hop", axes: str = "all") -> float:
    """Mean distance of a uniform map: the mean over all pairs of patches, a patch with itself among them."""
    return float(patch_distances(grid, metric, axes).float().mean())


def shares(maps: Tensor, tokens: TokenLayout, queries: list[int] | None = None) -> dict[str, Tensor]:
    """Mean weight of patches on the class token (nan without one) and on themselves, (..., n, L) -> (...)."""
    rows, patches = patch_rows(maps, tokens, queries)
    own = rows[..., torch.arange(len(patches), device=maps.device), patches + tokens.prefix].mean(-1)
    to_class = rows[..., 0].mean(-1) if tokens.prefix else torch.full_like(own, math.nan)
    return {"class_share": to_class, "self_share": own}


@kinds_checked
def negative_mass(maps: Tensor) -> Tensor:
    """Size of the negative weights of each row, (..., L) -> (...)."""
    return maps.clamp(max=0).sum(-1).neg()


@kinds_checked
def tokens_used(maps: Tensor) -> Tensor:
    """(sum |a|)^2 / sum a^2 of each row: from 1, one token, to L, all alike; the signed analogue of exp(entropy)."""
    return maps.abs().sum(-1).square() / maps.square().sum(-1)


@kinds_checked
def entropy(maps: Tensor) -> Tensor:
    """Entropy in nats of each row of |A| / sum |A|: Shannon's for a distribution, log L for a uniform map."""
    return torch.special.entr(unsigned(maps, "absolute")).sum(-1)


@kinds_checked
def received(maps: Tensor) -> Tensor:
    """Attention that each key receives, mean over queries of |A| / sum |A|: (..., n, L) -> (..., L)."""
    return unsigned(maps, "absolute").mean(-2)


def gini(shares: Tensor) -> Tensor:
    """Gini coefficient of non-negative numbers (..., L): 0 all alike, 1 - 1/L one has all."""
    ranked = shares.sort(-1).values
    count = shares.shape[-1]
    rank = torch.arange(1, count + 1, device=shares.device, dtype=shares.dtype)
    return ((2 * rank - count - 1) * ranked).sum(-1) / (count * ranked.sum(-1))


@kinds_checked
def sink_rate(
    captured: Captured, *, share: float = SINK_SHARE, relative: tuple[float, ...] = (10.0, 50.0)
) -> dict[str, float]:
    """Share of heads (over layers and images) in which a key receives more than `share` of the attention.

    "patches" asks for any patch, "class token" for the first token; "relative 10" for any token with at least 10 times
    the mean. For signed maps |A| / sum |A| stands for A.
    """
    found: dict[str, list[Tensor]] = {}
    p = captured.tokens.prefix
    for layer in captured.layers:
        a = received(captured.maps(layer))
        found.setdefault("patches", []).append((a[..., p:].amax(-1) > share).flatten())
        if p:
            found.setdefault("class token", []).append((a[..., 0] > share).flatten())
        for factor in relative:
            ratio = a.amax(-1) / a.mean(-1)
            found.setdefault(f"relative {factor:g}", []).append((ratio >= factor).flatten())
    return {name: float(torch.cat(parts).float().mean()) for name, parts in found.items()}


@kinds_checked
def summary(captured: Captured) -> dict[str, Tensor]:
    """Every number here for each layer and head, mean over images: a dict of tensors (layers, heads).

    distance, distance_signed, distance_positive (hops), class_share, self_share, entropy, tokens_used, negative_mass,
    largest (greatest |weight| times the number of tokens, so 1 for a uniform map), sink_patch, sink_class (received
    by the strongest patch and by the class token), gini. Rows of patches only where a place matters.
    """
    tokens, queries, p = captured.tokens, captured.queries, captured.tokens.prefix
    rows: dict[str, list[Tensor]] = {}
    for layer in captured.layers:
        A = captured.maps(layer)
        a = received(A)
        found = {
            "distance": mean_distance(A, tokens, queries),
            "distance_signed": mean_distance(A, tokens, queries, sign="signed"),
            "distance_positive": mean_distance(A, tokens, queries, sign="positive"),
            **shares(A, tokens, queries),
            "entropy": entropy(A).mean(-1),
            "tokens_used": tokens_used(A).mean(-1),
            "negative_mass": negative_mass(A).mean(-1),
            "largest": A.abs().amax((-1, -2)) * tokens.count,
            "sink_patch": a[..., p:].amax(-1),
            "sink_class": a[..., 0] if p else torch.full_like(a[..., 0], math.nan),
            "gini": gini(a),
        }
        for name, value in found.items():
            rows.setdefault(name, []).append(value.mean(0))
    return {name: torch.stack(parts) for name, parts in rows.items()}
