"""Cluster attention on the GPU: its operator and launches. Formulas: parts.py; sizes: plan.py.

Shape legend: B sequences, H query heads, Hk key heads, Lq, Lk lengths, D, E widths, K clusters (KP padded), T near and
R responding clusters of a tile of M queries; "heads" of what is kept are key heads, with the tiles of all query heads
of one.

Memory beside inputs and outputs: statistics K D E a head, and Lq K numbers of 16 bits (gains) forward, five times that
backward; with one response for all none forward, three times backward. Linear in the length for a fixed K: no Lq x Lk
and no Lq x K x D tensor exists. What a launch needs beside tensors is kept by the plan: Python costs time too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..launch import cdiv, empty_like_rows, layout, like_rows, padded
from ..operator import Operator
from ..tokens import Fixed
from . import backward, forward, keys, statistics, sums
from .plan import Call, Plan, no_numbers, of_blocks, plan_for

TILES = ("GROUP", "D", "BD", "M")
ADDED = {"N": 512, "C": 8, "num_warps": 4}
ADDING = Fixed(ADDED, True)
Pool = Callable[[Plan, Any, Tensor, Tensor], None]
ROWS_OF = (*TILES, "CLOSURE", "NEAR", "BE", "CK", "KP", "SQUARE", "PRECISION")


def empty(call: Call, keep: bool) -> tuple[Tensor, ...]:
    """out, and lse (B H, Lq), vectors (B Hk, KP, 2 BD + BE), factors (B Hk, KP, 4 BD + 2 BE), matrices (B Hk, KP, BD,
    BE), near (B Hk, tiles, T), responding (B Hk, tiles, R), and rounding (B, H, Lq, E).

    One matrix for all clusters is kept as two of its type, (B Hk, 2, BD, BE). `rounding` is what the output lost in its
    own to 16 bits, for a backward pass only.
    """
    query, plan = call.query, plan_for(call)
    shape, heads = plan.shape, plan.pairs
    answering = shape.response if plan.response == 2 else 0
    return (
        empty_like_rows(query, shape.E),
        query.new_empty(heads * shape.group, shape.length_q, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 2 * plan.BD + plan.BE, dtype=torch.float32),
        query.new_empty(heads, plan.KP, 4 * plan.BD + 2 * plan.BE),
        query.new_empty(heads, 2 if plan.response == 3 else plan.KP, plan.BD, plan.BE),
        query.new_empty(heads, plan.tiles, plan.listed, dtype=torch.int32),
        query.new_empty(heads, plan.tiles, answering, dtype=torch.int32),
        empty_like_rows(query, shape.E) if keep and query.dtype != torch.float32 else query.new_empty(0),
    )


def run_forward(call: Call, keep: bool) -> tuple[Tensor, ...]:
    if plan_for(call).copies:
        call = _in_order(call)
    plan, outputs = plan_for(call), empty(call, keep)
    unit, steps = layout(*call[:3], outputs[0])
    find_statistics(plan, call, outputs, unit, steps)
    _choose(plan, call, outputs, unit, steps)
    _attend(plan, call, outputs, unit, steps)
    return outputs


def _in_order(call: Call) -> Call:
    """The same call with keys and values copied in the order of the clusters."""
    key, value = (x.new_empty(x.shape) for x in call[1:3])
    _reorder(call, call.key, call.value, key, value, False)
    return call._replace(key=key, value=value, order=None)


def _reorder(call: Call, key: Tensor, value: Tensor, to_key: Tensor, to_value: Tensor, back: bool) -> None:
    plan, (unit, steps) = plan_for(call), layout(key, value, to_key, to_value)
    constants = {**plan.constants("D", "E"), "BD": padded(plan.shape.D), "BE": padded(plan.shape.E)}
    constants |= {"BACK": back, "N": 64, "UNIT": unit, "num_warps": 4}
    fixed = plan.once(f"reorder {unit} {back}", lambda: Fixed(constants, unit == 8))
    statistics.reorder.start(
        (cdiv(plan.shape.length_k, 64), plan.pairs, 1), fixed, key, value, to_key, to_value, order_of(call),
        *steps[0], *steps[1], *steps[2], *steps[3], plan.shape.length_k, plan.shape.heads, plan.per,
    )  # fmt: skip


def fixed_for(plan: Plan, name: str, unit: int, *names: str, rows: int | None = None, **more: Any) -> Fixed:
    """Constants of the kernel `name`: those that the plan knows by `names`, `more`, warps and registers; unit 0: it
    reads fresh memory alone."""
    known = {**plan.constants(*names), **more, **plan.resources(name, rows)}
    return Fixed(known | {"UNIT": unit} if unit else known, unit in (0, 8))


def find_statistics(
    plan: Plan, call: Any, outputs: Sequence[Tensor], unit: int, steps: Any, past: Pool | None = None
) -> None:
    """Writes vectors, factors and matrices, outputs[2:5], of the clusters of `call`. past: of causal attention, how the
    matrices become those of the past."""
    causal = past is not None
    vectors, factors, matrices = outputs[2:5]
    pooled, shape = plan.response == 3, plan.shape
    each = matrices.new_empty(plan.pairs, plan.KP, plan.BD, plan.BE) if pooled else matrices
    points, given = vectors, plan.many_clusters(call.key.device) and not causal
    if given:
        points = factors.new_empty(plan.pairs, 2 * plan.BD + plan.BE)
        names = ("ORDERED", "D", "E", "BD", "BE", "KP")
        fixed = plan.once(f"points {unit}", lambda: fixed_for(plan, "points", unit, *names, rows=128))
        statistics.points.start(
            (plan.pairs, 1, 1), fixed, call.key, call.value, call.bounds, order_of(call), points, *steps[1], *steps[2],
            shape.length_k, shape.heads, shape.clusters, plan.per,
        )  # fmt: skip
    N = plan.config("statistics").block
    fixed = plan.once(
        f"statistics {unit} {causal}",
        lambda: fixed_for(
            plan, "statistics", unit, "ORDERED", "D", "E", "BD", "BE", "KP", "PRECISION", rows=128,
            N=N, FOLD=16, STAGES=plan.config("statistics").stages, CAUSAL=causal, GIVEN=given,
            EVEN=shape.equal and shape.longest % N == 0,
        ),
    )  # fmt: skip
    statistics.statistics.start(
        (plan.KP, plan.pairs, 1), fixed, call.key, call.value, call.bounds, order_of(call), points, vectors, factors,
        each, *steps[1], *steps[2], shape.length_k, shape.heads, shape.clusters, plan.per, call.scale,
    )  # fmt: skip
    if pooled and past is not None:
        past(plan, call, each, matrices)
    elif pooled:
        size, N = plan.BD * plan.BE, plan.config("pool").block
        fixed = plan.once("pool", lambda: fixed_for(plan, "pool", 0, "KP", "CK", rows=128, SIZE=size, N=N))
        statistics.pool.start((size // N, plan.pairs, 1), fixed, each, call.bounds, matrices, plan.per)


def order_of(call: Any) -> Tensor:
    return no_numbers(call.key.device) if call.order is None else call.order


def _choose(plan: Plan, call: Call, outputs: Sequence[Tensor], unit: int, steps: Any) -> None:
    shape, (_, _, vectors, factors, _, near, responding, _) = plan.shape, outputs
    if call.which is not None:
        near[..., : shape.near].copy_(call.which.expand(*near.shape[:2], -1))
    choosing, listed = shape.near > 0 and call.which is None, plan.response == 2
    if choosing and shape.rank == "mean":
        _choose_by_mean(plan, call, vectors, near, unit, steps)
        choosing = False
    elif shape.prefix and not choosing:
        near[..., shape.near] = plan.KP
    if not (choosing or listed) or plan.fused:
        return
    scores = vectors.new_empty(plan.pairs, plan.tiles, 2, plan.KP)
    fixed = plan.once(
        f"choose {unit}",
        lambda: fixed_for(
            plan, "choose", unit, *ROWS_OF, "PREFIX",
            BY_ERROR=shape.rank == "error", LISTED=listed, GIVEN=not choosing,
        ),
    )  # fmt: skip
    forward.choose.start(
        (plan.tiles, plan.pairs, 1), fixed, call.query, call.logs, vectors, factors, scores, _list(near),
        _list(responding), *steps[0], shape.length_q, shape.heads, plan.head_tiles, shape.clusters, plan.per,
        plan.listed, responding.shape[-1], call.scale,
    )  # fmt: skip


def _choose_by_mean(plan: Plan, call: Call, vectors: Tensor, near: Tensor, unit: int, steps: Any) -> None:
    shape, names = plan.shape, ("PREFIX", "CLOSURE", "BD", "BE", "CK", "KP")
    if plan.few_tiles(call.query.device):
        fixed = plan.once(
            f"choose_alone {unit}", lambda: fixed_for(plan, "choose_alone", unit, *names, "GROUP", "D", "M", rows=128)
        )
        forward.choose_alone.start(
            (plan.tiles, plan.pairs, 1), fixed, call.query, call.logs, vectors, near, *steps[0],
            shape.length_q, shape.heads, plan.head_tiles, shape.clusters, plan.per, plan.listed, call.scale,
        )  # fmt: skip
        return
    moments = vectors.new_empty(plan.pairs, plan.tiles, 2, plan.BD)
    fixed = plan.once(f"query_moments {unit}", lambda: fixed_for(plan, "query_moments", unit, *TILES, rows=128))
    forward.query_moments.start(
        (plan.tiles, plan.pairs, 1), fixed, call.query, moments, *steps[0],
        shape.length_q, shape.heads, plan.head_tiles, call.scale,
    )  # fmt: skip
    name = "choose_by_products" if plan.by_products(call.query.device) else "choose_by_mean"
    N = plan.config(name).block
    fixed = plan.once(name, lambda: fixed_for(plan, name, 0, *names, rows=128, N=N))
    getattr(forward, name).start(
        (cdiv(plan.tiles, N), plan.pairs, 1), fixed, moments, call.logs, vectors, near,
        plan.tiles, shape.clusters, plan.per, plan.listed,
    )  # fmt: skip


def _attend(plan: Plan, call: Call, outputs: Sequence[Tensor], unit: int, steps: Any) -> None:
    shape, (out, lse, vectors, factors, matrices, near, responding, rounding) = plan.shape, outputs
    (q, k, v), heads, config = call[:3], plan.pairs, plan.near_config("attend")
    apart, keep = plan.response in (1, 2), rounding.numel() > 0
    chunk = plan.CK if plan.fused or apart else min(config.keys or plan.CK, plan.KP)
    chunks = plan.KP // chunk
    gains = q.new_empty(heads, plan.tiles, plan.KP, shape.tile) if apart else matrices
    tops = vectors.new_empty(heads, plan.tiles, chunks, shape.tile) if apart and chunks > 1 else vectors
    fixed = plan.once(
        f"attend {unit} {keep}",
        lambda: fixed_for(
            plan, "attend", unit, *ROWS_OF, "PREFIX", "ORDERED", "WHOLE", "E", "RESPONSE",
            CHOOSE=plan.fused, BY_ERROR=shape.rank == "error", KEEP=keep, EVEN=plan.even(config.block), N=config.block,
            LOOSE=plan.loose,
            CHUNK_STAGES=1 if plan.fused or apart else config.stages, NEAR_STAGES=plan.near_stages(config, q.device),
            STAGES=config.stages, CK=chunk, WIDE=plan.wide,
        ),
    )  # fmt: skip
    forward.attend.start(
        (plan.tiles, heads, 1), fixed, q, k, v, out, rounding, lse, call.bounds, order_of(call), call.logs, vectors,
        factors, matrices, _list(near), _list(responding), gains, tops, *steps[0], *steps[1], *steps[2], *steps[3],
        shape.length_q, shape.length_k, shape.heads, plan.head_tiles, shape.clusters, plan.per,
        *plan.blocks(config.block), plan.listed, responding.shape[-1], call.scale,
    )  # fmt: skip


def _list(numbers: Tensor) -> Tensor:
    return numbers if numbers.numel() else no_numbers(numbers.device)


def run_backward(call: Call, grad: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    if plan_for(call).copies:
        dq, key_found, value_found = run_backward(_in_order(call), grad, *outputs)
        dk, dv = (like_rows(x) for x in call[1:3])
        _reorder(call, dk, dv, key_found, value_found, True)
        return dq, dk, dv
    plan, vectors, responding = plan_for(call), outputs[2], outputs[6]
    dq, dk, dv = (like_rows(x) for x in call[:3])
    if plan.shape.masked:  # keys that take no part have no gradient
        dk.zero_()
        dv.zero_()
    unit, steps = layout(*call[:3], outputs[0], grad, dq, dk, dv)
    per_query, rest = _backward_queries(plan, call, grad, dq, outputs, unit, steps)
    grad_vectors, grad_matrices = _backward_vectors(plan, call, grad, rest, vectors, unit, steps)
    if grad_matrices is None:
        grad_matrices = _backward_matrices(plan, call, grad, rest[1], responding, vectors, unit, steps)
    _backward_keys(plan, call, grad, dk, dv, outputs, per_query, grad_vectors, grad_matrices, unit, steps)
    if plan.shape.prefix:
        backward_prefix(plan, call, grad, dk, dv, per_query, unit, steps)
    return dq, dk, dv


def _backward_queries(
    plan: Plan, call: Call, g: Tensor, dq: Tensor, outputs: Sequence[Tensor], unit: int, steps: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Writes dq; returns shifts and deltas (B Hk, tiles, M), and weights, gains, dz and dx (B Hk, tiles, KP, M)."""
    shape, (out, lse, vectors, factors, matrices, near, responding, rounding) = plan.shape, outputs
    (q, k, v), heads, config = call[:3], plan.pairs, plan.config("query_gradients")
    per_query = tuple(lse.new_empty(heads, plan.tiles, shape.tile) for _ in range(2))
    # Gains multiply the largest part of dq: in 16 bits they would add a third rounding to those of S and of dq itself.
    kinds = (q.dtype, torch.float32, q.dtype, q.dtype)
    counts = (plan.KP, 1 if plan.response == 3 else plan.KP, plan.KP, plan.KP)
    rest = tuple(
        q.new_empty(heads, plan.tiles, n, shape.tile, dtype=kind) for n, kind in zip(counts, kinds, strict=True)
    )
    fixed = plan.once(
        f"query_gradients {unit}",
        lambda: fixed_for(
            plan, "query_gradients", unit, *ROWS_OF, "ORDERED", "E", "RESPONSE", EVEN=plan.even(config.block),
            LOOSE=plan.loose, N=config.block, CHUNK_STAGES=1 if plan.response in (1, 2) else config.stages,
            STAGES=config.stages, NEAR_STAGES=plan.near_stages(config, q.device),
            CK=min(config.keys or plan.CK, plan.KP),
        ),
    )  # fmt: skip
    backward.query_gradients.start(
        (plan.tiles, heads, 1), fixed, q, k, v, out, rounding, g, dq, lse, *per_query, call.bounds, order_of(call),
        call.logs, vectors, factors, matrices, _list(near), _list(responding), *rest,
        *steps[0], *steps[1], *steps[2], *steps[3], *steps[4], *steps[5],
        shape.length_q, shape.length_k, shape.heads, plan.head_tiles, shape.clusters, plan.per,
        *plan.blocks(config.block), plan.listed, responding.shape[-1], call.scale,
    )  # fmt: skip
    return per_query, rest


