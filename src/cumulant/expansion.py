"""The expansion around one query: which path computes it (kernels, tiles, plain torch), and its weights.

Shape legend: ... leading dimensions, B all in one, H query heads, Lq queries, Lk keys, D, E widths of key and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import Call, check_choice, check_order, positions_of
from .causal import DIAGONAL_CHUNK, causal_attention
from .closures import check_closure
from .kernels import launch, notice
from .kernels.dense import cpu
from .moments import FEW, centred_sums, exact_dtype, full_third_by_pairs, in_units, ratio, statistics_dtype
from .tensors import broken, spoiled
from .tracing import transformed, without_autocast

BACKENDS = ("auto", "reference", "triton", "cpu")
AROUND = ("zero", "mean")
LEAST_SCALE = 2.0**-12  # causal kernels of order 2 divide by the scale, and float16 ends at 65504


class Form(NamedTuple):
    """How softmax is expanded; `cumulant.attention` says what each means."""

    order: int = 3
    full: bool = False
    normalization: str = "mean"
    closure: str | None = None
    around: str = "zero"
    apart: int = 0
    backend: str = "auto"

    def checked(self) -> Form:
        check_order(self.order, self.full, self.normalization)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("around", self.around, AROUND)
        if self.closure is not None:
            check_closure(self.closure)
        if type(self.apart) is not int or self.apart < 0:
            raise ValueError(f"apart must lie between 0 and the number of queries, got {self.apart!r}")
        return self


def expand(call: Call, form: Form) -> Tensor:
    """Expansion around 0, (..., H, Lq, E), of a checked call; `closure` and `around` of the form are not looked at."""
    query, key = call[:2]
    weighted = call.key_mask is not None and call.key_mask.is_floating_point()
    if form.order == 3 and not weighted and _at_most(2, key.shape[-2]):
        form = form._replace(order=2, full=False)  # the third cumulant of two tokens is 0: no rounding of it is added
    if form.backend == "cpu" and query.device.type != "cpu":
        raise ValueError(f'backend="cpu" needs tensors on the CPU, got {query.device}; use backend="auto"')
    lead, unit = call.lead, None
    q, k, v, weights = call.in_one_batch()
    if weights is not None and weighted and key.shape[-2]:
        weights, unit = in_units(weights)
        if not call.is_causal:  # whose rows see the largest
            weights = weights.to(statistics_dtype(query.dtype))
    call = call._replace(query=q, key=k, value=v, key_mask=weights)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _reference(call._replace(query=q, key=k, value=v), form, unit)

    with without_autocast(query.device.type):  # statistics stay in float32
        path = path_for(form, call)
        if path == "triton":
            out = by_kernels(call, form)
            if unit is not None and form.normalization == "sum":
                out = (out * unit[..., None, None]).to(query.dtype)
        elif path == "cpu":
            total = _total_weight(k, weights, unit) if form.normalization == "sum" else None
            out = cpu.attention(*call[:4], form.order, call.softmax_scale, total, reference=plain)
        else:
            out = plain(q, k, v)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])


def weigh(call: Call, form: Form, positions: Tensor | Sequence[int] | None = None) -> Tensor:
    """The weights A (..., H, Lq, Lk) of `expand`; causal rows stand at `positions` (Lq,), or at 0, 1, ..."""
    query, key, key_mask, order = call.query, call.key, call.key_mask, form.order
    lead, scale = call.lead, call.softmax_scale
    dtype, (heads, Lq, _), (groups, Lk, _) = statistics_dtype(query.dtype), query.shape[-3:], key.shape[-3:]
    places, lost = positions_of(positions, Lq, query.device), None
    if call.is_causal:
        dtype = exact_dtype(query)  # rows of drifting keys lie far from the mean of all: large terms then nearly cancel
    with without_autocast(query.device.type):
        q = (query.to(dtype) * scale).expand(*lead, *query.shape[-3:])
        q = q.unflatten(-3, (groups, heads // max(1, groups))).flatten(-3, -2)  # grouped heads share their keys
        k, weights, unit = key.to(dtype), q.new_ones(1, Lk), None
        if key_mask is not None:
            weights, unit = in_units(key_mask) if key_mask.is_floating_point() and Lk else (key_mask, None)
            weights = weights.to(dtype)[..., None, None, :]
            k = k.masked_fill(weights.mT == 0, 0)
        if call.is_causal:
            lost = broken(k)
            k = k.masked_fill(lost.unsqueeze(-1), 0)
        k = k - centred_sums(k, k, 1, False, weights.squeeze(-2)).key_mean.unsqueeze(-2)
        if call.is_causal:
            seen = torch.arange(Lk, device=q.device) <= places[:, None]
            weights = weights * seen.repeat(heads // max(1, groups), 1)
        exact = exact_dtype(query)
        share = ratio(weights.to(exact), weights.sum(-1, keepdim=True, dtype=exact)).to(dtype)  # rounded once

        def centred(x: Tensor) -> Tensor:
            return x - (share * x).sum(-1, keepdim=True)

        A = q.new_ones(*q.shape[:-1], 1)
        if order > 1:
            u = centred(q @ k.mT)
            A = A + u
            if order == 3 and form.full:
                A = A + centred(0.5 * u * u)
            elif order == 3:
                A = A + centred((0.5 * q * q) @ (k * k).mT - (q * q * (share @ k)) @ k.mT)
        if form.normalization == "sum":
            share = weights if unit is None else weights * unit[..., None, None, :].to(dtype)
        A = (A * share).unflatten(-2, (heads // max(1, groups), Lq))
        if lost is not None:
            A = spoiled(A, lost.unsqueeze(-2), places)
        return A.flatten(-4, -3).to(query.dtype)


def _reference(call: Call, form: Form, unit: Tensor | None) -> Tensor:
    """Plain torch: differentiable any number of times, and what torch.compile and torch.export trace. Weights of keys,
    the mask of the call, are in units (B, 1)."""
    query, key, value, weights = call[:4]
    order, full, scale, heads = form.order, form.full, call.softmax_scale, key.shape[-3]
    q = query.unflatten(-3, (heads, query.shape[-3] // max(1, heads)))
    w = None if weights is None else weights.unsqueeze(-2)
    if call.is_causal and query.shape[-2] and key.shape[-2]:  # with nothing to see, or nobody to see it, all is 0
        gain = None if form.normalization == "mean" else (key.new_ones(1, 1) if unit is None else unit)
        out = causal_attention(q, key, value, order=order, full=full, weights=w, scale=scale, gain=gain)
        return out.flatten(-4, -3)
    rows = q.flatten(-3, -2).to(statistics_dtype(query.dtype))  # 16 bits hold the sum of many values last
    if _at_most(FEW, key.shape[-2]):
        key, value = key.to(exact_dtype(key)), value.to(exact_dtype(value))
    if full and rows.shape[-2] * key.shape[-2] <= key.shape[-1] ** 2 * value.shape[-1]:  # pairs are fewer than moments
        out = full_third_by_pairs(rows, key, value, w, scale)
    else:
        out = centred_sums(key, value, order, full, w).to(rows.dtype).apply(rows, scale)
    if form.normalization == "sum":
        out = out * _total_weight(key, weights, unit)
    return out.to(query.dtype).unflatten(-2, q.shape[-3:-1]).flatten(-4, -3)


def _at_most(few: int, keys: int) -> bool:
    """Whether keys are so few; never where the code is traced for any number of them."""
    return not torch.compiler.is_compiling() and keys <= few


def _total_weight(key: Tensor, weights: Tensor | None, unit: Tensor | None) -> Tensor:
    """Sum of the weights, given in a unit (B, 1), as (B, 1, 1, 1) in the statistics' precision."""
    dtype = statistics_dtype(key.dtype)
    if weights is None:
        return torch.full((1, 1, 1, 1), float(key.shape[-2]), dtype=dtype, device=key.device)
    total = weights.sum(-1, dtype=dtype, keepdim=True)
    return (total if unit is None else total * unit.to(dtype))[..., None, None]


