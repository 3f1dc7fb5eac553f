"""`cluster_attention` and its weights: arguments are checked here, once.

Shape legend: ... leading dimensions, B their product, H query heads, Hk key heads, G = H / Hk, Lq queries, Lk keys, D
key width, E value width, K clusters.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shards
from ..call import Call, Grid
from ..kernels import replay
from ..moments import exact_dtype, statistics_dtype
from ..tensors import nothing
from ..tracing import without_autocast
from .alike import as_before, in_order, order_by_content, shares_by_content
from .asked import Asked, causal_blocks, check_tree
from .backend import Assignment, Case, Form, kernels_for
from .build import Clusters, Field, Packed, check_assignment, check_clusters, make_layout, pack
from .by_content import by_content
from .causal import causal_clusters
from .fields import Seen, mix
from .kmeans import KMeans, kmeans
from .layout import Blocks, Layout, check_grid
from .neighbours import beside
from .run import finds_at_once, run_kernels
from .shares import by_heads
from .short import answers_by_token, token_responses
from .statistics import centred, origin
from .tree import Tree


def cluster_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    clusters: Clusters,
    near: int | str = 0,
    closure: str = "tanh",
    grid: Grid | None = None,
    prefix: int = 0,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    rank: str = "auto",
    variance: str = "diagonal",
    response: int | str | None = "auto",
    near_rows: int | str = "auto",
    queries: str = "each",
    least: int = 1,
    offset: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Attention that expands softmax inside clusters of keys: a dial from linear attention to softmax.

        log Z_c = log n_c + q.k_mean_c + phi(s_c)            s_c^2 = sum_i q_i^2 var_c(k_i)
        out = sum_c softmax_c(log Z_c) (v_mean_c + f(s_c) <v~ k~^T>_c q)

    with near clusters token by token under the same softmax. Layout and meaning of query, key, value, masks and scale
    follow `cumulant.attention`. Clusters of one token and empty ones are exact (one token not with response="pooled").

    Args:
        query: (..., H, Lq, D).
        key: (..., H, Lk, D); fewer heads with `enable_gqa`.
        value: (..., H, Lk, E).
        clusters: a number K, blocks of consecutive tokens of equal size (on a `grid`, about K blocks as square as it
            allows; as many as tokens or more: every token its own); (a, b) or (a, b, c), blocks along each side of the
            `grid`; `Blocks(size)`; `Tree(K)`, by content and all of one size, with two levels if it has leaves;
            `KMeans(K)`, in the queries' metric; or an assignment, integers in [0, K) of shape (..., Hk or 1, Lk -
            prefix). torch.compile in one graph takes blocks and trees.
        near: so many clusters of largest mass for each query are exact; or "neighbours", the own and all touching
            blocks (with Lq = Lk). As many as there are clusters: softmax.
        closure: "tanh" or "langevin", which saturate, or "gauss", which is second order as it stands.
        grid: (rows, cols) or (frames, rows, cols) of the tokens after the first `prefix`.
        prefix: so many tokens at the start (class tokens) are exact for every query. With is_causal, the first that
            take part (attention sinks), for every later row.
        key_mask: (..., Lk), bool or non-negative weights. K blocks of a sequence are of the tokens that take part,
            `Blocks(size)` and blocks of a grid stay where they are. Where nothing takes part the output is 0.
        is_causal: row i sees the keys j <= i: blocks of the past are clusters, the current block is exact. K blocks
            then depend on the length; `Blocks(size, keep, recent)` do not.
        rank: near clusters are those of largest "mass", or of largest mass times s^2: "error". "mean": with `near_rows`
            of largest mean of the mass over these queries, from two cumulants of theirs: as good as "mass", and one
            number a cluster and block of queries instead of one a cluster and query. "auto", here and below: "mass", 1
            and None; from 1,024 queries and keys on "mean", 128 and "pooled" for near > 0 of blocks, not causal,
            "error", 64 and "pooled" for near > 0 of `Tree`, `KMeans` or an assignment, and "mass", 1 and "pooled" for K
            causal blocks.
        variance: "diagonal", or "full" for s_c^2 = q^T cov_c(k) q, which costs K D^2 a query in place of K D.
        response: only so many clusters of largest weight answer with their covariance, the others with their mean;
            "pooled": all answer with one covariance, the mean of theirs by weight, at the price of one; when causal,
            of those that a row sees.
        near_rows: so many queries in a row share their near clusters, and those that respond where `response` limits
            them: one matrix product each. The GPU wants 64 or 128. With "neighbours" each chooses for itself. With a
            `Tree`, `KMeans` or an assignment they share who are alike, not who stand in a row.
        queries: "each" asks for itself; "mean": those of a block ask once, with their mean, and all get its answer, at
            K / Lk of the cost (blocks of a sequence or grid, as many queries as keys).
        least: blocks hold at least so many tokens, where K would make smaller ones.
        offset: with is_causal, the place of the first query among the keys: row i sees the keys j <= offset + i.
        backend: "auto", "reference" (plain torch, blockwise) or "triton": masks of bool, heads of at most 128 (float32:
            64), diagonal variance, one near field for 32, 64 or 128 queries; causal with response=None,
            0 or, of blocks that are not merged, "pooled", and near up to 16 of at most 256 blocks; blocks of at most 64
            tokens of a short sequence with either variance. "auto" takes them on CUDA where they can compute the case,
            and says once what stands in the way where they cannot.

    Returns:
        (..., H, Lq, E), in the dtype of the query. Cost a query: 2 K D + K E + K D E (response D E instead of K D E;
        Lk (D + E) where clusters are so short that this is less) and (D + E) for each near token; statistics D E a key.
        No L x L and no L x K x D tensor is held.
    """
    asked = Asked(clusters, near, closure, rank, variance, response, near_rows, queries, least, backend)
    how = is_causal, scale, enable_gqa, None, grid, prefix, offset
    kind = None
    if key_mask is None and isinstance(clusters, int | tuple | Blocks | Tree | KMeans):
        kind = replay.kind("clusters", query, key, value, *how, *asked)
    if kind is None:
        return _attend(Call(query, key, value, key_mask, *how), asked)
    return replay.call(kind, lambda: _attend(Call(query, key, value, None, *how), asked), query, key, value)


