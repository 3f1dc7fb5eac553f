"""Clusters by content, all of one size: keys are halved along the direction in which queries tell them apart most.

Shape legend: N heads of all sequences, L tokens (P padded), R tokens that look at them, D width, S of them sampled.

Two tokens are as far apart as the logits that S sampled queries give them: x = k q_s, and half of <(q.(k - k'))^2> is
their plain distance. Halving is by the median along the first principal direction of x, found by a few steps of power
iteration: after log2 K rounds there are K clusters of L / K tokens, in a row once the tokens are put in that order.
That costs S D + (2 steps + 1) S log2 K a token, a seventh of KMeans(64), and no shape depends on what the tokens hold.
With a `width` x are the coordinates of the keys in so many directions instead (`basis`).
In a node of many tokens, ENOUGH of them say in which direction it is cut; where it is cut is the median of all.
On a GPU kernels.tree does all this in one to five launches a level, without a sort: 128 tokens of every node there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import check_count
from ..kernels.launch import HAS_TRITON
from ..tensors import inverse
from .basis import basis_work, spread_out

ENOUGH = 256  # tokens of a node that say in which direction it is cut, where it has four times as many


@dataclass(frozen=True)
class Tree:
    """`count` clusters of one size by content, for each head of each sequence; a power of two.

    Args:
        count: how many clusters; of fewer tokens, the largest power of two that leaves none empty.
        leaves: into how many leaves each cluster divides, a power of two. With 2 or more, each query opens the `opened`
            clusters whose error is largest, meets their leaves instead, and `near` counts leaves among those.
        opened: clusters that a query opens, with leaves.
        patch: tokens of a side of a grid that stay together: squares of them are halved by the mean of their keys, at
            1 / patch^2 of the search. Where that does not divide the grid, or with a key_mask, tokens go one by one.
        sample: queries that say how far keys are apart.
        iterations: steps of power iteration for each halving.
        width: of so many directions (`basis.logit_basis`) keys are compared and, with leaves, clusters are met; near
            tokens are exact with all. 0, or no fewer than the heads have: all.
        exact: with leaves, so many tokens of the near leaves are exact, for each query those of its largest logits in
            `width` directions; what is left of a near leaf answers together. 0: all of them.
    """

    count: int
    leaves: int = 1
    opened: int = 0
    patch: int = 1
    sample: int = 64
    iterations: int = 2
    width: int = 0
    exact: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("count", 1),
            ("leaves", 1),
            ("opened", 0),
            ("patch", 1),
            ("sample", 1),
            ("iterations", 0),
            ("width", 0),
            ("exact", 0),
        ):
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
        if self.exact and self.leaves == 1:
            raise ValueError(
                "exact of Tree says how many tokens of near leaves are exact: it needs leaves and opened, as in "
                f"Tree(64, leaves=8, opened=16, exact=160), got leaves=1, exact={self.exact}"
            )

    def for_tokens(self, L: int) -> Tree:
        """The same with no more clusters than L tokens, and no more leaves than a cluster has tokens."""
        count = min(self.count, 1 << (max(1, L).bit_length() - 1))
        leaves = min(self.leaves, max(1, 1 << ((max(1, L) // count).bit_length() - 1)))
        opened = min(self.opened, count) if leaves > 1 else 0
        return replace(self, count=count, leaves=leaves, opened=opened, exact=self.exact if leaves > 1 else 0)

    def multiply_adds(self, L: int, D: int) -> float:
        """Of the search, for L keys of width D; with a patch, of a picture that it divides."""
        if self.patch > 1:
            return L * D + replace(self, patch=1).multiply_adds(L // self.patch**2, D)
        levels = (self.count * self.leaves).bit_length() - 1
        sample = self.width if self.narrow(D) else min(self.sample, L)
        looks = sum(_enough(L >> level) / (L >> level) for level in range(levels) if L >> level)
        if self.narrow(D):  # the keys' own product is D width a token too
            return float(L) * sample * (D + levels + 2 * self.iterations * looks) + basis_work(L, L, D)
        return float(L) * sample * (D + levels + 2 * self.iterations * looks)

    def narrow(self, D: int) -> bool:
        """Whether heads of width D have more directions than this takes."""
        return 0 < self.width < D


@torch.no_grad()
def tree_order(looking: Tensor, tokens: Tensor, parts: int, options: Tree, absent: Tensor | None = None) -> Tensor:
    """The order (N, L) of tokens (N, L, D) in which `parts` runs of ceil(L / parts) are alike to looking (N, R, D).

    Tokens that are `absent` (N, L) are in the last runs.
    """
    return order_of(tokens @ spread_out(looking, options.sample).mT, parts, options, absent)


@torch.no_grad()
def order_of(x: Tensor, parts: int, options: Tree, absent: Tensor | None = None) -> Tensor:
    """The same of tokens x (N, L, S) whose plain distance says how far they are apart."""
    if x.is_cuda and HAS_TRITON:
        from ..kernels.tree import host

        if host.fits(x):
            return host.order(x, parts, options.iterations, absent)
    N, L, _ = x.shape
    x = x.nan_to_num(0.0, 0.0, 0.0)  # what is no number is alike to nothing: it must not reach the mean of the others
    size = -(-L // parts)
    order = torch.arange(parts * size, device=x.device).expand(N, -1)
    there = None
    if absent is not None or parts * size != L:
        there = order < L
        if absent is not None:
            there = there & ~F.pad(absent, (0, parts * size - L))
        x = F.pad(x, (0, 0, 0, parts * size - L)) * there.unsqueeze(-1)
    nodes = 1
    while nodes < parts:
        place = _sorted(_along(x, there, nodes, options.iterations))
        order = order.gather(1, place)
        there = None if there is None else there.gather(1, place)
        nodes *= 2
        if nodes < parts:
            x = rows_of(x, place)
    return order if parts * size == L else _without_padding(order, L)


def rows_of(x: Tensor, order: Tensor) -> Tensor:
    """Rows `order` (N, M) of x (N, L, W): (N, M, W). Whole rows at once, which a gather by element is not."""
    first = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
    return x.flatten(0, 1).index_select(0, (order + first[:, None]).flatten()).view(*order.shape, x.shape[-1])


def permuted(x: Tensor, order: Tensor, back: bool = False) -> Tensor:
    """`rows_of` an order (N, L) of all rows of x (N, L, W), or the inverse."""
    if x.is_cuda and HAS_TRITON:
        from ..kernels.tree import rows

        if rows.fits(x):
            out: Tensor = rows.Permuted.apply(x, order, back)
            return out
    return rows_of(x, inverse(order) if back else order)


def _enough(m: int) -> int:
    """So many of the m tokens of a node say in which direction it is cut."""
    return ENOUGH if m >= 4 * ENOUGH else m


def _sorted(places: Tensor) -> Tensor:
    """Numbers (N, nodes m) of the tokens of each row, node after node in the order of places (N, nodes, m)."""
    if places.device.type == "cuda":
        return _sorted_at_once(places)
    first = torch.arange(0, places[0].numel(), places.shape[-1], device=places.device)
    return (places.argsort(-1) + first[:, None]).flatten(1)


def _sorted_at_once(places: Tensor) -> Tensor:
    """The same by one sort of all, for a GPU: there torch sorts a few long rows one after the other."""
    N, nodes, m = places.shape
    bits = places.float().view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # whole numbers in the order of the places
    node = torch.arange(N * nodes, device=places.device).view(N, nodes, 1)
    found = ((node << 32) + bits).flatten().argsort()
    return found.view(N, -1) - torch.arange(0, N * nodes * m, nodes * m, device=places.device)[:, None]


def _along(x: Tensor, there: Tensor | None, nodes: int, iterations: int) -> Tensor:
    """Places (N, nodes, m) of tokens x (N, nodes m, S) along the first principal direction of their node; inf for those
    that are not `there` (N, nodes m)."""
    x = x.unflatten(1, (nodes, -1))
    present = None if there is None else there.unflatten(1, (nodes, -1)).unsqueeze(-1)
    some = spread_out(x, _enough(x.shape[-2]))
    if present is None:
        mean = some.mean(-2, keepdim=True)
        some = some - mean
    else:
        here = spread_out(present, _enough(x.shape[-2]))
        mean = some.sum(-2, keepdim=True) / here.sum(-2, keepdim=True).clamp(min=1)
        some = (some - mean) * here
    far = some.square().sum(-1).argmax(-1)  # the token farthest from the mean
    direction = some.gather(-2, far[..., None, None].expand(*far.shape, 1, x.shape[-1]))
    for _ in range(iterations):
        direction = (some @ direction.mT).mT @ some
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    places = (x - mean) @ direction.mT
    return (places if present is None else places.masked_fill(~present, float("inf"))).squeeze(-1)


def _without_padding(order: Tensor, L: int) -> Tensor:
    """The first L of each row that are tokens, in their order."""
    return order.gather(1, torch.argsort((order >= L).to(torch.int8), dim=1, stable=True)[:, :L])
