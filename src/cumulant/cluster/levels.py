"""Two levels of clusters by content: each query opens a few clusters and meets their leaves, of these a few exactly.

Shape legend: B batch, H key heads, n query rows, K clusters of r leaves, m tokens of a leaf, t opened clusters, u near
leaves, p exact tokens, D, E widths, W <= D directions of the far field. Queries carry the scale.

    (w_c, w_b, w_l) = softmax over (log Z_c of closed clusters, log Z_b of far leaves of open ones, q.k_l of the rest)
    out = sum_c w_c v_mean_c + sum_b w_b v_mean_b + sum_l w_l v_l + (sum_c w_c f_c + a sum_b w_b f_b) S^T q

With `exact` tokens T, near leaves are looked at token by token in W directions, and the T of largest logits are exact.
What is left of such a leaf answers as a far leaf: Z_b = sum exp(q.k_l) in W directions, v_mean_b over its tokens.

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
from .near import heaviest, marked, near_answers
from .statistics import log, merge_pieces, moments_of
from .tree import Tree, rows_of

LEAST = 1e-4  # of a leaf's weight: where less is left, it has the mean of the whole leaf, not a small difference


class Narrow(NamedTuple):
    """Queries and keys as the far field sees them, of W directions."""

    query: Tensor  # (B, H, n, W)
    key: Tensor  # (B, H, K r, m, W)


class Levels(NamedTuple):
    """What rows meet."""

    clusters: Far  # (B, H, K), with one response for all
    leaves: Far  # (B, H, K r), without any
    narrower: Tensor  # (B, H, 1): a
    tokens: Tokens  # of the leaves
    near_keys: Tensor | None  # (B, H, K r, m, W) where few near tokens are exact
    exact: Exact | None


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

    Cost a row: (K + t r) (2 W + E) + W E + u m (D + E), or with T exact tokens u m W + T (D + E) in its place.
    """
    far = Narrow(q, key) if narrow is None else narrow
    moments = moments_of(far.key, value, slots)
    owner = torch.arange(tree.count, device=q.device).repeat_interleave(tree.leaves)[None, None]
    clusters = Far.of(merge_pieces(moments, owner, tree.count)).pooled()
    leaves = Far.of(moments)._replace(response=None)
    narrower = _narrower(far.query, leaves, clusters)
    tokens = Tokens(key, value, log(slots))
    B, H, _, D = q.shape
    (E, m), W = (value.shape[-1], key.shape[-2]), far.query.shape[-1]
    leaves_met, near = tree.opened * tree.leaves, form.near if isinstance(form.near, int) else 0
    near = min(near, leaves_met)
    few = 0 < tree.exact < near * m
    at_once, grouped = _at_once(q, tree), not few and tokens.grouped(q.unsqueeze(-2), True)
    of_row = 4 * tree.count
    if few:
        dense = _dense(q, near, key.shape[2])
        of_row += 4 * near * m + (3 * key.shape[2] * m if dense else near * m * W + tree.exact * (D + E))
    else:
        of_row += near * (m + 3 * (D + E) if grouped else m * (D + E))
    of_row += 3 * tree.count * tree.leaves + 6 * leaves_met if at_once else leaves_met * (2 * W + E)
    step = max(1, room(q, grouped) // max(1, B * H * of_row))
    levels = Levels(clusters, leaves, narrower, tokens, far.key if few else None, exact)
    parts = [
        recomputed(_rows, rows, seen, levels, tree, form)
        for rows, seen in zip(q.split(step, 2), far.query.split(step, 2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _narrower(q: Tensor, leaves: Far, clusters: Far) -> Tensor:
    """Mean s^2 over rows and leaves, beside that over rows and clusters: (B, H, 1). Cost: D a row and leaf."""
    squares = q.square().mean(-2)

    def mean(far: Far) -> Tensor:
        return (far.shares * (far.spread @ squares.unsqueeze(-1)).squeeze(-1)).sum(-1, keepdim=True)

    return ratio(mean(leaves), mean(clusters))


def _rows(q: Tensor, seen: Tensor, levels: Levels, tree: Tree, form: Form) -> Tensor:
    """Of rows q (B, H, n, D), as the far field sees them (B, H, n, W)."""
    clusters, leaves, narrower, tokens, near_keys, exact = levels
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
    near, few = min(near, ids.shape[-1]), None
    if near:
        chosen = _largest(leaf_Z, leaf_variance, near, form)  # among those of open clusters
        logits[1] = _without(leaf_Z, chosen)
        which = ids.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
        if near_keys is not None:
            few = Few.of(q, seen, chosen, which, levels, tree.exact)
            logits.append(few.logits)
            values.append(few.value)
        elif tokens.grouped(q.unsqueeze(-2), True):
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
    if few is not None:
        logits.append(few.rest)
    w = list(softmax_or_zero(torch.cat(logits, -1)).split([x.shape[-1] for x in logits], -1))
    answering = w[1]  # leaves that answer as a whole
    if few is not None:
        answering, w[1], w[2] = few.shared(w.pop(), w[1], w[2])
        if few.value.ndim == w[2].ndim:  # values of all tokens, of which the exact ones have a weight
            w[2] = w[2].new_zeros(*w[2].shape[:-1], few.value.shape[-2]).scatter_add(-1, few.place, w[2])
    lift = (w[0] * gain(variance, closure)).sum(-1) + narrower * (answering * gain(leaf_variance, closure)).sum(-1)
    if at_once:  # leaf 0 stands for those of no cluster, with a weight of 0
        w[1] = w[1].new_zeros(*ids.shape[:-1], leaf_values.shape[-2]).scatter_add(-1, ids, w[1])
    out = torch.zeros_like(values[0][..., :1, :])
    for weight, value in zip(w, values, strict=True):
        each = value.ndim > weight.ndim  # clusters or tokens of each row's own
        out = out + ((weight.unsqueeze(-2) @ value).squeeze(-2) if each else weight @ value)
    if clusters.pool is not None and form.response != 0:
        out = out + lift.unsqueeze(-1) * (seen @ clusters.pool)
    return out


class Few(NamedTuple):
    """Of near leaves of each row the T tokens of the largest logits, exact; and what is left of these leaves."""

    logits: Tensor  # (B, H, n, T) of the exact tokens
    value: Tensor  # (B, H, n, T, E), or of all tokens (B, H, K r m, E)
    place: Tensor  # (B, H, n, T): the exact tokens among all
    weight: Tensor  # (B, H, n, T), as key_mask has it
    leaf: Tensor  # (B, H, n, T): the place among near leaves
    rest: Tensor  # (B, H, n, u m): logits of the others in W directions, -inf for exact ones
    left: Tensor  # (B, H, n, u): weight of the others
    whole: Tensor  # (B, H, n, u): weight of each near leaf
    chosen: Tensor  # (B, H, n, u): places of near leaves among those of open clusters

    @classmethod
    def of(cls, q: Tensor, seen: Tensor, chosen: Tensor, which: Tensor, levels: Levels, count: int) -> Few:
        """Of `count` tokens of leaves `which` (B, H, n, u), -1 for none."""
        tokens, near_keys = levels.tokens, levels.near_keys
        assert near_keys is not None
        u, m = which.shape[-1], near_keys.shape[-2]
        dense = _dense(q, u, near_keys.shape[2])
        if dense:
            logits, log_weight = _of_all(seen, near_keys, tokens.log_weight, which)
        else:
            key, _, log_weight = Tokens(near_keys, near_keys[..., :0], tokens.log_weight).gather(which)
            logits = (key @ seen.unsqueeze(-1)).squeeze(-1) + log_weight  # (B, H, n, u m)
        best = logits.detach().topk(count, -1).indices
        leaf, own_weight = best // m, log_weight.gather(-1, best)
        place = which.clamp(min=0).gather(-1, leaf) * m + best % m
        exact, value = logits.gather(-1, best), tokens.value.flatten(2, 3)
        if near_keys is not tokens.key:  # these were all directions already
            keys = tokens.key.flatten(2, 3)
            met = (q @ keys.mT).gather(-1, place) if dense else (_at(keys, place) @ q.unsqueeze(-1)).squeeze(-1)
            exact = met + own_weight
        value = value if dense else _at(value, place)
        left = log_weight.exp().scatter(-1, best, 0).unflatten(-1, (u, m)).sum(-1)
        whole = (
            levels.leaves.log_weight.exp().unsqueeze(-2).expand(*which.shape[:-1], -1).gather(-1, which.clamp(min=0))
        )
        rest = logits.scatter(-1, best, ABSENT)
        return cls(exact, value, place, own_weight.exp(), leaf, rest, left, whole, chosen.clamp(min=0))

    def shared(self, w: Tensor, leaves: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of leaves that respond, of the leaves' values and of the exact tokens' values.

        w (B, H, n, u m) is what the others got, `leaves` (B, H, n, t r) and `tokens` (B, H, n, T) the rest of that
        softmax. Their mean value is that of the whole leaf without its exact tokens: no value is read for it.
        """
        mass = w.unflatten(-1, (self.left.shape[-1], -1)).sum(-1)
        apart = self.left > LEAST * self.whole
        each = torch.where(apart, ratio(mass, self.left), 0)  # of one unit of weight
        of_leaf = torch.where(apart, each * self.whole, mass)
        return (
            leaves.scatter_add(-1, self.chosen, mass),
            leaves.scatter_add(-1, self.chosen, of_leaf),
            tokens - each.gather(-1, self.leaf) * self.weight,
        )


def _at_once(q: Tensor, tree: Tree) -> bool:
    """Whether rows meet all leaves in one product and take of it what they opened, K / t times the multiply-adds.

    That is quicker than to move the statistics of t r leaves to each row: on a CPU 2.5 times for 16 of 64 clusters.
    """
    return tree.count <= 32 * tree.opened


def _dense(q: Tensor, near: int, leaves: int) -> bool:
    """Whether rows meet all tokens in one product and take of it those of near leaves.

    A GPU multiplies a hundred numbers in the time that it takes to move one, and gradients of what many rows were given
    would be added up one by one. On a CPU tokens are moved.
    """
    return q.device.type != "cpu" and leaves <= 32 * near


def _of_all(q: Tensor, key: Tensor, log_weight: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and log weights (B, H, n, u m) of leaves `which` (B, H, n, u), -1 for none, from q (B, H, n, W) times all
    of key (B, H, K r, m, W); log_weight (B, H or 1, K r, m)."""
    m = key.shape[-2]
    ids = (which.clamp(min=0).unsqueeze(-1) * m + torch.arange(m, device=q.device)).flatten(-2)
    weights = log_weight.flatten(2).unsqueeze(-2).expand(*which.shape[:-1], -1).gather(-1, ids)
    weights = weights.masked_fill((which < 0).repeat_interleave(m, -1), ABSENT)
    return (q @ key.flatten(2, 3).mT).gather(-1, ids) + weights, weights


def _largest(log_Z: Tensor, variance: Tensor, count: int, form: Form) -> Tensor:
    """Numbers (..., n, count) of the clusters of each row by the rank of the form, -1 where there are fewer."""
    rank = "mass" if form.rank == "mass" else "error"
    return heaviest(log_Z.detach(), variance.detach(), count, rank, None, True, True)


def _without(log_Z: Tensor, which: Tensor) -> Tensor:
    """log Z with -inf at `which`, -1 for none."""
    return log_Z.masked_fill(marked(which, log_Z.shape[-1]), ABSENT)


def _picked(far: Far, ids: Tensor) -> Far:
    """Of clusters (B, H, K), those with numbers ids (B, H, n, a) as lists of each row."""

    def take(x: Tensor) -> Tensor:
        return _at(x.flatten(3) if x.ndim > 3 else x.unsqueeze(-1), ids)

    return Far(take(far.log_weight).squeeze(-1), take(far.key_mean), take(far.value_mean), take(far.spread), None)


def _at(x: Tensor, ids: Tensor) -> Tensor:
    """Rows of x (B, H or 1, K, F) with numbers ids (B, H, n, a): (B, H, n, a, F)."""
    x = x.expand(*ids.shape[:2], *x.shape[2:])
    return rows_of(x.flatten(0, 1), ids.flatten(0, 1).flatten(1)).view(*ids.shape, x.shape[-1])