def _attend(call: Call, asked: Asked) -> Tensor:
    """What `cluster_attention` computes, step by step."""
    call, clusters, backend = call.checked(), asked.clusters, asked.backend
    (query, key, value), is_causal, Lk = call[:3], call.is_causal, call.key.shape[-2]
    check_clusters(clusters)
    asked.check_tokens(call.offset, is_causal)
    across = shards.answerer()
    if across is not None:
        return across.cluster(call, asked)
    form = asked.form(call, query.shape[-2], Lk)
    if not is_causal or call.grid is not None:
        call = call._replace(grid=check_grid(Lk, call.grid, call.prefix))
    lead, (H, Lq, _), E = call.lead, query.shape[-3:], value.shape[-1]
    if not (prod(lead) and H and Lq and Lk and E):
        return nothing((*lead, H, Lq, E), query, key, value, call.key_mask)
    if call.prefix == Lk and not is_causal:  # every token is exact, as in one cluster that is near
        clusters, call = 1, call._replace(grid=None, prefix=0)
        form = form._replace(near=1, near_rows=1, together=False)
    if isinstance(clusters, Tree):
        check_tree(clusters, call, form)
        with without_autocast(query.device.type):
            attend = partial(cluster_attention, backend=backend)
            return by_content(call, clusters.for_tokens(Lk - call.prefix), form, attend, backend)
    if isinstance(clusters, Tensor) and not is_causal:
        made: Any = Assignment(*check_assignment(clusters, lead, key.shape[-3], Lk - call.prefix, key.device))
    else:
        made = clusters
    case = Case(call, made, form, min(asked.least, Lk))  # more than all tokens is all of them
    kernels = kernels_for(backend, case)
    with without_autocast(query.device.type):
        q, k, v, mask = call.in_one_batch()
        order = None
        if shares_by_content(case) and not (kernels == "clusters" and finds_at_once(case)):
            order = order_by_content(q, k, mask, form.near_rows, call.prefix)
            q = in_order(q, order)
        if kernels is None:
            case = case._replace(call=call._replace(query=q, key=k, value=v, key_mask=mask))
            out = (_reference(case) if backend == "reference" else by_heads(_reference, case)).to(query.dtype)
        else:
            if len(lead) == 1:  # layers of a model share a mask, which is known by the tensor that it is
                mask = call.key_mask
            weights = point = None
            if q.dtype == torch.float32:  # which has digits to lose far from 0; 16 bits have few
                k, v, weights, point = centred(k, v, mask, is_causal)
            out = run_kernels(kernels, case._replace(call=call._replace(query=q, key=k, value=v, key_mask=mask)))
            if point is not None:
                out = _moved(out.unflatten(1, (key.shape[-3], -1)), point, weights, call).flatten(1, 2)
        out = out if order is None else as_before(out, order)
    return out if out.shape == (*lead, H, Lq, E) else out.reshape(*lead, H, Lq, E)


