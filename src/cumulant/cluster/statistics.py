"""Statistics of clusters: `Moments` of second order with the spread of the keys beside them.

Shape legend: B batch, H key heads, N pieces, m tokens of a piece, K clusters, D key width, E value width.

Of each cluster: W, k_mean, v_mean, S = sum w k~ v~^T and P, either sum w k~^2 (D, "diagonal") or sum w k~ k~^T
(D x D, "full"). All of it merges as `Moments` do; P is kept without the third order T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..moments import Moments, centred_sums, in_units, ratio
from ..tensors import ABSENT
from .basis import spread_out

VARIANCES = ("diagonal", "full")
SOME = 1024  # tokens that say where all are, on a GPU


def moments_of(key: Tensor, value: Tensor, weights: Tensor, *, full: bool = False, response: bool = True) -> Moments:
    """Moments of pieces: key (..., m, D), value (..., m, E), weights (..., m). Cost: m D (E + 1), m D^2 more if full.

    Without `response` no S is kept: what a far field of means alone needs.
    """
    moments = centred_sums(key, value, 2 if response else 1, False, weights)  # keys from an origin near them
    centred = (key - moments.key_mean.unsqueeze(-2)).masked_fill((weights == 0).unsqueeze(-1), 0)
    weighted = weights.unsqueeze(-1) * centred
    return moments._replace(P=weighted.mT @ centred if full else (weighted * centred).sum(-2))


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two disjoint clusters."""
    first, second = a._replace(P=None), b._replace(P=None)
    merged = first.merge(second)
    dk = b.key_mean - a.key_mean
    both = ratio(a.weight * b.weight, merged.weight)
    assert a.P is not None
    assert b.P is not None
    return merged._replace(P=a.P + b.P + _square(both, dk, a.full))


def joined(parts: Sequence[Moments]) -> Moments:
    """Clusters (B, H, K) side by side."""
    return Moments._make(None if x[0] is None else torch.cat(x, 2) for x in zip(*parts, strict=True))


def log(weights: Tensor) -> Tensor:
    """-inf, with a gradient of 0, for a weight of 0."""
    there = weights > 0
    return torch.where(there, torch.where(there, weights, 1).log(), ABSENT)


def merge_pieces(pieces: Moments, owner: Tensor, count: int) -> Moments:
    """Moments of `count` clusters from those of their pieces; owner (B or 1, H or 1, N) names the cluster of each."""
    W, k, v, S, P, _ = pieces
    assert P is not None
    owner = owner.expand(W.shape)

    def sums(x: Tensor) -> Tensor:
        extra = x.ndim - owner.ndim
        index = owner.reshape(*owner.shape, *(1,) * extra).expand(x.shape)
        total = x.new_zeros(*owner.shape[:-1], count, *x.shape[owner.ndim :])
        return total.scatter_add(owner.ndim - 1, index, x)

    def back(x: Tensor) -> Tensor:
        return x.gather(-2, owner.unsqueeze(-1).expand(*owner.shape, x.shape[-1]))

    weight = sums(W)
    k_mean, v_mean = (ratio(sums(W.unsqueeze(-1) * x), weight.unsqueeze(-1)) for x in (k, v))
    dk, dv = k - back(k_mean), v - back(v_mean)
    total_S = None if S is None else sums(S + (W.unsqueeze(-1) * dk).unsqueeze(-1) * dv.unsqueeze(-2))
    return Moments(weight, k_mean, v_mean, total_S, sums(P + _square(W, dk, pieces.full)))


def _square(W: Tensor, dk: Tensor, full: bool) -> Tensor:
    if full:
        return (W.unsqueeze(-1) * dk).unsqueeze(-1) * dk.unsqueeze(-2)
    return W.unsqueeze(-1) * dk * dk


def origin(k: Tensor, weights: Tensor | None, is_causal: bool) -> Tensor:
    """A point near the keys, from which they are measured: logits then are small numbers wherever the keys lie.

    The result does not depend on it, so it needs no gradient, and on a GPU SOME of them say where it is: a pass over
    all takes as long as a small kernel. Causal rows may know the first key only.
    """
    k = k.detach()
    if is_causal:
        if weights is None:
            return k[:, :, :1]
        first = (weights > 0).int().argmax(-1, keepdim=True).unsqueeze(-1)
        return torch.take_along_dim(k, first, -2)
    if weights is None:
        return (spread_out(k, SOME) if k.is_cuda else k).mean(-2, keepdim=True)
    share = ratio(weights, weights.sum(-1, keepdim=True)).detach()
    return (share.unsqueeze(-1) * k).sum(-2, keepdim=True)


def value_point(v: Tensor, weights: Tensor | None, is_causal: bool) -> Tensor:
    """The same for values: rows of weights sum to 1, and what all values share cancels in gradients. 0 if around 0."""
    if v.is_cuda and weights is None and not is_causal:  # both in one pass
        spread, point = torch.var_mean(spread_out(v.detach(), SOME), -2, correction=0, keepdim=True)
        return torch.where(point.square() > spread, point, 0)
    point = origin(v, weights, is_causal)
    if is_causal:
        return point
    share = None if weights is None else ratio(weights, weights.sum(-1, keepdim=True)).detach().unsqueeze(-1)
    squares = (v.detach() - point).square()
    spread = squares.mean(-2, keepdim=True) if share is None else (share * squares).sum(-2, keepdim=True)
    return torch.where(point.square() > spread, point, 0)


def centred(
    k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Keys and values (B, H, L, .) from points near them, 0 where the mask (B, L) has none; weights (B, 1, L); and the
    point of the values."""
    if mask is None:
        point = value_point(v, None, is_causal)
        return k - origin(k, None, is_causal), v - point, None, point
    weights = (in_units(mask)[0] if mask.is_floating_point() else mask).to(k.dtype).unsqueeze(1)
    absent = (weights == 0).unsqueeze(-1)
    k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
    point = value_point(v, weights, is_causal)
    return k - origin(k, weights, is_causal), (v - point).masked_fill(absent, 0), weights, point
