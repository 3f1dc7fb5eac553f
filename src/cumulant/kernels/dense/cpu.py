"""Non-causal cumulant attention on the CPU: matrix products over tiles that stay in the cache.

Shape legend: B batch, H key heads, Hq query heads (a multiple of H), Lq, Lk lengths, D, E widths. A tile is g
(batch, head) pairs times n tokens, laid out (g, n, width).

A plain version writes centred keys, their squares and the squared queries to memory, each as large as the input.
Here they live in workspace tiles, so the time goes into the products themselves and a forward pass allocates its
output, the moments and the workspace. Tiles are tasks of their own (`workers`): each pass is one parallel region over
keys and one over queries. With nu = 1, or the sum of the weights W, S' = nu scale S / W, T' = nu scale^2 T / 2W:

    out = nu <v> + q S' + q^2 T'
    dq  = do S'^T + 2 q * (do T'^T)             dS = nu scale q^T do / W,  dT = nu scale^2/2 (q^2)^T do / W
    dv  = w [ k~ dS + k~^2 dT + nu sum do / W - <k~^2> dT ]
    dk  = w [ v~ dS^T + 2 k~ * (v~ dT^T) - 2 sum_e dT S / W ]

Backward, tokens are centred about the means as float32 holds them, x = k~ + a and y = v~ + b, and what these are off
(a, b) is in the constants: keys far from the origin cost no digits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ...moments import Moments, ratio, statistics_dtype
from ...tracing import is_plain, transformed, without_autocast
from ..launch import empty_like_rows
from ..workers import side_by_side

TILE = 1 << 17  # numbers in a workspace tile, 512 KiB in float32: several fit the cache of a core
SAMPLE = 512  # tokens whose mean is the point about which sums are taken
FEW = 16  # tokens that tell whether values are far from 0
TOKENS = 2048  # tokens in a tile, at most: enough for the matrix products to run at full speed
TASKS = 8  # tasks, at least, into which long sequences of few heads are cut
_KEPT = threading.local()
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
        out, groups, kept = empty_like_rows(query, value.shape[-1]), _groups(key, ctx.across), is_plain(query)

        def moments(task: tuple[_Tile, slice]) -> Moments:
            tile, n = task
            w = tile.weights(weights, n)
            return _moments(tile(key, n), tile(value, n), w, ctx.order, _Workspace(query, kept))

        def read_out(task: tuple[Moments, _Tile, slice]) -> None:
            state, tile, n = task
            nu = tile.total(ctx.total, state)
            _read_out(tile(query, n), state, nu, tile(out, n), ctx.scale, _Workspace(query, kept))

        waiting = []
        for tiles in groups:
            parts = _run(moments, [(tile, n) for n in _spans(len(tiles), key) for tile in tiles], kept)
            states = [reduce(Moments.merge, parts[i :: len(tiles)]) for i in range(len(tiles))]
            waiting.append(_merging(states, ctx.across))
        ctx.states = []
        for tiles, found in zip(groups, waiting, strict=True):
            ctx.states.append(found())
            both = zip(ctx.states[-1], tiles, strict=True)
            _run(read_out, [(*one, n) for one in both for n in _spans(len(tiles), query)], kept)
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
        groups, kept = _groups(key, ctx.across), is_plain(query)

        def queries(task: tuple[Moments, _Tile, slice]) -> Sums:
            state, tile, n = task
            q, do, nu = tile(query, n), tile(grad, n), tile.total(ctx.total, state)
            return _backward_queries(q, do, state, nu, tile(dq, n), ctx.scale, _Workspace(query, kept))

        def keys(task: tuple[Moments, Sums, _Tile, slice]) -> None:
            state, sums, tile, n = task
            tokens, to = (tile(key, n), tile(value, n), tile.weights(weights, n)), (tile(dk, n), tile(dv, n))
            nu = tile.total(ctx.total, state)
            _backward_keys(*tokens, state, nu, sums, *to, ctx.scale, _Workspace(query, kept))

        waiting = []
        for states, tiles in zip(ctx.states, groups, strict=True):
            both, spans = list(zip(states, tiles, strict=True)), _spans(len(tiles), query)
            parts = _run(queries, [(*one, n) for n in spans for one in both], kept)
            waiting.append(_adding([reduce(_added, parts[i :: len(tiles)]) for i in range(len(tiles))], ctx.across))
        for states, tiles, sums in zip(ctx.states, groups, waiting, strict=True):
            each = zip(states, sums(), tiles, strict=True)
            _run(keys, [(*one, n) for one in each for n in _spans(len(tiles), key)], kept)
        if ctx.uneven and ctx.across is None:
            _balance(dk, weights)
        return dq, dk, dv


def _balance(dk: Tensor, weights: Tensor) -> None:
    """Takes off what dk (B, H, L, D) sums up to over the keys, which is 0 but for what rounding left in the means.

    A key that outweighs all others lies as near to the mean as float64 can tell, and that error is all it has.
    """
    share = ratio(weights, weights.sum(-1, keepdim=True))[:, None, :, None]
    dk.sub_(share * dk.sum(-2, keepdim=True))


def _run(task: Callable[[Any], Any], items: list[Any], plain: bool) -> list[Any]:
    return side_by_side(task, items) if plain else [task(item) for item in items]


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


class _Tile:
    """A range of batches and key heads; calling it cuts that part out of any (B, heads, L, width) tensor."""

    def __init__(self, batches: slice, heads: slice, key_heads: int) -> None:
        self.batches, self.heads, self.key_heads = batches, heads, key_heads

    def __call__(self, x: Tensor, n: slice) -> Tensor:
        groups = x.shape[1] // self.key_heads
        return x[self.batches, self.heads.start * groups : self.heads.stop * groups, n]

    def weights(self, x: Tensor | None, n: slice) -> Tensor | None:
        """(B, L) weights as (g, L, 1)."""
        if x is None:
            return None
        x = x[self.batches, n]
        return x[:, None].expand(-1, self.heads.stop - self.heads.start, -1).flatten(0, 1).unsqueeze(-1)

    def total(self, x: Tensor | bool | None, state: Moments) -> Tensor | None:
        """(B or 1, 1, 1, 1) numbers as (g or 1, 1, 1); True: the weights of the state."""
        if isinstance(x, bool):
            return state.weight[:, None, None] if x else None
        if x is None or x.shape[0] == 1:
            return None if x is None else x[0]
        return x[self.batches, 0].repeat_interleave(self.heads.stop - self.heads.start, 0)


def _groups(key: Tensor, across: Across | None) -> list[list[_Tile]]:
    """The tiles, in one group, or in two where messages go in halves: of the heads, or of the batch."""
    B, H = key.shape[:2]
    if across is None or not across.halves or B * H < 2:
        return [list(_tiles(key, slice(0, B), slice(0, H)))]
    cuts = [(slice(0, B), slice(0, H // 2)), (slice(0, B), slice(H // 2, H))]
    if H == 1:
        cuts = [(slice(0, B // 2), slice(0, H)), (slice(B // 2, B), slice(0, H))]
    return [list(_tiles(key, *cut)) for cut in cuts]


def _tiles(key: Tensor, of_batches: slice, of_heads: slice) -> Iterator[_Tile]:
    _, H, L, D = key.shape
    pairs, many = max(1, TILE // max(1, D * L)), of_heads.stop - of_heads.start
    batches, heads = max(1, pairs // many), min(many, pairs)
    heads = -(-many // -(-many // heads))  # even shares
    for b in range(of_batches.start, of_batches.stop, batches):
        for h in range(of_heads.start, of_heads.stop, heads):
            last = min(of_heads.stop, h + heads)
            yield _Tile(slice(b, min(of_batches.stop, b + batches)), slice(h, last), H)


def _spans(tiles: int, x: Tensor) -> list[slice]:
    """The tokens of x (B, heads, L, width) cut so that even few tiles of heads make `TASKS` tasks, of whole chunks."""
    L = x.shape[-2]
    n = max(TOKENS, L) if tiles >= TASKS else -(-L // -(-TASKS // tiles))
    n = max(1, -(-n // TOKENS)) * TOKENS
    return [slice(start, min(L, start + n)) for start in range(0, max(1, L), n)]


def _chunks(x: Tensor) -> Iterator[slice]:
    """Token ranges that keep a (g, n, width) tile of x within the workspace size."""
    g, L, width = prod(x.shape[:-2]), x.shape[-2], x.shape[-1]
    n = max(1, min(TOKENS, TILE // max(1, g * width)))
    return (slice(start, min(L, start + n)) for start in range(0, L, n))


class _Workspace:
    """Named buffers that are reused from tile to tile: fresh memory costs more than the arithmetic on it.

    A thread keeps its own for the next call, five of `TILE` numbers: whether freed memory goes back to the system, and
    comes as new pages every time, depends on what else the process has freed, and doubles the time of a small call.
    """

    def __init__(self, like: Tensor, kept: bool) -> None:
        self.kept = kept
        self.dtype, self.device = statistics_dtype(like.dtype), like.device
        self.buffers: dict[str, Tensor] = vars(_KEPT).setdefault(str(self.dtype), {}) if kept else {}

    def take(self, name: str, *shape: int) -> Tensor:
        size = prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            with torch.inference_mode(False):  # what is kept serves calls outside of it too
                self.buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self.buffers[name][:size].view(shape)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def flat(self, x: Tensor) -> Tensor | None:
        """x (b, h, n, width) itself as (g, n, width), or None where its dtype or strides do not allow it."""
        return _merged(x) if x.dtype == self.dtype else None

    def load(self, name: str, x: Tensor) -> Tensor:
        """x (b, h, n, width) as (g, n, width) in the statistics' precision: itself where possible, else a copy."""
        flat = self.flat(x)
        if flat is None:
            self.take(name, *x.shape).copy_(x)
            flat = self.take(name, prod(x.shape[:2]), *x.shape[2:])
        return flat

    def centred(self, name: str, x: Tensor, mean: Tensor, absent: Tensor | None) -> Tensor:
        """x (b, h, n, width) minus its mean (g, width) as (g, n, width); 0 where a token is absent."""
        out = self.take(name, *x.shape)
        torch.sub(x, mean.view(*x.shape[:2], 1, -1), out=out)
        out = out.view(-1, *x.shape[2:])
        return out if absent is None else out.masked_fill_(absent, 0)

    def target(self, name: str, x: Tensor) -> Tensor:
        """A place to compute x in: x itself as (g, n, width) where possible, else a buffer for `store`."""
        flat = self.flat(x)
        return self.take(name, prod(x.shape[:2]), *x.shape[2:]) if flat is None else flat

    def store(self, x: Tensor, computed: Tensor) -> None:
        if self.flat(x) is None:
            x.copy_(computed.view(x.shape))