def path_for(form: Form, call: Call) -> str:
    """The path that computes this case: "triton", "cpu" or "reference" (plain torch, which computes all)."""
    (q, k, v), backend = call[:3], form.backend
    if backend == "reference" or form.order == 1 or not (q.numel() and k.numel() and v.numel()):
        return "reference"
    if backend == "triton" or (backend == "auto" and notice.expected(q)):
        return "triton" if takes_kernels("attention", form, call) else "reference"
    beyond = _beyond_kernels(form, call)
    tiled = q.device.type == "cpu" and not call.is_causal and beyond is None and not torch.compiler.is_compiling()
    return "cpu" if tiled and not _at_most(FEW, k.shape[-2]) else "reference"


def takes_kernels(operator: str, form: Form, call: Call) -> bool:
    """Whether kernels compute this case, where they are asked for or expected; raises or says why they cannot."""
    q, beyond = call.query, _beyond_kernels(form, call)
    obstacle = beyond or launch.obstacle(q, call.value) or launch.no_room(q, call.value, form.order, call.is_causal)
    if obstacle is None and q.dtype == torch.float16 and form.normalization == "sum":
        obstacle = 'normalization="sum" in float16, which holds sums up to 65504 only: plain torch sums in float32'
    if obstacle is None:
        return True
    if form.backend == "triton" and beyond is None:
        raise ValueError(f'backend="triton" cannot be used: {obstacle}; use backend="auto"')
    notice.plain_torch(operator, q, obstacle)
    return False


