"""Cumulant attention expanded around the mean query instead of around 0.

Shape legend: ... leading dimensions, H heads, L queries, S keys, D, E widths.

Softmax at q = q0 + d is softmax at d under the weights w = softmax(scale K q0) of the keys: exp(q.k) = exp(q0.k)
exp(d.k). Its cumulants in d are those of the tilted measure w, so that

    order 2   <v>_w + scale Cov_w(v, k) (q - q0)          q0 = the mean of the queries

is exact at q0 and to first order around it, where the expansion around 0 begins with equal weights for all keys. One
more softmax, of one query a head: cost S D beside that of the order. Weights differ from head to head, so heads go to
`cumulant.attention` as sequences of their own, with w as weights of their keys; kernels included. Those give no
gradient of the weights; it follows from what they do give, see `_WeighedValues`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .call import Call, check_choice
from .expansion import AROUND, Form, expand, path_for
from .tensors import log_weights, repeat_heads, softmax_or_zero, wide
from .tracing import without_autocast

Expansion = Callable[[Call, Form], Tensor]  # `expand`, or `weigh` for its weights


def check_around(around: str, is_causal: bool, apart: int = 0) -> None:
    check_choice("around", around, AROUND)
    if around == "mean" and is_causal:
        raise ValueError('around="mean" has no causal form: the mean would know later queries; pass around="zero"')
    if apart and is_causal:
        raise ValueError(f"apart={apart} has no causal form: all keys are seen by the queries that stand apart")


def around_mean(what: Expansion, call: Call, form: Form) -> Tensor:
    """`what`, `expand` or `weigh`, of the call with query - q0 and weights w of the keys, for q0 the mean query.

    The first `form.apart` queries, class tokens say, have a mean of their own: they ask for something else than the
    others. Queries that `query_mask` leaves out are in no mean. One query alone is its own mean: it gets softmax.
    """
    call = call.prepared()
    query, present = call.present_queries()
    heads, lead, scale = query.shape[-3], query.shape[:-3], call.softmax_scale
    key, value = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    if not (query.shape[-2] and key.shape[-2]):
        check_apart(form.apart, query.shape[-2])
        return what(Call(query, key, value, scale=scale), form)
    added = log_weights(call.key_mask, wide(key[..., 0]))
    k, v = _fold(key), _fold(value)
    outs = []
    for rows, mean in means(query, present, form.apart):
        logits = mean_logits(mean, key, added, scale).reshape(-1, key.shape[-2])
        d = _fold(wide(rows) - mean)
        out = _tilted(what, Call(d, k, v, scale=scale), logits, form).to(rows.dtype)
        outs.append(out.reshape(*lead, heads, *out.shape[-2:]))
    return torch.cat(outs, -2)


def softmax_rows(call: Call, apart: int, weigh: bool) -> Tensor:
    """Softmax attention, or its weights, of the first `apart` queries (class tokens, say). Cost: S D each."""
    check_apart(apart, call.query.shape[-2])
    call = call.prepared()
    query = call.query[..., :apart, :]
    with without_autocast(query.device.type):
        key, value = (wide(repeat_heads(x, query.shape[-3])) for x in (call.key, call.value))
        added = log_weights(call.key_mask, key[..., 0])
        logits = call.softmax_scale * wide(query) @ (key - key_point(key, added)).mT
        w = softmax_or_zero(logits if added is None else logits + added.unsqueeze(-2))
        return (w if weigh else w @ value).to(query.dtype)


def means(query: Tensor, present: Tensor | None, apart: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of query (..., H, L, D), the first `apart` and the others, each with its mean (..., H, 1, D).

    `present` (..., 1, L, 1) is 0 for queries, 0 themselves, that do not count.
    """
    L = query.shape[-2]
    check_apart(apart, L)
    parts = [n for n in (apart, L - apart) if n]
    counts = [None] * len(parts) if present is None else present.ne(0).split(parts, -2)
    for rows, there in zip(query.split(parts, -2), counts, strict=True):
        if there is None:
            yield rows, wide(rows).mean(-2, keepdim=True)
        else:
            yield rows, wide(rows).sum(-2, keepdim=True) / there.sum(-2, keepdim=True).clamp(min=1)