def _merged(x: Tensor) -> Tensor | None:
    """(b, h, n, width) as a (b h, n, width) view, or None where the strides do not allow it."""
    b, h = x.shape[:2]
    if x.stride(-1) != 1 or (b > 1 and h > 1 and x.stride(0) != h * x.stride(1)):
        return None
    return x.view(b * h, *x.shape[2:])


def _moments(key: Tensor, value: Tensor, weights: Tensor | None, order: int, space: _Workspace) -> Moments:
    """Moments of one tile, flat over (batch, head): sums about a point near the means, moved to the means at the end.

    Without weights that point is the mean of evenly spaced tokens, so the tokens are read once; with weights a
    pass of its own finds the means.
    """
    L, D, E = key.shape[-2], key.shape[-1], value.shape[-1]
    g = key.shape[0] * key.shape[1]
    S = space.zeros(g, D, E)
    P, T = (space.zeros(g, D), torch.zeros_like(S)) if order == 3 else (None, None)
    absent = None
    as_they_are = False
    if not L:
        k_mean, v_mean = (S.new_zeros(g, width, dtype=torch.float64) for width in (D, E))
        return Moments(S.new_zeros(g), k_mean, v_mean, S, P, T)
    if weights is None:
        W = torch.full((g, 1), float(L), dtype=space.dtype, device=space.device)
        k_mean, v_mean = (_sample(x, SAMPLE).mean(-2, dtype=space.dtype).view(g, -1) for x in (key, value))
        # At order 2 centred keys suffice: values around 0 as they are spare a pass, their mean comes out of the sums.
        if order == 2 and space.flat(value) is not None:
            few = _sample(value, FEW).reshape(g, -1, E)
            around_zero = few.mean(-2).square() <= few.square().mean(-2) * 0.5
            as_they_are = space.kept and bool(around_zero.all())
        if as_they_are:
            v_mean = space.zeros(g, E)
    else:
        absent = weights == 0
        W = weights.sum(-2)
        zero = space.zeros()
        k_mean, v_mean = space.zeros(g, D), space.zeros(g, E)
        for n in _chunks(key):
            for x, mean in ((key, k_mean), (value, v_mean)):
                rows = space.centred("k", x[..., n, :], zero.expand(g, x.shape[-1]), absent[:, n])
                mean += _total(rows, weights[:, n])
        k_mean, v_mean = ratio(k_mean, W), ratio(v_mean, W)
    over_W = ratio(torch.ones_like(W), W)
    k_rest, v_rest = torch.zeros_like(k_mean), torch.zeros_like(v_mean)
    for n in _chunks(key):
        w, gone = (None, None) if weights is None or absent is None else (weights[:, n], absent[:, n])
        k = space.centred("k", key[..., n, :], k_mean, gone)
        own = value[..., n, :]
        v = space.load("v", own) if as_they_are else space.centred("v", own, v_mean, gone)
        if w is not None:
            v.mul_(w)
        k_rest += _total(k, w)
        v_rest += v.sum(-2)
        S.baddbmm_(k.mT, v)
        if T is not None and P is not None:
            k.mul_(k)
            P += _total(k, w)
            T.baddbmm_(k.mT, v)
    a, b = k_rest * over_W, v_rest * over_W
    column, row = a.unsqueeze(-1), b.unsqueeze(-2)
    if T is not None and P is not None:
        P.addcmul_(k_rest, a, value=-1)
        T.addcmul_(column, S, value=-2).addcmul_((k_rest * a - P).unsqueeze(-1), row)
    S.addcmul_(k_rest.unsqueeze(-1), row, value=-1)
    return Moments(W.squeeze(-1), k_mean.double() + a, v_mean.double() + b, S, P, T)


