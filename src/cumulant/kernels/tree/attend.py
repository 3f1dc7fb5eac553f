"""Attention in clusters of a tree, as one operator: the search, keys and values in its order, queries where alike ones
share near clusters, and the kernels of clusters. What is launched depends on no number that tokens hold, so that a call
can be repeated (`kernels.replay`) and is one node of a compiled graph.

Shape legend: B sequences, H heads, Lq, Lk lengths, D, E widths, K clusters (KP padded), P places of tokens in runs, the
last ones padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cluster import host as clusters
from ..cluster import plan
from ..launch import cdiv, empty_like_rows, like_rows
from ..operator import Operator
from . import host, rows


class Call(NamedTuple):
    """One call -> (B, H, Lq, E)."""

    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, H, Lk, D)
    value: Tensor  # (B, H, Lk, E)
    places: Tensor  # (S,) int64: queries that say which keys are alike
    of_queries: Tensor  # (S,) int64: keys whose logits say which queries are alike
    tiles: Tensor  # (1, Lq) int64: the order of queries that share near clusters as tiles of a grid; or (1, 0)
    bounds: Tensor  # tables of blocks of the keys in order, as of `cluster.plan.Call`
    logs: Tensor
    parts: int  # into so many runs keys are cut
    runs: int  # and queries; 0: they stay as they stand, or are in tiles
    turns: int  # of the search for a direction
    clusters: int  # this and what follows as of `cluster.plan.Call`
    longest: int
    equal: bool
    scale: float
    tile: int
    near: int
    response: int
    closure: str
    rank: str


def _inside(call: Call, query: Tensor, key: Tensor, value: Tensor) -> plan.Call:
    """What the kernels of clusters are called with, of tokens in order."""
    return plan.Call(query, key, value, None, call.bounds, call.logs, None, *call[11:])


def empty(call: Call, keep: bool) -> tuple[Tensor, ...]:
    """out, `host.orders`, and the state of `cluster.host`."""
    (B, H, Lq, _), Lk, new = call.query.shape, call.key.shape[2], call.query.new_empty
    if host.one_search(call.query, call.key, call.places, call.of_queries, call.parts, call.runs):
        sizes = (2 * B * H, Lk), (B * H, 0)
    else:
        sizes = (B * H, call.parts * cdiv(Lk, call.parts)), (B * H, call.runs and call.runs * cdiv(Lq, call.runs))
    out, *state = clusters.empty(_inside(call, *call[:3]), keep)
    return out, *(new(size, dtype=torch.int64) for size in sizes), *state


def run_forward(call: Call, keep: bool) -> tuple[Tensor, ...]:
    query, key, value = call[:3]
    orders = host.orders(query, key, call.places, call.of_queries, call.parts, call.runs, call.turns)
    of_keys, of_queries = _apart(call, *orders)
    key, value = (rows.moved_to(x, of_keys) for x in (key, value))
    if of_queries is None:
        out, *state = clusters.run_forward(_inside(call, query, key, value), keep)
    else:
        found, *state = clusters.run_forward(_inside(call, rows.moved_to(query, of_queries), key, value), keep)
        out = rows.moved_back(found, of_queries, empty_like_rows(query, found.shape[-1]))
    return out, *orders, *state


def _apart(call: Call, order: Tensor, asking: Tensor) -> tuple[Tensor, Tensor | None]:
    """The orders of the keys and of the queries, None where these stay as they stand, out of `host.orders`."""
    N = call.query.shape[0] * call.query.shape[1]
    if order.shape[0] > N:
        return order[:N], order[N:]
    if call.runs:
        return order, asking
    return order, call.tiles.expand(N, -1) if call.tiles.numel() else None


def run_backward(call: Call, grad: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    out, *orders = outputs[:3]
    of_keys, of_queries = _apart(call, *orders)
    query, (key, value) = call.query, (rows.moved_to(x, of_keys) for x in call[1:3])
    if of_queries is not None:
        query, grad, out = (rows.moved_to(x, of_queries) for x in (query, grad, out))
    dq, dk, dv = clusters.run_backward(_inside(call, query, key, value), grad, out, *outputs[3:])
    if of_queries is not None:
        dq = rows.moved_back(dq, of_queries, like_rows(call.query))
    dk, dv = (rows.moved_back(x, of_keys, like_rows(y)) for x, y in ((dk, call.key), (dv, call.value)))
    return dq, dk, dv


attention = Operator("tree_cluster", Call, run_forward, run_backward, empty, states=9, reads_out=True)
