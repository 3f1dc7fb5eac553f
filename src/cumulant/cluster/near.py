"""Which clusters of a block of queries are near, and which respond; and the near field cluster by cluster: queries go
to the clusters they chose, instead of the clusters' tokens to them.

Shape legend: B batch, H key heads, R blocks of n query rows, t near clusters of a block, K clusters of m tokens, D, E
widths; a pair is a block of rows and one of its near clusters.

Gathered for each block, near tokens are R t m (D + E) numbers to be moved; queries are R t n D. Pairs are sorted by
cluster and every cluster is multiplied with all rows that chose it. Each pair gives log Z = log sum_l weight_l
exp(q.k_l) and the mean value under those weights: to the shared softmax a near cluster is a cluster that is known
exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..closures import gain
from ..tensors import ABSENT, in_line, softmax_or_zero
from ..tracing import is_plain, transformed
from .tree import rows_of

RANKS = ("mass", "error", "mean")
FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
SLICE = 1  # rows of a cluster in one product, in units of what a cluster gets on average


def groups(q: Tensor, rows: int, tokens: int) -> bool:
    """Whether `rows` that choose together are few beside the tokens of a cluster, and q is on a CPU.

    How many chose a cluster must be known: elsewhere that waits for the device, or cannot be traced.
    """
    plain = q.device.type == "cpu" and not torch.compiler.is_compiling() and not transformed()
    return plain and 4 * rows <= tokens


def near_answers(q: Tensor, which: Tensor, key: Tensor, value: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """log Z (B, H, R, n, t) and mean values (B, H, R, n, t, E) of clusters `which` (B, H, R, t), -1 for none.

    q (B, H, R, n, D), key (B, H, K, m, D), value (B, H, K, m, E), log_weight (B, H or 1, K, m).
    Cost: R t n m (D + E); memory R t n (D + E + m), a few times that where most choose the same cluster.
    """
    (B, H, R, n, D), (K, m, E), t = q.shape, (*key.shape[2:4], value.shape[-1]), which.shape[-1]
    pairs = R * t
    flat = torch.where(which < 0, K, which).flatten(2)
    order = flat.argsort(dim=-1, stable=True)
    counts = torch.zeros(B, H, K + 1, dtype=torch.long).scatter_add_(-1, flat, torch.ones_like(flat))
    starts = counts.cumsum(-1) - counts
    longest = counts[..., :K].amax((0, 1))
    log_weight = log_weight.expand(B, H, K, m)
    step = max(1, SLICE * pairs // max(1, K))
    owners, masses, means = [order[..., :0]], [], []
    for start in range(0, int(longest.max()), step):
        active = (longest > start).nonzero().squeeze(-1)  # later slices are those of the clusters that many chose
        place = start + torch.arange(min(step, int(longest.max()) - start))
        at = (starts[..., active].unsqueeze(-1) + place).clamp(max=pairs - 1)
        pair = order.gather(-1, at.flatten(2))  # (B, H, A P)
        rows = rows_of(q.reshape(B * H, R, n * D), (pair // t).flatten(0, 1))
        keys, values, weights = (x if len(active) == K else x[:, :, active] for x in (key, value, log_weight))
        logits = rows.view(B, H, len(active), len(place) * n, D) @ keys.mT + weights.unsqueeze(-2)
        mass, mean = _read(logits, values)
        owners.append(torch.where((place < counts[..., active].unsqueeze(-1)).flatten(2), pair, pairs))
        masses.append(mass.view(B, H, -1, n))
        means.append(mean.view(B, H, -1, n, E))
    masses.append(q.new_full((B, H, 1, n), ABSENT))  # the answer of a pair without a cluster
    means.append(q.new_zeros(B, H, 1, n, E))
    owner, mass, mean = torch.cat(owners, -1), torch.cat(masses, 2), torch.cat(means, 2)
    total = owner.shape[-1]
    found = torch.full((B, H, pairs + 1), total).scatter_(-1, owner, torch.arange(total).expand_as(owner))[..., :pairs]
    mass = mass.gather(2, found.unsqueeze(-1).expand(-1, -1, -1, n)).unflatten(2, (R, t))
    mean = rows_of(mean.reshape(B * H, total + 1, n * E), found.flatten(0, 1)).view(B, H, R, t, n, E)
    return mass.transpose(-1, -2), mean.transpose(-2, -3)


def fused(q: Tensor, key: Tensor, value: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """log Z (B, H, R, n, 1) and mean values (B, H, R, n, 1, E) of tokens that blocks of rows were given, (B, H, R, m).

    By torch's fused softmax of a CPU, in half the time of the products one by one; None where that cannot serve: it
    gives log Z without a gradient, and NaN for rows that see nothing.
    """
    plain = q.device.type == "cpu" and not torch.is_grad_enabled() and is_plain(q) and not transformed()
    if not (plain and FLASH and q.shape[-1] == value.shape[-1] and q.numel()):
        return None
    mask = None
    if log_weight.any():
        if (log_weight.amax(-1) == ABSENT).any():
            return None
        mask = in_line(log_weight).unsqueeze(-2).expand(*q.shape[:-1], -1).flatten(0, 1)
    out, mass = FLASH(*(in_line(x).flatten(0, 1) for x in (q, key, value)), attn_mask=mask, scale=1.0)
    return mass.view(*q.shape[:-1], 1), out.view(*q.shape[:-1], 1, -1)


def _read(logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """log of the sum of exponentials, and the mean value; -inf and 0 where no token has any weight."""
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top == ABSENT, 0, top)
    kernel = (logits - top).exp()
    total = kernel.sum(-1, keepdim=True)
    there = total > 0
    total = torch.where(there, total, 1)
    mass = torch.where(there, top + total.log(), ABSENT).squeeze(-1)
    return mass, (kernel @ value) / total


def marked(which: Tensor, K: int) -> Tensor:
    """Whether lists `which` (..., t), -1 for none, name each of K clusters: (..., K) bool."""
    found = torch.zeros(*which.shape[:-1], K + 1, dtype=torch.bool, device=which.device)
    return found.scatter(-1, torch.where(which < 0, K, which), True)[..., :K]  # a -1 goes to a column that is cut off


def heaviest(
    log_Z: Tensor, variance: Tensor, count: int, rank: str, rows: Tensor | None, by_row: bool, pooled: bool = False
) -> Tensor:
    """The `count` clusters of largest mass, or of largest mass times s^2, for each block or each row of it.

    log_Z, variance (B, H, N, n, K) -> (B, H, N, count) or, by row, (B, H, N, n, count). A block adds up the
    probabilities of its rows. -1 where fewer clusters hold anything: an empty one is exact already, and so, ranked by
    "error", is one without spread, unless a `pooled` response lends it that of others: then it comes last.
    """
    score = log_Z
    if rank == "error":
        least = torch.finfo(variance.dtype).tiny if pooled else 0
        score = log_Z + torch.where(variance > least, variance, least).log()
    if not by_row and score.shape[-2] > 1:
        share = score - log_Z.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        if rows is not None:
            share = share.masked_fill(~rows.unsqueeze(-1), ABSENT)
        score = share.logsumexp(-2)
    elif not by_row:
        score = score.squeeze(-2)
    return largest(score, count)


def largest(score: Tensor, count: int) -> Tensor:
    """Numbers of the `count` largest scores (..., K), -1 in place of those that are -inf."""
    top, which = score.topk(min(count, score.shape[-1]), -1)
    return which.masked_fill(top == ABSENT, -1)


def responding(
    log_Z: Tensor, variance: Tensor, count: int, closure: str, rows: Tensor | None, taken: Tensor | None
) -> Tensor:
    """The `count` clusters (B, H, N, count) with the largest sum over a block's rows of probability times f.

    log_Z, variance (B, H, N, n, K); near clusters, `taken` (B, H, N, K), come last.
    """
    share = softmax_or_zero(log_Z) * gain(variance, closure)
    if rows is not None:
        share = share.masked_fill(~rows.unsqueeze(-1), 0)
    score = share.sum(-2)
    if taken is not None:
        score = score.masked_fill(taken, -1)
    return score.topk(count, -1).indices
