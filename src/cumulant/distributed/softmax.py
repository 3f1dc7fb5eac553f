"""Exact softmax attention over several workers: the baseline, whose messages grow with the sequence.

Shape legend: B batch, H query heads, Hk key heads, L queries, S keys of one worker's block, D, E widths.

Of each block of keys a row knows out = softmax(q k) v and lse = log sum exp(q k). Two blocks merge:

    lse = log(e^lse_a + e^lse_b)         out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse)

Blocks go round a ring, the next one on its way while one is computed, or are all gathered first. In the backward pass
they go round again, with the gradients gathered so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..tensors import ABSENT, in_line, log_weights, one_batch, repeat_heads, wide
from .exchange import Gather, Message, Pending, Scatter
from .parts import Parts

ROWS = 1 << 22  # numbers of logits that plain torch holds at once
TRAVELS = ("ring", "gather")


class Asked(NamedTuple):
    """What stays the same for all blocks."""

    parts: Parts
    lengths: list[int]
    scale: float
    is_causal: bool
    travel: str


def softmax(parts: Parts, call: Call, travel: str = "ring") -> Tensor:
    """`F.scaled_dot_product_attention` of a prepared call whose keys are those of this worker, (..., H, L, E)."""
    if call.dropout_p:
        raise ValueError(f"dropout_p={call.dropout_p}: dropout of probabilities is not split over workers; pass 0")
    query, key, value = (one_batch(x, call.lead) for x in call[:3])
    if call.is_causal and key.shape[-2] != query.shape[-2]:
        got = f"{query.shape[-2]} and {key.shape[-2]}"
        raise ValueError(f"is_causal needs as many queries as keys on each worker, got {got}")
    added = log_weights(call.key_mask, wide(query))
    bias = (
        wide(key).new_zeros(key.shape[0], key.shape[-2])
        if added is None
        else added.reshape(*key.shape[:1], key.shape[-2])
    )
    lengths = parts.lengths(key.shape[-2])
    if key.dtype in (torch.float32, torch.float64):  # 16 bits have few digits to lose
        key = key - _middle(parts, key.detach(), sum(lengths))
    asked = Asked(parts, lengths, call.softmax_scale, call.is_causal, travel)
    out: Tensor = _Softmax.apply(asked, query, key, value, bias if parts.workers.any(added is not None) else None)
    return out.reshape(*call.query.shape[:-1], value.shape[-1])


def _middle(parts: Parts, key: Tensor, tokens: int) -> Tensor:
    """The mean (B, Hk, 1, D) of all workers' keys, from which all measure theirs: it adds one number to all logits of a
    row. In dq keys are summed under weights that cancel over all workers, not over those of one."""
    return parts.workers.add(key.sum(-2, keepdim=True))[0] / max(1, tokens)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        out = wide(query).new_zeros(*query.shape[:-1], value.shape[-1])
        lse = out.new_full(query.shape[:-1], ABSENT)
        for rank, block in _blocks(asked, [key, value] if bias is None else [key, value, bias]):
            for rows, columns, causal in _pairs(asked, rank, query.shape[-2]):
                part = _Part.of(asked, query, block, rows, columns, causal)
                _merge(out, lse, rows, *part.forward())
        ctx.asked = asked
        ctx.save_for_backward(query, key, value, bias, out, lse)  # not rounded: parts cancel
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, lse = ctx.saved_tensors
        asked: Asked = ctx.asked
        dq = torch.zeros_like(wide(query))
        tensors = [key, value] if bias is None else [key, value, bias]
        grads = [torch.zeros_like(wide(x)) for x in (key, value)]
        for rank, block, block_grads in _blocks_and_gradients(asked, tensors, grads):
            for rows, columns, causal in _pairs(asked, rank, query.shape[-2]):
                part = _Part.of(asked, query, block, rows, columns, causal)
                found = part.backward(grad[..., rows, :], out[..., rows, :], lse[..., rows])
                dq[..., rows, :] += found[0]
                for total, new in zip(block_grads, found[1:], strict=True):
                    total[..., columns, :] += new.unflatten(1, (key.shape[1], -1)).sum(2)
        return None, dq.to(query.dtype), grads[0].to(key.dtype), grads[1].to(value.dtype), None


class _Part(NamedTuple):
    """Some rows against some keys of a block."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float
    causal: bool

    @classmethod
    def of(cls, asked: Asked, query: Tensor, block: list[Tensor], rows: slice, columns: slice, causal: bool) -> _Part:
        key, value = (repeat_heads(x[..., columns, :], query.shape[1]) for x in block[:2])
        bias = block[2][..., columns] if len(block) > 2 else None
        return cls(query[..., rows, :], key, value, bias, asked.scale, causal)

    @property
    def fused(self) -> bool:
        """Whether torch's own kernel takes it."""
        return self.query.device.type == "cpu" and self.bias is None and self.key.shape[-1] == self.value.shape[-1]

    def forward(self) -> tuple[Tensor, Tensor]:
        """out (B, H, L, E) and lse (B, H, L)."""
        if self.fused:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, lse = kernel(*map(in_line, self[:3]), 0.0, self.causal, scale=self.scale)
            return wide(out), lse
        found = []
        for rows in self._rows():
            logits = self._logits(rows)
            lse = logits.logsumexp(-1)
            found.append((_weights(logits, lse) @ wide(self.value), lse))
        outs, sums = zip(*found, strict=True)
        return torch.cat(outs, -2), torch.cat(sums, -1)

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value by this part, where out and lse are those over all keys."""
        if self.fused:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            given = (x.contiguous() for x in (grad, *self[:3], out.to(grad.dtype)))
            dq, dk, dv = kernel(*given, lse.contiguous(), 0.0, self.causal, scale=self.scale)
            return dq, dk, dv
        delta = (wide(grad) * wide(out)).sum(-1, keepdim=True)
        key, value = wide(self.key), wide(self.value)
        dq, dk, dv = [], torch.zeros_like(key), torch.zeros_like(value)
        for rows in self._rows():
            weights, do = _weights(self._logits(rows), lse[..., rows]), wide(grad[..., rows, :])
            dv += weights.mT @ do
            slope = self.scale * weights * (do @ value.mT - delta[..., rows, :])
            dq.append(slope @ key)
            dk += slope.mT @ wide(self.query[..., rows, :])
        return torch.cat(dq, -2), dk, dv

    def _rows(self) -> Iterator[slice]:
        B, H, L, _ = self.query.shape
        step = max(1, ROWS // max(1, B * H * self.key.shape[-2]))
        return (slice(start, min(L, start + step)) for start in range(0, L, step))

    def _logits(self, rows: slice) -> Tensor:
        logits = self.scale * wide(self.query[..., rows, :]) @ wide(self.key).mT
        if self.bias is not None:
            logits = logits + self.bias[:, None, None, :]
        if self.causal:
            place = torch.arange(self.key.shape[-2], device=logits.device)
            logits = logits.masked_fill(place > place[rows, None], ABSENT)
        return logits


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse), 0 where a row sees nothing."""
    return (logits - lse.masked_fill(lse == ABSENT, 0).unsqueeze(-1)).exp()


