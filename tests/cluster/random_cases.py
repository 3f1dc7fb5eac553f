"""Random calls of cluster attention, with the oracle that answers them: shapes, clusters, near fields, masks, types."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from cluster_oracle import Margin, causal, noncausal
from torch import Tensor

from cumulant.cluster import Blocks, KMeans, kmeans_assignment
from cumulant.cluster.alike import as_before, in_order, order_by_content
from cumulant.cluster.layout import divide


@dataclass
class Example:
    """inputs (q, k, v), options of the call, and the oracle for the same inputs in float64."""

    inputs: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    oracle: Callable[..., Tensor]
    margin: Margin


def cut(tokens: int, parts: int) -> list[int]:
    """Numbers of `parts` runs of tokens whose lengths differ by one at most."""
    return [max(c for c in range(parts) if -(-c * tokens // parts) <= i) for i in range(tokens)]


def on_grid(grid: tuple[int, ...], blocks: tuple[int, ...]) -> Tensor:
    sides = [cut(side, parts) for side, parts in zip(grid, blocks, strict=True)]
    cells = [tuple(side[i] for side, i in zip(sides, at, strict=True)) for at in product(*map(range, grid))]
    numbers = {cell: n for n, cell in enumerate(product(*map(range, blocks)))}
    return torch.tensor([numbers[cell] for cell in cells])


def touching(blocks: tuple[int, ...]) -> Callable[[int], list[int]]:
    cells = list(product(*map(range, blocks)))

    def beside(c: int) -> list[int]:
        return [n for n, x in enumerate(cells) if all(abs(a - b) <= 1 for a, b in zip(cells[c], x, strict=True))]

    return beside


def example(seed: int) -> Example:
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = r.choice([torch.float64] * 4 + [torch.float32] * 2 + [torch.bfloat16])
    is_causal = r.random() < 0.3
    B, Hk, G, D, E = (r.choice(x) for x in ([1, 1, 2], [1, 2], [1, 1, 2], [1, 3, 4, 8], [1, 3, 8]))
    prefix = 0 if is_causal else r.choice([0, 0, 1, 2])
    kinds = ["count", "blocks"] if is_causal else ["count", "count", "blocks", "grid", "grid", "assignment", "k-means"]
    kind = r.choice(kinds)
    grid = r.choice([(3, 4), (2, 5), (4, 4), (2, 2, 3), (1, 7), (2, 3, 2)]) if kind == "grid" else None
    L = math.prod(grid) if grid else r.choice([1, 2, 5, 9, 13, 16, 20])
    Lk = L + prefix
    Lq = Lk if r.random() < 0.6 else r.choice([1, 3, 7, 11])
    order = r.choice([(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])  # of the dimensions in memory

    def draw(H: int, length: int, width: int) -> Tensor:
        shape = [(B, H, length, width)[i] for i in order]
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).permute(*order)

    q, k, v = r.choice([0.3, 1, 2]) * draw(Hk * G, Lq, D), draw(Hk, Lk, D) + r.choice([0, 2]), draw(Hk, Lk, E)
    mask = _mask(r, generator, B, Lk)
    w = None if mask is None else mask.double()
    form = {
        "closure": r.choice(["gauss", "tanh", "langevin"]),
        "variance": r.choice(["diagonal", "diagonal", "full"]),
        "rank": r.choice(["mass", "mass", "error", "mean"]),
        "response": r.choice([None, None, 0, 1, 2, 5, *([] if is_causal else ["pooled"])]),
        "scale": r.choice([None, None, None, 0.1, 1.0, -0.5, 0.0]),
    }
    options = {**form, "key_mask": mask, "enable_gqa": G > 1}
    margin = Margin()
    if is_causal:
        clusters: Any = r.choice([1, 2, 3, 5, 30])
        blocks = Blocks(max(1, -(-Lq // clusters)))
        if kind == "blocks":
            clusters = blocks = Blocks(r.choice([1, 2, 3, 5, 40]), r.choice([None, 0, 1, 3]), r.choice([0, 1, 2, 9]))
        near = r.choice([0, 0, 1, 2, 50]) if blocks.keep is None else 0
        first = r.choice([0, 0, 1, 3])
        rule = {"size": blocks.size, "keep": blocks.keep, "recent": blocks.recent, "prefix": first}
        options |= {"clusters": clusters, "near": near, "is_causal": True, "prefix": first}
        return Example(
            (q, k, v), options, lambda *x: causal(*x, weights=w, near=near, margin=margin, **rule, **form), margin
        )
    least = r.choice([1, 1, 2, 3]) if kind == "count" else 1
    standing, beside = None, (lambda c: [c - 1, c, c + 1])
    if kind == "count":
        clusters = r.choice([1, 2, 3, 4, 7, 40])
        standing, ids = _of_those_that_take_part(w, B, Hk, L, prefix, clusters, least)
    elif kind == "blocks":
        clusters = Blocks(r.choice([1, 2, 4, 7, 50]))
        ids = (torch.arange(L) // clusters.size).expand(B, Hk, L)
    elif kind == "grid":
        sides = tuple(r.randint(1, side) for side in grid)
        count = r.choice([1, 2, 4, 6, 9])
        clusters, sides = (sides, sides) if r.random() < 0.5 else (count, divide(grid, count))
        ids, beside = on_grid(grid, sides).expand(B, Hk, L), touching(sides)
    elif kind == "assignment":
        shape = r.choice([(L,), (1, L), (Hk, L), (B, Hk, L), (B, 1, L), (1, Hk, L)])
        clusters = torch.randint(0, r.choice([1, 2, 4, 9]), shape, generator=generator)
        clusters = clusters.to(r.choice([torch.int64, torch.int32, torch.uint8, torch.uint16]))
        ids = clusters.long().expand(B, Hk, L)
    else:
        search = KMeans(
            r.choice([1, 2, 4, 30]), r.choice([0, 1, 5]), r.choice([1, 2]), r.choice(["full", "diagonal", "none"])
        )
        among = None if mask is None else mask[:, prefix:]
        ids = kmeans_assignment(q, k[:, :, prefix:], search, key_mask=among, enable_gqa=G > 1)
        sees = dtype == torch.float64 and (form["scale"] is None or form["scale"] > 0)
        clusters = search if sees else ids  # in narrow types a key may lie as near to two centres
    have_neighbours = Lq == Lk and kind not in ("assignment", "k-means")
    near = r.choice([0, 0, 1, 2, 3, 50, *(["neighbours"] * 2 if have_neighbours else [])])
    rows = r.choice([1, 1, 1, 2, 3, 5, 64])
    together = have_neighbours and near != "neighbours" and r.random() < 0.15
    queries = "mean" if together else "each"
    options |= {"clusters": clusters, "near": near, "near_rows": rows, "prefix": prefix, "grid": grid, "least": least}
    options |= {"queries": queries}
    how = {
        "weights": w,
        "prefix": prefix,
        "near": near,
        "near_rows": 1 if near == "neighbours" else rows,
        "touching": beside,
        "standing": ids[:, 0] if standing is None else standing,
        "queries": queries,
        "margin": margin,
    }
    if rows == 1 or kind not in ("assignment", "k-means"):
        return Example((q, k, v), options, lambda *x: noncausal(*x, ids, **how, **form), margin)
    alike = order_by_content(q, k, mask, rows, prefix)

    def in_tiles(query: Tensor, *x: Tensor) -> Tensor:
        return as_before(noncausal(in_order(query, alike), *x, ids, **how, **form), alike)

    return Example((q, k, v), options, in_tiles, margin)


def _mask(r: random.Random, generator: torch.Generator, B: int, L: int) -> Tensor | None:
    kind = r.choice(["none"] * 5 + ["some", "some", "weights", "all", "from the left"])
    if kind == "none":
        return None
    drawn = torch.rand(B, L, generator=generator, dtype=torch.float64)
    mask = {"some": drawn > 0.35, "weights": 2 * drawn * (drawn > 0.2), "all": drawn >= 0}.get(kind)
    if mask is None:
        mask = torch.arange(L) >= torch.randint(0, L, (B, 1), generator=generator)
    if r.random() < 0.15:
        mask[0] = 0  # nothing is left
    return mask


def _of_those_that_take_part(
    weights: Tensor | None, B: int, Hk: int, L: int, prefix: int, count: int, least: int
) -> tuple[Tensor, Tensor]:
    """Block in which each token stands (B, L), and of each key (B, Hk, L), when absent tokens move the borders."""
    standing = torch.zeros(B, L, dtype=torch.long)
    for b in range(B):
        there = [True] * L if weights is None else (weights[b, prefix:] > 0).tolist()
        n = sum(there)
        numbers, last = iter(cut(n, max(1, min(count, -(-n // least))))), 0
        for i in range(L):
            last = next(numbers) if there[i] else last
            standing[b, i] = last
    return standing, standing[:, None].expand(B, Hk, L)
