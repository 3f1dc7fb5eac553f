"""Where the tokens of each cluster are: blocks of a sequence, blocks of a grid, or any assignment, in one form.

Shape legend: B batch (or 1), H key heads (or 1), L tokens, K clusters, N pieces of m tokens, u pieces of a cluster.

A layout cuts the tokens into N pieces of at most m. A block is one piece; a cluster of an arbitrary assignment may be
several, so that one large cluster does not pad all others to its size: N m <= 1.5 L whatever the assignment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Grid, whole
from ..moments import ratio
from ..tracing import transformed


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` consecutive tokens, however many; what causal attention and streams use.

    Args:
        size: tokens of a block.
        keep: None keeps every past block apart. A number merges old blocks in pairs, pairs of pairs, ...: of each
            size the newest `keep` (or one more) stay apart, so that L tokens make about (keep + 1) log2(L / size)
            clusters. 0 is a binary counter.
        recent: so many whole blocks before the current one are exact too.
    """

    size: int
    keep: int | None = None
    recent: int = 0

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("keep", 0), ("recent", 0)):
            number = getattr(self, name)
            if not whole(number, least) and not (name == "keep" and number is None):
                raise ValueError(f"{name} of Blocks must be an integer of at least {least}, got {number!r}")


class Layout(NamedTuple):
    """Pieces of the tokens, and the clusters they belong to."""

    pieces: int  # N
    size: int  # m
    clusters: int  # K
    places: Tensor | None = None  # (B, H, N, m) places of the tokens; None: one after the other
    present: Tensor | None = None  # (B, H, N, m) slots that hold a token; None: all
    owner: Tensor | None = None  # (B, H, N) cluster of each piece; None: each piece is one
    members: Tensor | None = None  # (B, H, K, u) pieces of each cluster, -1 where there are fewer
    adjacent: Tensor | None = None  # (K, t) blocks beside each block and itself, -1 for none; blocks only
    place: Tensor | None = None  # (B, L) block of each token where a mask moves the borders; blocks only
    sides: tuple[tuple[int, int], ...] = ()  # blocks of a grid and tokens of each, side by side, where they divide it

    def pack(self, x: Tensor) -> Tensor:
        """Tokens x (B, H, L, W) as (B, H, N, m, W); empty slots hold some token, and have weight 0."""
        if self.places is None and not self.sides:
            return x.unflatten(-2, (self.pieces, self.size))
        if self.sides:  # a permutation: as such it is quicker than as an index, above all backward
            n = len(self.sides)
            x = x.unflatten(-2, [count for side in self.sides for count in side])
            x = x.permute(0, 1, *range(2, 2 + 2 * n, 2), *range(3, 3 + 2 * n, 2), -1)
            return x.reshape(*x.shape[:2], self.pieces, self.size, x.shape[-1])
        assert self.places is not None
        if self.places.shape[:2] == (1, 1):
            return x[..., self.places[0, 0].flatten(), :].unflatten(-2, (self.pieces, self.size))
        index = self.places.flatten(-2).expand(*x.shape[:2], -1)
        packed = x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
        return packed.unflatten(-2, (self.pieces, self.size))

    def unpack(self, x: Tensor, length: int) -> Tensor:
        """The inverse of `pack`: (..., N, m, W) -> (..., L, W), for layouts that are the same in every sequence."""
        if self.sides:
            n, lead = len(self.sides), x.ndim - 3
            x = x.reshape(*x.shape[:-3], *(a for a, _ in self.sides), *(b for _, b in self.sides), x.shape[-1])
            along = [lead + side + inside * n for side in range(n) for inside in (0, 1)]
            return x.permute(*range(lead), *along, lead + 2 * n).flatten(lead, lead + 2 * n - 1)
        x = x.flatten(-3, -2)
        if self.places is None or self.present is None:
            return x if self.places is None else x[..., self.places.flatten().argsort(), :]
        place = torch.where(self.present, self.places, length).flatten()
        slots = torch.arange(place.numel(), device=place.device)
        found = place.new_zeros(length + 1).scatter(0, place, slots)
        return x[..., found[:-1], :]

    def means(self, x: Tensor, slots: Tensor) -> Tensor:
        """Means of tokens x (B, H, G, L, W) over each block, (B, H, G, K, W); slots (B, 1, N, m) weigh them."""
        packed = torch.stack([self.pack(part) for part in x.unbind(2)], 2)
        share = ratio(slots, slots.sum(-1, keepdim=True)).unsqueeze(2).unsqueeze(-1)
        return (share * packed).sum(-2)

    def handed_out(self, x: Tensor, length: int) -> Tensor:
        """x (B, H, G, K, W) of blocks for each of their tokens, (B, H, G, L, W)."""
        if self.place is None:
            return self.unpack(x.unsqueeze(-2).expand(*x.shape[:-1], self.size, x.shape[-1]), length)
        index = self.place[:, None, None, :, None].expand(*x.shape[:3], -1, x.shape[-1])
        return x.gather(-2, index)

    def weights(self, key: Tensor, weights: Tensor | None) -> Tensor:
        """Weights (B, H or 1, N, m) of the slots, from those of the tokens (B, 1, L) or ones."""
        if weights is None:
            if self.present is None:
                return key.new_ones(1, 1, self.pieces, self.size)
            return self.present.to(key.dtype)
        weights = weights.to(key.dtype)
        if self.places is not None and self.places.shape[1] != 1:  # each head has clusters of its own
            weights = weights.expand(*key.shape[:-1])
        packed = self.pack(weights.unsqueeze(-1)).squeeze(-1)
        return packed if self.present is None else torch.where(self.present, packed, 0)


