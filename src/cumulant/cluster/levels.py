"""Two levels of clusters by content: each query opens a few clusters and meets their leaves, of these a few exactly.

Shape legend: B batch, H key heads, n query rows, K clusters of r leaves, m tokens of a leaf, t opened clusters, u near
leaves, p exact tokens, D, E widths, W <= D directions of the far field. Queries carry the scale.

    (w_c, w_b, w_l) = softmax over (log Z_c of closed clusters, log Z_b of far leaves of open ones, q.k_l of the rest)
    out = sum_c w_c v_mean_c + sum_b w_b v_mean_b + sum_l w_l v_l + (sum_c w_c f_c + a sum_b w_b f_b) S^T q

Opened are the clusters of largest mass times s^2, and near the leaves of largest: where an expansion of second order
errs most. S is the covariance within clusters, one for all; leaves are narrower by a, the mean of s^2 over leaves and
rows beside that over clusters and rows. Queries and keys of log Z and S may be those of fewer directions (`basis`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..closures import gain, log_mass
from ..moments import ratio
from ..tensors import ABSENT, softmax_or_zero
from .backend import Form
from .fields import Exact, Far, Tokens, recomputed, room
from .near import heaviest, near_answers
from .statistics import log, merge_pieces, moments_of
from .tree import Tree


class Narrow(NamedTuple):
    """Queries and keys as the far field sees them, of W directions."""

    query: Tensor  # (B, H, n, W)
    key: Tensor  # (B, H, K r, m, W)


def two_levels(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    exact: Exact | None,
    tree: Tree,
    form: Form,
    narrow: Narrow | None = None,
) -> Tensor:
    """Rows q (B, H, n, D) over leaves key (B, H, K r, m, D), value (B, H, K r, m, E), slots (B, H, K r, m), in blocks.

    Cost a row: (K + t r) (2 W + E) + u m (D + E) + W E.
    """
    far = Narrow(q, key) if narrow is None else narrow
    moments = moments_of(far.key, value, slots)
    owner = torch.arange(tree.count, device=q.device).repeat_interleave(tree.leaves)[None, None]
    clusters = Far.of(merge_pieces(moments, owner, tree.count)).pooled()
    leaves = Far.of(moments)._replace(response=None)
    narrower = _narrower(far.query, leaves, clusters)
    tokens = Tokens(key, value, log(slots))
    B, H, _, D = q.shape
    E, m = value.shape[-1], key.shape[-2]
    leaves_met, near = tree.opened * tree.leaves, form.near if isinstance(form.near, int) else 0
    at_once, grouped = _at_once(q, tree), tokens.grouped(q.unsqueeze(-2), True)
    of_row = 4 * tree.count + near * (m + 3 * (D + E) if grouped else m * (D + E))
    of_row += 3 * tree.count * tree.leaves + 6 * leaves_met if at_once else leaves_met * (2 * far.query.shape[-1] + E)
    step = max(1, room(q, grouped) // max(1, B * H * of_row))
    parts = [
        recomputed(_rows, rows, seen, clusters, leaves, narrower, tokens, exact, tree, form)
        for rows, seen in zip(q.split(step, 2), far.query.split(step, 2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _narrower(q: Tensor, leaves: Far, clusters: Far) -> Tensor:
    """Mean s^2 over rows and leaves, beside that over rows and clusters: (B, H, 1). Cost: D a row and leaf."""
    squares = q.square().mean(-2)

    def mean(far: Far) -> Tensor:
        return (far.shares * (far.spread @ squares.unsqueeze(-1)).squeeze(-1)).sum(-1, keepdim=True)

    return ratio(mean(leaves), mean(clusters))


def _rows(
    q: Tensor,
    seen: Tensor,
    clusters: Far,
    leaves: Far,
    narrower: Tensor,
    tokens: Tokens,
    exact: Exact | None,
    tree: Tree,
    form: Form,
) -> Tensor:
    """Of rows q (B, H, n, D), as the far field sees them (B, H, n, W)."""
    closure, r, near = form.closure, tree.leaves, form.near
    assert isinstance(near, int)
    log_Z, variance = clusters.masses(seen, closure)
    opened = _largest(log_Z, variance, tree.opened, form)
    closed = _without(log_Z, opened)
    ids = (opened.clamp(min=0).unsqueeze(-1) * r + torch.arange(r, device=q.device)).flatten(-2)  # (B, H, n, t r)
    at_once = _at_once(q, tree)
    if at_once:
        means = leaves.log_weight.unsqueeze(-2) + seen @ leaves.key_mean.mT  # (B, H, n, K r)
        means, leaf_variance = (x.gather(-1, ids) for x in (means, (seen * seen) @ leaves.spread.mT))
        leaf_Z, leaf_values = means + log_mass(leaf_variance, closure), leaves.value_mean
    else:
        own = _picked(leaves, ids)
        leaf_Z, leaf_variance = (x.squeeze(-2) for x in own.masses(seen.unsqueeze(-2), closure))
        leaf_values = own.value_mean
    leaf_Z = leaf_Z.masked_fill((opened < 0).repeat_interleave(r, -1), ABSENT)
    logits, values = [closed, leaf_Z], [clusters.value_mean, leaf_values]
    near = min(near, ids.shape[-1])
    if near:
        chosen = _largest(leaf_Z, leaf_variance, near, form)  # among those of open clusters
        logits[1] = _without(leaf_Z, chosen)
        which = ids.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
        if tokens.grouped(q.unsqueeze(-2), True):
            mass, value = near_answers(q.unsqueeze(-2), which, *tokens[:3])
            logits.append(mass.squeeze(-2))
            values.append(value.squeeze(-3))
        else:
            key, value, log_weight = tokens.gather(which)
            logits.append((key @ q.unsqueeze(-1)).squeeze(-1) + log_weight)
            values.append(value)
    if exact is not None:
        logits.append(q @ exact.key.squeeze(2).mT + exact.log_weight.squeeze(2))
        values.append(exact.value.squeeze(2))
    w = softmax_or_zero(torch.cat(logits, -1)).split([x.shape[-1] for x in logits], -1)
    lift = (w[0] * gain(variance, closure)).sum(-1) + narrower * (w[1] * gain(leaf_variance, closure)).sum(-1)
    if at_once:  # leaf 0 stands for those of no cluster, with a weight of 0
        table = w[1].new_zeros(*ids.shape[:-1], leaf_values.shape[-2]).scatter_add(-1, ids, w[1])
        w = (w[0], table, *w[2:])
    out = torch.zeros_like(values[0][..., :1, :])
    for weight, value in zip(w, values, strict=True):
        each = value.ndim > weight.ndim  # clusters or tokens of each row's own
        out = out + ((weight.unsqueeze(-2) @ value).squeeze(-2) if each else weight @ value)
    if clusters.pool is not None and form.response != 0:
        out = out + lift.unsqueeze(-1) * (seen @ clusters.pool)
    return out


def _at_once(q: Tensor, tree: Tree) -> bool:
    """Whether rows meet all leaves in one product and take of it what they opened, K / t times the multiply-adds.

    On a CPU that is quicker than to move the statistics of t r leaves to each row: 2.5 times for 16 of 64 clusters.
    """
    return q.device.type == "cpu" and tree.count <= 32 * tree.opened


def _largest(log_Z: Tensor, variance: Tensor, count: int, form: Form) -> Tensor:
    """Numbers (..., n, count) of the clusters of each row by the rank of the form, -1 where there are fewer."""
    rank = "mass" if form.rank == "mass" else "error"
    return heaviest(log_Z.detach(), variance.detach(), count, rank, None, True, True)


def _without(log_Z: Tensor, which: Tensor) -> Tensor:
    """log Z with -inf at `which`; a -1 goes to a column beyond the last, which is cut off again."""
    K = log_Z.shape[-1]
    taken = torch.zeros(*log_Z.shape[:-1], K + 1, dtype=torch.bool, device=log_Z.device)
    return log_Z.masked_fill(taken.scatter(-1, torch.where(which < 0, K, which), True)[..., :K], ABSENT)


def _picked(far: Far, ids: Tensor) -> Far:
    """Of clusters (B, H, K), those with numbers ids (B, H, n, a) as lists of each row."""

    def take(x: Tensor) -> Tensor:
        flat = x.flatten(3) if x.ndim > 3 else x.unsqueeze(-1)
        flat = flat.expand(*ids.shape[:2], *flat.shape[2:])
        found = flat.gather(2, ids.flatten(2).unsqueeze(-1).expand(-1, -1, -1, flat.shape[-1]))
        return found.unflatten(2, ids.shape[2:])

    return Far(take(far.log_weight).squeeze(-1), take(far.key_mean), take(far.value_mean), take(far.spread), None)
