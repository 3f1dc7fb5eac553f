"""Packed sequences over several workers: those that lie on one are its own, those that straddle meet in one message.

Shape legend: W workers, H query heads, Hk key heads, T tokens of this worker, D, E widths.

At most two sequences of a worker go on elsewhere: its first and its last. Every worker sends the moments of these two,
so that the message does not depend on the number of sequences either.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..attention import attend
from ..call import Call, offsets
from ..causal import causal_attention
from ..expansion import Form
from ..moments import Moments, added, centred_sums, statistics_dtype
from ..tensors import fold_groups, nothing
from ..tracing import without_autocast
from .exchange import Gather, exchange
from .parts import Parts, only

Fragment = tuple[int, int, int]  # a sequence, and from where to where it lies among a worker's tokens


def varlen(parts: Parts, call: Call, form: Form, cu_seq_q: Tensor, cu_seq_k: Tensor) -> Tensor:
    """(T, H, E) of a call (H, T, D) whose tokens are a worker's part of the pack that `cu_seq` cuts as a whole."""
    tokens, rank = call.key.shape[-2], parts.workers.rank
    if parts.zigzag:
        raise ValueError('packed sequences follow the order of workers: pass order="rank" to context_parallel')
    if call.query.shape[-2] != tokens or not torch.equal(cu_seq_q, cu_seq_k):
        raise ValueError("packed sequences over several workers need the same cu_seq, and tokens, of queries and keys")
    lengths = parts.lengths(tokens)
    at = offsets("cu_seq_q", cu_seq_q, sum(lengths), None, "max_q")
    everyone = [_fragments(at, a, b) for a, b in pairwise(accumulate(lengths, initial=0))]
    ends = [_ends(at, fragments, sum(lengths[:r])) for r, fragments in enumerate(everyone)]
    with without_autocast(call.query.device.type):
        own = [_moments(call, form, end) for end in ends[rank]]
        sent = own[0].filled(torch.stack(x) for x in zip(*(one.kept() for one in own), strict=True))  # (2, Hk, ...)
        rows = exchange(Gather(parts.workers), *sent.kept())
        whole = sent.filled(x.flatten(0, 1) for x in rows)  # (2 W, Hk, ...)
        sets = [(r, -1 if end is None else end[0]) for r, both in enumerate(ends) for end in both]
        outs = []
        for fragment in everyone[rank]:
            mine = _cut(call, fragment)
            if fragment not in ends[rank]:
                outs.append(attend(mine, form))
            elif call.is_causal:
                outs.append(
                    _going_on(mine, form, only(whole, [n == fragment[0] and r < rank for r, n in sets]).union(added))
                )
            else:
                outs.append(_read(mine, form, only(whole, [n == fragment[0] for _, n in sets]).union(added)))
        # Workers without such a sequence take part in the backward pass of those that have one.
        way_back = sum(x[:0].sum() for x in rows)
        empty = nothing((call.query.shape[0], 0, call.value.shape[-1]), *call[:3])
        return (torch.cat([empty, *outs], -2) + way_back).to(call.query.dtype).transpose(0, 1)


def _fragments(at: list[int], start: int, end: int) -> list[Fragment]:
    """What lies of each sequence between two places of the pack."""
    cut = ((i, max(a, start), min(b, end)) for i, (a, b) in enumerate(pairwise(at)))
    return [(i, a - start, b - start) for i, a, b in cut if a < b]


def _ends(at: list[int], fragments: list[Fragment], start: int) -> list[Fragment | None]:
    """The first and the last fragment of a worker where their sequences go on elsewhere, each once."""
    straddling = [f for f in fragments if at[f[0]] < start + f[1] or at[f[0] + 1] > start + f[2]]
    return [*straddling, None, None][:2]


def _cut(call: Call, fragment: Fragment) -> Call:
    n = slice(*fragment[1:])
    return call._replace(query=call.query[:, n], key=call.key[:, n], value=call.value[:, n])


def _moments(call: Call, form: Form, fragment: Fragment | None) -> Moments:
    """Moments (Hk, ...) of a fragment, of nothing where there is none."""
    mine = _cut(call, (0, 0, 0) if fragment is None else fragment)
    return centred_sums(mine.key, mine.value, form.order, form.full, None, keep=True)


def _read(call: Call, form: Form, moments: Moments) -> Tensor:
    rows = fold_groups(call.query, call.key.shape[-3]).to(statistics_dtype(call.query.dtype))
    out = moments.apply(rows, call.softmax_scale)
    out = out * moments.weight[..., None, None] if form.normalization == "sum" else out
    return out.to(call.query.dtype).reshape(*call.query.shape[:-1], call.value.shape[-1])


def _going_on(call: Call, form: Form, before: Moments) -> Tensor:
    heads = call.key.shape[-3]
    gain = None if form.normalization == "mean" else call.key.new_ones(1)
    out = causal_attention(
        call.query.unflatten(-3, (heads, call.query.shape[-3] // heads)), call.key, call.value, order=form.order,
        full=form.full, weights=None, scale=call.softmax_scale, gain=gain, carry=lambda own: lambda: before,
    )  # fmt: skip
    return out.flatten(-4, -3)
