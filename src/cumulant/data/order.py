"""The order of the data: which item comes at which step is a function of the seed and the epoch, of nothing else.

B: global batch, N: items of the part, n: slots of one epoch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Seeds = NDArray[np.int64]

GOLDEN = 0x9E3779B97F4A7C15


def mix(*words: int | NDArray[np.int64]) -> Seeds:
    """Integers (broadcast against each other) -> well mixed, non-negative int64: SplitMix64, one round a word."""
    state = np.zeros(np.broadcast_shapes(*(np.shape(word) for word in words)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = state + np.uint64(GOLDEN) + np.asarray(word, dtype=np.int64).astype(np.uint64)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(1)).astype(np.int64)


def epoch_order(
    items: int,
    batch: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    repeats: int,
    drop_last: bool,
    shards: NDArray[np.int64] | None = None,
    window: int = 0,
    lanes: int = 1,
) -> tuple[NDArray[np.int64], Seeds | None]:
    """Positions (n,) of one epoch in the order of use, and one seed (n,) a slot (None without shuffling).

    With `repeats` r every global batch is r copies, one after the other, of ceil(B / r) distinct items (cut to B),
    so that an epoch keeps its number of steps and sees about N / r items; copies stand B / r apart, so that
    neighbours, which mixup pairs, are different items. With `window` w, `shards` (N,) being the shard of each item, w
    shards at a time are shuffled among themselves, and the shards before. With `lanes` l the order is cut into l equal
    pieces, and each batch takes B / l items of each in turn: l readers then have shards of their own.
    """
    slots = items // batch * batch if drop_last else items
    if not shuffle:
        return np.arange(slots), None
    generator = torch.Generator().manual_seed(int(mix(seed, epoch)))
    if window and shards is not None:
        shuffled = by_shards(shards, window, generator)
        if lanes > 1:
            steps = len(shuffled) // batch  # what is left behind the last whole batch has no lane
            lined = shuffled[: steps * batch].reshape(lanes, steps, batch // lanes).swapaxes(0, 1).reshape(-1)
            shuffled = np.concatenate([lined, shuffled[steps * batch :]])
    else:
        shuffled = torch.randperm(items, generator=generator).numpy()
    if repeats > 1:
        batches, taken = [], 0
        for first in range(0, slots, batch):
            length = min(batch, slots - first)
            distinct = shuffled[taken : taken + -(-length // repeats)]
            batches.append(np.tile(distinct, repeats)[:length])
            taken += len(distinct)
        shuffled = np.concatenate(batches) if batches else shuffled
    return shuffled[:slots], mix(seed, epoch, np.arange(slots))


def by_shards(shards: NDArray[np.int64], window: int, generator: torch.Generator) -> NDArray[np.int64]:
    """All positions (N,), shuffled so that at any time only `window` shards are read from."""
    _, number, counts = np.unique(shards, return_inverse=True, return_counts=True)
    its = np.split(np.argsort(number, kind="stable"), np.cumsum(counts)[:-1])
    order = torch.randperm(len(its), generator=generator).tolist()
    mixed = []
    for first in range(0, len(order), window):
        some = np.concatenate([its[shard] for shard in order[first : first + window]])
        mixed.append(some[torch.randperm(len(some), generator=generator).numpy()])
    return np.concatenate(mixed)


def rank_slice(length: int, rank: int, world: int) -> slice:
    """The contiguous share of a rank in a batch of `length`; the shares of all ranks make up the batch."""
    return slice(length * rank // world, length * (rank + 1) // world)