def consecutive(
    L: int, count: int, weights: Tensor | None = None, device: torch.device | None = None, least: int = 1
) -> Layout:
    """`count` blocks of consecutive tokens whose sizes differ by one at most, none smaller than `least` if avoidable.

    With weights (B, L) the blocks are those of the tokens that take part: absent tokens move the borders, exactly as
    if they had been taken out.
    """
    K = min(count, max(1, -(-L // least)))
    adjacent = beside((K,), device)
    if weights is None and L % K == 0 and L:
        return Layout(K, L // K, K, adjacent=adjacent)
    if weights is None:
        places, there = _cut(L, K, device)
        return Layout(K, places.shape[1], K, places[None, None], there[None, None], adjacent=adjacent)
    taking = weights > 0
    number = taking.sum(-1, keepdim=True)  # (B, 1)
    blocks = (-(-number // least)).clamp(min=1, max=K)
    starts = torch.minimum(-(-torch.arange(K + 1, device=device) * number // blocks), number)
    size = max(least, -(-L // K))
    rank = starts[:, :-1, None] + torch.arange(size, device=device)  # (B, K, m)
    present = rank < starts[:, 1:, None]
    order = torch.argsort((~taking).to(torch.int8), dim=-1, stable=True)
    index = order.gather(-1, rank.clamp(max=max(0, L - 1)).flatten(1)).view_as(rank) if L else rank
    # A query at an absent token stands where the last token that takes part before it does.
    standing = torch.minimum((taking.cumsum(-1) - 1).clamp(min=0), (number - 1).clamp(min=0))
    place = standing * blocks // number.clamp(min=1)
    return Layout(K, size, K, index[:, None], present[:, None], adjacent=adjacent, place=place)


def of_size(size: int, L: int, device: torch.device) -> Layout:
    """Blocks of exactly `size` tokens, the last one as long as the rest."""
    count = max(1, -(-L // size))
    adjacent = beside((count,), device)
    if count * size == L:
        return Layout(count, size, count, adjacent=adjacent)
    place = torch.arange(count * size, device=device).view(1, 1, count, size)
    return Layout(count, size, count, place.clamp(max=max(0, L - 1)), place < L, adjacent=adjacent)


def on_grid(grid: Grid, blocks: Grid, device: torch.device | None = None) -> Layout:
    """Blocks of a grid of tokens (rows, cols) or (frames, rows, cols); `blocks` says how many along each side."""
    sides = [_cut(side, parts, device) for side, parts in zip(grid, blocks, strict=True)]
    place = torch.zeros((), dtype=torch.long, device=device)
    present = torch.ones((), dtype=torch.bool, device=device)
    for (index, there), side in zip(sides, grid, strict=True):
        # (b1, m1, b2, m2, ...): each side multiplies the places by its length and adds its own.
        place = place[..., None, None] * side + index
        present = present[..., None, None] & there
    outer, inner = range(0, 2 * len(grid), 2), range(1, 2 * len(grid), 2)
    K, size = math.prod(blocks), math.prod([index.shape[1] for index, _ in sides])
    place, present = (x.permute(*outer, *inner).reshape(1, 1, K, size) for x in (place, present))
    full = all(side % parts == 0 for side, parts in zip(grid, blocks, strict=True))
    cuts = tuple((parts, side // parts) for side, parts in zip(grid, blocks, strict=True)) if full else ()
    return Layout(K, size, K, place, None if full else present, adjacent=beside(blocks, device), sides=cuts)


def tiled(grid: Grid, tile: Grid) -> Layout:
    """Tiles of so many tokens a side, which divide the grid, to `pack` and `unpack`: no tensor is made for them."""
    sides = tuple((side // size, size) for side, size in zip(grid, tile, strict=True))
    K = math.prod([count for count, _ in sides])  # a list: torch.compile takes no generator here
    return Layout(K, math.prod(tile), K, sides=sides)


def assigned(ids: Tensor, count: int, near: bool) -> Layout:
    """Any assignment ids (B, H, L) in [0, count). Cost: a sort of L numbers; `near` asks for the pieces by cluster."""
    L = ids.shape[-1]
    size = max(1, L // (2 * count))
    N = L // size + count
    numbers = torch.zeros(*ids.shape[:-1], count, dtype=torch.long, device=ids.device)
    numbers = numbers.scatter_add(-1, ids, torch.ones_like(ids))
    pieces = -(-numbers // size)
    first_token, first_piece = (F.pad(x, (1, -1)).cumsum(-1) for x in (numbers, pieces))
    order = torch.argsort(ids, dim=-1, stable=True)
    cluster = ids.gather(-1, order)
    rank = torch.arange(L, device=ids.device) - first_token.gather(-1, cluster)
    slot = (first_piece.gather(-1, cluster) + rank // size) * size + rank % size
    index = torch.zeros(*ids.shape[:-1], N * size, dtype=torch.long, device=ids.device).scatter(-1, slot, order)
    present = torch.zeros_like(index, dtype=torch.bool).scatter(-1, slot, True)
    number = torch.arange(N, device=ids.device)
    owner = torch.searchsorted(pieces.cumsum(-1), number.expand(*ids.shape[:-1], N).contiguous(), right=True)
    members = None
    if near:
        hidden = transformed() or ids.is_meta  # then nobody may look at the numbers: as many as there could be
        widest = N if hidden else max(1, int(pieces.max())) if pieces.numel() else 1
        step = torch.arange(widest, device=ids.device)
        members = (first_piece.unsqueeze(-1) + step).masked_fill(step >= pieces.unsqueeze(-1), -1)
    shape = (*ids.shape[:-1], N, size)
    # Pieces that no cluster needed hold nothing; the last cluster may own them.
    owner = owner.clamp(max=count - 1)
    return Layout(N, size, count, index.view(shape), present.view(shape), owner, members)


def divide(grid: Grid, count: int, least: int = 1) -> Grid:
    """About `count` blocks as cubic as the grid allows; as many as there are tokens: every token its own.

    The prime factors of count go to the longest block side. A 2 that would make blocks of fewer than `least` tokens is
    left out; where a larger factor does not fit, the next smaller count is divided instead: 7 on (4, 4) is (2, 3).
    """
    tokens = math.prod(grid)
    if least == 1 and count >= tokens:
        return tuple(max(1, side) for side in grid)
    while True:
        blocks, left_out = _shared_out(grid, count, least)
        if left_out <= 2:
            return blocks
        count = min(count - 1, tokens)


def _shared_out(grid: Grid, count: int, least: int) -> tuple[Grid, int]:
    """Blocks along each side, and the largest prime factor of count that found no place (1: all did)."""
    blocks, left_out = [1] * len(grid), 1
    for prime in _primes(count, max(grid)):
        longest = max(side / cuts for side, cuts in zip(grid, blocks, strict=True))
        axis = max(a for a in range(len(grid)) if grid[a] / blocks[a] == longest)
        if grid[axis] // blocks[axis] >= prime and math.prod(grid) >= least * prime * math.prod(blocks):
            blocks[axis] *= prime
        else:
            left_out = max(left_out, prime)
    return tuple(blocks), left_out


def cuts(blocks: Grid, grid: Grid) -> bool:
    """Whether `blocks` are as many numbers as the grid has sides, each of 1 to that many parts of it."""
    fits = (whole(b, 1) and b <= max(1, side) for b, side in zip(blocks, grid, strict=False))
    return len(blocks) == len(grid) and all(fits)


def check_grid(tokens: int, grid: Sequence[int] | None, prefix: int) -> Grid | None:
    """The grid as a tuple; raises if it and the prefix do not make the tokens."""
    if not whole(prefix) or prefix > tokens:
        raise ValueError(f"prefix must lie between 0 and the {tokens} tokens, got {prefix!r}")
    if grid is None:
        return None
    if not isinstance(grid, Sequence) or len(grid) not in (2, 3):
        raise ValueError(f"grid must be (rows, cols) or (frames, rows, cols), got {grid!r}")
    if not all(map(whole, grid)):
        raise ValueError(f"grid must be (rows, cols) or (frames, rows, cols) in whole numbers, got {grid!r}")
    if math.prod(grid) != tokens - prefix:
        raise ValueError(
            f"grid {tuple(grid)} holds {math.prod(grid)} tokens, but there are {tokens} keys, {prefix} of them prefix: "
            f"{tokens - prefix}; pass grid= and prefix= that fit"
        )
    return tuple(grid)


def _cut(side: int, parts: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Places (parts, m) along a side cut into parts that differ by one at most, and which of them are there."""
    starts = -(-torch.arange(parts + 1, device=device) * side // parts)
    place = starts[:-1, None] + torch.arange(max(1, -(-side // parts)), device=device)
    return place.clamp(max=max(0, side - 1)), place < starts[1:, None]


def beside(blocks: Grid, device: torch.device | None) -> Tensor:
    """(K, 3^n): the blocks that touch each block of a grid of blocks, itself among them, -1 beyond the border."""
    at = torch.stack(torch.meshgrid(*(torch.arange(b, device=device) for b in blocks), indexing="ij"), -1)
    steps = torch.tensor(list(product((-1, 0, 1), repeat=len(blocks))), device=device)
    near = at.reshape(-1, 1, len(blocks)) + steps
    sides = torch.tensor(blocks, device=device)
    strides = torch.tensor([math.prod(blocks[i + 1 :]) for i in range(len(blocks))], device=device)
    outside = ((near < 0) | (near >= sides)).any(-1)
    return (near * strides).sum(-1).masked_fill(outside, -1)


def _primes(number: int, most: int) -> list[int]:
    """Prime factors, the largest first; what is left of the number once they exceed `most` comes as one."""
    found, p = [], 2
    while p * p <= number and p <= most:
        while number % p == 0:
            found.append(p)
            number //= p
        p += 1
    return [number, *found[::-1]] if number > 1 else found[::-1]
