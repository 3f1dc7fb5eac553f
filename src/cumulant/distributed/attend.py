"""Cumulant attention of one worker's queries over the tokens of all workers.

Shape legend: ... leading dimensions, B all in one, Hk key heads, G query heads of each, L tokens of this worker, p its
pieces, D, E widths.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor

from ..call import Call
from ..causal import causal_attention
from ..expansion import Form, takes_kernels
from ..kernels import notice
from ..kernels.batch import batch_of
from ..kernels.dense import cpu
from ..moments import Moments, centred_sums, statistics_dtype
from ..tensors import fold_groups, nothing, one_batch
from ..tracing import transformed, without_autocast
from .parts import Parts, first_piece


def attend(parts: Parts, call: Call, form: Form) -> Tensor:
    """(..., H, L, E) of a checked call; keys and values are those of this worker.

    Non-causal: one exchange of moments forward and one of their gradients backward. Causal: an exclusive scan.
    """
    check_form(form)
    query, key, value = call[:3]
    lead, scale = call.lead, call.softmax_scale
    q, k, v = (one_batch(x, lead) for x in (query, key, value))
    weights = None
    if call.key_mask is not None:
        weights = call.key_mask.expand(*lead, key.shape[-2]).reshape(prod(lead), key.shape[-2])
    if not (prod(lead) and key.shape[-3] and query.shape[-3]):
        return nothing((*query.shape[:-1], value.shape[-1]), query, key, value)
    with without_autocast(query.device.type):
        run = _causal if call.is_causal else _over_all
        out = run(parts, q, k, v, weights, form, scale)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])


def check_form(form: Form) -> None:
    """Raises for expansions that need more than moments."""
    if form.apart:
        raise ValueError(f"apart={form.apart} is not split over workers; pass apart=0")
    if form.around != "zero":
        raise ValueError(f'around={form.around!r} is not split over workers; pass around="zero"')
    if form.closure not in (None, "gauss"):
        raise ValueError(f"closure={form.closure!r} is not split over workers; pass closure=None")


def _over_all(
    parts: Parts, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, form: Form, scale: float
) -> Tensor:
    """q (B, H, L, D), k (B, Hk, S, D), v (B, Hk, S, E), weights (B, S) -> (B, H, L, E)."""
    weights = None if weights is None else weights.to(statistics_dtype(q.dtype))
    plain = partial(_reference, parts, weights=weights, form=form, scale=scale)
    tiled = form.backend in ("auto", "cpu") and q.device.type == "cpu" and form.order > 1 and not form.full
    learned = weights is not None and weights.requires_grad
    if tiled and q.shape[-1] and v.shape[-1] and not (learned or transformed() or torch.compiler.is_compiling()):
        total = form.normalization == "sum"
        return cpu.attention(q, k, v, weights, form.order, scale, total, reference=plain, across=parts.workers)
    asked = form.order > 1 and (form.backend == "triton" or (form.backend == "auto" and notice.expected(q)))
    if asked and takes_kernels("attention over several workers", form, q, v, weights, False, scale):
        from ..kernels.dense.split import attention

        batch = batch_of(q, k, v, weights, form.order, scale, form.normalization)
        return plain(q, k, v) if torch.compiler.is_compiling() else attention(batch, parts.workers)
    return plain(q, k, v)


def _reference(
    parts: Parts, q: Tensor, k: Tensor, v: Tensor, *, weights: Tensor | None, form: Form, scale: float
) -> Tensor:
    """The same in plain torch, differentiable any number of times."""
    w = None if weights is None else weights.unsqueeze(-2)
    moments = parts.workers.merge(centred_sums(k, v, form.order, form.full, w, keep=True))
    rows = fold_groups(q, k.shape[-3]).to(statistics_dtype(q.dtype))
    out = moments.apply(rows, scale)
    if form.normalization == "sum":
        out = out * moments.weight[..., None, None]
    return out.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])


def _causal(parts: Parts, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, form: Form, scale: float) -> Tensor:
    """Row i sees the keys of this worker up to i, and all that stand before its piece."""
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
