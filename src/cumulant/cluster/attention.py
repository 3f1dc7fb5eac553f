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
from ..call import Call, Grid, check_choice
from ..closures import check_closure
from ..kernels import replay
from ..moments import statistics_dtype
from ..tensors import in_units, nothing, one_batch, repeat_heads
from ..tracing import without_autocast
from .auto import AUTO, tuning
from .backend import TILES, Assignment, Case, Form, blocks_of_past, kernels_for
from .basis import logit_basis
from .build import Clusters, Field, Packed, check_assignment, check_clusters, make_layout, pack
from .causal import causal_clusters
from .fields import Exact, Seen, mix
from .kmeans import KMeans, kmeans
from .layout import Blocks, Layout, check_grid, of_size, tiled, whole
from .levels import Narrow, two_levels
from .near import RANKS
from .run import run_kernels
from .shares import by_heads
from .short import answers_by_token, token_responses
from .statistics import VARIANCES, log, origin, value_point
from .tree import Tree, order_of, rows_of, seen_by, tree_order

BACKENDS = ("auto", "reference", "triton")
QUERIES = ("each", "mean")
LONG_GRID = 16_384  # tokens of a grid from which its tiles share near clusters of a tree


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
            and None; from 1,024 queries and keys on "mean", 128 and "pooled" for near > 0 of blocks, not causal, and
            "mass", 1 and "pooled" for K causal blocks with near=0.
        variance: "diagonal", or "full" for s_c^2 = q^T cov_c(k) q, which costs K D^2 a query in place of K D.
        response: only so many clusters of largest weight answer with their covariance, the others with their mean;
            "pooled": all answer with one covariance, the mean of theirs by weight, at the price of one; when causal,
            of those that a row sees.
        near_rows: so many queries in a row share their near clusters, and those that respond where `response` limits
            them: one matrix product each. The GPU wants 64 or 128. With "neighbours" each chooses for itself. With a
            `Tree` they share who are alike, not who stand in a row.
        queries: "each" asks for itself; "mean": those of a block ask once, with their mean, and all get its answer, at
            K / Lk of the cost (blocks of a sequence or grid, as many queries as keys).
        least: blocks hold at least so many tokens, where K would make smaller ones.
        offset: with is_causal, the place of the first query among the keys: row i sees the keys j <= offset + i.
        backend: "auto", "reference" (plain torch, blockwise) or "triton": masks of bool, heads of at most 128 (float32:
            64), diagonal variance, near field of blocks for 32, 64 or 128 queries in a row; causal with near=0 and
            response=None, 0 or, of blocks that are not merged, "pooled"; blocks of at most 64 tokens of a short
            sequence with either variance. "auto" takes them on CUDA where they can compute the case, and says once what
            stands in the way where they cannot.

    Returns:
        (..., H, Lq, E), in the dtype of the query. Cost a query: 2 K D + K E + K D E (response D E instead of K D E;
        Lk (D + E) where clusters are so short that this is less) and (D + E) for each near token; statistics D E a key.
        No L x L and no L x K x D tensor is held.
    """
    options = (
        is_causal, scale, enable_gqa, grid, prefix, offset, clusters, near, closure, rank, variance, response,
        near_rows, queries, least, backend,
    )  # fmt: skip
    kind = None
    if key_mask is None and isinstance(clusters, int | tuple | Blocks):
        kind = replay.kind("clusters", query, key, value, *options)
    if kind is None:
        return _attend(query, key, value, key_mask, *options)
    return replay.call(kind, lambda: _attend(query, key, value, None, *options), query, key, value)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool, scale: float | None,
    enable_gqa: bool, grid: Grid | None, prefix: int, offset: int, clusters: Clusters, near: int | str, closure: str,
    rank: str, variance: str, response: int | str | None, near_rows: int | str, queries: str, least: int, backend: str,
) -> Tensor:  # fmt: skip
    """What `cluster_attention` computes, step by step."""
    call = Call(query, key, value, key_mask, is_causal, scale, enable_gqa, None, grid, prefix, offset).checked()
    (query, key, value), Lk = call[:3], key.shape[-2]
    check_clusters(clusters)

    def form_of(queries_in_all: int, keys_in_all: int) -> Form:
        found = tuning(
            near, offset + queries_in_all, keys_in_all, is_causal=is_causal,
            blocks=isinstance(clusters, int | tuple | Blocks), count=isinstance(clusters, int),
            tree=clusters if isinstance(clusters, Tree) else None, asking=queries,
        )  # fmt: skip
        return check_form(
            near,
            closure,
            found.rank if rank == AUTO else rank,
            variance,
            found.response if response == AUTO else response,
            found.near_rows if near_rows == AUTO else near_rows,
            backend,
            queries,
        )

    if not whole(least, 1):
        raise ValueError(f"least must be a number of tokens, 1 or more, got {least!r}")
    if not whole(offset) or (offset and not is_causal):
        raise ValueError(f"offset must be a place, 0 or more, of causal queries, got {offset!r} with {is_causal=}")
    across = shards.answerer()
    if across is not None:
        return across.cluster(call, clusters, form_of, least)
    form = form_of(query.shape[-2], Lk)
    if not is_causal or grid is not None:
        call = call._replace(grid=check_grid(Lk, grid, prefix))
    lead, (H, Lq, _), E = call.lead, query.shape[-3:], value.shape[-1]
    if not (prod(lead) and H and Lq and Lk and E):
        return nothing((*lead, H, Lq, E), query, key, value)
    if prefix == Lk and not is_causal:  # every token is exact, as in one cluster that is near
        clusters, call = 1, call._replace(grid=None, prefix=0)
        form = form._replace(near=1, near_rows=1, together=False)
    if isinstance(clusters, Tree):
        _check_tree(clusters, call, form)
        with without_autocast(query.device.type):
            return _by_content(call, clusters.for_tokens(Lk - prefix), form, backend)
    if isinstance(clusters, Tensor) and not is_causal:
        made: Any = Assignment(*check_assignment(clusters, lead, key.shape[-3], Lk - call.prefix, key.device))
    else:
        made = clusters
    case = Case(call, made, form, min(least, Lk))  # more than all tokens is all of them
    kernels = kernels_for(backend, case)
    with without_autocast(query.device.type):
        q, k, v = (one_batch(x, lead) for x in (query, key, value))
        if kernels is None:
            plain = _reference if backend == "reference" else partial(by_heads, _reference)
            out = plain(q, k, v, case).to(query.dtype)
        else:
            mask = call.key_mask if key_mask is None or len(lead) == 1 else key_mask.expand(*lead, Lk).reshape(-1, Lk)
            point = None
            if q.dtype == torch.float32 and mask is None:  # which has digits to lose far from 0; 16 bits have few
                point = value_point(v, None, is_causal)
                k, v = k - origin(k, None, is_causal), v - point
            call = call._replace(query=q, key=k, value=v, key_mask=mask)
            out = run_kernels(kernels, case._replace(call=call))
            out = out if point is None else out + repeat_heads(point, H)
    return out if out.shape == (*lead, H, Lq, E) else out.reshape(*lead, H, Lq, E)


def _check_tree(tree: Tree, call: Call, form: Form) -> None:
    """Raises for what clusters by content cannot do."""
    if call.is_causal:
        raise TypeError("clusters must be an int or Blocks(size, keep, recent) when is_causal, got Tree")
    if form.near == "neighbours":
        raise ValueError(
            'near="neighbours" needs blocks of a sequence or a grid: clusters of a Tree have no neighbours'
        )
    if form.together:
        raise ValueError('queries="mean" needs blocks of a sequence or a grid: clusters of a Tree hold no queries')
    if tree.exact and not form.near:
        raise ValueError(f"exact={tree.exact} tokens of a Tree are those of near leaves: pass near, got near=0")
    if tree.leaves > 1 and (form.near_rows != 1 or form.full or not (form.pooled or form.response == 0)):
        got = (
            f"near_rows={form.near_rows}, variance={'full' if form.full else 'diagonal'!r}, response={form.response!r}"
        )
        raise ValueError(
            'a Tree with leaves takes near_rows=1, variance="diagonal" and response="pooled" or 0 (all "auto" as they '
            f"are), got {got}"
        )


def _by_content(call: Call, tree: Tree, form: Form, backend: str) -> Tensor:
    """Attention over keys in the order of a tree: blocks of that order, or two levels of them."""
    (query, key, value), prefix, lead = call[:3], call.prefix, call.lead
    Hk, Lk, E = key.shape[-3], key.shape[-2], value.shape[-1]
    q = one_batch(query, lead).unflatten(1, (Hk, -1)).flatten(0, 1)  # (N, G, Lq, D): heads of keys are sequences
    k, v = (one_batch(x, lead).flatten(0, 1) for x in (key, value))  # (N, Lk, .)
    mask = None
    if call.key_mask is not None:
        mask = call.key_mask.expand(*lead, Lk).reshape(-1, Lk).repeat_interleave(Hk, 0)
    parts, L = tree.count * tree.leaves, Lk - prefix
    G, Lq = q.shape[1:3]
    patches = _patches(call, tree)
    absent = None if mask is None else mask[:, prefix:] == 0
    basis = None
    if tree.narrow(q.shape[-1]):
        with torch.no_grad():
            dtype, keys = statistics_dtype(q.dtype), k[:, prefix:]
            basis = logit_basis(q.flatten(1, 2).to(dtype), keys.to(dtype), tree.width, absent)

    tiles, shared, asking = _tiles(call, form), form.near_rows > 1 and tree.leaves == 1, None
    runs = 1 << max(0, (Lq // form.near_rows).bit_length() - 1)  # of queries that share near clusters

    def ordered(keys: Tensor) -> Tensor:
        if basis is None:
            return tree_order(q.flatten(1, 2), keys, parts, tree, absent)
        return order_of(keys.detach().to(basis[1].dtype) @ basis[1], parts, tree, absent)

    plain = basis is None and patches is None and absent is None and not prefix
    if plain and shared and tiles is None and G == 1 and Lq == L and L % max(parts, runs) == 0:
        # One search for keys and queries: runs of more parts are those of fewer, cut further.
        both = torch.cat((seen_by(q[:, 0], k, tree), seen_by(k, q[:, 0], tree)))
        (order, asking), size = order_of(both, max(parts, runs), tree).chunk(2), L // parts
    elif patches is None:
        order, size = ordered(k[:, prefix:]), -(-L // parts)
        order = order + prefix if prefix else order
    else:
        places = torch.arange(prefix, Lk, device=q.device).view(1, 1, L, 1)
        order = ordered(patches.pack(k[:, None, prefix:]).mean(-2).squeeze(1))
        order, size = patches.pack(places)[0, 0, :, :, 0][order].flatten(1), -(-patches.pieces // parts) * patches.size
    if prefix:
        order = torch.cat((torch.arange(prefix, device=q.device).expand(len(order), -1), order), 1)
    k, v = (rows_of(x, order) for x in (k, v))
    mask = None if mask is None else mask.gather(1, order)
    if tree.leaves > 1:
        out = _two_levels(q, k, v, mask, call, tree, form, size, basis)
    else:
        if tiles is not None:
            q = tiles.pack(q).flatten(2, 3)
        elif shared:  # those who share near clusters are alike too
            if asking is None:
                looking = k.unsqueeze(1).expand(-1, G, -1, -1).flatten(0, 1)
                asking = tree_order(looking, q.flatten(0, 1), runs, tree)
            q = rows_of(q.flatten(0, 1), asking).view_as(q)
        out = cluster_attention(
            q, k.unsqueeze(1), v.unsqueeze(1), clusters=Blocks(size), near=form.near, closure=form.closure,
            prefix=prefix, key_mask=mask, scale=call.softmax_scale, enable_gqa=G > 1, rank=form.rank,
            variance="full" if form.full else "diagonal", response="pooled" if form.pooled else form.response,
            near_rows=form.near_rows, backend=backend,
        )  # fmt: skip
        if tiles is not None:
            out = tiles.unpack(out.unflatten(2, (-1, tiles.size)), Lq)
        elif asking is not None:
            places = torch.arange(Lq, device=q.device).expand_as(asking)
            back = torch.zeros_like(asking).scatter(1, asking, places)
            out = rows_of(out.flatten(0, 1), back).view_as(out)
    return out.reshape(*lead, Hk * G, Lq, E)


def _patches(call: Call, tree: Tree) -> Layout | None:
    """Squares of a grid that stay together in a tree; None: its tokens go one by one."""
    grid, side = call.grid, tree.patch
    if side == 1 or grid is None or call.key_mask is not None or any(n % side for n in grid):
        return None
    return tiled(grid, (side,) * len(grid))


def _tiles(call: Call, form: Form) -> Layout | None:
    """Tiles of a long grid whose queries share near clusters; None: those by content do.

    At 65,536 tokens of SAM 2 both have the same error, and tiles need no tree of the queries.
    """
    grid, L = call.grid, call.query.shape[-2]
    if grid is None or len(grid) != 2 or call.prefix or L < LONG_GRID or form.near_rows not in TILES:
        return None
    rows = 1 << ((form.near_rows.bit_length() - 1) // 2)  # as square as it can be
    tile = (rows, form.near_rows // rows)
    return None if any(side % n for side, n in zip(grid, tile, strict=True)) else tiled(grid, tile)


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
    prefix, dtype = call.prefix, statistics_dtype(q.dtype)
    given, G = q.dtype, q.shape[1]
    rows = q.flatten(1, 2).unsqueeze(1).to(dtype) * call.softmax_scale  # (N, 1, G Lq, D)
    k, v = k.unsqueeze(1).to(dtype), v.unsqueeze(1).to(dtype)
    weights = None
    if mask is not None:
        weights = (in_units(mask)[0] if mask.is_floating_point() else mask).to(dtype).unsqueeze(1)
        gone = (weights == 0).unsqueeze(-1)
        k, v = k.masked_fill(gone, 0), v.masked_fill(gone, 0)
    k, point = k - origin(k, weights, False), value_point(v, weights, False)
    v = v - point
    if weights is not None:
        v = v.masked_fill(gone, 0)
    exact = None
    if prefix:
        first = k.new_zeros(1, 1, prefix) if weights is None else log(weights[..., :prefix])
        exact = Exact(k[:, :, None, :prefix], v[:, :, None, :prefix], first[:, :, None, None, :])
        k, v, weights = k[:, :, prefix:], v[:, :, prefix:], None if weights is None else weights[..., prefix:]
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


def _reference(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Plain torch: q (B, H, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, E) -> (B, Hk, G, Lq, E)."""
    call, form, prefix = case.call, case.form, case.call.prefix
    dtype, (B, Hk, Lk, _) = statistics_dtype(q.dtype), k.shape
    given, k, v = q.dtype, k.to(dtype), v.to(dtype)
    q = (q.to(dtype) * call.softmax_scale).unflatten(1, (Hk, q.shape[1] // Hk))  # (B, Hk, G, Lq, D)
    weights = None
    if call.key_mask is not None:
        weights = call.key_mask.expand(*call.lead, Lk).reshape(B, 1, Lk)
        weights = (in_units(weights)[0] if weights.is_floating_point() else weights).to(dtype)
        absent = (weights == 0).unsqueeze(-1)
        k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
    k, point = k - origin(k, weights, call.is_causal), value_point(v, weights, call.is_causal)
    v = v - point if weights is None else (v - point).masked_fill(absent, 0)
    if call.is_causal:
        blocks = causal_blocks(case, call.offset + q.shape[-2])
        out = causal_clusters(q, k, v, weights, blocks, form, call.offset, prefix)
    else:
        asking, layout = _means(q, k, weights, case) if form.together else (q, None)
        out = _noncausal(asking, pack(q, k, v, weights, case), form, prefix, Lk, given)
        if layout is not None:
            out = torch.cat((out[..., :prefix, :], layout.handed_out(out[..., prefix:, :], Lk - prefix)), -2)
    if weights is None:
        return out + point.unsqueeze(2)
    seen = (weights > 0).cumsum(-1)  # of the last key that a row sees; a row without any stays 0
    last = torch.arange(out.shape[-2], device=q.device) + call.offset
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
    query, key, lead, Hk, dtype = *call[:2], call.lead, call.key.shape[-3], statistics_dtype(call.key.dtype)
    q, k = (x.expand(*lead, *x.shape[-3:]).reshape(prod(lead), *x.shape[-3:]).to(dtype) for x in (query, key))
    weights = None
    if key_mask is not None:
        weights = key_mask.expand(*lead, k.shape[-2]).reshape(prod(lead), 1, -1).to(dtype)
        k = k.masked_fill((weights == 0).unsqueeze(-1), 0)
    q = q.unflatten(1, (Hk, -1)).flatten(2, 3)
    return kmeans(q, k - origin(k, weights, False), weights, options).reshape(*lead, *k.shape[1:3])


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
        first, rest = q[..., :prefix, :], q[..., prefix:, :]
        outs = []
        if prefix:  # prefix tokens stand nowhere: all blocks are far from them
            out = mix(first.flatten(2, 3).unsqueeze(-2), far, None, Seen(exact), form)
            outs.append(out.squeeze(-2).unflatten(2, (G, prefix)))
        length = rest.shape[-2]
        if layout.place is None:
            rows = torch.stack([layout.pack(x) for x in rest.unbind(2)], 2)  # (B, Hk, G, K, m, D)
            which = layout.adjacent.repeat(G, 1)[None, None]
            out = mix(rows.flatten(2, 3), far, tokens, Seen(exact, which), form).unflatten(2, (G, -1))
            outs.append(layout.unpack(out, length))
        else:
            which = layout.adjacent[layout.place].repeat(1, G, 1)[:, None]
            out = mix(rest.flatten(2, 3).unsqueeze(-2), far, tokens, Seen(exact, which), form)
            outs.append(out.squeeze(-2).unflatten(2, (G, length)))
        return torch.cat(outs, -2)
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


def check_form(
    near: int | str,
    closure: str,
    rank: str,
    variance: str,
    response: int | str | None,
    near_rows: int | str = 1,
    backend: str = "auto",
    queries: str = "each",
) -> Form:
    """The options that need no tensors, checked."""
    check_closure(closure)
    if near != "neighbours" and not whole(near):
        raise ValueError(f'near must be a number of clusters, 0 or more, or "neighbours", got {near!r}')
    check_choice("rank", rank, RANKS)
    check_choice("variance", variance, VARIANCES)
    check_choice("backend", backend, BACKENDS)
    check_choice("queries", queries, QUERIES)
    pooled = response == "pooled"
    count = None if pooled else response
    if count is not None and not whole(count):
        raise ValueError(f'response must be None (all clusters), a number, 0 or more, or "pooled", got {response!r}')
    if not whole(near_rows, 1):
        raise ValueError(f"near_rows must be at least 1, got {near_rows!r}")
    return Form(near, closure, rank, variance == "full", count, near_rows, pooled, queries == "mean")


def causal_blocks(case: Case, Lq: int) -> Blocks:
    """The blocks of causal attention; raises for what has no causal form."""
    blocks, call, form = case.clusters, case.call, case.form
    if call.grid is not None:
        raise ValueError(f"is_causal=True takes blocks of a sequence; pass grid=None, got {call.grid}")
    if not whole(call.prefix):
        raise ValueError(f"prefix must be a number of tokens, 0 or more, got {call.prefix!r}")
    if not isinstance(blocks, int | Blocks):
        kind = type(blocks).__name__
        raise TypeError(f"clusters must be an int or Blocks(size, keep, recent) when is_causal, got {kind}")
    if form.near == "neighbours":
        raise ValueError('near="neighbours" has no causal form; Blocks(size, recent=1) makes the block before exact')
    blocks = blocks_of_past(blocks, Lq)
    if form.near and blocks.keep is not None:
        raise ValueError(
            f"near={form.near} needs the tokens of old blocks, which {blocks} merges; use recent= or keep=None"
        )
    if form.together:
        raise ValueError('queries="mean" has no causal form: a block would know its later queries; pass "each"')
    if form.near_rows != 1:
        raise ValueError(f"near_rows={form.near_rows} would let a row choose for earlier ones; pass 1 when is_causal")
    return blocks
