"""Trees over tokens, level by level: which nodes are the children of which.

Shape legend: ... leading dimensions, N tokens, X nodes of a level, P their parents, b most children of a parent.

All tokens lie at the same depth: where a given tree has some higher up, chains of single children lead down to them.
Hierarchical attention does not notice chains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Grid


class Level(NamedTuple):
    """The children of each parent, as indices into the level below, and where each child stands among them."""

    children: Tensor  # (P, b) int64, -1 where there is no child
    place: Tensor  # (X,) int64: node x is child place[x] of all P b
    in_order: bool = False  # children 0, 1, 2 ... of full parents: nothing has to be moved

    @classmethod
    def of(cls, children: Tensor, nodes: int, *, in_order: bool = False) -> Level:
        flat = children.flatten()
        # Absent children are written to one spare entry behind the others.
        place = flat.new_zeros(nodes + 1)
        place = place.scatter(0, torch.where(flat < 0, nodes, flat), torch.arange(len(flat), device=flat.device))
        return cls(children, place[:nodes], in_order)

    def gather(self, x: Tensor, dim: int = -2) -> Tensor:
        """Nodes along `dim` (X) become parents and children, (P, b); absent children hold an arbitrary node."""
        if self.in_order:
            return x.unflatten(dim, self.children.shape)
        taken = x.index_select(dim, self.children.clamp(min=0).flatten())
        return taken.unflatten(dim, self.children.shape)

    def scatter(self, x: Tensor, dim: int = -2) -> Tensor:
        """The inverse: children, flattened along `dim` (P b), become nodes (X)."""
        return x if self.in_order else x.index_select(dim, self.place)


class Tree(NamedTuple):
    """Levels from the tokens to the root, which is the one parent of the last."""

    levels: tuple[Level, ...]

    @property
    def tokens(self) -> int:
        return len(self.levels[0].place)

    @property
    def widths(self) -> tuple[int, ...]:
        """The most children of a parent, for each level from the tokens up."""
        return tuple(level.children.shape[-1] for level in self.levels)

    def to(self, device: Any) -> Tree:
        moved = (Level(one.children.to(device), one.place.to(device), one.in_order) for one in self.levels)
        return Tree(tuple(moved))

    @classmethod
    def windows(
        cls,
        grid: Grid,
        window: int | tuple[int, ...] | None = None,
        *,
        prefix: int = 0,
        levels: int | None = None,
        device: Any = None,
    ) -> Tree:
        """Windows of a grid of tokens, windows of those, and so on, until one root holds what is left.

        grid is (N,), (rows, cols) or (frames, rows, cols). `window` is its sides, or the number of children, whose root
        must be whole; by default 4 of a sequence, 2 along each axis of a grid. After `levels` groupings the root takes
        all nodes that are left. `prefix` tokens before the grid are children of the root.
        """
        steps, _ = window_steps(grid, window, levels)
        node = torch.arange(math.prod(grid), device=device).reshape(grid) + prefix
        extra = torch.arange(prefix, device=device)
        below = prefix + math.prod(grid)
        built: list[Level] = []
        for step in steps:
            short = [x for s, n in zip(reversed(step), reversed(node.shape), strict=True) for x in (0, -n % s)]
            split = [x for s, n in zip(step, F.pad(node, short).shape, strict=True) for x in (n // s, s)]
            cells = F.pad(node, short, value=-1).reshape(split)
            cells = cells.permute(*range(0, 2 * len(grid), 2), *range(1, 2 * len(grid), 2))
            shape, children = cells.shape[: len(grid)], cells.flatten(len(grid)).flatten(0, len(grid) - 1)
            chains = F.pad(extra[:, None], (0, children.shape[-1] - 1), value=-1)
            in_order = len(grid) == 1 and not prefix and not any(short)
            built.append(Level.of(torch.cat((children, chains)), below, in_order=in_order))
            count = math.prod(shape)
            node, below = torch.arange(count, device=device).reshape(shape), count + prefix
            extra = torch.arange(count, below, device=device)
        root = torch.cat((extra, node.flatten()))
        return cls((*built, Level.of(root[None], below, in_order=not prefix)))

    @classmethod
    def nested(cls, tree: Sequence[Any], *, device: Any = None) -> Tree:
        """A tree given as nested sequences of token indices, e.g. [[0, 1, 2], [3, [4, 5]], 6].

        Every token from 0 to N - 1 must occur once.
        """
        tokens = sorted(_leaves(tree))
        if not tokens or tokens != list(range(len(tokens))):
            raise ValueError(f"tree must hold every token from 0 to N - 1 once, got {tokens}")
        nodes: list[Any] = [tree]
        tables: list[tuple[list[list[int]], int]] = []
        for depth in range(_height(tree), 0, -1):
            rows: list[list[int]] = []
            below: list[Any] = []
            for node in nodes:
                children = [node] if isinstance(node, int) else list(node)
                last = depth == 1
                rows.append([c if last else len(below) + i for i, c in enumerate(children)])
                below.extend(children)
            tables.append((rows, len(below)))
            nodes = below
        levels = []
        for rows, count in reversed(tables):
            width = max(map(len, rows))
            padded = [row + [-1] * (width - len(row)) for row in rows]
            levels.append(Level.of(torch.tensor(padded, device=device), count))
        return cls(tuple(levels))


def window_steps(grid: Grid, window: int | tuple[int, ...] | None, levels: int | None) -> tuple[list[Grid], Grid]:
    """The window of each grouping of `Tree.windows`, and the grid of nodes that is left to the root."""
    steps: list[Grid] = []  # annotated, not list[Grid](), which torch.compile does not know
    sides, left = window_sides(window, grid), tuple(grid)
    while math.prod(left) > math.prod(sides) and (levels is None or len(steps) < levels):
        step = tuple(min(s, n) for s, n in zip(sides, left, strict=True))
        if all(s == 1 for s in step):
            break
        steps.append(step)
        left = tuple(-(-n // s) for s, n in zip(step, left, strict=True))
    return steps, left


def window_sides(window: int | tuple[int, ...] | None, grid: Grid) -> tuple[int, ...]:
    """The sides of the windows on a grid, see `Tree.windows`."""
    axes = len(grid)
    if window is None:
        return (4,) if axes == 1 else (2,) * axes
    if isinstance(window, int) and not isinstance(window, bool):
        side = round(max(0, window) ** (1 / axes))
        if window >= 2 and side**axes == window:
            return (side,) * axes
    elif isinstance(window, (tuple, list)) and len(window) == axes and min(window) >= 1 and max(window) >= 2:
        return tuple(window)
    power = {1: "a number", 2: "a square number", 3: "a cube number"}[axes]
    raise ValueError(
        f"branching must be {power} of at least 2 children, or {axes} sides of a window, for tokens on a grid "
        f"{tuple(grid)}; got {window!r}"
    )


def _leaves(node: Any) -> list[int]:
    if isinstance(node, int) and not isinstance(node, bool):
        return [node]
    if not isinstance(node, (list, tuple)) or not node:
        raise ValueError(f"tree must be made of token indices and sequences that are not empty, got {node!r} in it")
    return [leaf for child in node for leaf in _leaves(child)]


def _height(node: Any) -> int:
    return 0 if isinstance(node, int) else 1 + max(_height(child) for child in node)
