"""Non-causal cumulant attention on the CPU: matrix products over tiles that stay in the cache.

Shape legend: B batch, H key heads, Hq query heads (a multiple of H), Lq, Lk lengths, D, E widths. A tile is g
(batch, head) pairs times n tokens, laid out (g, n, width).

A plain version writes centred keys, their squares and the squared queries to memory, each as large as the input.
Here they live in workspace tiles, so the time goes into the products themselves and a forward pass allocates its
output, the moments and the workspace. Where the cores are ours (`workers.Pace`) an operation is one of torch on all its
threads, over a tile of many heads. Where others want them, or few heads are cut along the sequence, tiles are tasks of
threads of their own: a pass is one parallel region, or one over keys and one over queries.
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
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...moments import Moments, ratio, statistics_dtype
from ...tracing import is_plain, transformed, without_autocast
from ..launch import empty_like_rows
from ..workers import Pace, side_by_side
from .passes import Read, Sums, backward_keys, backward_queries, moments, read_out
from .tiles import GRAIN, Tile, Workspace, cut, may_join, spans

PACE = Pace()


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
    given = query, key, value, weights, order, scale, total, reference, across, uneven
    if is_plain(query) and not (torch.is_grad_enabled() and any(x.requires_grad for x in given[:3])):
        return _Attention.forward(SimpleNamespace(save_for_backward=_forgotten), *given)
    return _Attention.apply(*given)


def _forgotten(*tensors: Tensor | None) -> None:
    """Nobody asks for gradients."""


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
        out, kept, whole = empty_like_rows(query, value.shape[-1]), is_plain(query), _whole(ctx.across, key, query)
        numbers = max(query.numel(), key.numel(), value.numel(), out.numel())
        threads = torch.get_num_threads() if kept else 1
        kind = (ctx.order, weights is None, key.shape[-1], value.shape[-1], numbers.bit_length(), threads)
        large = kept and numbers >= GRAIN
        halves = ctx.across is not None and ctx.across.halves
        together = large and threads > 1 and whole and may_join(query, key) and PACE.ours()
        groups = ctx.groups = cut(query, key, halves, threads, together)
        ctx.together, ctx.kind = together, kind
        apart = ctx.apart = large and not together
        ctx.alike = key.shape[-2] if weights is None and ctx.across is None else 0

        def space() -> Workspace:  # of the thread that asks
            return Workspace(query, kept, together)

        def found(task: tuple[Tile, slice]) -> Moments:
            tile, n = task
            return moments(tile(key, n), tile(value, n), tile.weights(weights, n), ctx.order, space())

        def answered(task: tuple[Moments, Tile, slice]) -> None:
            state, tile, n = task
            read = Read.of(state, tile.total(ctx.total, state), ctx.scale, ctx.alike)
            read_out(tile(query, n), read, tile(out, n), space())

        def both(tile: Tile) -> Moments:
            state = found((tile, slice(None)))
            answered((state, tile, slice(None)))
            return state

        if whole:
            with PACE.timed(kind, numbers, together):
                ctx.states = [_run(both, groups[0], apart)]
            return out
        waiting = []
        for tiles in groups:
            parts = _run(found, [(tile, n) for n in spans(key, key) for tile in tiles], apart)
            states = [reduce(Moments.merge, parts[i :: len(tiles)]) for i in range(len(tiles))]
            waiting.append(_merging(states, ctx.across))
        ctx.states = []
        for tiles, pending in zip(groups, waiting, strict=True):
            ctx.states.append(pending())
            each = zip(ctx.states[-1], tiles, strict=True)
            _run(answered, [(*one, n) for one in each for n in spans(query, key)], apart)
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
            needed = ctx.needs_input_grad[:3]
            with torch.enable_grad():  # of views: one tensor may be made of another, or be it, as in attention(x, x, x)
                inputs = [x.view_as(x) for x in (query, key, value)]
                out = ctx.reference(*inputs)
            asked = [x for x, wanted in zip(inputs, needed, strict=True) if wanted]
            found = iter(torch.autograd.grad(out, asked, grad, create_graph=twice))
            return tuple(next(found) if wanted else None for wanted in needed)
        dq, dk, dv = (empty_like_rows(x, x.shape[-1]) for x in (query, key, value))
        groups, kept = ctx.groups, is_plain(query)
        apart, together = ctx.apart and kept, ctx.together

        def space() -> Workspace:
            return Workspace(query, kept, together)

        def queries(task: tuple[Moments, Tile, slice]) -> Sums:
            state, tile, n = task
            read = Read.of(state, tile.total(ctx.total, state), ctx.scale, ctx.alike)
            given = tile(query, n), tile(grad, n), read, tile(dq, n)
            return backward_queries(*given, space())

        def keys(task: tuple[Moments, Sums, Tile, slice]) -> None:
            state, sums, tile, n = task
            k, v, w, nu = tile(key, n), tile(value, n), tile.weights(weights, n), tile.total(ctx.total, state)
            to = tile(dk, n), tile(dv, n)
            backward_keys(k, v, w, state, nu, ctx.scale, ctx.alike, sums, *to, space())

        def both(task: tuple[Moments, Tile]) -> None:
            state, tile = task
            keys((state, queries((state, tile, slice(None))), tile, slice(None)))

        if _whole(ctx.across, key, query):
            with PACE.timed(("backward", ctx.kind), query.numel(), together):
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
