"""Cluster attention over a sequence that several workers hold: moments of blocks for all, near tokens for who asks.

Shape legend: W workers, B batch, H key heads, G query heads of each, L tokens of this worker, K blocks of all, c of
which this worker touches, m slots of a block, n rows of a tile, p prefix tokens, t near blocks, D, E widths.

Far field: each worker sends the moments of its tokens of each block that it touches; a block that lies on several is
merged by all. One gather, whose size depends on the blocks and not on their tokens; with response="pooled" one D x E
matrix for all of them. Prefix tokens, and the queries of tiles that lie on two workers, travel in it.
Near field: workers tell each other which blocks their rows chose, by the same ranking as one process, and get those
blocks' tokens from who holds them: a gather of K bits a head, and one message of t m (D + E) numbers for each block.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cluster.asked import causal_blocks
from ..cluster.backend import Case
from ..cluster.causal import merged_lists, responses
from ..cluster.fields import Exact, Far, Seen, Tokens, mix, nearest, room
from ..cluster.layout import Blocks, check_grid
from ..cluster.neighbours import beside
from ..cluster.statistics import log, merge_pieces, moments_of
from ..kernels import notice
from ..moments import Moments, means_dtype, ratio
from ..tensors import ABSENT, nothing
from ..tracing import without_autocast
from .blocks import Spread, Tokenwise, held
from .exchange import Gather, Swap, Workers, exchange
from .parts import Parts


def clusters_over_workers(parts: Parts, case: Case, spread: Spread, softmax: Callable[[], Tensor]) -> Tensor:
    """(..., H, L, E) of a checked call; `softmax` answers where every block is near."""
    _check(parts, case, spread)
    call, form, queries, keys = case.call, case.form, sum(spread.queries), sum(spread.keys)
    if not call.is_causal or call.grid is not None:
        call = call._replace(grid=check_grid(keys, call.grid, call.prefix))
    shape = (*call.query.shape[:-1], call.value.shape[-1])
    if not (call.lead.numel() and shape[-3] and shape[-1] and queries and keys):
        return nothing(shape, *call[:3])
    case = case._replace(call=call, least=min(case.least, keys))
    if call.is_causal:
        case = case._replace(clusters=causal_blocks(case, queries))
    elif call.prefix == keys:
        return softmax()
    notice.plain_torch("cluster_attention over several workers", call.query, "its kernels hold the whole sequence")
    with without_autocast(call.query.device.type):
        tokens = Tokenwise.of(call, spread.masked)
        whole = _Sequence(parts.workers, case, spread, tokens)
        if not call.is_causal and isinstance(form.near, int) and form.near >= whole.held.clusters:
            return softmax()
        out = whole.causal() if call.is_causal else whole.attention()
        return out.to(call.query.dtype).reshape(shape)


def _check(parts: Parts, case: Case, spread: Spread) -> None:
    """Raises for what is not split over workers."""
    call, clusters, form = case.call, case.clusters, case.form
    if not isinstance(clusters, int | tuple | Blocks):
        raise ValueError(
            f"clusters={type(clusters).__name__} are found by looking at all tokens, which no worker holds; pass a "
            "number of blocks, Blocks(size), or blocks of a grid"
        )
    if parts.zigzag:
        raise ValueError('blocks follow the order of workers: pass order="rank" to context_parallel')
    if form.together:
        raise ValueError('queries="mean" is not split over workers; pass queries="each"')
    if form.near_rows > 1 and form.response:
        raise ValueError(
            f"response={form.response} is chosen by tiles of near_rows={form.near_rows} queries, which may lie on two "
            'workers; pass near_rows=1, or response=None, 0 or "pooled"'
        )
    if (call.is_causal or form.near == "neighbours") and spread.queries != spread.keys:
        raise ValueError(
            f"is_causal and near='neighbours' need as many queries as keys on each worker, got {spread.queries} and "
            f"{spread.keys}"
        )
    if call.offset:
        raise ValueError(f"offset={call.offset} is not split over workers; pass 0")
    if call.is_causal and call.prefix:
        raise ValueError(
            f"sinks (prefix={call.prefix}) of causal blocks are not split over workers; pass 0, or convert the model "
            'with 0 of them: "cluster16+sinks=0"'
        )


class _Sequence:
    """One call: what this worker holds, and what all of them know after the first message."""

    def __init__(self, workers: Workers, case: Case, spread: Spread, tokens: Tokenwise) -> None:
        self.workers, self.case, self.form, self.spread, self.tokens = workers, case, case.form, spread, tokens
        call, prefix, keys = case.call, case.call.prefix, spread.keys
        self.start = sum(spread.queries[: workers.rank])
        first = [max(0, min(prefix - a, n)) for a, n in zip(accumulate(keys, initial=0), keys, strict=False)]
        self.first = first[workers.rank]  # of this worker's tokens, so many are prefix
        k, weights = tokens.k, tokens.weights
        rest = None if weights is None else weights[..., self.first :]
        if case.call.is_causal and weights is None:
            rest = k.new_ones(len(k), 1, k.shape[2])
        moving = None if case.call.is_causal else rest
        self.held = held(
            workers, [n - p for n, p in zip(keys, first, strict=True)], case.clusters, call.grid, case.least, moving,
            k.device,
        )  # fmt: skip
        self.rest = rest
        self.tied: list[Tensor] = []  # of every exchange something, for its way back

    def exchanged(self, kind: Gather | Swap, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = exchange(kind, *tensors)
        self.tied += [x[:0].sum() for x in found]
        return found

    def finished(self, out: Tensor) -> Tensor:
        """Whoever used nothing of a message takes part in its way back."""
        return out + sum(self.tied)

    def points(self) -> tuple[Tensor, Tensor]:
        """A point near this worker's keys and one near its values, (B, H, 1, ...): sums about them lose no digits."""
        _, k, v, weights = self.tokens
        if weights is None:
            count = max(1, k.shape[2])
            return k.detach().sum(2, keepdim=True) / count, v.detach().sum(2, keepdim=True) / count
        share = ratio(weights, weights.sum(-1, keepdim=True)).detach().unsqueeze(-1)
        return (share * k.detach()).sum(2, keepdim=True), (share * v.detach()).sum(2, keepdim=True)

    def meet(self, *more: Tensor) -> tuple[Far | None, Moments, list[Tensor]]:
        """The first message: moments (B, H, K) of all blocks about `self.origin`, and (W, ...) of `more` tensors.

        Where responses are pooled, the far field has them already.
        """
        form, layout, near = self.form, self.held.layout, self.points()
        k, v = (x[:, :, self.first :] - at for x, at in zip(self.tokens[1:3], near, strict=True))
        self.keys, self.values, self.slots = layout.pack(k), layout.pack(v), layout.weights(k, self.rest)
        slots = self.slots.expand(self.keys.shape[:-1])
        own = moments_of(self.keys, self.values, slots, full=form.full, response=form.response != 0)
        wide = means_dtype(k)
        own = own._replace(key_mean=own.key_mean.to(wide) + near[0], value_mean=own.value_mean.to(wide) + near[1])
        pool = own.S.sum(2) if form.pooled and own.S is not None else None
        own = own._replace(S=None) if form.pooled else own
        lacking = self.held.most - layout.clusters
        padded = [F.pad(x, (*(0, 0) * (x.ndim - 3), 0, lacking)) for x in own.kept()]
        found = self.exchanged(Gather(self.workers), *padded, *more, *([] if pool is None else [pool]))
        pieces = own.filled(x.movedim(0, 2).flatten(2, 3) for x in found[: len(padded)])
        extra = list(found[len(padded) : len(padded) + len(more)])
        self.origin, self.point = self.common(pieces, extra)
        k_mean, v_mean = pieces.key_mean - self.origin, pieces.value_mean - self.point
        pieces = pieces._replace(key_mean=k_mean.to(k.dtype), value_mean=v_mean.to(k.dtype))
        # Tokens from here on are measured from the point that all share.
        shift = [(a - b).to(k.dtype) for a, b in zip(near, (self.origin, self.point), strict=True)]
        self.keys, self.values = self.keys + shift[0].unsqueeze(2), self.values + shift[1].unsqueeze(2)
        step = torch.arange(self.held.most, device=k.device)
        owner = torch.cat([(a + step).clamp(max=max(a, b - 1)) for a, b in self.held.ranges])
        moments = merge_pieces(pieces, owner[None, None], self.held.clusters)
        if pool is None:
            return None, moments, extra
        W, dk, dv = (
            pieces.weight.unsqueeze(-1),
            *(x - mean[:, :, owner] for x, mean in zip(pieces[1:3], moments[1:3], strict=True)),
        )
        total = found[-1].sum(0) + (W * dk).mT @ dv
        weight = moments.weight.sum(-1)[..., None, None]
        return Far.of(moments)._replace(pool=ratio(total, weight)), moments, extra

    def common(self, pieces: Moments, extra: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The point of all keys and of all values, (B, H, 1, ...), without gradient: their mean, or the first token."""
        if self.case.call.is_causal:
            there, keys, values = extra[:3]
            found = (there > 0).int().argmax(0)[None, ..., None]  # the first worker whose tokens take part
            key, value = (x.gather(0, found.expand(1, *x.shape[1:]))[0] for x in (keys, values))
            return key.detach().unsqueeze(2).to(means_dtype(key)), value.detach().unsqueeze(2).to(means_dtype(value))
        share = ratio(pieces.weight, pieces.weight.sum(-1, keepdim=True)).detach().unsqueeze(-1)
        key, value = ((share * x.detach()).sum(2, keepdim=True) for x in pieces[1:3])
        return key, value

    def near_tokens(self, which: Tensor, more: Tensor | None = None) -> Tokens:
        """Tokens of the blocks in `which` (B, H, N, t), -1 for none, from the workers that hold them.

        `more` (B, H, K) bool: blocks that are wanted besides.
        """
        workers, K, ranges = self.workers, self.held.clusters, self.held.ranges
        B, H, c, m, D = self.keys.shape
        E = self.values.shape[-1]
        wanted = torch.zeros(B, H, K + 1, dtype=torch.bool, device=which.device)
        flat = torch.where(which < 0, K, which).expand(B, H, *which.shape[2:]).flatten(2)
        wanted = wanted.scatter(-1, flat, True)[..., :K]
        wanted = wanted if more is None else wanted | more
        (asked,) = workers.rows(wanted)  # (W, B, H, K)
        a, b = ranges[workers.rank]
        giving = asked[..., a:b].nonzero()  # worker, sequence, head and block of what we send
        taking = [wanted[..., start:stop].nonzero() for start, stop in ranges]
        to = tuple(torch.bincount(giving[:, 0], minlength=workers.size).tolist())
        of = tuple(len(x) for x in taking)
        weight = self.slots.expand(B, H, c, m).unsqueeze(-1)
        packed = torch.cat((self.keys, self.values, weight), -1).masked_fill(weight == 0, 0)
        rows = packed[giving[:, 1], giving[:, 2], giving[:, 3]].flatten(1)
        (found,) = self.exchanged(Swap(workers, to, of), rows)
        place = wanted.cumsum(-1) - 1
        U = max(1, int(wanted.sum(-1).max()))
        index = torch.cat([x + x.new_tensor([0, 0, start]) for x, (start, _) in zip(taking, ranges, strict=True)])
        i, j, block = index.unbind(1)
        slots = packed.new_zeros(B, H, U, m, D + E + 1)
        slots = slots.index_put((i, j, place[i, j, block]), found.unflatten(1, (m, -1)), accumulate=True)
        owner = torch.zeros(B, H, U, dtype=torch.long, device=which.device)
        owner[i, j, place[i, j, block]] = block
        key, value, weight = slots.split([D, E, 1], -1)
        members = place.masked_fill(~wanted, -1).unsqueeze(-1)
        return Tokens(key, value, log(weight.squeeze(-1)), members, owner)

    # Not causal.

    def attention(self) -> Tensor:
        """(B, H, G, Lq, E)."""
        form, (q, k, v, weights), prefix = self.form, self.tokens, self.case.call.prefix
        before = slice(0, self.first)
        given = [x[:, :, before] for x in (k, v)]
        given.append(k.new_ones(len(k), 1, self.first) if weights is None else weights[..., before])
        at = min(sum(self.spread.keys[: self.workers.rank]), prefix)
        lacking = prefix - at - self.first
        sent = [F.pad(x, (*(0, 0) * (x.ndim - 3), at, lacking)) for x in given]
        tiles = self.tiles()
        far, moments, extra = self.meet(*sent, *([] if tiles is None else tiles))
        far = Far.of(moments) if far is None else far
        exact, total = None, moments.weight.sum(-1)
        if prefix:
            key, value, weight = (x.sum(0) for x in extra[:3])
            key, value = key - self.origin.to(key.dtype), value - self.point.to(key.dtype)
            total = total + weight.sum(-1)
            exact = Exact(key.unsqueeze(2), value.unsqueeze(2), log(weight)[:, :, None, None, :])
        out = self.beside(q, far, exact) if form.near == "neighbours" else self.ranked(q, far, exact, extra[3:])
        seen = torch.where((total > 0)[..., None, None], self.point, 0).unsqueeze(2)
        return self.finished(out + seen.to(out.dtype))

    @property
    def n(self) -> int:
        """Queries in a row that share their near blocks."""
        near = isinstance(self.form.near, int) and self.form.near > 0
        return min(sum(self.spread.queries), self.form.near_rows) if near else 1

    def tiles(self) -> list[Tensor] | None:
        """Queries of this worker's first and last tile, (B, H, G, n, D) each, 0 in place of those of others."""
        n, q = self.n, self.tokens.q.detach()
        if n == 1:
            return None
        Lq, start = q.shape[3], self.start % n
        head = F.pad(q[..., : n - start, :], (0, 0, start, 0))
        head = F.pad(head, (0, 0, 0, n - head.shape[-2]))
        rest = (start + Lq - 1) % n + 1 if start + Lq > n else 0  # of a last tile that is not the first
        tail = F.pad(q[..., Lq - rest :, :], (0, 0, 0, n - rest))
        return [head, tail]

    def whole_tiles(self, rows: Tensor, ends: list[Tensor]) -> Tensor:
        """Rows (B, H, G, N, n, D) of this worker's tiles, with those of others at both ends."""
        n, counts = self.n, self.spread.queries
        first, last = self.start // n, self.start // n + rows.shape[3] - 1
        found = rows.clone()
        for place, tile in ((0, first), (-1, last)) if last > first else ((0, first),):
            total = torch.zeros_like(rows[..., 0, :, :])
            for at, count, head, tail in zip(accumulate(counts, initial=0), counts, *ends, strict=False):
                if count and at // n == tile:
                    total = total + head
                elif count and (at + count - 1) // n == tile:
                    total = total + tail
            found[..., place, :, :] = total
        return found

    def ranked(self, q: Tensor, far: Far, exact: Exact | None, ends: list[Tensor]) -> Tensor:
        """The `near` blocks of largest rank, of each tile of queries."""
        near, n, (G, Lq) = self.form.near, self.n, q.shape[2:4]
        assert isinstance(near, int)
        front = self.start % n if Lq else 0
        N = -(-(front + Lq) // n) if Lq else 0
        rows = F.pad(q, (0, 0, front, N * n - front - Lq)).unflatten(3, (N, n))
        if not near:
            out = mix(rows.flatten(2, 3), far, None, Seen(exact), self.form) if N else rows.flatten(2, 3)[..., :1]
            return self.unrolled(out, q, front, far)
        asking = rows.detach()
        present = None
        if n > 1 and N:
            asking = self.whole_tiles(asking, ends)
            place = (self.start // n) * n + torch.arange(N * n, device=q.device)
            present = (place < sum(self.spread.queries)).view(N, n).repeat(G, 1)
        which = self.chosen(asking.flatten(2, 3), far, near, present, None)
        tokens = self.near_tokens(which)
        out = mix(rows.flatten(2, 3), far, tokens, Seen(exact, which), self.form) if N else rows.flatten(2, 3)
        return self.unrolled(out, q, front, far)

    def unrolled(self, out: Tensor, q: Tensor, front: int, far: Far) -> Tensor:
        """(B, H, G N, n, E) as (B, H, G, Lq, E)."""
        (B, H, G, Lq, _), E = q.shape, far.value_mean.shape[-1]
        if not Lq:
            return q.new_zeros(B, H, G, 0, E) + q.sum() * 0
        return out.flatten(2, 3).unflatten(2, (G, -1))[..., front : front + Lq, :]

    def chosen(self, rows: Tensor, far: Far, near: int, present: Tensor | None, hidden: Tensor | None) -> Tensor:
        """Near blocks (B, H, N, t) of rows (B, H, N, n, D); with `hidden` (N, K), causal ones of each row apart."""
        B, H, N, n, _ = rows.shape
        K, by_row = far.log_weight.shape[-1], hidden is not None
        step = max(1, room(rows) // max(1, B * H * n * 4 * K))
        found = []
        with torch.no_grad():
            for i in range(0, N, step):
                at = slice(i, min(N, i + step))
                block = rows[:, :, at]
                log_Z, variance = (
                    x.unflatten(2, block.shape[2:4]) for x in far.masses(block.flatten(2, 3), self.form.closure)
                )
                if hidden is not None:
                    log_Z = log_Z.masked_fill(hidden[at][:, None, :], ABSENT)
                there = None if present is None else present[at]
                found.append(nearest(block, far, near, there, self.form, by_row, (log_Z, variance)))
        if not found:
            return torch.empty(B, H, 0, *((n,) if by_row else ()), min(near, K), dtype=torch.long, device=rows.device)
        return torch.cat(found, 2)

    def beside(self, q: Tensor, far: Far, exact: Exact | None) -> Tensor:
        """The own block and those that touch it, of each query; prefix queries stand nowhere and have none."""
        held, (a, b) = self.held, self.held.ranges[self.workers.rank]
        blocks = held.layout if held.place is None else None
        which = (held.adjacent[a:b][None] if held.place is None else held.adjacent[held.place])[:, None]
        return beside(q, self.first, blocks, far, self.near_tokens(which), Seen(exact, which), self.form)

    # Causal.

    def causal(self) -> Tensor:
        """Blocks of the past are clusters, the current one and `recent` before it exact: (B, H, G, L, E)."""
        q, k, v, weights = self.tokens
        # What no row may see must not reach it, NaN included; rows that see a token without numbers have none.
        broken = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
        k, v = (x.masked_fill(broken.unsqueeze(-1), 0) for x in (k, v))
        self.tokens = Tokenwise(q, k, v, weights)
        form, blocks, (a, b) = self.form, self.case.clusters, self.held.ranges[self.workers.rank]
        assert isinstance(blocks, Blocks)
        assert isinstance(form.near, int)
        assert self.rest is not None
        (B, H, G, L, _), C, N, E = q.shape, self.held.layout.size, self.held.clusters, v.shape[-1]
        taking = (self.rest > 0).expand(B, H, L)
        first = F.pad(taking, (0, 1)).int().argmax(-1)[..., None, None]  # the first token that takes part
        found = [
            F.pad(x, (0, 0, 0, 1)).gather(2, first.expand(B, H, 1, x.shape[-1])).squeeze(2).detach() for x in (k, v)
        ]
        counts = [taking.sum(-1).to(k.dtype), broken.sum(-1).to(k.dtype)]
        _, moments, extra = self.meet(counts[0], *found, counts[1])
        far = Far.of(moments)
        block = torch.arange(N, device=q.device)
        own = block[a:b]
        recent = min(blocks.recent, N - 1)
        window = own[:, None] - torch.arange(recent, -1, -1, device=q.device)  # (c, recent + 1), the own block last
        rows = self.held.layout.pack(q.flatten(1, 2)).unflatten(1, (H, G))  # (B, H, G, c, C, D)
        rows = rows.transpose(2, 3).flatten(3, 4)  # (B, H, c, G C, D)
        hidden = table = which = None
        wanted = torch.zeros(B, H, N, dtype=torch.bool, device=q.device)
        if blocks.keep is None:
            hidden = block >= own[:, None] - recent
            if form.near:
                which = self.chosen(rows.detach(), far, min(form.near, N), None, hidden)
                wanted = wanted.scatter(-1, which.clamp(min=0).flatten(2), True) if which.numel() else wanted
        else:
            moments, table = merged_lists(moments, N, blocks.keep, recent)
            far, table = Far.of(moments), table[a:b]
        tokens = self.near_tokens(window.masked_fill(window < 0, -1)[None, None], wanted)
        key, value, log_weight = tokens.gather(window.masked_fill(window < 0, -1).expand(B, H, b - a, recent + 1))
        seen = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        seen = F.pad(seen, (recent * C, 0), value=True)
        exact = Exact(key, value, torch.where(seen, log_weight.unsqueeze(-2), ABSENT).repeat(1, 1, 1, G, 1))
        if L:
            near = 0 if which is None else which
            near_tokens = None if which is None else tokens
            far, pool = responses(far, hidden, table, form)
            field = Seen(exact, near, hidden=hidden, table=table, pool=pool)
            out = mix(rows, far, near_tokens, field, form, by_row=True)
            out = self.held.layout.unpack(out.unflatten(3, (G, C)).transpose(2, 3), L)
        else:
            out = q.new_zeros(B, H, G, 0, E) + q.sum() * 0
        earlier = [x[: self.workers.rank].sum(0) for x in (extra[0], extra[3])]
        sees = earlier[0].unsqueeze(-1) + taking.cumsum(-1) > 0
        lost = earlier[1].unsqueeze(-1) + broken.cumsum(-1) > 0
        out = out + torch.where(sees[:, :, None, :, None], self.point.unsqueeze(2).to(out.dtype), 0)
        return self.finished(out.masked_fill(lost[:, :, None, :, None], float("nan")))
