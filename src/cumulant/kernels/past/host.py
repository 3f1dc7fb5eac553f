"""Causal cluster attention on the GPU: its operator and launches. Who sees what: forward.py; statistics: cluster/.

Shape legend: B sequences, H query heads, Hk key heads, Lq, Lk lengths, D, E widths, KP clusters of all levels, padded,
A places in the list of a tile of M rows.

Memory beside inputs and outputs: statistics KP D E a head, and Lq A numbers of 16 bits (gains) forward, five times that
backward; without responses none forward, three times backward. With T near clusters Lq T (E + 3) numbers forward, of
which Lq 2 T are kept, and Lq T D backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cluster.host import TILES, added_up, backward_prefix, find_statistics, fixed_for, order_of
from ..cluster.order import sorted_tables
from ..cluster.plan import Plan, Shape, kept_plan, no_numbers
from ..launch import cdiv, empty_like_rows, layout, like_rows, multiprocessors, padded
from ..operator import Operator
from . import backward, forward
from . import near as by_pair
from . import pooled as by_one

CK = 32  # clusters of a list that the programs of a tile take at once
_CELLS = 512  # numbers of each matrix that a program sums over clusters
_ROWS = (*TILES, "ORDERED", "PREFIX", "CLOSURE", "RESPONSE", "E", "BE", "KP", "SQUARE", "PRECISION")


class Call(NamedTuple):
    """One call -> (B, H, Lq, E). Tables are those of `cluster.past`."""

    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hk, Lk, D); query head h reads key head h // (H / Hk)
    value: Tensor  # (B, Hk, Lk, E)
    bounds: Tensor
    logs: Tensor
    order: Tensor | None
    spans: Tensor
    lists: Tensor
    levels: Tensor
    clusters: int  # of all levels
    blocks: int
    size: int  # tokens of a block
    recent: int
    offset: int
    scale: float
    tile: int
    response: int  # -1: clusters answer with their covariance, -2: with the mean of theirs by size, 0: with their mean
    closure: str
    prefix: int  # sinks: the first tokens that take part, in no cluster
    near: int  # clusters of its past that each row sees token by token
    rank: str  # those of largest "mass", or of largest mass times variance: "error"
    masked: bool  # some tokens take no part


def plan_for(call: Call) -> Plan:
    query, (B, Hk, Lk, D) = call.query, call.key.shape
    shape = Shape(
        B, Hk, query.shape[1] // Hk, query.shape[2], Lk, D, call.value.shape[-1], call.bounds.shape[0],
        call.order is not None, call.clusters, call.size, False, call.tile, call.near, call.response, call.closure,
        "past", False, call.prefix, call.masked,
    )  # fmt: skip
    return kept_plan(shape, query.dtype)


def empty(call: Call, keep: bool) -> tuple[Tensor, ...]:
    """out, and lse (B H, Lq), vectors, factors, matrices of KP clusters as of cluster/host.py, rounding, and of near
    clusters `named` (B H, G Lq, T), the pairs by cluster (B H, G Lq T) and their bounds (B H, 2, KP + 1) (near.py); of
    one response for all, for a backward pass, the sum of p f of each row, (B H, tiles, M).

    One response for all that a row sees is kept as two matrices for each last one of these, (B H, KP, 2, BD, BE).
    """
    query, plan = call.query, plan_for(call)
    heads, shape = plan.pairs, plan.shape
    return (
        empty_like_rows(query, shape.E),
        query.new_empty(heads * shape.group, shape.length_q, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 2 * plan.BD + plan.BE, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 4 * plan.BD + 2 * plan.BE),
        query.new_empty(heads, plan.KP, *((2,) if plan.response == 3 else ()), plan.BD, plan.BE),
        empty_like_rows(query, shape.E) if keep and query.dtype != torch.float32 else query.new_empty(0),
        query.new_empty(heads, shape.group * shape.length_q, call.near, dtype=torch.int32),
        query.new_empty(heads, shape.group * shape.length_q * call.near, dtype=torch.int32),
        query.new_empty(heads, 2, plan.KP + 1 if call.near else 0, dtype=torch.int32),
        query.new_empty(heads, plan.tiles if keep and plan.response == 3 else 0, shape.tile, dtype=torch.float32),
    )


def run_forward(call: Call, keep: bool) -> tuple[Tensor, ...]:
    plan, outputs = plan_for(call), empty(call, keep)
    unit, steps = layout(*call[:3], outputs[0])
    find_statistics(plan, call, outputs, unit, steps, _pool)
    shape, (out, lse, vectors, factors, matrices, rounding, *_) = plan.shape, outputs
    (q, k, v), heads, A = call[:3], plan.pairs, call.lists.shape[-1] - 1
    answers = levels = vectors
    if call.near:
        outputs = (*outputs[:6], *_choose(plan, call, vectors, factors, outputs[6], unit, steps), outputs[9])
        answers, levels = _answers(plan, call, outputs, keep, unit, steps)
    keep, noted, each = rounding.numel() > 0, keep and plan.response == 3, plan.response == 1
    gains = q.new_empty(heads, plan.tiles, A, shape.tile) if each else outputs[9] if noted else matrices
    tops = vectors.new_empty(heads, plan.tiles, A // CK, shape.tile) if each else vectors
    within = _within(call)
    kind, more = f"attend {unit} {keep} {noted} {within}", dict(NEAR=call.near, KEEP=keep, NOTED=noted, WITHIN=within)
    fixed = plan.once(kind, lambda: _fixed(plan, "past_attend", unit, **more))
    forward.attend.start(
        (plan.tiles, heads, 1), fixed, q, k, v, out, rounding, lse, call.bounds, order_of(call), call.logs, call.spans,
        call.lists, vectors, factors, matrices, gains, tops, _list(outputs[6]), answers, levels,
        *steps[0], *steps[1], *steps[2], *steps[3],
        shape.length_q, shape.length_k, shape.heads, plan.head_tiles, plan.per, A, call.size, call.recent, call.offset,
        call.scale,
    )  # fmt: skip
    return outputs


def _list(numbers: Tensor) -> Tensor:
    return numbers if numbers.numel() else no_numbers(numbers.device)


def _choose(
    plan: Plan, call: Call, vectors: Tensor, factors: Tensor, named: Tensor, unit: int, steps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Near clusters of each row, and the pairs by cluster with their bounds."""
    shape, N = plan.shape, max(16, min(64, 8192 // plan.KP))
    tiles, names = cdiv(shape.length_q, N), ("CLOSURE", "GROUP", "D", "BD", "BE", "KP")
    fixed = plan.once(
        f"choose {unit} {call.rank}",
        lambda: fixed_for(
            plan, "past_choose", unit, *names, rows=128, NEAR=call.near, BY_ERROR=call.rank == "error",
            POOLED=plan.response == 3, N=N, CK=CK,
        ),
    )  # fmt: skip
    by_pair.choose_rows.start(
        (tiles * shape.group, plan.pairs, 1), fixed, call.query, call.logs, vectors, factors, named, *steps[0],
        shape.length_q, shape.heads, tiles, call.clusters, plan.per, call.size, call.recent, call.offset, call.scale,
    )  # fmt: skip
    ends, _, pairs = sorted_tables(named.view(plan.pairs, -1), None, call.clusters)
    return named, pairs, ends


def _parts(plan: Plan, call: Call) -> tuple[int, int, int]:
    """Grid for the pairs of each cluster: twice the programs that these would want if all were chosen as often."""
    pairs = plan.shape.group * plan.shape.length_q * call.near
    return max(1, min(64, cdiv(2 * pairs, call.tile * call.clusters))), call.clusters, plan.pairs


def _fixed_pairs(plan: Plan, call: Call, name: str, unit: int) -> Any:
    config = plan.config(name)
    names = (*TILES, "ORDERED", "E", "BE", "KP", "PRECISION")
    return fixed_for(plan, name, unit, *names, NEAR=call.near, N=config.block, STAGES=config.stages)


def _answers(
    plan: Plan, call: Call, outputs: Sequence[Tensor], keep: bool, unit: int, steps: Any
) -> tuple[Tensor, Tensor]:
    """What the near clusters of each row answer, in float32 where a backward pass will take differences."""
    shape, (_, _, vectors, factors, _, _, named, pairs, ends, _) = plan.shape, outputs
    levels = vectors.new_empty(named.shape)
    answers = (vectors if keep else call.query).new_empty(*named.shape, plan.BE)
    fixed = plan.once(f"answers {unit} {keep}", lambda: _fixed_pairs(plan, call, "past_answers", unit))
    by_pair.answer_pairs.start(
        _parts(plan, call), fixed, *call[:3], answers, levels, call.bounds, order_of(call), factors, pairs, ends,
        *steps[0], *steps[1], *steps[2], shape.length_q, shape.length_k, shape.heads, plan.per, call.scale,
    )  # fmt: skip
    return answers, levels


def _pair_sums(plan: Plan, call: Call, grad: Tensor, outputs: Sequence[Tensor], unit: int, steps: Any) -> Tensor:
    """What the near clusters of each row add to its dq."""
    shape, (out, lse, _, factors, _, rounding, named, pairs, ends, _) = plan.shape, outputs
    found = lse.new_empty(*named.shape, plan.BD)
    fixed = plan.once(f"pair_gradients {unit}", lambda: _fixed_pairs(plan, call, "past_pair_gradients", unit))
    by_pair.pair_gradients.start(
        _parts(plan, call), fixed, *call[:3], out, rounding, grad, found, lse, call.bounds, order_of(call), factors,
        pairs, ends, *steps[0], *steps[1], *steps[2], *steps[3], *steps[4],
        shape.length_q, shape.length_k, shape.heads, plan.per, call.scale,
    )  # fmt: skip
    return found


def _within(call: Call) -> bool:
    """Whether each tile lies in one block of rows, for kernels that ask: with one response for all."""
    return call.response == -2 and call.size % call.tile == 0 and call.offset % call.tile == 0


def _fixed(plan: Plan, name: str, unit: int, **more: Any) -> Any:
    config = plan.config(name)
    stages = {"STAGES": config.stages, "NEAR_STAGES": config.key_stages, "AHEAD": config.keys > 0}
    return fixed_for(plan, name, unit, *_ROWS, N=config.block, CK=CK, **stages, **more)


def run_backward(call: Call, grad: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    plan, (out, lse, vectors, factors, matrices, rounding, named, pairs, ends, gains) = plan_for(call), outputs
    (q, k, v), shape, heads, A = call[:3], plan.shape, plan.pairs, call.lists.shape[-1] - 1
    dq, dk, dv = (like_rows(x) for x in call[:3])
    if shape.masked or call.offset + shape.length_q < shape.length_k:  # keys that no row sees have no gradient
        dk.zero_()
        dv.zero_()
    unit, steps = layout(*call[:3], out, grad, dq, dk, dv)
    pair_sums = _pair_sums(plan, call, grad, outputs, unit, steps) if call.near else lse
    per_query = tuple(lse.new_empty(heads, plan.tiles, shape.tile) for _ in range(2))
    each = heads, plan.tiles, A, shape.tile
    weights, dz, dx = (q.new_empty(each) for _ in range(3))
    if plan.response != 3:  # in float32: in 16 bits gains would add a rounding to the largest part of dq
        gains = lse.new_empty(each)
    rest = weights, gains, dz, dx
    seen = A, call.size, call.recent, call.offset
    within = _within(call)
    kind = f"query_gradients {unit} {within}"
    fixed = plan.once(kind, lambda: _fixed(plan, "past_query_gradients", unit, NEAR=call.near, WITHIN=within))
    backward.query_gradients.start(
        (plan.tiles, heads, 1), fixed, q, k, v, out, rounding, grad, dq, lse, *per_query, call.bounds, order_of(call),
        call.logs, call.spans, call.lists, vectors, factors, matrices, *rest, _list(named), pair_sums,
        *steps[0], *steps[1], *steps[2], *steps[3], *steps[4], *steps[5],
        shape.length_q, shape.length_k, shape.heads, plan.head_tiles, plan.per, *seen, call.scale,
    )  # fmt: skip
    grad_vectors, grad_matrices = _sums(plan, call, grad, rest, vectors, unit, steps)
    config = plan.config("past_key_gradients")
    block = min(config.block, padded(call.size, 32))
    fixed = plan.once(
        f"key_gradients {unit} {block} {within}",
        lambda: fixed_for(
            plan, "past_key_gradients", unit, *TILES, "ORDERED", "RESPONSE", "E", "BE", "KP", "PRECISION",
            rows=128, NEAR=call.near, N=block, ROWS=min(call.tile, 64), STAGES=config.stages, AHEAD=config.keys > 0,
            PLAIN=within and not shape.ordered and not call.prefix,
        ),
    )  # fmt: skip
    backward.key_gradients.start(
        (cdiv(call.size, block), call.blocks, heads), fixed, q, k, v, grad, dk, dv, *per_query, call.bounds,
        order_of(call), call.levels, vectors, grad_vectors, grad_matrices, _list(pairs), _list(ends),
        *steps[0], *steps[1], *steps[2], *steps[4], *steps[6], *steps[7],
        shape.length_q, shape.length_k, shape.heads, plan.head_tiles, plan.per, call.size, call.recent, call.offset,
        call.levels.shape[-1], call.scale,
    )  # fmt: skip
    if call.prefix:
        backward_prefix(plan, call, grad, dk, dv, per_query, unit, steps, call.offset)
    return dq, dk, dv


def _sums(
    plan: Plan, call: Call, g: Tensor, rest: Sequence[Tensor], vectors: Tensor, unit: int, steps: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of vectors and matrices of the clusters, float32; of no matrices: anything."""
    q, shape, heads = call.query, plan.shape, plan.pairs
    weights, gains, dz, dx = rest
    tokens = *steps[0], *steps[4], shape.length_q, shape.heads, plan.head_tiles
    names = (*TILES, "E", "BE", "KP", "PRECISION")
    name = "past_vector_gradients_with_pools" if plan.response == 3 else "past_vector_gradients"
    config = plan.config(name)
    at_once = min(config.keys, plan.KP)
    splits = _splits(plan, plan.KP // at_once * heads, q.device, config.key_stages)
    partial = vectors.new_empty(splits, *vectors.shape)
    both = _within(call) and at_once == plan.KP and shape.group == 1 and call.offset % call.size == 0
    found = vectors.new_empty(plan.pairs, plan.KP, plan.BD, plan.BE) if plan.response == 3 else vectors
    fixed = plan.once(
        f"vector_gradients {unit} {both}",
        lambda: fixed_for(
            plan, name, unit, *names, "SQUARE", rows=128, N=min(config.block or 128, shape.tile),
            CK=at_once, STAGES=config.stages, POOLS=both,
        ),
    )  # fmt: skip
    backward.vector_gradients.start(
        (plan.KP // at_once, heads, splits), fixed, q, g, weights, dz, dx, gains, call.spans, partial, found, *tokens,
        call.clusters, call.lists.shape[-1] - 1, call.size, call.recent, call.offset, call.scale,
    )  # fmt: skip
    grad_vectors = added_up(partial)
    if plan.response == 0:
        return grad_vectors, vectors
    if plan.response == 3:
        _pool_gradients(plan, call, g, gains, found, both, unit, tokens)
        return grad_vectors, found
    matrix = plan.config("past_matrix_gradients")
    C, N = matrix.keys, min(shape.tile, matrix.block)
    splits = _splits(plan, plan.KP // C * heads, q.device, 2)
    partial = vectors.new_empty(splits, heads, plan.KP, plan.BD, plan.BE)
    more = {"N": N, "C": C, "STAGES": matrix.stages}
    name = "past_matrix_gradients"
    fixed = plan.once(f"matrix_gradients {unit}", lambda: fixed_for(plan, name, unit, *names, rows=128, **more))
    backward.matrix_gradients.start(
        (plan.KP // C, heads, splits), fixed, q, g, gains, call.spans, partial, *tokens, call.clusters,
        call.lists.shape[-1] - 1, call.offset,
    )  # fmt: skip
    return grad_vectors, added_up(partial)


def _pool(plan: Plan, call: Call, each: Tensor, pooled: Tensor) -> None:
    """Writes the responses of the clusters up to each one, out of theirs."""
    size, N = plan.BD * plan.BE, _CELLS
    fixed = plan.once("pools", lambda: _fixed_pool(plan))
    by_one.pools.start((size // N, plan.pairs, 1), fixed, each, call.bounds, pooled, plan.per, call.clusters)


def _fixed_pool(plan: Plan) -> Any:
    sizes = {"SIZE": plan.BD * plan.BE, "N": _CELLS}
    return fixed_for(plan, "pool", 0, "KP", rows=128, **sizes)


def _pool_gradients(
    plan: Plan, call: Call, g: Tensor, gains: Tensor, found: Tensor, known: bool, unit: int, tokens: tuple[int, ...]
) -> None:
    """Writes gradients of the clusters' own matrices, (B H, KP, BD, BE) float32, in place of those of the pools, which
    may be `known`."""
    config, size, N = plan.config("past_pool_gradients"), plan.BD * plan.BE, _CELLS
    names = (*TILES, "E", "BE", "KP", "PRECISION")
    fixed = plan.once(
        f"pool_gradients {unit}",
        lambda: fixed_for(
            plan, "past_pool_gradients", unit, *names, rows=128, N=min(config.block, padded(call.size, 16)),
            STAGES=config.stages,
        ),
    )  # fmt: skip
    if not known:
        by_one.pool_gradients.start(
            (call.clusters, plan.pairs, 1), fixed, call.query, g, gains, found, *tokens, call.size, call.recent,
            call.offset,
        )  # fmt: skip
    least = max(0, call.offset // call.size - call.recent - 1)
    fixed = plan.once("handed_back", lambda: _fixed_pool(plan))
    by_one.handed_back.start(
        (size // N, plan.pairs, 1), fixed, found, call.bounds, plan.per, call.clusters, call.recent, least
    )


def _splits(plan: Plan, programs: int, device: torch.device, resident: int) -> int:
    """Programs that share the tiles of a cluster: so many for each multiprocessor, eight at most."""
    slots = resident * multiprocessors(device)
    return max(1, min(8, cdiv(slots, programs), plan.tiles // 4))


attention = Operator("past", Call, run_forward, run_backward, empty, states=9, reads_out=True)
