"""The call that hands a case of cluster attention over to its kernels.

Shape legend: B batch, H, Hk heads of queries and keys, Lq queries, Lk keys, D, E widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..moments import statistics_dtype
from .backend import TILES, Assignment, Case, blocks_of_past, past_tile, slots_of
from .kmeans import KMeans, first_centres, kmeans
from .past import past_tables, widest_list
from .statistics import origin
from .tables import flat_mask, tables


def run_kernels(kernels: str, case: Case) -> Tensor:
    """(B, H, Lq, E) of query (B, H, Lq, D), key (B, Hk, Lk, D) and value (B, Hk, Lk, E), by `kernels`."""
    return {"short": _run_short, "clusters": _run_clusters, "past": _run_past}[kernels](case)


def _run_short(case: Case) -> Tensor:
    from ..kernels.short import host as triton_short

    call, form = case.call, case.form
    places, slots = slots_of(*case.blocks, call.prefix)
    shared: dict[str, Any] = {"scale": call.softmax_scale, "prefix": call.prefix}
    return triton_short.attention(*call[:3], places, slots, closure=form.closure, full=form.full, **shared)


def _run_clusters(case: Case) -> Tensor:
    from ..kernels.cluster import host as triton_cluster

    call, form = case.call, case.form
    if isinstance(case.clusters, KMeans):
        case = case._replace(clusters=_found(case, flat_mask(call)))
    K, near = case.sizes[0], form.near
    assert isinstance(near, int)
    choosing = near > 0 or form.response is not None
    return triton_cluster.attention(
        *call[:3],
        None,
        *tables(case),
        scale=call.softmax_scale,
        tile=form.near_rows if choosing and form.near_rows in TILES else 128 if call.query.shape[-2] > 64 else 64,
        near=near,
        response=-2 if form.pooled else -1 if form.response is None or form.response >= K else form.response,
        closure=form.closure,
        rank=form.rank,
        prefix=call.prefix,
        masked=call.key_mask is not None,
    )


def _run_past(case: Case) -> Tensor:
    from ..kernels.past import host as triton_past

    call, form, Lq = case.call, case.form, case.call.query.shape[-2]
    blocks, tile = blocks_of_past(case.clusters, call.offset + Lq), past_tile(Lq)
    tables = past_tables(call, blocks, tile)
    return triton_past.attention(
        *call[:3],
        *tables,
        clusters=widest_list(Lq, call.offset, blocks, tile)[0],
        blocks=-(-(call.offset + Lq) // blocks.size),
        size=blocks.size,
        recent=blocks.recent,
        offset=call.offset,
        scale=call.softmax_scale,
        tile=tile,
        respond=form.response != 0,
        closure=form.closure,
        masked=call.key_mask is not None,
    )


def _found(case: Case, mask: Tensor | None) -> Assignment:
    """The clusters that k-means finds: by kernels where a program can hold the centres, else as plain torch does."""
    from ..kernels.kmeans import host as triton_kmeans

    call, options, (B, Hk, _, D) = case.call, case.clusters, case.call.key.shape
    K = case.sizes[0]
    key = call.key[:, :, call.prefix :]
    present = None if mask is None else mask[:, call.prefix :]
    if options.metric != "diagonal" and triton_kmeans.fits(K, D):
        query = call.query if options.metric == "full" and call.query.shape[-2] else None
        with torch.no_grad():
            step = options.step(key.shape[-2])
            some = None if present is None else present[:, None, ::step]
            centres = first_centres(key[:, :, ::step], some, options)
            return Assignment(triton_kmeans.nearest(query, key, present, centres, options.iterations, step), K)
    dtype = statistics_dtype(call.key.dtype)
    q = (call.query.to(dtype) * call.softmax_scale).reshape(B, Hk, -1, D)
    k, weights = call.key.to(dtype), None if mask is None else mask.unsqueeze(1).to(dtype)
    if weights is not None:
        k = k.masked_fill((weights == 0).unsqueeze(-1), 0)
    k = (k - origin(k, weights, False))[:, :, call.prefix :]
    return Assignment(kmeans(q, k, None if weights is None else weights[..., call.prefix :], options), K)
