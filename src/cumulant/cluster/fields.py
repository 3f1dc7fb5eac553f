"""Near and far field under one softmax: the heart of cluster attention, blockwise.

Shape legend: B batch, H key heads, N query blocks of n rows, K clusters, N' pieces of m tokens, u pieces of a cluster,
t near clusters, p exact tokens, D, E widths. Queries carry the scale.

    log Z_c = log W_c + q.k_mean_c + phi(s_c)          s_c^2 = sum_i q_i^2 P_ci / W_c      (or q^T P_c q / W_c)
    out = sum_c w_c (v_mean_c + f(s_c) S_c^T q / W_c) + sum_l w_l v_l       (pooled: sum S / sum W instead of S_c / W_c)
    (w_c, w_l) = softmax over (log Z_c of far clusters, q.k_l + log weight_l of near and exact tokens)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..closures import gain, log_mass
from ..kernels import launch
from ..moments import Moments, ratio
from ..tensors import ABSENT, softmax_or_zero
from ..tracing import constant, transformed
from .backend import Form
from .near import fused, groups, heaviest, largest, marked, near_answers, responding
from .statistics import log


def room(q: Tensor, grouped: bool = False) -> int:
    """Numbers that blocks of rows may hold at once: 4 million, or eight times the queries where those are many.

    Without gradients a CPU is best kept at the few that its caches hold; with them blocks are computed twice. Rows that
    go to the clusters they chose are `grouped`: four times as many of them make products of a fair size. A GPU waits
    for launches where blocks are small: it is given a 128th of its memory, and no more than 1 GiB.
    """
    if q.device.type == "cpu" and not torch.is_grad_enabled():
        return 1 << (24 if grouped else 22)
    return max(1 << 22, 8 * q.numel(), min(1 << 28, _memory(q.device) // 512))


_memory = constant(launch.memory)


class Far(NamedTuple):
    """What a far field needs of its clusters: leading dimensions (B, H), or (B, H, N) once `listed`."""

    log_weight: Tensor  # (..., K), -inf for empty clusters
    key_mean: Tensor  # (..., K, D)
    value_mean: Tensor  # (..., K, E)
    spread: Tensor  # (..., K, D) or (..., K, D, D): P / W
    response: Tensor | None  # (..., K, D, E): S / W
    pool: Tensor | None = None  # (B, H, D, E): one response for all clusters

    @classmethod
    def of(cls, moments: Moments) -> Far:
        """From moments (B, H, K)."""
        W, k, v, S, P, _ = moments
        assert P is not None
        matrix = torch.where(W > 0, W, 1)[..., None, None]  # divided by: one over the smallest weights is no number
        spread = P / (matrix if moments.full else matrix.squeeze(-1))
        return cls(log(W), k, v, spread, None if S is None else S / matrix)

    @property
    def shares(self) -> Tensor:
        """W_c / sum of W, (B, H, K)."""
        W = self.log_weight.exp()
        return ratio(W, W.sum(-1, keepdim=True))

    def pooled(self) -> Far:
        """With one response in place of K, the covariance within clusters: sum_c S_c / sum_c W_c. Cost: K D E."""
        every = torch.ones(1, self.log_weight.shape[-1], dtype=torch.bool, device=self.log_weight.device)
        return self._replace(response=None, pool=self.pools(every).squeeze(-3))

    def pools(self, seen: Tensor) -> Tensor:
        """That of the clusters which each block of rows sees, (N, K) bool: (B, H, N, D, E). Cost: N K D E."""
        assert self.response is not None
        W = self.log_weight.exp().unsqueeze(-2) * seen
        return (ratio(W, W.sum(-1, keepdim=True)) @ self.response.flatten(-2)).unflatten(-1, self.response.shape[-2:])

    def listed(self, table: Tensor) -> Far:
        """Clusters (B, H, K) as lists of their own for blocks of rows: table (N, A), -1 for none -> (B, H, N, A)."""

        def take(x: Tensor) -> Tensor:
            return x[:, :, table.clamp(min=0)]

        log_weight = take(self.log_weight).masked_fill(table < 0, ABSENT)
        response = None if self.response is None else take(self.response)
        return Far(log_weight, take(self.key_mean), take(self.value_mean), take(self.spread), response)

    def masses(self, q: Tensor, closure: str) -> tuple[Tensor, Tensor]:
        """log Z and s^2 of every cluster for rows q (..., n, D): (..., n, K) each. Cost: 2 n K D (n K D^2 full)."""
        if self.spread.ndim > self.key_mean.ndim:
            D = q.shape[-1]
            stacked = self.spread.transpose(-3, -2).flatten(-2)  # (..., D, K D)
            variance = ((q @ stacked).unflatten(-1, (-1, D)) * q.unsqueeze(-2)).sum(-1).clamp(min=0)
        else:
            variance = (q * q) @ self.spread.mT
        log_Z = self.log_weight.unsqueeze(-2) + q @ self.key_mean.mT + log_mass(variance, closure)
        return log_Z, variance

    def mean_masses(self, q: Tensor, rows: Tensor | None, closure: str) -> Tensor:
        """log of the mean of Z over the rows q (B, H, N, n, D) of a block, from two cumulants of theirs: (B, H, N, K).

            log W_c + <q>.k_mean_c + 1/2 sum_i var(q_i) (k_mean_c - k_mean)_i^2 + phi(s_c)
            s_c^2 = s_c^2(<q>) + sum_i var(q_i) P_ci / W_c

        up to a number that all clusters share. rows (N, n) bool are rows that exist. Cost a block: 3 K D.
        """
        if rows is None:
            mean = q.mean(-2)
            on_cpu = q.device.type == "cpu"  # where torch's own takes one number at a time
            variance = (q - mean.unsqueeze(-2)).square().mean(-2) if on_cpu else q.var(-2, correction=0)
        else:
            there = rows.to(q.dtype).unsqueeze(-1)
            count = there.sum(-2).clamp(min=1)
            mean = (q * there).sum(-2) / count
            variance = ((q - mean.unsqueeze(-2)).square() * there).sum(-2) / count
        full = self.spread.ndim > self.key_mean.ndim
        spread = self.spread.diagonal(dim1=-2, dim2=-1) if full else self.spread
        away = self.key_mean - (self.shares.unsqueeze(-1) * self.key_mean).sum(-2, keepdim=True)
        s2 = self.masses(mean, closure)[1] + variance @ spread.mT
        linear = self.log_weight.unsqueeze(-2) + mean @ self.key_mean.mT
        return linear + 0.5 * variance @ away.square().mT + log_mass(s2, closure)

    def values(self, q: Tensor, w: Tensor, variance: Tensor, form: Form, which: Tensor | None = None) -> Tensor:
        """sum_c w_c (v_mean_c + f_c S_c^T q), (..., n, E), responses of the heaviest clusters of each row only.

        Or of the clusters `which` (B, H, N, r) of each block of rows, with q (B, H, N, n, D).
        """
        out = w @ (self.value_mean if which is None else self.value_mean.unsqueeze(2))
        if self.pool is None and self.response is None:
            return out
        g = w * gain(variance, form.closure)
        if self.pool is not None:
            return out + g.sum(-1, keepdim=True) * (q @ self.pool)
        assert self.response is not None
        if which is not None:
            g = g.gather(-1, which.unsqueeze(-2).expand(*w.shape[:-1], which.shape[-1]))
            return out + _outer(g, q) @ self._picked(which)  # (B, H, N, n, r D) @ (B, H, N, r D, E)
        if form.response is None or form.response >= w.shape[-1]:
            return out + _outer(g, q) @ self.response.flatten(-3, -2)
        g, own = g.topk(form.response, -1)
        return out + (_outer(g, q).unsqueeze(-2) @ self._picked(own)).squeeze(-2)

    def _picked(self, which: Tensor) -> Tensor:
        """Responses of clusters `which` (..., x, r), stacked: (..., x, r D, E)."""
        assert self.response is not None
        K, D, E = self.response.shape[-3:]
        flat = self.response.flatten(-2).expand(*which.shape[:-2], K, D * E)
        index = which.flatten(-2).unsqueeze(-1)
        picked = flat.gather(-2, index.expand(*index.shape[:-1], D * E))
        return picked.unflatten(-1, (D, E)).unflatten(-3, which.shape[-2:]).flatten(-3, -2)


def _outer(g: Tensor, q: Tensor) -> Tensor:
    """g (..., K) times q (..., D), as (..., K D)."""
    return (g.unsqueeze(-1) * q.unsqueeze(-2)).flatten(-2)


class Tokens(NamedTuple):
    """Tokens in pieces, for what is exact: (B, H, N', m, D), (B, H, N', m, E), (B, H or 1, N', m)."""

    key: Tensor
    value: Tensor
    log_weight: Tensor
    members: Tensor | None = None  # (B, H, K, u) pieces of each cluster; None: piece c is cluster c
    owner: Tensor | None = None  # (B, H, N') cluster of each piece, with `members`

    def dense(self, near: int) -> bool:
        """Whether a masked product over all tokens is quicker than gathering those of `near` clusters for each row.

        Clusters of very different sizes are padded to the largest when they are gathered; plain torch then loses more
        by moving tokens about than by multiplying too many.
        """
        return self.members is not None and 8 * near * self.members.shape[-1] >= self.key.shape[2]

    def grouped(self, q: Tensor, by_row: bool) -> bool:
        """Whether rows q (..., n, D) go to the clusters they chose, instead of tokens to them."""
        return groups(q, 1 if by_row else q.shape[-2], self.key.shape[-2])

    def pieces(self, which: Tensor) -> Tensor:
        """Pieces of clusters `which` (B, H, N, t), -1 for none: (B, H, N, t u)."""
        if self.members is None:
            return which
        members = self.members.expand(*which.shape[:2], *self.members.shape[2:])
        index = which.clamp(min=0).flatten(-2).unsqueeze(-1)
        found = members.gather(-2, index.expand(*index.shape[:-1], members.shape[-1]))
        return found.unflatten(-2, which.shape[-2:]).masked_fill((which < 0).unsqueeze(-1), -1).flatten(-2)

    def masked(self, taken: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All keys and values (B, H, 1, N' m, ...), and log weights of those in clusters `taken` (B, H, N, n, K)."""
        assert self.owner is not None
        lead = taken.shape[:-1]
        owner = self.owner[:, :, None, None, :].expand(*lead, self.owner.shape[-1])
        m = self.key.shape[-2]
        inside = taken.gather(-1, owner).repeat_interleave(m, -1)
        log_weight = torch.where(inside, self.log_weight.flatten(-2)[:, :, None, None, :], ABSENT)
        return self.key.flatten(2, 3).unsqueeze(2), self.value.flatten(2, 3).unsqueeze(2), log_weight

    def gather(self, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and log weights of clusters `which` (B, H, N, t), -1 for none: (B, H, N, t u m, ...)."""
        which = self.pieces(which)
        (B, H, N, t), count = which.shape, self.key.shape[2]
        first = torch.arange(0, B * H * count, count, device=which.device).view(B, H, 1, 1)
        index = (which.clamp(min=0) + first).flatten()

        def take(x: Tensor) -> Tensor:
            x = x.expand(B, H, *x.shape[2:]).flatten(3)
            return x.flatten(0, 2).index_select(0, index).view(B, H, N, t, x.shape[-1])

        m = self.key.shape[-2]
        log_weight = take(self.log_weight).masked_fill((which < 0).unsqueeze(-1), ABSENT).flatten(-2)
        key, value = (take(x).unflatten(-1, (m, -1)).flatten(-3, -2) for x in (self.key, self.value))
        return key, value, log_weight


class Exact(NamedTuple):
    """Tokens that every row sees one by one: prefix tokens, or the blocks around the current one when causal."""

    key: Tensor  # (B, H, N or 1, p, D)
    value: Tensor  # (B, H, N or 1, p, E)
    log_weight: Tensor  # (B, H or 1, N or 1, n or 1, p), -inf for what a row may not see


class Seen(NamedTuple):
    """What blocks of rows meet beside the clusters, and which of those."""

    exact: Exact | None = None
    near: int | Tensor = 0  # so many clusters, or their numbers (.., .., N, t)
    rows: Tensor | None = None  # (N, n) bool, rows that exist
    hidden: Tensor | None = None  # (N, K) bool, clusters that a block may not see
    table: Tensor | None = None  # (N, A), the clusters of each block instead of all, -1 for none
    pool: Tensor | None = None  # (B, H, N, D, E), one response for all clusters that a block sees

    def part(self, at: slice, N: int) -> Seen:
        """For some of the N blocks of rows."""
        exact = None if self.exact is None else Exact(*(_cut(x, at, N) for x in self.exact))
        near = self.near if isinstance(self.near, int) else _cut(self.near, at, N)
        rows, hidden, table = (None if x is None else x[at] for x in (self.rows, self.hidden, self.table))
        return Seen(exact, near, rows, hidden, table, None if self.pool is None else self.pool[:, :, at])


def mix(q: Tensor, far: Far, tokens: Tokens | None, seen: Seen, form: Form, by_row: bool = False) -> Tensor:
    """Attention of rows q (B, H, N, n, D) over clusters and tokens, (B, H, N, n, E), in blocks of rows.

    A number of near clusters is chosen for each block of n rows (for each row of it if `by_row`), those that respond
    likewise, by each row where `near` are numbers of clusters.
    Cost a row: 2 K D + K E + (response or K) D E + t u m (D + E); memory O(L (D + E)).
    """
    near, table, exact, most = seen.near, seen.table, seen.exact, form.response
    B, H, N, n, D = q.shape
    E, K = far.value_mean.shape[-1], far.log_weight.shape[-1] if table is None else table.shape[-1]
    count = near if isinstance(near, int) else near.shape[-1]
    of_row, grouped = 4 * K + (0 if exact is None else exact.key.shape[-2]), False
    of_block = 0 if table is None else K * (2 * D + E + D * E)
    if far.response is not None:
        if most is None or _by_block(most, K, n, table is None, by_row or not isinstance(near, int)):
            of_row += min(K if most is None else most, K) * D
            of_block += 0 if most is None else most * D * E
        else:
            of_row += min(most, K) * D * E
    if far.spread.ndim > far.key_mean.ndim:
        of_row += K * D
    if count and tokens is not None:
        pieces = count * (1 if tokens.members is None else tokens.members.shape[-1])
        beside = pieces * tokens.key.shape[-2]
        if tokens.dense(count):
            of_row += 2 * tokens.key.shape[2] * tokens.key.shape[3]
        elif grouped := tokens.grouped(q, by_row):
            of_row += 3 * pieces * (tokens.key.shape[-2] + D + E)
        else:
            of_row += beside * (1 + (D + E if by_row else 0))
            of_block += 0 if by_row else beside * (D + E)
    step = max(1, room(q, grouped) // max(1, B * H * (n * of_row + of_block)))
    if step >= N:
        return _rows(q, far, tokens, seen, form, by_row)
    outs = []
    for start in range(0, N, step):
        at = slice(start, start + step)
        # What a block holds grows with K D and t m D.
        outs.append(recomputed(_rows, q[:, :, at], far, tokens, seen.part(at, N), form, by_row))
    return torch.cat(outs, 2)


def recomputed(block: Callable[..., Tensor], *parts: Any) -> Tensor:
    """block(*parts), computed once more in the backward pass: what it holds is then held for one block at a time."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed():
        return checkpoint(block, *parts, use_reentrant=False)
    return block(*parts)


def _cut(x: Tensor, at: slice, N: int) -> Tensor:
    return x if x.shape[2] != N else x[:, :, at]


def _rows(q: Tensor, far: Far, tokens: Tokens | None, seen: Seen, form: Form, by_row: bool) -> Tensor:
    exact, near, rows, hidden, table, pool = seen
    closure, most = form.closure, form.response
    B, H, N, n, _ = q.shape
    shared = table is None  # one set of clusters for all rows: one matmul over all of them
    if table is not None:
        far = far.listed(table)
    K = far.log_weight.shape[-1]
    log_Z, variance = far.masses(q.flatten(2, 3) if shared else q, closure)
    if shared:
        log_Z, variance = (x.unflatten(2, (N, n)) for x in (log_Z, variance))
    if hidden is not None:
        log_Z = log_Z.masked_fill(hidden[:, None, :], ABSENT)
    logits, values = [log_Z], []
    taken = None
    which = near if isinstance(near, Tensor) else None
    if isinstance(near, int) and near:
        masses = log_Z.detach(), variance.detach()
        which = nearest(q.detach(), far, near, rows, form, by_row, masses, pool is not None)
    if which is not None and tokens is not None and which.shape[-1]:
        which = which.expand(B, H, *which.shape[2:])
        taken = marked(which, K)  # near clusters leave the far field
        logits[0] = log_Z.masked_fill(taken if by_row else taken.unsqueeze(-2), ABSENT)
        if tokens.dense(which.shape[-1]):
            key, value, log_weight = tokens.masked(taken if by_row else taken.unsqueeze(-2))
            logits.append((q.flatten(2, 3) @ key.squeeze(2).mT).unflatten(2, (N, n)) + log_weight)
        elif tokens.grouped(q, by_row):
            blocks = q.flatten(2, 3).unsqueeze(-2) if by_row else q
            chosen = which.flatten(2, 3) if by_row else which
            mass, value = near_answers(blocks, tokens.pieces(chosen), tokens.key, tokens.value, tokens.log_weight)
            mass, value = (x.flatten(2, 3).unflatten(2, (N, n)) for x in (mass, value))
            logits.append(mass)
        elif by_row:  # each row has tokens of its own: (B, H, N n, t m, D) as (B, H, N, n, t m, D)
            near_tokens = tokens.gather(which.flatten(2, 3))
            key, value, log_weight = (x.unflatten(2, (N, n)) for x in near_tokens)
            logits.append((key @ q.unsqueeze(-1)).squeeze(-1) + log_weight)
        else:
            key, value, log_weight = tokens.gather(which)
            answer = fused(q, key, value, log_weight)
            if answer is None:
                logits.append(q @ key.mT + log_weight.unsqueeze(-2))
            else:
                logits.append(answer[0])
                value = answer[1]
        values.append(value)
    if exact is not None:
        if exact.key.shape[2] == 1:
            product = (q.flatten(2, 3) @ exact.key.squeeze(2).mT).unflatten(2, (N, n))
        else:
            product = q @ exact.key.mT
        logits.append(product + exact.log_weight)
        values.append(exact.value)
    w = softmax_or_zero(torch.cat(logits, -1))
    parts = w.split([x.shape[-1] for x in logits], -1)
    far_w = parts[0]
    each = by_row or isinstance(near, Tensor)  # who is given a near field still chooses alone who responds
    if far.response is not None and most is not None and _by_block(most, K, n, shared, each):
        chosen = responding(log_Z.detach(), variance.detach(), most, closure, rows, taken)
        out = far.values(q, far_w, variance, form, chosen)
    elif shared:
        q_flat, w_flat, s_flat = (x.flatten(2, 3) for x in (q, far_w, variance))
        out = far.values(q_flat, w_flat, s_flat, form).unflatten(2, (N, n))
    else:
        out = far.values(q, far_w, variance, form)
    if pool is not None:
        out = out + (far_w * gain(variance, closure)).sum(-1, keepdim=True) * (q @ pool)
    for weight, value in zip(parts[1:], values, strict=True):
        if value.ndim > weight.ndim:  # tokens of each row's own
            out = out + (weight.unsqueeze(-2) @ value).squeeze(-2)
        elif value.shape[2] == 1:  # the same tokens for all blocks of rows: one product
            out = out + (weight.flatten(2, 3) @ value.squeeze(2)).unflatten(2, (N, n))
        else:
            out = out + weight @ value
    return out


def nearest(
    q: Tensor,
    far: Far,
    near: int,
    rows: Tensor | None,
    form: Form,
    by_row: bool,
    masses: tuple[Tensor, Tensor],
    pooled: bool = False,
) -> Tensor:
    """Numbers of the `near` clusters of each block of rows q (B, H, N, n, D), or of each row, -1 for none.

    `masses` are log Z and s^2 of every row, (B, H, N, n, K) each; `pooled`: blocks of rows have a response of theirs.
    """
    if form.rank == "mean" and q.shape[-2] > 1 and not by_row:
        return largest(far.mean_masses(q, rows, form.closure).detach(), near)
    return heaviest(*masses, near, form.rank, rows, by_row, pooled or far.pool is not None)


def _by_block(most: int, K: int, n: int, shared: bool, by_row: bool) -> bool:
    """Whether the clusters that respond are chosen for a block of rows, not for each row."""
    return 0 < most < K and n > 1 and shared and not by_row