def _sample(x: Tensor, count: int) -> Tensor:
    """About `count` tokens of x (..., L, width), evenly spaced."""
    return x[..., :: max(1, x.shape[-2] // count), :]


def _total(x: Tensor, w: Tensor | None) -> Tensor:
    """Sum of x (g, n, width) over n with weights w (g, n, 1)."""
    return x.sum(-2) if w is None else (w.mT @ x).squeeze(-2)


def _read_matrices(state: Moments, nu: Tensor | None, scale: float, heads: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """nu <v>, S' and T' of the module docstring, one for each query head."""
    over_W = ratio(torch.ones_like(state.weight), state.weight)[:, None, None]
    groups = heads // state.weight.shape[0]
    v_mean = state.value_mean.to(over_W.dtype).unsqueeze(-2)
    if nu is not None:
        v_mean, over_W = v_mean * nu, over_W * nu

    def spread(x: Tensor) -> Tensor:
        return x if groups == 1 else x.repeat_interleave(groups, 0)

    assert state.S is not None
    T = None if state.T is None else spread(state.T * (0.5 * scale * scale * over_W))
    return spread(v_mean), spread(state.S * (scale * over_W)), T


def _read_out(query: Tensor, state: Moments, nu: Tensor | None, out: Tensor, scale: float, space: _Workspace) -> None:
    v_mean, S, T = _read_matrices(state, nu, scale, query.shape[0] * query.shape[1])
    for n in _chunks(query):
        q = space.load("q", query[..., n, :])
        o = space.target("o", out[..., n, :])
        o.copy_(v_mean.expand_as(o))
        o.baddbmm_(q, S)
        if T is not None:
            o.baddbmm_(torch.mul(q, q, out=space.take("k", *q.shape)), T)
        space.store(out[..., n, :], o)


def _backward_queries(
    query: Tensor, grad: Tensor, state: Moments, nu: Tensor | None, dq: Tensor, scale: float, space: _Workspace
) -> Sums:
    """Writes dq; returns sum do, q^T do and (q^2)^T do of each key head."""
    heads, g = query.shape[0] * query.shape[1], state.weight.shape[0]
    _, S, T = _read_matrices(state, nu, scale, heads)
    dS, dT = torch.zeros_like(S), None if T is None else torch.zeros_like(T)
    d_mean = S.new_zeros(heads, S.shape[-1])
    for n in _chunks(query):
        q = space.load("q", query[..., n, :])
        do = space.load("v", grad[..., n, :])
        out = space.target("o", dq[..., n, :])
        torch.bmm(do, S.mT, out=out)
        d_mean += do.sum(-2)
        dS.baddbmm_(q.mT, do)
        if T is not None and dT is not None:
            work = space.take("k", *q.shape)
            out.addcmul_(torch.bmm(do, T.mT, out=work), q, value=2)
            dT.baddbmm_(torch.mul(q, q, out=work).mT, do)
        space.store(dq[..., n, :], out)

    def gathered(x: Tensor) -> Tensor:
        return x if heads == g else x.view(g, heads // g, *x.shape[1:]).sum(1)

    return gathered(d_mean), gathered(dS), None if dT is None else gathered(dT)


def _backward_keys(
    key: Tensor, value: Tensor, weights: Tensor | None, state: Moments, nu: Tensor | None, sums: Sums, dk: Tensor,
    dv: Tensor, scale: float, space: _Workspace,
) -> None:  # fmt: skip
    over_W = ratio(torch.ones_like(state.weight), state.weight)[:, None, None]
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
    for n in _chunks(key):
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
