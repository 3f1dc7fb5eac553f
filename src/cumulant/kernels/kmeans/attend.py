"""Attention in clusters that k-means finds, as one operator: the search, an order of the queries where alike ones share
near clusters, and the kernels of clusters. What is launched depends on no number that tokens hold, so that a call can
be repeated (`kernels.replay`) and is one node of a compiled graph.

Shape legend: B sequences, H query heads, Hk key heads, Lq, Lk lengths, K clusters (KP padded), P places of queries in
runs, the last ones padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cluster import host as clusters
from ..cluster import order as sorting
from ..cluster import plan
from ..cluster.bounds import padding
from ..launch import cdiv, empty_like_rows, like_rows
from ..operator import Operator
from ..tree import host as tree
from ..tree import rows
from . import host


class Call(NamedTuple):
    """One call -> (B, H, Lq, E)."""

    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hk, Lk, D)
    value: Tensor  # (B, Hk, Lk, E)
    places: Tensor  # (S,) int64: keys whose logits say which queries are alike
    clusters: int
    iterations: int
    step: int  # centres are fitted on every so-many-th key
    looks: bool  # at the queries for a metric; else distances are plain
    runs: int  # into so many queries are halved; 0: they stay as they stand
    turns: int  # of the search for a direction
    scale: float  # this and what follows as of `cluster.plan.Call`
    tile: int
    near: int
    response: int
    closure: str
    rank: str


def _inside(call: Call, query: Tensor, tables: Sequence[Tensor]) -> plan.Call:
    """What the kernels of clusters are called with: tables (bounds, logs, order)."""
    bounds, logs, order = tables
    return plan.Call(query, call.key, call.value, None, bounds, logs, order, call.clusters, 0, False, *call[10:])


def empty(call: Call, keep: bool) -> tuple[Tensor, ...]:
    """out, the tables of the clusters, the order of the queries (B H, P), and the state of `cluster.host`."""
    query, (B, Hk, Lk, _), KP = call.query, call.key.shape, padding(call.clusters)
    P = call.runs * cdiv(query.shape[2], call.runs) if call.runs else 0
    bounds = query.new_empty(B * Hk, 2, KP + 1, dtype=torch.int32)
    logs, order = bounds.new_empty(B * Hk, KP, dtype=torch.float32), bounds.new_empty(B * Hk, Lk)
    asking = bounds.new_empty(B * query.shape[1], P, dtype=torch.int64)
    out, *state = clusters.empty(_inside(call, query, (bounds, logs, order)), keep)
    return out, bounds, logs, order, asking, *state


def run_forward(call: Call, keep: bool) -> tuple[Tensor, ...]:
    query, key, K = call.query, call.key, call.clusters
    ids = host.launched(query if call.looks else None, key, None, None, K, call.iterations, call.step)
    tables = sorting.tables_on_device(ids.view(-1, ids.shape[2]), None, K)
    if not call.runs:
        out, *state = clusters.run_forward(_inside(call, query, tables), keep)
        return out, *tables, ids.new_empty(0, dtype=torch.int64), *state
    asking = tree.order_of_queries(query, key, call.places, call.runs, call.turns)
    found, *state = clusters.run_forward(_inside(call, rows.moved_to(query, asking), tables), keep)
    out = rows.moved_back(found, asking, empty_like_rows(query, found.shape[-1]))
    return out, *tables, asking, *state


def run_backward(call: Call, grad: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    out, tables, asking, state = outputs[0], outputs[1:4], outputs[4], outputs[5:]
    if not call.runs:
        return clusters.run_backward(_inside(call, call.query, tables), grad, out, *state)
    query, grad, out = (rows.moved_to(x, asking) for x in (call.query, grad, out))
    found, dk, dv = clusters.run_backward(_inside(call, query, tables), grad, out, *state)
    return rows.moved_back(found, asking, like_rows(call.query)), dk, dv


attention = Operator("kmeans_cluster", Call, run_forward, run_backward, empty, states=11, reads_out=True)
