"""Clusters by content: attention over keys in the order of a tree, as blocks of that order or two levels of them.

Shape legend: N heads of all sequences, G query heads of each, Lq queries, Lk keys, D, E widths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Call, Grid
from ..moments import statistics_dtype
from .alike import SEARCH, as_before, in_order, order_by_content, runs_of
from .backend import TILES, Case, Form, kernels_for
from .basis import logit_basis
from .build import without_prefix
from .layout import Blocks, Layout, of_size, tiled
from .levels import Narrow, two_levels
from .run import can_search, run_tree
from .statistics import centred
from .tree import Tree, order_of, permuted, tree_order

LONG_GRID = 16_384  # tokens of a grid from which its tiles share near clusters of a tree


def by_content(call: Call, tree: Tree, form: Form, attend: Callable[..., Tensor], backend: str) -> Tensor:
    """Attention over keys in the order of a tree: blocks of that order, which `attend` takes, or two levels of them.

    One operator for all of it where kernels find the order and take the blocks.
    """
    q, k, v, mask = call.in_one_batch()
    (Hk, Lk), E, prefix = k.shape[1:3], v.shape[-1], call.prefix
    tile = _tile(call, form)
    found = _at_once(call._replace(query=q, key=k, value=v, key_mask=mask), tree, form, tile, backend)
    if found is not None:
        return found.reshape(*call.lead, Hk, q.shape[2], E)
    shared = form.near_rows > 1 and tree.leaves == 1 and tile is None
    asking = order_by_content(q, k, mask, form.near_rows, prefix) if shared else None
    q = q.unflatten(1, (Hk, -1)).flatten(0, 1)  # (N, G, Lq, D): heads of keys are sequences
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (N, Lk, .)
    mask = None if mask is None else mask.repeat_interleave(Hk, 0)
    parts, L = tree.count * tree.leaves, Lk - prefix
    G, Lq = q.shape[1:3]
    patches = _patches(call, tree)
    absent = None if mask is None else mask[:, prefix:] == 0
    basis = None
    if tree.narrow(q.shape[-1]):
        with torch.no_grad():
            dtype, keys = statistics_dtype(q.dtype), k[:, prefix:]
            basis = logit_basis(q.flatten(1, 2).to(dtype), keys.to(dtype), tree.width, absent)

    def ordered(keys: Tensor) -> Tensor:
        if basis is None:
            return tree_order(q.flatten(1, 2), keys, parts, tree, absent)
        return order_of(keys.detach().to(basis[1].dtype) @ basis[1], parts, tree, absent)

    if patches is None:
        order, size = ordered(k[:, prefix:]), -(-L // parts)
        order = order + prefix if prefix else order
    else:
        places = torch.arange(prefix, Lk, device=q.device).view(1, 1, L, 1)
        order = ordered(patches.pack(k[:, None, prefix:]).mean(-2).squeeze(1))
        order, size = patches.pack(places)[0, 0, :, :, 0][order].flatten(1), -(-patches.pieces // parts) * patches.size
    if prefix:
        order = torch.cat((torch.arange(prefix, device=q.device).expand(len(order), -1), order), 1)
    k, v = (permuted(x, order) for x in (k, v))
    mask = None if mask is None else mask.gather(1, order)
    if tree.leaves > 1:
        out = _two_levels(q, k, v, mask, call, tree, form, size, basis)
    else:
        tiles = None if tile is None else tiled(*tile)
        if tiles is not None:
            q = tiles.pack(q).flatten(2, 3)
        elif asking is not None:  # those who share near clusters are alike too
            q = in_order(q, asking)
        out = attend(
            q, k.unsqueeze(1), v.unsqueeze(1), clusters=Blocks(size), near=form.near, closure=form.closure,
            prefix=prefix, key_mask=mask, scale=call.softmax_scale, enable_gqa=G > 1, rank=form.rank,
            variance="full" if form.full else "diagonal", response="pooled" if form.pooled else form.response,
            near_rows=form.near_rows,
        )  # fmt: skip
        if tiles is not None:
            out = tiles.unpack(out.unflatten(2, (-1, tiles.size)), Lq)
        elif asking is not None:
            out = as_before(out, asking)
    return out.reshape(*call.lead, Hk * G, Lq, E)


def _patches(call: Call, tree: Tree) -> Layout | None:
    """Squares of a grid that stay together in a tree; None: its tokens go one by one."""
    grid, side = call.grid, tree.patch
    if side == 1 or grid is None or call.key_mask is not None or any(n % side for n in grid):
        return None
    return tiled(grid, (side,) * len(grid))


def _tile(call: Call, form: Form) -> tuple[Grid, Grid] | None:
    """A long grid, and its tiles whose queries share near clusters; None: those by content do.

    At 65,536 tokens of SAM 2 both have the same error, and tiles need no tree of the queries.
    """
    grid, L = call.grid, call.query.shape[-2]
    if grid is None or len(grid) != 2 or call.prefix or L < LONG_GRID or form.near_rows not in TILES:
        return None
    rows = 1 << ((form.near_rows.bit_length() - 1) // 2)  # as square as it can be
    tile = (rows, form.near_rows // rows)
    return None if any(side % n for side, n in zip(grid, tile, strict=True)) else (grid, tile)


def _at_once(call: Call, tree: Tree, form: Form, tile: tuple[Grid, Grid] | None, backend: str) -> Tensor | None:
    """(B, H, Lq, E) of a call in one batch by one operator of kernels; None where they cannot."""
    (q, k, v), L = call[:3], call.key.shape[-2]
    whole = tree.leaves == 1 and not tree.narrow(q.shape[-1]) and _patches(call, tree) is None
    plain = call.key_mask is None and not call.prefix and q.shape[1] == k.shape[1] and tree.count > 1
    if not (whole and plain and tree.sample <= SEARCH.sample):
        return None
    case = Case(call._replace(grid=None), Blocks(-(-L // tree.count)), form, 1)
    if kernels_for(backend, case) != "clusters" or not can_search(max(L, q.shape[-2]), tree.sample):
        return None
    runs = runs_of(q.shape[-2], form.near_rows) if form.near_rows > 1 and tile is None else 0
    point = None
    if q.dtype == torch.float32:  # which has digits to lose far from 0
        k, v, _, point = centred(k, v, None)
        case = case._replace(call=case.call._replace(key=k, value=v))
    out = run_tree(case, tree, runs if runs > 1 else 0, tile)
    return out if point is None else out + point


def _two_levels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    call: Call,
    tree: Tree,
    form: Form,
    size: int,
    basis: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """q (N, G, Lq, D) over sorted k (N, Lk, D), v (N, Lk, E), in plain torch: (N, G, Lq, E)."""
    dtype, given, G = statistics_dtype(q.dtype), q.dtype, q.shape[1]
    rows = q.flatten(1, 2).unsqueeze(1).to(dtype) * call.softmax_scale  # (N, 1, G Lq, D)
    k, v, weights, point = centred(k.unsqueeze(1).to(dtype), v.unsqueeze(1).to(dtype), mask)
    exact, k, v, weights = without_prefix(k, v, weights, call.prefix)
    layout = of_size(size, k.shape[2], k.device)
    lacking = tree.count * tree.leaves - layout.clusters  # leaves that no token is left for
    slots = layout.weights(k, weights).expand(len(k), 1, -1, -1)
    keys, values, slots = (
        F.pad(x, (*(0, 0) * (x.ndim - 3), 0, lacking)) for x in (layout.pack(k), layout.pack(v), slots)
    )
    narrow = None
    if basis is not None:
        narrow = Narrow(
            *(x @ y.view(len(k), *(1,) * (x.ndim - 3), *y.shape[1:]) for x, y in zip((rows, keys), basis, strict=True))
        )
    out = two_levels(rows, keys, values, slots, exact, tree, form, narrow)
    seen = point if mask is None else torch.where((mask > 0).any(-1)[:, None, None, None], point, 0)
    return (out + seen).to(given).squeeze(1).unflatten(1, (G, -1))