def _beyond_kernels(form: Form, call: Call) -> str | None:
    """Why only plain torch has what is asked for, whatever the tensors are, or None."""
    weights, is_causal, scale = call.key_mask, call.is_causal, call.softmax_scale
    if form.full:
        return "full=True, the whole third cumulant, has no kernel; full=False takes its diagonal"
    if transformed():
        return "torch.func transforms and forward-mode gradients need plain torch"
    if weights is not None and weights.requires_grad:
        return "kernels give key_mask no gradient; pass key_mask.detach() if none is wanted"
    few = DIAGONAL_CHUNK if is_causal else 2
    if weights is not None and weights.is_floating_point() and _at_most(few, weights.shape[-1]):
        return f"terms of up to {few} weighted keys may nearly cancel: plain torch has float64 for them"
    if is_causal and form.order == 2 and abs(scale) < LEAST_SCALE:
        return f"causal kernels take a scale of {LEAST_SCALE:g} or more, got {scale:g}; scale the query instead"
    return None


def by_kernels(call: Call, form: Form, *packed: Any) -> Tensor:
    """The kernels' answer, in the dtype of q; `packed` are boundaries of sequences, tokens then come before heads.

    Causal ones look at all rows of a part from one point. They take float32 where large terms then cancel, of which 16
    bits would leave the rounding: weights may let one token be all of a row, and another of the next; the third order
    in float16 leaves its range, and meets a compiler error of Triton 3.6 besides; so does the second where `scale` is
    large: gradients of keys multiply scale * query by up to 64, the rows of a tile, and are NaN where the query makes
    that product 65,504 or more. Whether it does could only be told by reading it.
    """
    (q, k, v, weights), order = call[:4], form.order
    rest = call.softmax_scale, form.normalization, *packed
    if not call.is_causal:
        from .kernels.dense.host import attention

        return attention(q, k, v, weights, order, *rest)
    from .kernels.causal.host import attention as causal

    uneven = weights is not None and weights.is_floating_point()
    in_range = q.dtype != torch.float16 or (order == 2 and abs(call.softmax_scale) <= 1)
    if in_range and not uneven:
        return causal(q, k, v, weights, order, *rest)
    given, (q, k, v), room = q.dtype, (x.to(statistics_dtype(x.dtype)) for x in (q, k, v)), None
    if weights is not None and uneven:
        room = _room(weights)
        weights = (weights * room).to(q.dtype)
    out = causal(q, k, v, weights, order, *rest)
    return (out if room is None or form.normalization == "mean" else out / room[..., None, None]).to(given)


def _room(weights: Tensor) -> Tensor:
    """A power of two (B, 1) that brings weights (B, L) of at most 2 into float32: 1, or more where some are tiny."""
    least = weights.masked_fill(weights == 0, 1).amin(-1, keepdim=True)
    return (2.0**-100 / least).log2().clamp(0, 80).floor().exp2()
