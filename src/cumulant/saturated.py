"""Second order that cannot run away: its response closed by tanh or langevin.

Shape legend: ... leading dimensions, H heads, L tokens, D, E widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .call import Call, positions_of
from .closures import gain
from .expansion import Form
from .moments import FEW, exact_dtype, in_units, ratio, statistics_dtype
from .tracing import without_autocast


def saturated(
    what: Callable[[Call, Form], Tensor], call: Call, form: Form, positions: Tensor | Sequence[int] | None = None
) -> Tensor:
    """out = <v> + f(s) <(q.k~) v~> with s^2 = sum_i q_i^2 <k~_i^2>: order 2 whose response saturates as 1 / s.

    `what` is `expand`, or `weigh` for the weights, of causal rows at `positions`. The response is linear in the query:
    order 2 of f(s) q, so that every kernel serves, and nothing is larger than the answer. Cost: that of order 2 and
    L D more.
    """
    if not (call.query.numel() and call.key.numel()):
        return what(call, form)
    assert form.closure is not None
    given, wide = call.query.dtype, statistics_dtype(call.query.dtype)
    kernels = form.backend == "triton" or (form.backend == "auto" and call.query.is_cuda)
    few = not torch.compiler.is_compiling() and call.key.shape[-2] <= FEW
    if not kernels and (call.is_causal or few):
        wide = exact_dtype(call.query)  # causal rows are looked at from one point for many: more digits cancel
    # Widened once: where f saturates, gradients through it and past it cancel, and each would be rounded on its own.
    query, key, value = (x.to(wide) for x in (call.query, call.key, call.value))
    with without_autocast(call.query.device.type):
        spread, alone = _spread(call._replace(query=query, key=key), positions)
        factor = gain(((query * call.softmax_scale).square() * spread).sum(-1, keepdim=True), form.closure)
        # Rows that see one key have no response, and no gradient of one: here 0, in 16 bits it would be rounded.
        query = query * factor.masked_fill(alone, 0)
    if kernels:  # they multiply what is alike
        query, key, value = query.to(given), key.to(given), call.value
    return what(call._replace(query=query, key=key, value=value), form).to(given)


def _spread(call: Call, positions: Tensor | Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """<k~^2> (..., H, Lq or 1, D) over the keys that a row sees, of a call in at least float32; where it sees one."""
    q, k, dtype = call.query, call.key, call.query.dtype
    w = k.new_ones(k.shape[-2:-1]).unsqueeze(-1)
    if call.key_mask is not None:
        w = in_units(call.key_mask)[0].to(exact_dtype(k) if call.is_causal else dtype)[..., None, :, None]
        k = k.masked_fill((call.key_mask == 0)[..., None, :, None], 0)
    present = (w > 0).int()
    first = present.argmax(-2, keepdim=True)
    # Any origin near the keys will do. (take_along_dim would fix every size under torch.compile.)
    k = k - k.detach().gather(-2, first.expand(*k.shape[:-2], 1, k.shape[-1]))
    if call.is_causal:
        # Running sums in float64: a difference of squares far from the first key costs digits.
        wide = exact_dtype(k)
        seen = slice(q.shape[-2] if positions is None else None)
        k, w, present = (x[..., seen, :] for x in (k.to(wide), w.to(wide), present))
        W, alone = w.cumsum(-2), present.cumsum(-2) <= 1
        m, square = (ratio((w * x).cumsum(-2), W.expand_as(x)) for x in (k, k * k))
        spread = (square - m * m).clamp(min=0).to(dtype)
        missing = q.shape[-2] - spread.shape[-2]
        if positions is not None:
            at = positions_of(positions, q.shape[-2], q.device).clamp(max=spread.shape[-2] - 1)
            spread, alone = spread[..., at, :], alone[..., at, :]
        elif missing > 0:
            spread, alone = (
                torch.cat((x, x[..., -1:, :].expand(*x.shape[:-2], missing, -1)), -2) for x in (spread, alone)
            )
    else:
        share, alone = ratio(w, w.sum(-2, keepdim=True)), present.sum(-2, keepdim=True) <= 1
        k = k - (share * k).sum(-2, keepdim=True)
        spread = (share * k * k).sum(-2, keepdim=True)
    groups = q.shape[-3] // max(1, k.shape[-3])
    return spread.repeat_interleave(groups, -3), alone
