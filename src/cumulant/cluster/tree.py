"""Clusters by content, all of one size: keys are halved along the direction in which queries tell them apart most.

Shape legend: N heads of all sequences, L tokens (P padded), R tokens that look at them, D width, S of them sampled.

Two tokens are as far apart as the logits that S sampled queries give them: x = k q_s, and half of <(q.(k - k'))^2> is
their plain distance. Halving is by the median along the first principal direction of x, found by a few steps of power
iteration: after log2 K rounds there are K clusters of L / K tokens, in a row once the tokens are put in that order.
That costs S D + (2 steps + 1) S log2 K a token, a seventh of KMeans(64), and no shape depends on what the tokens hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import check_count


@dataclass(frozen=True)
class Tree:
    """`count` clusters of one size by content, for each head of each sequence; a power of two.

    Args:
        count: how many clusters; of fewer tokens, the largest power of two that leaves none empty.
        leaves: into how many leaves each cluster divides, a power of two. With 2 or more, each query opens the `opened`
            clusters whose error is largest, meets their leaves instead, and `near` counts leaves among those.
        opened: clusters that a query opens, with leaves.
        sample: queries that say how far keys are apart.
        iterations: steps of power iteration for each halving.
    """

    count: int
    leaves: int = 1
    opened: int = 0
    sample: int = 64
    iterations: int = 2

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("leaves", 1), ("opened", 0), ("sample", 1), ("iterations", 0)):
            check_count(f"{name} of Tree", getattr(self, name), least)
        for name in ("count", "leaves"):
            number = getattr(self, name)
            if number & (number - 1):
                lower = 1 << (number.bit_length() - 1)
                raise ValueError(f"{name} of Tree must be a power of two, got {number}: take {lower} or {2 * lower}")
        if (self.leaves > 1) != (self.opened > 0):
            raise ValueError(
                "leaves and opened of Tree go together: with leaves=4, opened=8 a query sees the leaves of 8 clusters, "
                f"got leaves={self.leaves}, opened={self.opened}"
            )

    def for_tokens(self, L: int) -> Tree:
        """The same with no more clusters than L tokens, and no more leaves than a cluster has tokens."""
        count = min(self.count, 1 << (max(1, L).bit_length() - 1))
        leaves = min(self.leaves, max(1, 1 << ((max(1, L) // count).bit_length() - 1)))
        opened = min(self.opened, count) if leaves > 1 else 0
        return Tree(count, leaves, opened, self.sample, self.iterations)

    def multiply_adds(self, L: int, D: int) -> float:
        """Of the search, for L keys of width D."""
        levels = (self.count * self.leaves).bit_length() - 1
        sample = min(self.sample, L)
        return float(L) * sample * (D + levels * (2 * self.iterations + 1))


@torch.no_grad()
def tree_order(looking: Tensor, tokens: Tensor, parts: int, options: Tree, absent: Tensor | None = None) -> Tensor:
    """The order (N, L) of tokens (N, L, D) in which `parts` runs of ceil(L / parts) are alike to looking (N, R, D).

    Tokens that are `absent` (N, L) come last.
    """
    N, L, _ = tokens.shape
    x = tokens @ _spread_out(looking, options.sample).mT  # (N, L, S)
    size = -(-L // parts)
    order = torch.arange(parts * size, device=x.device).expand(N, -1)
    there = order < L
    if absent is not None:
        there = there & ~F.pad(absent, (0, parts * size - L))
    # What is no number is alike to nothing: it must not reach the mean of the others.
    x = F.pad(x.nan_to_num(0.0, 0.0, 0.0), (0, 0, 0, parts * size - L)) * there.unsqueeze(-1)
    nodes = 1
    while nodes < parts:
        place = _along(x.unflatten(1, (nodes, -1)), there.unflatten(1, (nodes, -1)), options.iterations).argsort(-1)
        first = torch.arange(0, parts * size, parts * size // nodes, device=x.device)
        place = (place + first[:, None]).flatten(1)
        order, there = order.gather(1, place), there.gather(1, place)
        x = x.gather(1, place.unsqueeze(-1).expand_as(x))
        nodes *= 2
    return order[:, :L] if parts * size == L else _without_padding(order, L)


def _spread_out(x: Tensor, count: int) -> Tensor:
    """`count` rows of x (N, R, D) at places that follow the golden ratio: no grid has its period."""
    R = x.shape[1]
    if count >= R:
        return x
    places = (torch.arange(count, dtype=torch.float64, device=x.device) * 0.6180339887498949) % 1 * R
    return x[:, places.long()]


def _along(x: Tensor, there: Tensor, iterations: int) -> Tensor:
    """Places of tokens x (N, nodes, m, S) along the first principal direction of each node; inf for those not there."""
    number = there.sum(-1, keepdim=True).clamp(min=1).unsqueeze(-1)
    x = (x - x.sum(-2, keepdim=True) / number) * there.unsqueeze(-1)
    far = x.square().sum(-1).argmax(-1)  # the token farthest from the mean
    direction = x.gather(-2, far[..., None, None].expand(*far.shape, 1, x.shape[-1]))
    for _ in range(iterations):
        direction = (x @ direction.mT).mT @ x
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return (x @ direction.mT).squeeze(-1).masked_fill(~there, float("inf"))


def _without_padding(order: Tensor, L: int) -> Tensor:
    """The first L of each row that are tokens, in their order."""
    return order.gather(1, torch.argsort((order >= L).to(torch.int8), dim=1, stable=True)[:, :L])
