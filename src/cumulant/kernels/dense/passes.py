"""The passes over the tokens of a tile: moments and rows forward, queries and keys backward.

Shape legend: b batches, h heads, g = b h, n tokens of a chunk, L tokens, D, E widths. Formulas are in `cpu`.

An operation here is one of torch over a whole tile: on its own threads, many heads at once, or on one thread of
`workers`, a few heads. No digit depends on which: a product of several matrices takes each by itself.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ...moments import Moments, ratio
from .tiles import Workspace, chunks

SAMPLE = 512  # tokens, at most, whose mean is the point about which sums are taken

Sums = tuple[Tensor, Tensor, Tensor | None]  # of do, of q do^T and of q^2 do^T


def moments(key: Tensor, value: Tensor, weights: Tensor | None, order: int, space: Workspace) -> Moments:
    """Moments of one tile, flat over (batch, head): sums about a point near the means, moved to the means at the end.

    Without weights that point is the mean of evenly spaced tokens, so the tokens are read once; with weights a
    pass of its own finds the means.
    """
    (g, L, D), E = (key.shape[0] * key.shape[1], *key.shape[2:]), value.shape[-1]
    over_W: Tensor | float
    if weights is None or not L:
        weight, over_W, absent = torch.full((g,), float(L), dtype=space.dtype, device=space.device), 1 / max(1, L), None
        k_mean, v_mean = (_middle(x, space.dtype).view(g, -1) for x in (key, value))
    else:
        absent, total = weights == 0, weights.sum(-2)
        k_mean, v_mean = (ratio(_weighted(x, weights, absent, space), total) for x in (key, value))
        weight, over_W = total.squeeze(-1), ratio(torch.ones_like(total), total)
    k_rest = v_rest = S = P = T = None
    for n in chunks(key):
        w, gone = (None, None) if weights is None or absent is None else (weights[:, n], absent[:, n])
        k = space.centred("k", key[..., n, :], k_mean, gone)
        v = space.centred("v", value[..., n, :], v_mean, gone)
        if w is not None:
            v.mul_(w)
        k_rest = _plus(k_rest, _total(k, w))
        v_rest = _plus(v_rest, v.sum(-2))
        S = _with_product(S, k, v)
        if order == 3:
            k.mul_(k)
            P = _plus(P, _total(k, w))
            T = _with_product(T, k, v)
    if k_rest is None or v_rest is None or S is None:
        S, third = space.zeros(g, D, E), order == 3
        P, T = (space.zeros(g, D), torch.zeros_like(S)) if third else (None, None)
        return Moments(weight, k_mean.double(), v_mean.double(), S, P, T)
    a, b = k_rest * over_W, v_rest * over_W
    row = b.unsqueeze(-2)
    if T is not None and P is not None:
        square = k_rest * a
        P.sub_(square)
        T.addcmul_(a.unsqueeze(-1), S, value=-2).addcmul_((square - P).unsqueeze(-1), row)
    S.addcmul_(k_rest.unsqueeze(-1), row, value=-1)
    return Moments(weight, k_mean.double().add_(a), v_mean.double().add_(b), S, P, T)


def _middle(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean (b, h, width) of evenly spaced tokens of x (b, h, L, width), 0 without any.

    Every eighth at most, and 4 sqrt(L) of a long sequence, 512 at most: one far token that is among them moves the
    point by so little that the others' distance from it costs no digits.
    """
    L = x.shape[-2]
    few = x[..., :: max(1, min(L // 16, 8), L // max(1, min(SAMPLE, 4 * isqrt(L)))), :].to(dtype).contiguous()
    return few.mean(-2) if L else few.sum(-2)


def _weighted(x: Tensor, weights: Tensor, absent: Tensor, space: Workspace) -> Tensor:
    """Sum (g, width) of the tokens of x (b, h, L, width) times their weights (g, L, 1)."""
    zero = space.zeros().expand(weights.shape[0], x.shape[-1])
    found = None
    for n in chunks(x):
        found = _plus(found, _total(space.centred("k", x[..., n, :], zero, absent[:, n]), weights[:, n]))
    assert found is not None
    return found


def _plus(sums: Tensor | None, x: Tensor) -> Tensor:
    return x if sums is None else sums.add_(x)


def _with_product(sums: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """sums (g, D, E) plus x^T y of x (g, n, D) and y (g, n, E)."""
    return torch.bmm(x.mT, y) if sums is None else sums.baddbmm_(x.mT, y)


def _total(x: Tensor, w: Tensor | None) -> Tensor:
    """Sum of x (g, n, width) over n with weights w (g, n, 1)."""
    return x.sum(-2) if w is None else (w.mT @ x).squeeze(-2)


def _over_weight(state: Moments, alike: int) -> Tensor | float:
    """1 / W, as (g, 1, 1) where weights differ; `alike`: so many tokens of weight 1 in each."""
    return 1 / alike if alike else ratio(torch.ones_like(state.weight), state.weight)[:, None, None]


class Read(NamedTuple):
    """What rows are read out with: out = mean + linear q S + square q^2 T."""

    mean: Tensor  # (g, 1, E), nu <v>
    S: Tensor  # (g, D, E)
    T: Tensor | None
    linear: float  # factors of products, which cost nothing there; 1 where weights differ, and the matrices have them
    square: float

    @classmethod
    def of(cls, state: Moments, nu: Tensor | None, scale: float, alike: int) -> Read:
        """With S' = linear S and T' = square T as in `cpu`."""
        assert state.S is not None
        mean = state.value_mean.to(state.S.dtype).unsqueeze(-2)
        if nu is None and alike:
            return cls(mean, state.S, state.T, scale / alike, 0.5 * scale * scale / alike)
        over_W = _over_weight(state, alike)
        if nu is not None:
            mean, over_W = mean * nu, over_W * nu
        T = None if state.T is None else state.T * (0.5 * scale * scale * over_W)
        return cls(mean, state.S * (scale * over_W), T, 1.0, 1.0)

    def spread(self, heads: int) -> Read:
        """Of each key head for each of its query heads."""
        if heads == self.S.shape[0]:
            return self
        mean, S, T = (None if x is None else x.repeat_interleave(heads // x.shape[0], 0) for x in self[:3])
        assert mean is not None
        assert S is not None
        return Read(mean, S, T, *self[3:])


def read_out(query: Tensor, read: Read, out: Tensor, space: Workspace) -> None:
    read = read.spread(query.shape[0] * query.shape[1])
    for n in space.rows(query):
        q = space.load("q", query[..., n, :])
        o = space.target("o", out[..., n, :])
        o.copy_(read.mean.expand_as(o))  # given as the first argument it would be copied twice
        o.baddbmm_(q, read.S, alpha=read.linear)
        if read.T is not None:
            o.baddbmm_(torch.mul(q, q, out=space.take("k", *q.shape)), read.T, alpha=read.square)
        space.store(out[..., n, :], o)


def backward_queries(query: Tensor, grad: Tensor, read: Read, dq: Tensor, space: Workspace) -> Sums:
    """Writes dq; returns sum do, q^T do and (q^2)^T do of each key head."""
    heads, g = query.shape[0] * query.shape[1], read.S.shape[0]
    _, S, T, linear, square = read.spread(heads)
    d_mean = dS = dT = None
    whole = space.whole(query)
    if whole:
        _turned(space.load("v", grad), S, linear, space.target("o", dq))
    for n in chunks(query):
        q = space.load("q", query[..., n, :])
        do = space.load("v", grad[..., n, :])
        out = space.target("o", dq[..., n, :])
        if not whole:
            _turned(do, S, linear, out)
        work = space.take("k", *do.shape)
        d_mean = _plus(d_mean, (do if do.is_contiguous() else work.copy_(do)).sum(-2))  # else tiles change its order
        dS = _with_product(dS, q, do)
        if T is not None:
            work = space.take("k", *q.shape)
            out.addcmul_(torch.bmm(do, T.mT, out=work), q, value=2 * square)
            dT = _with_product(dT, torch.mul(q, q, out=work), do)
        space.store(dq[..., n, :], out)
    if d_mean is None or dS is None:
        d_mean, dS = S.new_zeros(heads, S.shape[-1]), torch.zeros_like(S)
        dT = None if T is None else torch.zeros_like(T)

    def gathered(x: Tensor) -> Tensor:
        return x if heads == g else x.view(g, heads // g, *x.shape[1:]).sum(1)

    return gathered(d_mean), gathered(dS), None if dT is None else gathered(dT)


def _turned(do: Tensor, S: Tensor, factor: float, out: Tensor) -> None:
    torch.baddbmm(out, do, S.mT, beta=0, alpha=factor, out=out)


def backward_keys(
    key: Tensor, value: Tensor, weights: Tensor | None, state: Moments, nu: Tensor | None, scale: float, alike: int,
    sums: Sums, dk: Tensor, dv: Tensor, space: Workspace,
) -> None:  # fmt: skip
    over_W = _over_weight(state, alike)
    alpha = over_W if nu is None else over_W * nu
    d_mean, dS, dT = sums
    k_point, v_point = state.key_mean.to(dS.dtype), state.value_mean.to(dS.dtype)
    a, b = ((mean - x).to(x.dtype) for mean, x in ((state.key_mean, k_point), (state.value_mean, v_point)))
    a, b, dS = a.unsqueeze(-1), b.unsqueeze(-2), dS * (scale * alpha)
    v_constant, k_constant, slope = d_mean.unsqueeze(-2) * alpha - a.mT @ dS, -(b @ dS.mT), None
    if dT is not None and state.P is not None and state.S is not None:
        dT = dT * (0.5 * scale * scale * alpha)
        v_constant = v_constant + (a * a - state.P.unsqueeze(-1) * over_W).mT @ dT
        slope = -(b @ dT.mT)
        k_constant = k_constant - 2 * (dT * state.S * over_W).sum(-1).unsqueeze(-2) - 2 * a.mT * slope
        dS = dS - 2 * a * dT
    absent = None if weights is None else weights == 0
    for n in space.rows(key):
        gone = None if absent is None else absent[:, n]
        k = space.centred("k", key[..., n, :], k_point, gone)
        v = space.centred("v", value[..., n, :], v_point, gone)
        k_out, v_out = space.target("o", dk[..., n, :]), space.target("p", dv[..., n, :])
        k_out.copy_(k_constant.expand_as(k_out))
        k_out.baddbmm_(v, dS.mT)
        v_out.copy_(v_constant.expand_as(v_out))
        v_out.baddbmm_(k, dS)
        if dT is not None and slope is not None:
            turned = space.take("q", *k.shape)
            turned.copy_(slope.expand_as(turned))
            k_out.addcmul_(turned.baddbmm_(v, dT.mT), k, value=2)
            v_out.baddbmm_(k.mul_(k), dT)
        if weights is not None:
            k_out.mul_(weights[:, n])
            v_out.mul_(weights[:, n])
        space.store(dk[..., n, :], k_out)
        space.store(dv[..., n, :], v_out)
