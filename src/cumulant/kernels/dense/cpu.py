"""Non-causal cumulant attention on the CPU: matrix products over tiles that stay in the cache.

Shape legend: B batch, H key heads, Hq query heads (a multiple of H), Lq, Lk lengths, D, E widths. A tile is g
(batch, head) pairs times n tokens, laid out (g, n, width).

A plain version writes centred keys, their squares and the squared queries to memory, each as large as the input.
Here they live in workspace tiles, so the time goes into the products themselves and a forward pass allocates its
output, the moments and the workspace. Tiles are tasks of their own (`workers`): a pass is one parallel region, or one
over keys and one over queries where few heads are cut along the sequence.
With nu = 1, or the sum of the weights W, S' = nu scale S / W, T' = nu scale^2 T / 2W:

    out = nu <v> + q S' + q^2 T'
    dq  = do S'^T + 2 q * (do T'^T)             dS = nu scale q^T do / W,  dT = nu scale^2/2 (q^2)^T do / W
    dv  = w [ k~ dS + k~^2 dT + nu sum do / W - <k~^2> dT ]
    dk  = w [ v~ dS^T + 2 k~ * (v~ dT^T) - 2 sum_e dT S / W ]

Backward, tokens are centred about the means as float32 holds them, x = k~ + a and y = v~ + b, and what these are off
(a, b) is in the constants: keys far from the origin cost no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from ...moments import Moments, ratio, statistics_dtype
from ...tracing import is_plain, transformed, without_autocast
from ..launch import empty_like_rows
from ..workers import side_by_side
from .tiles import GRAIN, Tile, Workspace, chunks, cut, spans

SAMPLE = 512  # tokens of a long sequence whose mean is the point about which sums are taken

Sums = tuple[Tensor, Tensor, Tensor | None]  # of do, of q do^T and of q^2 do^T


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    order: int,
    scale: float,
    total: Tensor | bool | None,
    reference: Callable[[Tensor, Tensor, Tensor], Tensor],
    across: Across | None = None,
) -> Tensor:
    """query (B, Hq, Lq, D), key (B, H, Lk, D), value (B, H, Lk, E), weights (B, Lk) or None -> (B, Hq, Lq, E).

    `total` (B or 1, 1, 1, 1): nu, where it is not 1; True: the sum of the weights. `reference` computes the same by
    differentiable operations; only second derivatives and batched gradients use it. `across` has what the tokens and
    queries of other workers add. Cost: 2 L D E products a head at order 2, 4 L D E at order 3; reads q, k, v once,
    writes the output once.
    """
    uneven = weights is not None and weights.is_floating_point() and query.dtype == statistics_dtype(query.dtype)
    if weights is not None:  # before anything asks which are 0: what the statistics cannot hold is
        weights = weights.to(statistics_dtype(query.dtype))
    return _Attention.apply(query, key, value, weights, order, scale, total, reference, across, uneven)


class Across(Protocol):
    """Where other workers hold more of the sequence: what their tokens and queries add."""

    halves: bool  # whether messages go in two halves of the heads, one under way while the other is computed

    def merge(self, moments: Moments) -> Moments: ...

    def merging(self, moments: Moments) -> Callable[[], Moments]: ...

    def gathered(self, *tensors: Tensor) -> tuple[Tensor, ...] | None: ...

    def add(self, *tensors: Tensor) -> tuple[Tensor, ...]: ...

    def adding(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]: ...


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, *rest: Any) -> Tensor:
        ctx.order, ctx.scale, ctx.total, ctx.reference, ctx.across, ctx.uneven = rest
        ctx.save_for_backward(query, key, value, weights)
        out, kept = empty_like_rows(query, value.shape[-1]), is_plain(query)
        halves = ctx.across is not None and ctx.across.halves
        groups = ctx.groups = cut(query, key, halves, torch.get_num_threads() if kept else 1)
        apart = kept and max(query.numel(), key.numel(), value.numel(), out.numel()) >= GRAIN
        ctx.alike = key.shape[-2] if weights is None and ctx.across is None else 0

        def moments(task: tuple[Tile, slice]) -> Moments:
            tile, n = task
            w = tile.weights(weights, n)
            return _moments(tile(key, n), tile(value, n), w, ctx.order, Workspace(query, kept))

        def read_out(task: tuple[Moments, Tile, slice]) -> None:
            state, tile, n = task
            matrices = _read_matrices(state, tile.total(ctx.total, state), ctx.scale, ctx.alike)
            _read_out(tile(query, n), *matrices, tile(out, n), Workspace(query, kept))

        def both(tile: Tile) -> Moments:
            state = moments((tile, slice(None)))
            read_out((state, tile, slice(None)))
            return state

        if _whole(ctx.across, key, query):
            ctx.states = [_run(both, groups[0], apart)]
            return out
        waiting = []
        for tiles in groups:
            parts = _run(moments, [(tile, n) for n in spans(key, key) for tile in tiles], apart)
            states = [reduce(Moments.merge, parts[i :: len(tiles)]) for i in range(len(tiles))]
            waiting.append(_merging(states, ctx.across))
        ctx.states = []
        for tiles, found in zip(groups, waiting, strict=True):
            ctx.states.append(found())
            each = zip(ctx.states[-1], tiles, strict=True)
            _run(read_out, [(*one, n) for one in each for n in spans(query, key)], apart)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast("cpu"):  # which a caller may have left on
            return (*_Attention.gradients(ctx, grad), *(None,) * 7)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        twice, many = torch.is_grad_enabled(), transformed() or torch._C._functorch.is_legacy_batchedtensor(grad)
        if twice or many:  # somebody differentiates this backward, or asks for many at once: let autograd do it
            inputs, needed = (query, key, value), ctx.needs_input_grad[:3]
            asked = [x for x, wanted in zip(inputs, needed, strict=True) if wanted]
            with torch.enable_grad():
                out = ctx.reference(*inputs)
            found = iter(torch.autograd.grad(out, asked, grad, create_graph=twice))
            return tuple(next(found) if wanted else None for wanted in needed)
        dq, dk, dv = (empty_like_rows(x, x.shape[-1]) for x in (query, key, value))
        groups, kept = ctx.groups, is_plain(query)
        apart = kept and max(query.numel(), key.numel(), value.numel(), grad.numel()) >= GRAIN

        def queries(task: tuple[Moments, Tile, slice]) -> Sums:
            state, tile, n = task
            _, S, T = _read_matrices(state, tile.total(ctx.total, state), ctx.scale, ctx.alike)
            return _backward_queries(tile(query, n), tile(grad, n), S, T, tile(dq, n), Workspace(query, kept))

        def keys(task: tuple[Moments, Sums, Tile, slice]) -> None:
            state, sums, tile, n = task
            k, v, w, nu = tile(key, n), tile(value, n), tile.weights(weights, n), tile.total(ctx.total, state)
            to = tile(dk, n), tile(dv, n)
            _backward_keys(k, v, w, state, nu, ctx.scale, ctx.alike, sums, *to, Workspace(query, kept))

        def both(task: tuple[Moments, Tile]) -> None:
            state, tile = task
            keys((state, queries((state, tile, slice(None))), tile, slice(None)))

        if _whole(ctx.across, key, query):
            _run(both, list(zip(ctx.states[0], groups[0], strict=True)), apart)
        else:
            waiting = []
            for states, tiles in zip(ctx.states, groups, strict=True):
                each = list(zip(states, tiles, strict=True))
                parts = _run(queries, [(*one, n) for n in spans(query, key) for one in each], apart)
                sums = [reduce(_added, parts[i :: len(tiles)]) for i in range(len(tiles))]
                waiting.append(_adding(sums, ctx.across))
            for states, tiles, pending in zip(ctx.states, groups, waiting, strict=True):
                every = zip(states, pending(), tiles, strict=True)
                _run(keys, [(*one, n) for one in every for n in spans(key, key)], apart)
        if ctx.uneven and ctx.across is None:
            _balance(dk, weights)
        return dq, dk, dv


def _whole(across: Across | None, *tokens: Tensor) -> bool:
    """Whether each tile holds its sequences whole, so that one task goes through all passes: one region, and the
    tokens of a tile are still in the cache."""
    return across is None and all(len(spans(x, tokens[0])) == 1 for x in tokens)


def _balance(dk: Tensor, weights: Tensor) -> None:
    """Takes off what dk (B, H, L, D) sums up to over the keys, which is 0 but for what rounding left in the means.

    A key that outweighs all others lies as near to the mean as float64 can tell, and that error is all it has.
    """
    share = ratio(weights, weights.sum(-1, keepdim=True))[:, None, :, None]
    dk.sub_(share * dk.sum(-2, keepdim=True))


def _run(task: Callable[[Any], Any], items: list[Any], apart: bool) -> list[Any]:
    """Tasks on threads of their own: also one alone, whose operations torch would cut into shares, each a wait."""
    return side_by_side(task, items) if apart else [task(item) for item in items]


def _added(a: Sums, b: Sums) -> Sums:
    return a[0] + b[0], a[1] + b[1], None if a[2] is None or b[2] is None else a[2] + b[2]


def _merging(states: list[Moments], across: Across | None) -> Callable[[], list[Moments]]:
    """Of the moments of tiles, when it is asked, those of all workers."""
    if across is None:
        return lambda: states
    pending = across.merging(Moments._make(_of_tiles(states)))
    return lambda: [Moments._make(one) for one in _to_tiles(pending(), [len(x.weight) for x in states])]


def _adding(sums: list[Sums], across: Across | None) -> Callable[[], list[Sums]]:
    """The same of sums over queries."""
    if across is None:
        return lambda: sums
    third = sums[0][2] is not None
    pending = across.adding(*(x for x in _of_tiles(sums) if x is not None))
    return lambda: _to_tiles(pending() if third else (*pending(), None), [len(x[0]) for x in sums])


def _of_tiles(parts: Sequence[tuple[Any, ...]]) -> list[Tensor | None]:
    """What tiles found, side by side along their first dimension."""
    return [None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)]


def _to_tiles(whole: Sequence[Tensor | None], sizes: list[int]) -> list[Any]:
    """The inverse: what belongs to each tile."""
    return list(zip(*((None,) * len(sizes) if x is None else x.split(sizes) for x in whole), strict=True))


def _moments(key: Tensor, value: Tensor, weights: Tensor | None, order: int, space: Workspace) -> Moments:
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

    Every eighth at most, and some 512 of a long sequence: one far token that is among them moves the point by so
    little that the others' distance from it costs no digits.
    """
    L = x.shape[-2]
    few = x[..., :: max(1, min(L // 16, 8), L // SAMPLE), :].to(dtype).contiguous()
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


def _read_matrices(state: Moments, nu: Tensor | None, scale: float, alike: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """nu <v> (g, 1, E), S' and T' (g, D, E) of the module docstring."""
    assert state.S is not None
    over_W, v_mean = _over_weight(state, alike), state.value_mean.to(state.S.dtype).unsqueeze(-2)
    if nu is not None:
        v_mean, over_W = v_mean * nu, over_W * nu
    return v_mean, state.S * (scale * over_W), None if state.T is None else state.T * (0.5 * scale * scale * over_W)


def _spread(x: Tensor, heads: int) -> Tensor:
    """x (g, ...) of each key head for each of its query heads."""
    return x if heads == x.shape[0] else x.repeat_interleave(heads // x.shape[0], 0)


def _read_out(query: Tensor, v_mean: Tensor, S: Tensor, T: Tensor | None, out: Tensor, space: Workspace) -> None:
    heads = query.shape[0] * query.shape[1]
    v_mean, S, T = _spread(v_mean, heads), _spread(S, heads), None if T is None else _spread(T, heads)
    for n in chunks(query):
        q = space.load("q", query[..., n, :])
        o = space.target("o", out[..., n, :])
        o.copy_(v_mean.expand_as(o))
        o.baddbmm_(q, S)
        if T is not None:
            o.baddbmm_(torch.mul(q, q, out=space.take("k", *q.shape)), T)
        space.store(out[..., n, :], o)


def _backward_queries(query: Tensor, grad: Tensor, S: Tensor, T: Tensor | None, dq: Tensor, space: Workspace) -> Sums:
    """Writes dq; returns sum do, q^T do and (q^2)^T do of each key head."""
    heads, g = query.shape[0] * query.shape[1], S.shape[0]
    S, T = _spread(S, heads), None if T is None else _spread(T, heads)
    d_mean = dS = dT = None
    for n in chunks(query):
        q = space.load("q", query[..., n, :])
        do = space.load("v", grad[..., n, :])
        out = space.target("o", dq[..., n, :])
        torch.bmm(do, S.mT, out=out)
        work = space.take("k", *do.shape)
        d_mean = _plus(d_mean, (do if do.is_contiguous() else work.copy_(do)).sum(-2))  # else tiles change its order
        dS = _with_product(dS, q, do)
        if T is not None:
            work = space.take("k", *q.shape)
            out.addcmul_(torch.bmm(do, T.mT, out=work), q, value=2)
            dT = _with_product(dT, torch.mul(q, q, out=work), do)
        space.store(dq[..., n, :], out)
    if d_mean is None or dS is None:
        d_mean, dS = S.new_zeros(heads, S.shape[-1]), torch.zeros_like(S)
        dT = None if T is None else torch.zeros_like(T)

    def gathered(x: Tensor) -> Tensor:
        return x if heads == g else x.view(g, heads // g, *x.shape[1:]).sum(1)

    return gathered(d_mean), gathered(dS), None if dT is None else gathered(dT)


def _backward_keys(
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
    for n in chunks(key):
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
