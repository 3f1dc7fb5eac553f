"""Blocks with one response for all, on a CPU and without gradients: the same function in a few products and few passes.

Shape legend: g (batch, key head) pairs, R = G Lq query rows of each, n rows that share t near clusters, K clusters of m
slots, L = K m, D, E widths; a tilde: minus the mean of the cluster.

    S = sum_l k~_l v_l^T / L      one product over all tokens, where a sum over the covariances of clusters has K D E
    e_c = exp(log Z_c - top)      lift = sum_c e_c f_c
    out = (sum_c e_c v_mean_c + lift S^T q + exp(log Z_near - top) <v>_near) / (sum_c e_c + exp(log Z_near - top))

All that has a number a row and cluster is written in place, into buffers that stay in the caches. `fields` is the
reference: any clusters, any device, gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.dense.tiles import Workspace
from ..tensors import ABSENT, in_line
from .backend import Case, sizes_of
from .build import make_layout
from .fields import Far
from .layout import Blocks, Layout
from .near import FLASH, largest
from .statistics import log

HELD = 1 << 18  # numbers a row and cluster that are computed at a time


def serves(case: Case) -> bool:
    """Whether a case is one of these: what "auto" makes of near clusters of blocks, without mask and prefix."""
    call, form = case.call, case.form
    blocks = isinstance(case.clusters, int | tuple) or (
        isinstance(case.clusters, Blocks) and case.clusters.keep is None and not case.clusters.recent
    )
    if not blocks or call.is_causal or call.key_mask is not None or call.prefix or form.full or form.together:
        return False
    if isinstance(case.clusters, tuple) and call.grid is None:
        return False
    near = isinstance(form.near, int) and (form.near == 0 or (form.rank == "mean" and form.near_rows > 1))
    return near and form.pooled and form.closure == "tanh" and sizes_of(case)[0] > int(form.near)


def attend(case: Case) -> Tensor:
    """Of a call in one batch, q (b, H, Lq, D), k (b, Hk, Lk, D), v (b, Hk, Lk, E): (b, Hk, G, Lq, E)."""
    q, k, v = case.call[:3]
    (b, Hk, _, D), E, near = k.shape, v.shape[-1], int(case.form.near)
    g, space = b * Hk, Workspace(q, True)
    layout = make_layout(q, k, None, case, bool(near))
    far, keys, values, log_weight = _clusters(k, v, layout, case.call.softmax_scale, space)
    rows = q.to(space.dtype).reshape(g, -1, D)
    G = rows.shape[1] // q.shape[2]
    out = space.take("out", g, rows.shape[1], E)
    n = case.form.near_rows if near else rows.shape[1]
    of_block = g * n * layout.clusters
    for at, size in _blocks(G, q.shape[2], n, max(1, HELD // of_block)):
        own = rows[:, at]
        blocks = own.unflatten(1, (-1, size)).unsqueeze(0)
        which = None if not near else largest(far.mean_masses(blocks, None, "tanh"), near)[0]
        _rows(own, far, keys, values, log_weight, which, case.call.softmax_scale, out[:, at], space)
    return out.view(b, Hk, G, -1, E) + v.to(space.dtype).mean(-2)[:, :, None, None]


def _blocks(G: int, Lq: int, n: int, most: int) -> Iterator[tuple[slice, int]]:
    """Rows of each head in runs of whole blocks of n, at most so many, and what is left of the last; with their n."""
    for head in range(0, G * Lq, Lq):
        whole = head + Lq // n * n
        for start in range(head, whole, most * n):
            yield slice(start, min(whole, start + most * n)), n
        if whole < head + Lq:
            yield slice(whole, head + Lq), head + Lq - whole


def _clusters(
    k: Tensor, v: Tensor, layout: Layout, scale: float, space: Workspace
) -> tuple[Far, Tensor, Tensor, Tensor | None]:
    """Statistics (1, g, K, ...) of keys that carry the scale, tokens (g K, m, .) and log weights (K, m).

    log weights are None where every slot holds a token.
    """
    g, K = k.shape[0] * k.shape[1], layout.clusters

    def centred(name: str, x: Tensor) -> Tensor:
        packed = layout.pack(x)
        mean = x.to(space.dtype).mean(-2)[:, :, None, None]
        taken = space.take(name, g, K, layout.size, x.shape[-1])
        torch.sub(packed, mean, out=taken.view(packed.shape))
        return taken if there is None else taken.mul_(there)

    present = layout.present
    there = None if present is None else present[0].unsqueeze(-1).to(space.dtype)  # (1, K, m, 1)
    count = torch.full((1, K, 1), float(layout.size), dtype=space.dtype) if there is None else there.sum(-2)
    keys, values = centred("keys", k), centred("values", v)
    k_mean, v_mean = keys.sum(-2) / count, values.sum(-2) / count
    apart = torch.sub(keys, k_mean.unsqueeze(-2), out=space.take("apart", *keys.shape))
    if there is not None:
        apart.mul_(there)
    pool = torch.bmm(apart.flatten(1, 2).mT, values.flatten(1, 2)) * (scale / k.shape[-2])
    spread = apart.square_().sum(-2) / count
    far = (log(count).squeeze(-1).expand(g, K), k_mean * scale, v_mean, spread * scale**2, pool)
    log_W, k_mean, v_mean, spread, pool = (x.unsqueeze(0) for x in far)
    weights = None if there is None else log(there)[0, ..., 0]
    return Far(log_W, k_mean, v_mean, spread, None, pool), keys.flatten(0, 1), values.flatten(0, 1), weights


def _rows(
    q: Tensor, far: Far, keys: Tensor, values: Tensor, log_weight: Tensor | None, which: Tensor | None, scale: float,
    out: Tensor, space: Workspace,
) -> None:  # fmt: skip
    """Writes rows q (g, r, D) into out (g, r, E); `which` (g, N, t) are near clusters of r / N rows each."""
    assert far.pool is not None
    log_W, k_mean, v_mean, spread, pool = (x.squeeze(0) for x in (*far[:4], far.pool))
    (g, r, _), K = q.shape, k_mean.shape[1]
    squares = torch.mul(q, q, out=space.take("squares", *q.shape))
    s = torch.bmm(squares, spread.mT, out=space.take("s", g, r, K))
    s.clamp_(min=torch.finfo(s.dtype).tiny).sqrt_()
    f = torch.tanh(s, out=space.take("f", g, r, K)).div_(s)
    e = torch.mul(s, -2, out=space.take("e", g, r, K)).exp_().log1p_().add_(s).add_((log_W - math.log(2)).unsqueeze(-2))
    e.baddbmm_(q, k_mean.mT)
    top, mass, answer = e.amax(-1, keepdim=True), None, None
    if which is not None:
        mass, answer = _near(q, keys, values, log_weight, which, scale)
        N, t = which.shape[1:]
        e.view(g, N, r // N, K).scatter_(-1, which.unsqueeze(2).expand(g, N, r // N, t), ABSENT)
        top = torch.maximum(top, mass)
    e.sub_(top).exp_()
    total = e.sum(-1, keepdim=True)
    found = torch.bmm(e, v_mean, out=space.take("found", g, r, out.shape[-1]))
    lift = e.mul_(f).sum(-1, keepdim=True)
    found.addcmul_(torch.bmm(q, pool, out=space.take("answer", *found.shape)), lift)
    if mass is not None and answer is not None:
        mass = mass.sub(top).exp_()
        found.addcmul_(answer, mass)
        total.add_(mass)
    torch.div(found, total, out=out)


def _near(
    q: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, which: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """log Z (g, r, 1) and mean values (g, r, E) of the tokens of clusters `which` (g, N, t) for rows q (g, r, D)."""
    (g, N, _), K = which.shape, keys.shape[0] // len(q)
    index = (which + torch.arange(0, g * K, K).view(g, 1, 1)).flatten()
    key, value = (x.flatten(1).index_select(0, index).view(g * N, -1, x.shape[-1]) for x in (keys, values))
    rows = q.unflatten(1, (N, -1)).flatten(0, 1)
    mask = None if log_weight is None else log_weight[which.flatten()].view(g * N, 1, -1)
    if FLASH is not None and key.shape[-1] == value.shape[-1]:
        if mask is not None:
            mask = mask.unsqueeze(1).expand(-1, 1, rows.shape[1], -1)
        given = (in_line(x).unsqueeze(1) for x in (rows, key, value))
        answer, mass = FLASH(*given, attn_mask=mask, scale=scale)
    else:
        logits = torch.bmm(rows, key.mT).mul_(scale)
        logits = logits if mask is None else logits.add_(mask)
        mass = logits.logsumexp(-1)
        answer = torch.bmm(logits.sub_(mass.unsqueeze(-1)).exp_(), value)
    return mass.reshape(g, -1, 1), answer.reshape(g, -1, value.shape[-1])