def _merge(out: Tensor, lse: Tensor, rows: slice, more: Tensor, more_lse: Tensor) -> None:
    """Takes one more block into the rows of out and lse."""
    old = lse[..., rows]
    both = torch.logaddexp(old, more_lse)
    top = both.masked_fill(both == ABSENT, 0)
    old_share, new_share = ((x - top).exp().unsqueeze(-1) for x in (old, more_lse))
    out[..., rows, :] = out[..., rows, :] * old_share + more.nan_to_num() * new_share
    lse[..., rows] = both


def _pairs(asked: Asked, rank: int, queries: int) -> Iterator[tuple[slice, slice, bool]]:
    """Which of our rows meet which keys of worker `rank`, and whether each row only those up to itself."""
    parts, own = asked.parts, asked.parts.workers.rank
    if not asked.is_causal:
        if queries and asked.lengths[rank]:
            yield slice(0, queries), slice(0, asked.lengths[rank]), False
        return
    for row_place, rows in zip(parts.places(own), parts.slices(queries), strict=True):
        for place, columns in zip(parts.places(rank), parts.slices(asked.lengths[rank]), strict=True):
            there = rows.stop > rows.start and columns.stop > columns.start
            if there and place <= row_place:
                yield rows, columns, place == row_place


def _blocks(asked: Asked, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Key, value and bias of every worker, with its number, our own first."""
    workers = asked.parts.workers
    if asked.travel == "gather":
        for rank, block in enumerate(_gathered(asked, tensors)):
            yield rank, block
        return
    for step in range(workers.size):
        rank = (workers.rank - step) % workers.size
        pending = _pass_on(asked, tensors, rank) if step + 1 < workers.size else None
        yield rank, tensors
        if pending is not None:
            tensors = [x[0] for x in pending.rows()]


def _blocks_and_gradients(
    asked: Asked, tensors: list[Tensor], grads: list[Tensor]
) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
    """The same with sums for the gradients of key and value; at the end `grads` hold those of our own."""
    workers = asked.parts.workers
    if asked.travel == "gather":
        rows = [x.new_zeros(workers.size, *_sized(x, max(asked.lengths))) for x in grads]
        for rank, block in enumerate(_gathered(asked, tensors)):
            yield rank, block, [x[rank][..., : asked.lengths[rank], :] for x in rows]
        kind = Scatter(workers)
        for own, total in zip(grads, kind.finish(kind.start(rows)), strict=True):
            own.copy_(total[..., : own.shape[-2], :])
        return
    sums = grads
    for step in range(workers.size):
        rank = (workers.rank - step) % workers.size
        pending = _pass_on(asked, tensors, rank)
        yield rank, tensors, sums
        tensors, sums = ([x[0] for x in each.rows()] for each in (pending, _pass_on(asked, sums, rank)))
    for own, total in zip(grads, sums, strict=True):
        own.copy_(total)


def _pass_on(asked: Asked, tensors: list[Tensor], rank: int) -> Pending:
    """Starts sending the block of worker `rank` to the next worker, and receiving that of the one before."""
    workers = asked.parts.workers
    length = asked.lengths[(rank - 1) % workers.size]
    message = Message(
        tuple(torch.Size(_sized(x, length, like=tensors[0])) for x in tensors), Message.of(tensors).dtypes
    )
    return workers.turned(Message.of(tensors).pack(tensors), message)


def _gathered(asked: Asked, tensors: list[Tensor]) -> list[list[Tensor]]:
    """The tensors of every worker, by one collective of the longest part."""
    longest, kind = max(asked.lengths), Gather(asked.parts.workers)
    padded = []
    for x in tensors:
        full = x.new_zeros(_sized(x, longest, like=tensors[0]))
        axis = _axis(x, tensors[0])
        full.narrow(axis, 0, x.shape[axis]).copy_(x)
        padded.append(full)
    rows = kind.finish(kind.start(padded))
    return [
        [x[rank].narrow(_axis(own, tensors[0]), 0, n) for x, own in zip(rows, tensors, strict=True)]
        for rank, n in enumerate(asked.lengths)
    ]


def _axis(x: Tensor, key: Tensor) -> int:
    """Where the tokens are: before the channels, or last in a bias."""
    return x.ndim - (2 if x.ndim == key.ndim else 1)


def _sized(x: Tensor, length: int, like: Tensor | None = None) -> list[int]:
    shape = list(x.shape)
    shape[_axis(x, x if like is None else like)] = length
    return shape