def mean_logits(mean: Tensor, key: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """Logits (..., H, S) of the mean query (..., H, 1, D), with what a mask adds: their softmax weighs the keys."""
    logits = scale * (mean * (wide(key) - key_point(key, added))).sum(-1)
    return logits if added is None else logits + added


def key_point(key: Tensor, added: Tensor | None) -> Tensor:
    """A point amid the keys (..., H, S, D) that take part, (..., H, 1, D): softmax does not depend on it, but what
    float32 holds of its logits does."""
    key = wide(key.detach())
    if added is None:
        return key.mean(-2, keepdim=True) if key.shape[-2] else key.sum(-2, keepdim=True)
    return softmax_or_zero(added.detach()).unsqueeze(-2) @ key


def averaged(w: Tensor, value: Tensor) -> Tensor:
    """w @ value (..., 1, E) for weights (..., 1, S) whose sum is 1, or which are 0. Their gradient is made of
    differences of values, which are measured from the average itself."""
    average = w.detach() @ value.detach()
    return w @ (value - average) + average


def check_apart(apart: int, queries: int) -> None:
    if apart > queries:
        raise ValueError(f"apart must lie between 0 and the {queries} queries, got {apart}")


def _tilted(what: Expansion, call: Call, logits: Tensor, form: Form) -> Tensor:
    """query (N, 1, L, D), key (N, 1, S, D), logits (N, S) of the mean query -> (N, 1, L, E or S)."""
    w = softmax_or_zero(logits)
    if call.query.shape[-2] == 1:  # softmax itself
        out = w[:, None, None, :]
        with without_autocast(w.device.type):
            return averaged(out, wide(call.value)) if what is expand else out
    short = call._replace(query=call.query.to(call.key.dtype))
    if what is not expand:
        return what(short._replace(key_mask=w), form)
    if not _has_kernel(short, w, form):  # in float32: of the distances from the mean 16 bits would cut off digits
        return what(call._replace(key=wide(call.key), value=wide(call.value), key_mask=w), form)
    if w.requires_grad and torch.is_grad_enabled():
        return around_weights(short, form, logits, w.detach())
    return what(short._replace(key_mask=w), form)


def _has_kernel(call: Call, w: Tensor, form: Form) -> bool:
    """Whether a Triton kernel takes these tokens. That of the CPU can be differentiated twice, which weights cannot."""
    return path_for(form, call._replace(key_mask=w.detach())) == "triton"


def around_weights(call: Call, form: Form, logits: Tensor, w: Tensor) -> Tensor:
    """The expansion under key weights w with gradients of the logits (N, S) whose softmax w is, by a call without them.

    With g_l the gradient of v_l, over w_l, that of log w_l is, but for what softmax takes away again,

        w_l (g_l . v~_l)                                    order 2
        the above - w_l k~_l . h                            order 3,   h_i = scale^2 sum_q d_qi^2 (do_q . Cov(k_i, v))

    since all else in the cumulants is as linear in w_l as in v_l. Cost: L E at order 2, 2 L D E at order 3. First
    derivatives only.
    """
    d, key, value = call[:3]
    out = expand(call._replace(value=_WeighedValues.apply(value, logits, w), key_mask=w), form)
    if form.order < 3:
        return out
    return _WeighedThird.apply(out, logits, *(x.detach() for x in (d, key, value)), w, call.softmax_scale)


class _WeighedValues(torch.autograd.Function):
    """The values as they are; from their gradient, that of the logits: w_l (g_l . v~_l) less its sum, w_l-fold."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(value, w)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError('kernels give first derivatives only; for second ones pass backend="reference"')
        value, w = ctx.saved_tensors
        with without_autocast(grad.device.type):
            own = (wide(grad) * (wide(value) - w[:, None, None, :] @ wide(value))).sum(-1).squeeze(1)
        return grad, own - w * own.sum(-1, keepdim=True), None


class _WeighedThird(torch.autograd.Function):
    """The output of order 3 as it is; from its gradient, the second part of that of the logits: - w_l k~_l . h."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, logits: Tensor, d: Tensor, key: Tensor, value: Tensor, w: Tensor, scale: float
    ) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(d, key, value, w)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d, key, value, w = (wide(x) for x in ctx.saved_tensors)
        row = w[:, None, None, :]
        with without_autocast(grad.device.type):
            k, v = key - row @ key, value - row @ value
            covariance = (row.mT * k).mT @ v
            h = ctx.scale**2 * (((d * d).mT @ wide(grad)) * covariance).sum(-1, keepdim=True)
            return grad, -w * (k @ h)[:, 0, :, 0], *(None,) * 5


def _fold(x: Tensor) -> Tensor:
    """(..., H, L, W) as (N H, 1, L, W)."""
    return x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:])