def _reference(case: Case) -> Tensor:
    """Plain torch, of a call in one batch: (B, Hk, G, Lq, E)."""
    call, form, prefix = case.call, case.form, case.call.prefix
    (q, k, v, mask), dtype, given = call[:4], statistics_dtype(call.query.dtype), call.query.dtype
    if call.is_causal and mask is not None and mask.is_floating_point():
        dtype = exact_dtype(q)  # rows that come before the heaviest tokens see none but weights that float32 may lose
    Hk, Lk = k.shape[1:3]
    q = (q.to(dtype) * call.softmax_scale).unflatten(1, (Hk, q.shape[1] // Hk))  # (B, Hk, G, Lq, D)
    k, v, weights, point = centred(k.to(dtype), v.to(dtype), mask, call.is_causal)
    if call.is_causal:
        blocks = causal_blocks(case, call.offset + q.shape[-2])
        out = causal_clusters(q, k, v, weights, blocks, form, call.offset, prefix)
    else:
        asking, layout = _means(q, k, weights, case) if form.together else (q, None)
        out = _noncausal(asking, pack(q, k, v, weights, case), form, prefix, Lk, given)
        if layout is not None:
            out = torch.cat((out[..., :prefix, :], layout.handed_out(out[..., prefix:, :], Lk - prefix)), -2)
    return _moved(out, point, weights, call)


def _moved(out: Tensor, point: Tensor, weights: Tensor | None, call: Call) -> Tensor:
    """Rows (B, Hk, G, Lq, E) of values from a point (B, Hk, 1, E), for values as they are: `centred` undone."""
    if weights is None:
        return out + point.unsqueeze(2)
    seen, Lk = (weights > 0).cumsum(-1), weights.shape[-1]  # of the last key that a row sees; without any it stays 0
    last = torch.arange(out.shape[-2], device=out.device) + call.offset
    last = last.clamp(max=Lk - 1) if call.is_causal else torch.full_like(last, Lk - 1)
    return out + torch.where((seen[..., last] > 0)[:, :, None, :, None], point.unsqueeze(2), 0)


def cluster_scores(query: Tensor, key: Tensor, *, clusters: Clusters, **options: Any) -> Tensor:
    """The signed weights (..., H, Lq, Lk) with which `cluster_attention` mixes the values; rows sum to 1.

        A_l = w_c / n_c (1 + f_c q.k~_l) in a far cluster c, the probability itself for near and prefix tokens

    Options are those of `cluster_attention`, in plain torch unless `backend` is given. Cost a query: K D Lk; pass few
    queries of a long sequence, and with near clusters that queries share (`near_rows`, "auto" for long sequences) those
    of a whole tile.
    """
    query, key = Call(query, key, key, enable_gqa=True).checked()[:2]
    Lk = key.shape[-2]
    tokens = torch.eye(Lk, dtype=key.dtype, device=key.device).expand(*key.shape[:-1], Lk)
    return cluster_attention(query, key, tokens, clusters=clusters, **{"backend": "reference"} | options)


def kmeans_assignment(
    query: Tensor, key: Tensor, options: KMeans, *, key_mask: Tensor | None = None, enable_gqa: bool = False
) -> Tensor:
    """Cluster ids (..., Hk, Lk) that `clusters=options` would use, for `clusters=` of later calls."""
    if not isinstance(options, KMeans):
        raise TypeError(f"options must be KMeans(count, ...), got {type(options).__name__}")
    call = Call(query, key, key, key_mask, enable_gqa=enable_gqa).checked()
    if not key.shape[-2]:
        return key.new_zeros((*call.lead, *key.shape[-3:-1]), dtype=torch.long)
    q, k, _, mask = call.in_one_batch()
    dtype, weights = statistics_dtype(k.dtype), None
    q, k = q.to(dtype), k.to(dtype)
    if mask is not None:
        weights = mask.unsqueeze(1).to(dtype)
        k = k.masked_fill((weights == 0).unsqueeze(-1), 0)
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return kmeans(q, k - origin(k, weights, False), weights, options).reshape(*call.lead, *k.shape[1:3])


def _means(q: Tensor, k: Tensor, weights: Tensor | None, case: Case) -> tuple[Tensor, Layout]:
    """Prefix queries as they are and the mean of each block, (B, Hk, G, prefix + K, D); and the blocks."""
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f'queries="mean" needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}')
    if case.form.near == "neighbours":
        raise ValueError('queries="mean" leaves no query beside a block; pass near as a number')
    prefix = case.call.prefix
    k, weights = k[:, :, prefix:], None if weights is None else weights[..., prefix:]
    layout = make_layout(q, k, weights, case, False)
    if layout.adjacent is None:
        raise ValueError('queries="mean" needs blocks of a sequence or a grid: other clusters hold no queries')
    means = layout.means(q[..., prefix:, :], layout.weights(k, weights))
    return torch.cat((q[..., :prefix, :], means), -2), layout


def _noncausal(q: Tensor, packed: Packed, form: Form, prefix: int, Lk: int, dtype: torch.dtype) -> Tensor:
    """q (B, Hk, G, Lq, D) -> (B, Hk, G, Lq, E), for inputs of `dtype`."""
    G, Lq = q.shape[2:4]
    if answers_by_token(packed, form):
        return token_responses(q, packed, form, dtype)
    layout, far, tokens, exact = Field.of(packed, form)
    if form.near == "neighbours":
        if layout.adjacent is None:
            raise ValueError(
                'near="neighbours" needs blocks of a sequence or a grid: these clusters have no neighbours'
            )
        if Lq != Lk:
            raise ValueError(f'near="neighbours" needs as many queries as keys, got {Lq} and {Lk}')
        if layout.place is None:
            return beside(q, prefix, layout, far, tokens, Seen(exact, layout.adjacent[None, None]), form)
        return beside(q, prefix, None, far, tokens, Seen(exact, layout.adjacent[layout.place][:, None]), form)
    assert isinstance(form.near, int)
    near = min(form.near, layout.clusters)
    # Exact tokens alone make better products with many rows at once; without near clusters rows need no blocks.
    choosing = near or 0 < (form.response or 0) < layout.clusters
    n = min(Lq, 64 if not layout.clusters else form.near_rows if choosing else 1)
    blocks = -(-Lq // n)
    present = None
    if blocks * n != Lq:
        q = F.pad(q, (0, 0, 0, blocks * n - Lq))
        present = (torch.arange(blocks * n, device=q.device) < Lq).view(blocks, n).repeat(G, 1)
    rows = q.unflatten(3, (blocks, n)).flatten(2, 3)  # (B, Hk, G blocks, n, D)
    out = mix(rows, far, tokens, Seen(exact, near, present), form)
    return out.flatten(2, 3).unflatten(2, (G, -1))[..., :Lq, :]
