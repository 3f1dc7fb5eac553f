"""Causal cumulant attention in Triton, orders 2 and 3 (diagonal): its operator and launches.

Shape legend: B sequences, H key heads, Hq query heads, L tokens, D, E widths; a sequence is cut into `splits` parts of
`span` tokens, a part into tiles. q carries the scale. Row i sees the tokens j <= i. About any point (c, d), with
k' = k - c, v' = v - d, running weight W_i, running mean m_i of k', and a bar for the weighted mean over j <= i:

    f_i = q,                      g_j = k'           at order 2        u_ij = f_i.g_j
    f_i = (q - q^2 m_i, q^2/2),   g_j = (k', k'^2)   at order 3
    out_i = d + 1/W_i sum_j w_j u_ij v'_j + (1 - ubar_i) v'bar_i

Inside a tile u is a matrix; the tokens before it enter through their sums of g v'^T, g and v'. The point of a part is
near the mean of all that came before it, so that nothing is large, and no bit of the future reaches a row. Gradients,
with z_ij = do_i.v'_j and G_i = 1/W_i (1 with normalization="sum"):

    df_i = G_i sum_j w_j (z_ij - zbar_i) g_j         dg_j = w_j sum_{i>=j} G_i (z_ij - zbar_i) f_i
    dv_j = w_j sum_{i>=j} G_i (1 - ubar_i + u_ij) do_i
    order 2: dq = df, dk = dg.   Order 3, through m_i as well, with y_i = -q^2 df1_i:
    dq = (1 - 2 q m) df1 + q df2,   dk_j = dg1_j + 2 k'_j dg2_j + w_j sum_{i>=j} y_i / W_i

so keys need, of the rows after their part, R = sum G f do^T, r = sum G (1 - ubar) do and s = sum y/W - G zbar f. When
the point moves so that k', v' grow by a, b: f1 -> f1 - 2 a f2, ubar -> ubar + f1.a - f2.a^2 (f1 as it was), and
zbar -> zbar + do.b, which moves R, r and s from one part to the one before it.

Bytes: forward reads k, v twice and q once and writes out (k, v once for sequences of one part); backward reads
q, k, v, do twice and writes dq, dk, dv. At order 3, where all sums in one walk would spill registers, y and both f,
times G, go through memory: 14 tensors read and 6 written in all. Kept for the backward pass: the sums before each part,
those of k', v', k'^2 before each tile, and ubar, 4 bytes for each row and head. No atomics: runs are bitwise equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch, batch_of
from ..launch import empty_like_rows, like_rows, stride_unit, strides
from ..operator import Operator
from . import backward, forward, third
from .plan import ROWS, SCAN_WARPS, Plan


def _float32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def empty(batch: Batch, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, and what the backward pass needs: sums before each part and tile, and ubar of each row and head."""
    query, plan = batch.query, Plan(batch)
    state, means = (
        _float32(query, *plan.state_shape()),
        _float32(query, query.numel() // query.shape[-1] if keep else 0),
    )
    return empty_like_rows(query, batch.value.shape[-1]), state, means, _float32(query, *plan.tiles_shape(keep))


def run_forward(batch: Batch, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, state, means, tiles = empty(batch, keep)
    if out.numel() == 0:
        return out, state, means, tiles
    p, (w, w_strides) = Plan(batch), batch.weighing()
    query, key, value, _, cu_q, cu_k, *_ = batch
    parts = _float32(query, *p.state_shape()[1:]) if p.splits > 1 else state
    for e, columns in enumerate(p.columns):
        v, o = value[..., columns], out[..., columns]
        unit = stride_unit(query, key, v, o)
        walk = p.walk(batch, v.shape[-1], unit)
        if p.splits > 1:
            forward.part_sums[(p.pairs * (p.splits - 1),)](
                key, v, w, parts, cu_q, cu_k, *strides(unit, key, v), *w_strides, *p.sizes,
                **walk, **p.launch("part_sums"),
            )  # fmt: skip
            forward.prefixes[(p.pairs, p.BD // ROWS)](
                key, parts, state[e], cu_q, p.Lq, *p.sizes[2:], ROWS=ROWS, **p.scan, num_warps=SCAN_WARPS[0]
            )
        forward.outputs[(p.pairs * p.group * p.splits,)](
            query, key, v, w, o, means, state[e], tiles[e], cu_q, cu_k, *strides(unit, query, key, v), *w_strides,
            *strides(unit, o), *p.at_rows, *p.sizes, p.tiles("outputs"), batch.scale,
            KEEP=keep, **walk, **p.rows, **p.launch("outputs"),
        )  # fmt: skip
    return out, state, means, tiles


def run_backward(batch: Batch, grad: Tensor, state: Tensor, means: Tensor, tiles: Tensor) -> tuple[Tensor, ...]:
    dq, dk, dv = (like_rows(x) for x in batch[:3])
    query, key, value, _, cu_q, cu_k, *_ = batch
    if grad.numel() == 0 or key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    p, (w, w_strides) = Plan(batch), batch.weighing()
    count = query.numel() // p.D
    gains = _float32(query, 2 if w is None else 3, count)
    rows = _rows_of_third(p, dq) if p.order == 3 else ()
    sums = _float32(query, p.pairs, p.splits, p.group, p.sums) if p.splits > 1 else gains
    later = _float32(query, p.pairs, p.splits, p.sums) if p.splits > 1 else gains
    by_queries, by_keys = (p.pairs * p.group * p.splits,), (p.pairs * p.splits,)
    pieces = []
    for e, columns in enumerate(p.columns):
        v, g, dv_e = value[..., columns], grad[..., columns], dv[..., columns]
        dq_e, dk_e = (torch.empty_like(x, dtype=torch.float32) if len(p.columns) > 1 else x for x in (dq, dk))
        unit = stride_unit(query, key, v, g, dq_e, dk_e, dv_e)
        inputs, last = strides(unit, query, key, v), (*p.at_rows, count, *p.sizes)
        walk = {**p.walk(batch, v.shape[-1], unit), **p.rows}
        carry = {"CARRY": p.splits > 1, "SUMS": p.sums}
        if p.order == 2:
            backward.query_gradients[by_queries](
                query, key, v, w, g, dq_e, means, gains, sums, state[e], cu_q, cu_k, *inputs, *w_strides,
                *strides(unit, g, dq_e), *last, batch.scale, **carry, **walk, **p.launch("query_gradients"),
            )  # fmt: skip
        else:
            y, f, half, after = rows
            third.query_gradients[(by_queries[0] * (p.BD // p.half),)](
                query, key, v, w, g, dq_e, y, f, half, means, gains, state[e], tiles[e], cu_q, cu_k, *inputs,
                *w_strides, *strides(unit, g, dq_e), *last, p.tiles("outputs"), batch.scale,
                COLUMNS=p.half, **walk, **p.launch("query_gradients"),
            )  # fmt: skip
            some = {name: x for name, x in walk.items() if name not in ("MASKED", "STATE")}
            third.row_sums[by_queries](
                f, half, g, y, gains, sums, after, cu_q, cu_k, *strides(unit, g, dq_e), *last, p.tiles("key_gradients"),
                **carry, **some, **p.launch("row_sums"),
            )  # fmt: skip
        if p.splits > 1:
            backward.suffixes[(p.pairs,)](
                sums, later, state[e], cu_q, p.Lq, *p.sizes[2:],
                GROUP=p.group, SUMS=p.sums, **p.scan, num_warps=SCAN_WARPS[1],
            )  # fmt: skip
        if p.order == 2:
            backward.key_gradients[by_keys](
                query, key, v, w, g, dk_e, dv_e, gains, later, state[e], cu_q, cu_k, *inputs, *w_strides,
                *strides(unit, g, dk_e, dv_e), *last, batch.scale, SUMS=p.sums, **walk, **p.launch("key_gradients"),
            )  # fmt: skip
        else:
            for walks in p.walks:
                grid = (p.pairs,) if walks == "first" and w is None else by_keys
                third.key_gradients[grid](
                    key, v, w, g, dk_e, dv_e, y, f, half, gains, after, later, state[e], cu_q, cu_k, *inputs[3:],
                    *w_strides, *strides(unit, g, dk_e, dv_e, dq_e), *last, p.tiles("key_gradients"),
                    SUMS=p.sums, TILES=walks, **walk, **p.launch("key_gradients"),
                )  # fmt: skip
        pieces.append((dq_e, dk_e))
    if len(pieces) > 1:
        for x, parts in zip((dq, dk), zip(*pieces, strict=True), strict=True):
            x.copy_(sum(parts[1:], parts[0]))
    return dq, dk, dv


def _rows_of_third(p: Plan, dq: Tensor) -> tuple[Tensor, ...]:
    """Memory for what rows of order 3 leave for keys: y and both f, times G, and sums after each tile."""
    wide = torch.bfloat16 if dq.dtype == torch.bfloat16 else torch.float32
    after = _float32(dq, p.pairs, p.splits, p.group, p.tiles("key_gradients"), 2 * p.BD + p.BE)
    return torch.empty_like(dq), torch.empty_like(dq, dtype=wide), torch.empty_like(dq, dtype=wide), after


# (B, Hq, Lq, E), ragged (Tq, Hq, E). Cost: L (tile + 2 E) D a head, O(L) memory.
attention = Operator("causal", Batch, run_forward, run_backward, empty, states=3, make=batch_of)
