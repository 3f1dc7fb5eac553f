"""Cumulant attention of one worker's queries over the tokens of all workers.

Shape legend: ... leading dimensions, B all in one, Hk key heads, G query heads of each, L tokens of this worker, p its
pieces, D, E widths.

Packed sequences that lie on one worker are its own, those that straddle meet in one message: at most two sequences of a
worker go on elsewhere, its first and its last. Every worker sends the moments of these two, so that the message does
not depend on the number of sequences either.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from ..attention import attend as attend_here
from ..call import Call, offsets
from ..causal import causal_attention
from ..expansion import Form, takes_kernels
from ..kernels import notice
from ..kernels.batch import batch_of
from ..kernels.dense import cpu
from ..moments import Moments, added, centred_sums, statistics_dtype
from ..tensors import fold_groups, nothing
from ..tracing import transformed, without_autocast
from .exchange import Gather, exchange
from .parts import Parts, first_piece, only

Fragment = tuple[int, int, int]  # a sequence, and from where to where it lies among a worker's tokens


def attend(parts: Parts, call: Call, form: Form) -> Tensor:
    """(..., H, L, E) of a checked call; keys and values are those of this worker.

    Non-causal: one exchange of moments forward and one of their gradients backward. Causal: an exclusive scan.
    """
    check_form(form)
    lead, shape = call.lead, (*call.query.shape[:-1], call.value.shape[-1])
    if not (prod(lead) and call.key.shape[-3] and call.query.shape[-3]):
        return nothing(shape, *call[:3])
    q, k, v, weights = call.in_one_batch()
    call = call._replace(query=q, key=k, value=v, key_mask=weights)
    with without_autocast(q.device.type):
        out = (_causal if call.is_causal else _over_all)(parts, call, form)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])


def check_form(form: Form) -> None:
    """Raises for expansions that need more than moments."""
    if form.apart:
        raise ValueError(f"apart={form.apart} is not split over workers; pass apart=0")
    if form.around != "zero":
        raise ValueError(f'around={form.around!r} is not split over workers; pass around="zero"')
    if form.closure not in (None, "gauss"):
        raise ValueError(f"closure={form.closure!r} is not split over workers; pass closure=None")


def _over_all(parts: Parts, call: Call, form: Form) -> Tensor:
    """(B, H, L, E) of a call in one batch."""
    q, k, v, weights = call[:4]
    weights = None if weights is None else weights.to(statistics_dtype(q.dtype))
    call, scale = call._replace(key_mask=weights), call.softmax_scale

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _reference(parts, call._replace(query=q, key=k, value=v), form)

    tiled = form.backend in ("auto", "cpu") and q.device.type == "cpu" and form.order > 1 and not form.full
    learned = weights is not None and weights.requires_grad
    if tiled and q.shape[-1] and v.shape[-1] and not (learned or transformed() or torch.compiler.is_compiling()):
        total = form.normalization == "sum"
        return cpu.attention(q, k, v, weights, form.order, scale, total, reference=plain, across=parts.workers)
    asked = form.order > 1 and (form.backend == "triton" or (form.backend == "auto" and notice.expected(q)))
    if asked and takes_kernels("attention over several workers", form, call):
        from ..kernels.dense.split import attention

        batch = batch_of(q, k, v, weights, form.order, scale, form.normalization)
        return plain(q, k, v) if torch.compiler.is_compiling() else attention(batch, parts.workers)
    return plain(q, k, v)


def _reference(parts: Parts, call: Call, form: Form) -> Tensor:
    """The same in plain torch, differentiable any number of times."""
    w = None if call.key_mask is None else call.key_mask.unsqueeze(-2)
    return _read(
        call, form, parts.workers.merge(centred_sums(call.key, call.value, form.order, form.full, w, keep=True))
    )


def _causal(parts: Parts, call: Call, form: Form) -> Tensor:
    """Row i sees the keys of this worker up to i, and all that stand before its piece."""
    (q, k, v, weights), scale = call[:4], call.softmax_scale
    length, heads = q.shape[-2], k.shape[-3]
    if k.shape[-2] != length:
        raise ValueError(f"is_causal needs as many queries as keys on each worker, got {length} and {k.shape[-2]}")
    notice.plain_torch("causal attention over several workers", q, "its kernels begin with the first token")
    if weights is None:
        weights = torch.ones((), dtype=torch.bool, device=k.device).expand(k.shape[0], length)
    grouped = q.unflatten(-3, (heads, q.shape[-3] // heads))
    # A worker without tokens holds one that does not count; the shorter of two pieces ends with one.
    pieces = [
        torch.stack(_pieces(x, parts.zigzag, axis)) for x, axis in ((grouped, -2), (k, -2), (v, -2), (weights, -1))
    ]
    gain = None if form.normalization == "mean" else k.new_ones(1, 1, 1)
    out = causal_attention(
        *pieces[:3], order=form.order, full=form.full, weights=pieces[3].unsqueeze(-2), scale=scale, gain=gain,
        carry=lambda own: parts.before(_in(own, statistics_dtype(q.dtype))),
    )  # fmt: skip
    if parts.zigzag:
        first = first_piece(length)
        out = torch.cat((out[0][..., :first, :], out[1][..., : length - first, :]), -2)
    else:
        out = out[0][..., :length, :]
    return out.flatten(-4, -3)


def _in(moments: Moments, dtype: torch.dtype) -> Moments:
    """Sums in one dtype on all workers: where keys have weights, they are kept in float64."""
    return moments.filled(x if i in (1, 2) else x.to(dtype) for i, x in enumerate(moments.kept()))


def _pieces(x: Tensor, zigzag: bool, axis: int) -> list[Tensor]:
    """The one or two pieces of x along `axis`, of equal length, at least 1: what is missing is 0."""
    n = x.shape[axis]
    size = max(1, first_piece(n) if zigzag else n)
    cuts = [first_piece(n), n - first_piece(n)] if zigzag else [n]

    def fitted(part: Tensor) -> Tensor:
        missing = list(part.shape)
        missing[axis] = size - part.shape[axis]
        return torch.cat((part, part.new_zeros(missing)), axis) if missing[axis] else part

    return [fitted(part) for part in x.split(cuts, axis)]


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
                outs.append(attend_here(mine, form))
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