def _backward_vectors(
    plan: Plan, call: Call, g: Tensor, rest: Sequence[Tensor], vectors: Tensor, unit: int, steps: Any
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the vectors, and that of one matrix for all clusters (B Hk, 1, BD, BE) where it is summed with them:
    where all clusters are one chunk and heads narrow enough for registers."""
    q, shape, chunks, config = call.query, plan.shape, plan.KP // plan.CK, plan.config("vector_gradients")
    span, splits = plan.once(f"vector splits {q.device}", lambda: plan.split(plan.pairs * chunks, q.device, 2, 0.001))
    shared = plan.shares_sums
    matrix = plan.pairs * plan.BD * plan.BE if shared else 0
    partial = vectors.new_empty(splits, vectors.numel() + matrix)
    names = (*TILES, "WHOLE", "E", "BE", "CK", "KP", "SQUARE", "PRECISION")
    fixed = plan.once(
        f"vector_gradients {unit}",
        lambda: fixed_for(
            plan, "vector_gradients", unit, *names, rows=128, N=min(config.block, shape.tile), STAGES=config.stages,
            SHARED=shared,
        ),
    )  # fmt: skip
    sums.vector_gradients.start(
        (chunks, plan.pairs, splits), fixed, q, g, *rest, partial, *steps[0], *steps[4],
        shape.length_q, shape.heads, plan.head_tiles, plan.tiles, span, partial.stride(0), call.scale,
    )  # fmt: skip
    total = added_up(partial)
    found = total[: vectors.numel()].view(vectors.shape)
    return found, total[vectors.numel() :].view(plan.pairs, 1, plan.BD, plan.BE) if shared else None


def _backward_matrices(
    plan: Plan, call: Call, g: Tensor, gains: Tensor, responding: Tensor, vectors: Tensor, unit: int, steps: Any
) -> Tensor:
    """dS (B Hk, KP, BD, BE) float32, (B Hk, 1, BD, BE) of one matrix; anything where clusters answer with means."""
    if plan.response == 0:
        return vectors
    q, shape, heads = call.query, plan.shape, plan.pairs
    name = "listed_gradients" if plan.response == 2 else "matrix_gradients"
    config, names = plan.config(name), (*TILES, "E", "BE", "KP", "PRECISION")
    tokens = (*steps[0], *steps[4], shape.length_q, shape.heads, plan.head_tiles, plan.tiles)
    if plan.response == 2:
        total = vectors.new_empty(heads, plan.KP, plan.BD, plan.BE)
        lists = _tiles_of_clusters(plan, responding)
        fixed = plan.once(f"{name} {unit}", lambda: fixed_for(plan, name, unit, *names, rows=128, STAGES=config.stages))
        sums.listed_gradients.start((plan.KP, heads, 1), fixed, q, g, gains, total, *lists, *tokens)
        return total
    C, KP = (1, 1) if plan.response == 3 else (config.keys, plan.KP)
    groups = 1 if plan.response == 3 else cdiv(shape.clusters, C)
    # One matrix a head: writing a part of it costs next to nothing, and programs are small.
    resident, cost = (4, 0.0005) if plan.response == 3 else (config.key_stages, 0.03)
    span, splits = plan.once(f"splits {q.device}", lambda: plan.split(heads * groups, q.device, resident, cost))
    partial = vectors.new_empty(splits, heads, KP, plan.BD, plan.BE)
    more = {"N": min(shape.tile, config.block), "C": C, "KP": KP, "STAGES": config.stages}
    fixed = plan.once(f"{name} {unit}", lambda: fixed_for(plan, name, unit, *names, rows=128, **more))
    sums.matrix_gradients.start((groups, heads, splits), fixed, q, g, gains, partial, *tokens, span)
    return added_up(partial)


def added_up(partial: Tensor) -> Tensor:
    """The sum over the first dimension of fresh float32 memory: torch's own cannot be repeated without its Python."""
    if len(partial) == 1:
        return partial[0]
    total = partial.new_empty(partial.shape[1:])
    sums.add_up.start((cdiv(total.numel(), ADDED["N"]), 1, 1), ADDING, partial, total, total.numel(), len(partial))
    return total


def _tiles_of_clusters(plan: Plan, named: Tensor) -> tuple[Tensor, Tensor]:
    """Of lists of clusters (B Hk, tiles, T): how many tiles name each cluster, (B Hk, KP), and which."""
    heads, tiles, T = named.shape
    counts, lists = named.new_empty(heads, plan.KP), named.new_empty(heads, plan.KP, tiles)
    fixed = plan.once("tiles_of_clusters", lambda: Fixed({"N": 256, "num_warps": 4}, True))
    keys.tiles_of_clusters.start((plan.KP, heads, 1), fixed, named, counts, lists, tiles, T)
    return counts, lists


def _backward_keys(
    plan: Plan, call: Call, g: Tensor, dk: Tensor, dv: Tensor, outputs: Sequence[Tensor], per_query: Sequence[Tensor],
    grad_vectors: Tensor, grad_matrices: Tensor, unit: int, steps: Any,
) -> None:  # fmt: skip
    (q, k, v), shape, config, vectors = call[:3], plan.shape, plan.config("key_gradients"), outputs[2]
    lists = _tiles_of_clusters(plan, outputs[5]) if shape.near else (call.bounds, call.bounds)
    terms = plan.response == 3 and q.dtype != torch.float32
    if terms:
        vectors, grad_matrices = _key_terms(plan, call, vectors, grad_vectors, grad_matrices)
    loose = not shape.longest  # then a block more than a fair share; who has more takes them in turn
    blocks = cdiv(shape.longest or 2 * shape.length_k // shape.clusters, config.block)
    grid = max(1, blocks), shape.clusters, plan.pairs
    if plan.loose:  # where many rows choose the large clusters, those would be waited for
        loose, grid = False, (cdiv(shape.length_k, config.block) + shape.clusters, 1, plan.pairs)
    fixed = plan.once(
        f"key_gradients {unit}",
        lambda: fixed_for(
            plan, "key_gradients", unit, *TILES, "ORDERED", "WHOLE", "E", "BE", "KP", "PRECISION",
            rows=128 if shape.tile >= 64 else 32, LOOSE=loose, SPREAD=plan.loose, NEAR=shape.near,
            RESPONSE=plan.response > 0, POOLED=plan.response == 3, TERMS=terms,
            EVEN=plan.even(config.block), N=config.block, ROWS=min(shape.tile, 64), STAGES=config.stages,
        ),
    )  # fmt: skip
    keys.key_gradients.start(
        grid, fixed, q, k, v, g, dk, dv, *per_query, call.bounds,
        order_of(call), vectors, grad_vectors, grad_matrices, *lists,
        *steps[0], *steps[1], *steps[2], *steps[4], *steps[6], *steps[7],
        shape.length_q, shape.length_k, shape.heads, plan.head_tiles, plan.tiles, plan.per, call.scale,
    )  # fmt: skip


def _key_terms(
    plan: Plan, call: Call, vectors: Tensor, grad_vectors: Tensor, grad_matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """What `keys.key_terms` writes."""
    terms, halves = torch.empty_like(vectors), call.query.new_empty(plan.pairs, 2, plan.BD, plan.BE)
    CK = min(plan.KP, plan.config("key_terms").block)
    fixed = plan.once(
        "key_terms", lambda: fixed_for(plan, "key_terms", 0, "BD", "BE", "KP", "PRECISION", CK=CK, rows=128)
    )
    keys.key_terms.start(
        (plan.KP // CK, plan.pairs, 1), fixed, vectors, grad_vectors, grad_matrices, call.bounds, terms, halves,
        plan.per, call.scale,
    )  # fmt: skip
    return terms, halves


def backward_prefix(
    plan: Plan, call: Any, g: Tensor, dk: Tensor, dv: Tensor, per_query: Sequence[Tensor], unit: int, steps: Any,
    offset: int | None = None,
) -> None:  # fmt: skip
    """Writes dk and dv of the prefix. offset: place of the first row of causal attention."""
    (q, k, v), shape, config = call[:3], plan.shape, plan.config("key_gradients")
    N = plan.prefix_block
    blocks = cdiv(shape.prefix, N)
    name = f"prefix splits {q.device}"
    span, splits = plan.once(name, lambda: plan.split(plan.pairs * blocks, q.device, 2, 0.001))
    partial = per_query[0].new_empty(splits, plan.pairs, blocks, N, plan.BD + plan.BE)
    names, rows = ("ORDERED", "D", "E", "BD", "BE", "KP"), 128 if shape.tile >= 64 else 32
    fixed = plan.once(
        f"prefix_gradients {unit}",
        lambda: fixed_for(
            plan, "key_gradients", unit, *names, "GROUP", "WHOLE", "M", "PRECISION", rows=rows, N=N,
            ROWS=min(shape.tile, 64), STAGES=config.stages, CAUSAL=offset is not None,
        ),
    )  # fmt: skip
    keys.prefix_gradients.start(
        (blocks, splits, plan.pairs), fixed, q, k, v, g, partial, *per_query, call.bounds, order_of(call),
        *steps[0], *steps[1], *steps[2], *steps[4],
        shape.length_q, shape.length_k, shape.heads, plan.head_tiles, plan.tiles, span, plan.per, offset or 0,
        call.scale,
    )  # fmt: skip
    name = f"finish_prefix {unit}"
    fixed = plan.once(name, lambda: fixed_for(plan, "key_gradients", unit, *names, rows=rows, N=N))
    keys.finish_prefix.start(
        (blocks, plan.pairs, 1), fixed, partial, dk, dv, call.bounds, order_of(call), *steps[6], *steps[7],
        shape.length_k, shape.heads, splits, partial.stride(0), plan.per,
    )  # fmt: skip


attention = Operator("cluster", Call, run_forward, run_backward, empty, states=7, reads_out=True)


def attention_of_blocks(*inputs: Any, **options: Any) -> Tensor:
    """`attention`, called as `plan.of_blocks` is."""
    return attention(*of_blocks(*inputs, **options))
