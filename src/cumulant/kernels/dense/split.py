"""The same kernels where several workers hold a sequence: moments of this worker's keys, merged with those of all.

Shape legend: that of `Batch`; heads are B H, tokens those of this worker.

    forward:   partial moments -> one raw state -> exchange -> merge -> read out
    backward:  dq and sums over queries -> sum over workers -> dk, dv

What is exchanged, (order - 1) D E + 3 D + 2 E + 1 float32 numbers a head forward and (order - 1) D E + D + E backward,
does not depend on the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...moments import Moments
from ..batch import Batch
from ..launch import like_rows, on_device, rows
from ..once import once_differentiable
from . import host
from .cpu import Across
from .plan import Plan, plan_for


def attention(batch: Batch, across: Across) -> Tensor:
    """(B, Hq, Lq, E) of this worker's queries over the keys of all; gradients of the sum of all workers' losses."""
    out: Tensor = _Split.apply(across, batch[3:], *batch[:3])
    return out


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, across: Across, rest: tuple[Any, ...], *tokens: Tensor) -> Tensor:
        query, key, value = map(rows, tokens)
        batch = Batch(query, key, value, *rest)
        out, matrices, vectors = host.empty(batch, True)
        plan = plan_for(batch)
        with on_device(out.device):
            host.merge(plan, *_of_all(plan, batch, across), matrices, vectors, batch.scale)
            if out.numel():
                host.read_out(plan, batch, out, matrices, vectors)
        ctx.across, ctx.rest = across, rest
        ctx.save_for_backward(query, key, value, matrices, vectors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, matrices, vectors = ctx.saved_tensors
        batch, grad = Batch(query, key, value, *ctx.rest), rows(grad)
        dq, dk, dv = (like_rows(x) for x in batch[:3])
        plan = plan_for(batch)
        with on_device(grad.device):
            if grad.numel():
                of_matrices, of_vectors = host.backward_queries(plan, batch, grad, dq, matrices, vectors, torch.float32)
            else:  # somebody else's queries may have looked at our keys
                of_matrices = torch.zeros_like(matrices, dtype=torch.float32)
                of_vectors = vectors.new_zeros(len(vectors), plan.D + plan.E)
            of_matrices, of_vectors = ctx.across.add(of_matrices, of_vectors)
            if value.numel():
                host.backward_keys(plan, batch, dk, dv, vectors, of_matrices, of_vectors)
        return None, None, dq, dk, dv


def _of_all(plan: Plan, batch: Batch, across: Across) -> tuple[Tensor, Tensor]:
    """Raw moments (n, heads, ...) whose union is that of all workers' keys: those of each, or where these are too many
    to be sent everywhere, one."""
    own = host.partial_moments(plan, batch)
    if len(own[1]) > 1:
        merged = torch.empty_like(own[0][:1]), torch.empty_like(own[1][:1])
        host.merge(plan, *own, *merged, batch.scale, raw=True)
        own = merged
    found = across.gathered(own[0][0], own[1][0])
    if found is not None:
        return found[0], found[1]
    D, E, matrices, vectors = plan.D, plan.E, own[0][0], own[1][0]
    k, P, v, W, k_low, v_low = vectors.split([D, D, E, 1, D, E], -1)
    third = (P, matrices[:, 1]) if plan.order == 3 else (None, None)
    means = k.double() + k_low, v.double() + v_low
    whole = across.merge(Moments(W.squeeze(-1), *means, matrices[:, 0], *third))
    k, v = whole.key_mean.float(), whole.value_mean.float()
    low = (whole.key_mean - k).float(), (whole.value_mean - v).float()
    of_keys = torch.zeros_like(k) if whole.P is None else whole.P
    vectors = torch.cat((k, of_keys, v, whole.weight.unsqueeze(-1), *low), -1)
    return torch.stack([x for x in (whole.S, whole.T) if x is not None], 1).unsqueeze(0), vectors.unsqueeze(0)
