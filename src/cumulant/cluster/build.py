"""What queries meet: the tokens after the prefix, laid out as clusters, and the moments of those.

Shape legend: B batch, Hk key heads, G = H / Hk, Lq queries, Lk keys, K clusters, N pieces of m tokens, D, E widths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call import check_dense, expands_to, is_whole
from ..moments import ratio
from ..tracing import transformed
from .backend import Assignment, Case, Form
from .fields import Exact, Far, Tokens
from .kmeans import KMeans, kmeans
from .layout import Blocks, Layout, assigned, consecutive, cuts, divide, of_size, on_grid
from .statistics import log, merge_pieces, moments_of
from .tree import Tree

Clusters = int | tuple[int, ...] | Blocks | Tree | KMeans | Tensor


class Packed(NamedTuple):
    """The tokens after the prefix in pieces, which are the clusters or parts of them; and the prefix as it is."""

    layout: Layout
    key: Tensor  # (B, Hk, N, m, D)
    value: Tensor  # (B, Hk, N, m, E)
    weight: Tensor  # (B, Hk or 1, N, m), 0 where a slot holds no token
    exact: Exact | None


class Field(NamedTuple):
    """Clusters of the keys after the prefix, ready for queries."""

    layout: Layout
    far: Far
    tokens: Tokens
    exact: Exact | None

    @classmethod
    def of(cls, packed: Packed, form: Form) -> Field:
        """With the moments of every cluster. Cost: L D (E + 1), without E where no cluster responds."""
        layout, keys, values, slots, exact = packed
        weights = slots.expand(keys.shape[:-1])
        at_once = form.pooled and layout.owner is None and keys.device.type == "cpu"
        moments = moments_of(keys, values, weights, full=form.full, response=form.response != 0 and not at_once)
        if layout.owner is not None:
            moments = merge_pieces(moments, layout.owner, layout.clusters)
        far = Far.of(moments).pooled() if form.pooled and not at_once else Far.of(moments)
        if at_once:
            far = far._replace(pool=_pool(keys, values, weights, moments.key_mean))
        return cls(layout, far, Tokens(keys, values, log(slots), layout.members, layout.owner), exact)


def _pool(keys: Tensor, values: Tensor, weights: Tensor, mean: Tensor) -> Tensor:
    """What `Far.pooled` finds, (B, H, D, E), in one product over all tokens: no K D E numbers in between."""
    away = (keys - mean.unsqueeze(-2)) * weights.unsqueeze(-1)
    sums = away.flatten(2, 3).mT @ values.flatten(2, 3)
    return ratio(sums, weights.sum((-2, -1))[..., None, None])


def without_prefix(
    k: Tensor, v: Tensor, weights: Tensor | None, prefix: int
) -> tuple[Exact | None, Tensor, Tensor, Tensor | None]:
    """The first `prefix` of keys (B, H, L, D) and values, with weights (B, 1, L), as they are; and what follows."""
    if not prefix:
        return None, k, v, weights
    log_weight = k.new_zeros(1, 1, prefix) if weights is None else log(weights[..., :prefix])
    exact = Exact(k[:, :, None, :prefix], v[:, :, None, :prefix], log_weight[:, :, None, None, :])
    return exact, k[:, :, prefix:], v[:, :, prefix:], None if weights is None else weights[..., prefix:]


def pack(q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, case: Case) -> Packed:
    """For scaled q (B, Hk, G, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, E) and weights (B, 1, Lk)."""
    form = case.form
    exact, k, v, weights = without_prefix(k, v, weights, case.call.prefix)
    layout = make_layout(q, k, weights, case, bool(form.near))
    keys, values, slots = layout.pack(k), layout.pack(v), layout.weights(k, weights)
    if isinstance(form.near, int) and form.near >= layout.clusters:
        # Nothing is left far away: softmax over all tokens, prefix included.
        log_weight = log(slots).flatten(-2)[:, :, None, None, :]
        all_keys, all_values = keys.flatten(2, 3).unsqueeze(2), values.flatten(2, 3).unsqueeze(2)
        if exact is not None:
            heads = (max(log_weight.shape[0], exact.log_weight.shape[0]), max(log_weight.shape[1], 1), 1, 1, -1)
            log_weight = torch.cat((exact.log_weight.expand(heads), log_weight.expand(heads)), -1)
            all_keys, all_values = torch.cat((exact.key, all_keys), -2), torch.cat((exact.value, all_values), -2)
        exact = Exact(all_keys, all_values, log_weight)
        keys, values, slots = keys[:, :, :0], values[:, :, :0], slots[:, :, :0]
        layout = layout._replace(pieces=0, clusters=0, owner=None, members=None)
    return Packed(layout, keys, values, slots, exact)


def make_layout(q: Tensor, k: Tensor, weights: Tensor | None, case: Case, near: bool) -> Layout:
    """The layout that `clusters` stands for; raises where it does not fit the tokens."""
    clusters, grid, (Hk, L) = case.clusters, case.call.grid, k.shape[1:3]
    masked = None if weights is None else weights.squeeze(1)
    if isinstance(clusters, Assignment):
        return assigned(clusters.ids, clusters.clusters, near)
    if isinstance(clusters, Tensor):
        ids, count = check_assignment(clusters, case.call.lead, Hk, L, k.device)
        return assigned(ids, count, near)
    if isinstance(clusters, KMeans):
        if torch.compiler.is_compiling():
            raise ValueError(
                "clusters=KMeans(...) cannot be traced by torch.compile; use a number of blocks or Blocks(size), or "
                "leave this call as it is (torch.compiler.disable)"
            )
        ids = kmeans(q.flatten(2, 3), k, weights, clusters)
        return assigned(ids, min(clusters.count, max(1, L)), near)
    if isinstance(clusters, Blocks):
        if clusters.keep is not None or clusters.recent:
            raise ValueError(f"keep and recent of {clusters} belong to is_causal=True; pass Blocks({clusters.size})")
        return of_size(clusters.size, L, k.device)
    if isinstance(clusters, tuple):
        if grid is None:
            raise ValueError(
                f"clusters={clusters} are blocks of a grid: pass grid=(rows, cols) or (frames, rows, cols)"
            )
        if not cuts(clusters, grid):
            raise ValueError(f"clusters={clusters} must cut each side of grid={grid} into 1 to that many blocks")
        return on_grid(grid, clusters, k.device)
    if grid is not None:
        return on_grid(grid, divide(grid, clusters, case.least), k.device)
    return consecutive(L, clusters, masked, k.device, case.least)


def check_clusters(clusters: Clusters) -> None:
    """Raises for what can never be clusters, whatever the tokens."""
    if isinstance(clusters, bool) or not isinstance(clusters, int | tuple | Blocks | Tree | KMeans | Tensor):
        kinds = "an int, a tuple of ints, Blocks, Tree, KMeans or an integer tensor"
        raise TypeError(f"clusters must be {kinds}, got {type(clusters).__name__}")
    if isinstance(clusters, int) and clusters < 1:
        raise ValueError(f"clusters must be at least 1, got {clusters}")


def check_assignment(ids: Tensor, lead: torch.Size, Hk: int, L: int, device: torch.device) -> tuple[Tensor, int]:
    check_dense("clusters", ids)
    if not is_whole(ids):
        raise TypeError(f"clusters as an assignment must hold integers, got {ids.dtype}")
    wanted = (*lead, Hk, L)
    if not expands_to(ids, wanted):
        raise ValueError(
            f"clusters as an assignment must have shape {wanted}, one number for each key (after the prefix), "
            f"got {tuple(ids.shape)}"
        )
    if ids.device != device:
        raise ValueError(f"clusters as an assignment must be on the device of the key, {device}, got {ids.device}")
    if torch.compiler.is_compiling() or transformed() or ids.is_meta:
        raise ValueError(
            "clusters as an assignment tensor needs to read its largest number, which torch.compile, torch.func and "
            "tensors without data cannot; use a number of blocks or Blocks(size), or leave this call as it is "
            "(torch.compiler.disable)"
        )
    if not L:
        return ids.expand(wanted).reshape(-1, Hk, L).long(), 1
    low, high = (int(x) for x in torch.aminmax(ids.long()))
    if low < 0:
        raise ValueError(f"clusters as an assignment must hold numbers from 0 on, got {low}")
    if high >= 4 * L + 1024:
        raise ValueError(
            f"clusters as an assignment names cluster {high}, far more than the {L} keys; number them 0, 1, ..."
        )
    return ids.expand(wanted).reshape(-1, Hk, L).long(), high + 1
