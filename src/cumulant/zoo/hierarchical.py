"""Hierarchical self-attention (HSA): attention over a tree of tokens, constant on blocks of sibling subtrees.

Shape legend: ... leading dimensions, H heads, N tokens, D, E widths, X nodes of a level, P parents of up to b nodes.

For siblings B and C with n_B, n_C leaves and means q_B, k_C of them: s_BC = scale q_B.k_C, and from the leaves up

    phi(i) = -s_ii,   Z_B = exp(-phi(B)) + sum_{C sibling of B} n_C exp(s_BC),   phi(A) = -sum_B n_B / n_A log Z_B

Token i gives token j the weight mass(A) exp(s_BC) / Z_B, where B and C are the children of their lowest common
ancestor A that hold i and j, and mass is the product of exp(-phi) / Z on the way from the root down to A. Of all
weights that are constant on such blocks, these are nearest to softmax (in sum_i KL(theta_i | softmax_i)).

No code was released; the value path, the leaf term phi(i) and the dynamic programme were worked out from the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..call import Call, Grid, check_choice, whole
from ..moments import ratio
from ..tensors import ABSENT, nothing, repeat_heads, wide
from .grid import resize_table, resolve_grid, told_grid
from .mixing import Mixer
from .products import factor, one_hot_weights, pair_products
from .registry import can, register
from .tree import Level, Tree, window_sides, window_steps

ENERGIES = ("dot", "l2")


def hierarchical_attention(
    call: Call,
    *,
    branching: int | tuple[int, ...] | None = None,
    levels: int | None = None,
    tree: Tree | Sequence[Any] | None = None,
    energy: str = "dot",
    tables: Sequence[Tensor] | None = None,
) -> Tensor:
    """out_i = sum_j theta_ij v_j with the block weights theta of the tree, by one pass up and one down.

    The tree: windows of `branching` tokens (4 of a sequence, 2 x 2 on a `grid`, or the sides of a window), windows of
    windows and so on; after `levels` groupings the root takes all that is left, e.g. levels=1 makes 14 x 14 patches 49
    groups of 4 under one root. The first `prefix` tokens are children of the root. Or `tree`, a `Tree` or nested
    sequences of token indices. `energy` "dot" assumes normalised queries and keys; "l2" is s_BC = -scale / 2 times the
    mean of |q_i - k_j|^2, the form before that assumption. `tables` holds a table (b, F) or (H, b, F) for each level:
    e of a child among its siblings, with e_B.e_C added to s_BC (its exact form is not known from the paper).
    Key weights count as so many equal leaves; a token of weight 0 is not in the tree and its row gives 0.
    theta is positive, its rows sum to 1, and it is constant on sibling blocks. Cost: N b (D + E) for b children, over
    log_b N levels that shrink by b; memory N (b + D + E).
    """
    check_choice("energy", energy, ENERGIES)
    query, dtype = call.query, call.query.dtype
    if query.shape[-2] == 0:
        return nothing((*query.shape[:-1], call.value.shape[-1]), *call[:4])
    nodes = _tree_of(call, branching=branching, levels=levels, tree=tree)
    leaves = _leaves(call, energy, nodes, tables)
    steps, _ = _up(leaves, nodes, call.softmax_scale, tables, dtype)
    mass, out = leaves.phi.new_ones(1), leaves.phi.new_zeros(1, 1)
    for level, (u, child_values) in zip(reversed(nodes.levels), reversed(steps), strict=True):
        keep = u.diagonal(dim1=-2, dim2=-1)  # (..., H, P, b)
        own = torch.eye(u.shape[-1], dtype=torch.bool, device=u.device)
        siblings = factor(u.masked_fill(own, 0), dtype) @ factor(child_values, dtype)
        out = out.unsqueeze(-2) + mass[..., None, None] * siblings
        mass = mass.unsqueeze(-1) * keep
        out, mass = level.scatter(out.flatten(-3, -2)), level.scatter(mass.flatten(-2), -1)
    out = out + mass.unsqueeze(-1) * leaves.value
    return out.masked_fill((leaves.size == 0).unsqueeze(-1), 0)


class Nodes(NamedTuple):
    """A level on the way up: of each node the number of leaves, the means over them and the energy."""

    size: Tensor  # (..., 1, X)
    query: Tensor  # (..., H, X, D); as given for tokens, above them in at least float32, like key and value
    key: Tensor  # (..., H, X, D)
    value: Tensor  # (..., H, X, E)
    norms: Tensor | None  # (..., H, X, 2): scale / 2 times |q|^2 and |k|^2, for the l2 energy
    phi: Tensor  # (..., H, X); 0 for nodes without leaves


def _up(
    nodes: Nodes, tree: Tree, scale: float, tables: Sequence[Tensor] | None, dtype: torch.dtype
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """For each level u (..., H, P, b, b) and the children's values (..., H, P, b, E); and phi of the root.

    `dtype` is that of the inputs, see `products.product`.
    """
    steps = []
    for index, level in enumerate(tree.levels):
        u, values, nodes = _parents(nodes, level, scale, None if tables is None else tables[index], dtype)
        steps.append((u, values))
    return steps, nodes.phi


def _parents(
    nodes: Nodes, level: Level, scale: float, e: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Nodes]:
    count = level.gather(nodes.size, -1).masked_fill(level.children < 0, 0)  # (..., 1, P, b)
    q, k, v = (level.gather(x) for x in (nodes.query, nodes.key, nodes.value))
    phi = level.gather(nodes.phi, -1)
    s = pair_products(q, k, dtype) * scale
    norms = None if nodes.norms is None else level.gather(nodes.norms)
    if norms is not None:
        s = s - norms[..., :1] - norms[..., 1:].mT
    if e is not None:
        s = s + (e.to(s.dtype) @ e.to(s.dtype).mT).unsqueeze(-3)  # e_B.e_C of a table (b, F) or (H, b, F)
    # Siblings count with all their leaves, a node itself through its energy, in which they are already.
    siblings = s + torch.where(count > 0, count, 1).log().masked_fill(count == 0, ABSENT).unsqueeze(-2)
    own = torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
    logits = torch.where(own, -phi.unsqueeze(-1), siblings)
    log_Z = logits.logsumexp(-1)
    share = ratio(count, count.sum(-1, keepdim=True))  # n_B / n_A

    def average(x: Tensor) -> Tensor:
        return (share.unsqueeze(-1) * x).sum(-2)

    above = Nodes(
        count.sum(-1),
        average(q),
        average(k),
        average(v),
        None if norms is None else average(norms),
        -(share * log_Z).sum(-1),
    )
    return (logits - log_Z.unsqueeze(-1)).exp(), v, above


def _leaves(call: Call, energy: str, tree: Tree, tables: Sequence[Tensor] | None) -> Nodes:
    if tables is not None:
        _check_tables(tables, tree)
    q, scale = call.query, call.softmax_scale
    k, v = (repeat_heads(x, q.shape[-3]) for x in (call.key, call.value))
    if call.key_mask is None:
        count = wide(q).new_ones(*q.shape[:-3], 1, q.shape[-2])
    else:
        count = call.key_mask.unsqueeze(-2).to(wide(q).dtype)
        q = q.masked_fill((count == 0).unsqueeze(-1), 0)
    s = scale * (wide(q) * wide(k)).sum(-1)
    norms = None
    if energy == "l2":
        norms = torch.stack((wide(q).square().sum(-1), wide(k).square().sum(-1)), -1) * (scale / 2)
        s = s - norms.sum(-1)
    if tables is not None:
        e = tables[0].to(s.dtype)
        s = s + e.square().sum(-1)[..., tree.levels[0].place % e.shape[-2]]
    phi = -(s + torch.where(count > 0, count, 1).log()).masked_fill(count == 0, 0)
    return Nodes(count, q, k, v, norms, phi)


def _check_tables(tables: Sequence[Tensor], tree: Tree) -> None:
    if not isinstance(tables, list | tuple) or not all(isinstance(e, Tensor) and e.ndim > 1 for e in tables):
        shown = f"{type(tables).__name__} {tables!r:.60}"
        raise TypeError(f"tables must hold a tensor (b, F) or (H, b, F) for each level of the tree, got {shown}")
    got = tuple(e.shape[-2] for e in tables)
    if got != tree.widths:
        raise ValueError(f"tables must hold a table for each level of the tree, of {tree.widths} children, got {got}")


def make_tree(
    tokens: int,
    *,
    grid: Grid | None = None,
    prefix: int = 0,
    branching: int | tuple[int, ...] | None = None,
    levels: int | None = None,
    tree: Tree | Sequence[Any] | None = None,
    device: Any = None,
) -> Tree:
    """The tree that the options stand for; an error if it does not fit the tokens."""
    if tree is not None:
        tree = tree.to(device) if isinstance(tree, Tree) else Tree.nested(tree, device=device)
        if tree.tokens != tokens:
            raise ValueError(f"tree holds {tree.tokens} tokens, but there are {tokens}")
        return tree
    _check_levels(levels)
    shape = resolve_grid(tokens, grid, prefix)
    shape = (tokens - prefix,) if grid is None else shape
    return Tree.windows(shape, branching, prefix=prefix, levels=levels, device=device)


def _tree_of(call: Call, **layout: Any) -> Tree:
    query = call.query
    return make_tree(query.shape[-2], grid=call.grid, prefix=call.prefix, device=query.device, **layout)


def _check_levels(levels: int | None) -> None:
    if levels is not None and not whole(levels):
        raise ValueError(f"levels must not be negative, got {levels!r}; it is a number of groupings, or None")


class HierarchicalAttention(Mixer):
    """HSA for a layer: the tree is built from the grid of each call; with `position` children have learned places.

    Arguments are the options of `hierarchical_attention`; `position` is the width F of the tables e, 0 for none. They
    need to know the tree beforehand, from `grid_size` or `tree`. Another grid, of a call or of the layer that a
    checkpoint was made for, gets them fitted (`fit_tables`); another `tree` does not.
    """

    mechanism = "hierarchical"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        branching: int | tuple[int, ...] | None = None,
        levels: int | None = None,
        tree: Tree | Sequence[Any] | None = None,
        energy: str = "dot",
        position: int = 0,
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, branching=branching, levels=levels, energy=energy, **layer)
        check_choice("energy", energy, ENERGIES)
        _check_levels(levels)
        if position < 0:
            raise ValueError(f"position must be 0 (none) or the width of the tables, got {position}")
        if self.grid_size is not None:
            window_sides(branching, self.grid_size)
        if tree is not None and not isinstance(tree, Tree):
            tree = Tree.nested(tree, device="cpu")  # it is no parameter: on the meta device it would be lost
        tables = []
        if position:
            if self.grid_size is None and tree is None:
                raise ValueError("position needs to know the tree: pass grid_size to the layer, or the option tree")
            built = tree or Tree.windows(self.grid_size or (1,), branching, prefix=self.prefix, levels=levels)
            tables = [nn.Parameter(torch.empty(num_heads, width, position, **self.place)) for width in built.widths]
        self.options["tree"] = tree
        self.position = nn.ParameterList(tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.position:
            nn.init.trunc_normal_(table, std=0.02)

    def fit_loaded(self, state: dict[str, Any], name: str) -> None:
        mine = f"{name}position."
        words = sorted((key for key in state if key.startswith(mine)), key=lambda key: int(key[len(mine) :]))
        if not words or not self.position or self.options["tree"] is not None:
            return
        tables = [state[word] for word in words]
        if any(table.ndim != 3 or table.shape[::2] != self.position[0].shape[::2] for table in tables):
            return  # other heads or another width: loading says so
        for word in words:
            del state[word]
        assert self.grid_size is not None
        for level, table in enumerate(self._fitted(tables, self.grid_size)):
            state[f"{mine}{level}"] = table

    def _fitted(self, tables: list[Tensor], grid: Grid) -> list[Tensor]:
        return fit_tables(tables, grid, self.prefix, self.options["branching"], self.options["levels"])

    def asked(self, call: Call, x: Tensor | None) -> tuple[Call, dict[str, Any]]:
        call, tables = self.on_grid(call), [*self.position]
        if tables and call.grid is not None and self.options["tree"] is None:
            if call.prefix != self.prefix:
                raise ValueError(f"the positions were built for prefix={self.prefix} tokens, got prefix={call.prefix}")
            tables = self._fitted(tables, call.grid)
        return call, {"tables": tables or None, **self.options}


def fit_tables(
    tables: list[Tensor], grid: Grid, prefix: int, branching: int | tuple[int, ...] | None, levels: int | None
) -> list[Tensor]:
    """Tables (H, b, F) of the levels of a tree for that of another grid, of windows (ours).

    The places among the children of the root are resized bilinearly, those of prefix tokens stay. A level below keeps
    its own; one that was not there gets those of the level below it.
    """
    steps, root = window_steps(grid, branching, levels)
    if tuple(table.shape[-2] for table in tables) == (*map(math.prod, steps), prefix + math.prod(root)):
        return tables
    *lower, top = tables
    patches = top[:, prefix:]

    def fitted(table: Tensor, new: Grid, first: int = 0) -> Tensor:
        return resize_table(table, told_grid(table.shape[-2], first, new, "position"), new, first)

    below = [fitted(lower[min(i, len(lower) - 1)] if lower else patches, step) for i, step in enumerate(steps)]
    return [*below, fitted(top, root, prefix)]


HIERARCHICAL = register(
    name="hierarchical",
    summary="attention over a tree of tokens, constant on blocks of sibling subtrees",
    paper="Hierarchical Self-Attention (Amizadeh et al.)",
    year=2025,
    arxiv="2509.15448",
    cost="L b (D + E), b children a node",
    function=hierarchical_attention,
    row_weights=one_hot_weights(hierarchical_attention),
    module=HierarchicalAttention,
    independent_rows=False,
    order_free=False,
    **can("key_mask grouped_queries subquadratic ragged key_shift wants_grid"),
)
