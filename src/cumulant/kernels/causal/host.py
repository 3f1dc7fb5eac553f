"""Causal cumulant attention in Triton, orders 2 and 3 (diagonal): host code, custom operators, tuning table.

Shape legend: B sequences, H key heads, Hq query heads, L tokens, D, E widths; a sequence is cut into `splits` parts of
`span` tokens, a part into tiles. q carries the scale. Row i sees the tokens j <= i. About any point (c, d), with
k' = k - c, v' = v - d, running weight W_i, running mean m_i of k', and a bar for the weighted mean over j <= i:

    f_i = q,                      g_j = k'           at order 2        u_ij = f_i.g_j
    f_i = (q - q^2 m_i, q^2/2),   g_j = (k', k'^2)   at order 3
    out_i = d + 1/W_i sum_j w_j u_ij v'_j + (1 - ubar_i) v'bar_i

Inside a tile u is a matrix; the tokens before it enter through their sums of g v'^T, g and v'. The point of a part is
the mean of all that came before it, so that nothing is large, and no bit of the future reaches a row. Gradients, with
z_ij = do_i.v'_j and G_i = 1/W_i (1 with normalization="sum"):

    df_i = G_i sum_j w_j (z_ij - zbar_i) g_j         dg_j = w_j sum_{i>=j} G_i (z_ij - zbar_i) f_i
    dv_j = w_j sum_{i>=j} G_i (1 - ubar_i + u_ij) do_i
    order 2: dq = df, dk = dg.   Order 3, through m_i as well, with y_i = -q^2 df1_i:
    dq = (1 - 2 q m) df1 + q df2,   dk_j = dg1_j + 2 k'_j dg2_j + w_j sum_{i>=j} y_i / W_i

so keys need, of the rows after their part, R = sum G f do^T, r = sum G (1 - ubar) do and s = sum y/W - G zbar f. When
the point moves so that k', v' grow by a, b: f1 -> f1 - 2 a f2, ubar -> ubar + f1.a - f2.a^2 (f1 as it was), and
zbar -> zbar + do.b, which moves R, r and s from one part to the one before it.

Bytes: forward reads k, v twice and q once and writes out (k, v once for sequences of one part); backward reads
q, k, v, do twice and writes dq, dk, dv, at order 3 also writes and reads y, as large as q. Kept for the backward pass:
the sums before each part, and ubar, 4 bytes for each row and head. No atomics: runs are bitwise equal.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...tracing import is_plain
from ..direct import direct
from ..launch import (
    Config,
    cdiv,
    dot_precision,
    empty_like_rows,
    multiprocessors,
    on_device,
    padded,
    rows,
    stride_unit,
    strides,
    token_weights,
)
from . import backward as kernels_back
from . import forward as kernels

# kernel -> widest of D and E (padded) -> order 2, order 3, for 16-bit inputs; benchmarks/gpu_causal.py --sweep. At
# order 3 `query_gradients` leaves something for each tile of `key_gradients`: their tiles must be equal.
TABLE: dict[str, dict[int, tuple[Config, Config]]] = {
    "part_sums": {
        64: (Config(64, 4, 3, registers=128), Config(64, 4, 3, registers=168)),
        128: (Config(64, 8, 2), Config(64, 8, 2)),
        256: (Config(32, 8, 1), Config(32, 8, 1)),
    },
    "outputs": {
        64: (Config(64, 4, 3), Config(64, 4, 1)),
        128: (Config(64, 8, 2), Config(64, 8, 1)),
        256: (Config(32, 8, 1), Config(32, 8, 1)),
    },
    "query_gradients": {
        64: (Config(64, 4, 3), Config(64, 4, 2)),
        128: (Config(64, 8, 1), Config(32, 8, 1)),
        256: (Config(32, 8, 1), Config(16, 8, 1)),
    },
    "key_gradients": {
        64: (Config(64, 4, 3), Config(64, 4, 1)),
        128: (Config(64, 8, 1), Config(32, 8, 1)),
        256: (Config(32, 8, 1), Config(16, 8, 1)),
    },
}
FLOAT32 = Config(16, 8, 1)  # float32 tiles take twice the room; products without tensor cores are the bottleneck
SCAN_WARPS = (2, 8)  # of `prefixes` and `suffixes`
ROWS = 16  # rows of D that a program of `prefixes` carries
SHORTEST = 256  # tokens of a part, at least
ENOUGH = 4  # programs a multiprocessor from which on sequences stay whole: then k and v are read once
WANTED = 6  # programs a multiprocessor when sequences are cut


def config(kernel: str, order: int, width: int, dtype: torch.dtype) -> Config:
    """The line of TABLE for the widest of D and E."""
    if dtype == torch.float32:
        return FLOAT32
    return TABLE[kernel][max(64, width)][order - 2]


def value_block(order: int, D: int, dtype: torch.dtype) -> int:
    """Columns of v that one program takes: its D x E accumulators, 2 at order 2 and 4 at order 3, fill registers."""
    room = 16384 if order == 2 else 8192
    return max(32, min(128, room // padded(D) // (4 if dtype == torch.float32 else 1)))


def cut(pairs: int, length: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a part and parts of a sequence. Comparisons only, so that symbolic lengths stay symbolic."""
    processors = multiprocessors(device)
    parts = 1 if pairs >= ENOUGH * processors else cdiv(WANTED * processors, max(1, pairs))
    span = SHORTEST
    while span * parts < length:
        span *= 2
    return span, max(1, cdiv(length, span))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    order: int,
    scale: float,
    normalization: str = "mean",
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
) -> Tensor:
    """query (B, Hq, Lq, D), key (B, H, Lk, D), value (B, H, Lk, E), weights (B, Lk) or None -> (B, Hq, Lq, E).

    Ragged: query (Tq, Hq, D), key (Tk, H, D), value (Tk, H, E), weights (Tk,), with offsets cu_q, cu_k (B + 1) and the
    longest lengths, which are read from the device when not given. Query head h reads key head h // (Hq / H).
    Cost: L (tile + 2 E) D a head, O(L) memory.
    """
    if cu_q is None or cu_k is None:
        max_q, max_k = query.shape[2], key.shape[2]
    else:
        max_q, max_k = _longest(cu_q) if max_q is None else max_q, _longest(cu_k) if max_k is None else max_k
    arguments = (query, key, value, weights, cu_q, cu_k, max_q, max_k, order, scale, normalization == "sum")
    if not is_plain(query):
        return forward(*arguments)[0]
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Attention.apply(*arguments)
    return run_forward(*arguments)[0]


def _longest(offsets: Tensor) -> int:
    return int((offsets[1:] - offsets[:-1]).max()) if offsets.numel() > 1 else 0


class _Plan:
    """What the kernels of one call share: sizes, the cut of sequences into parts, compile-time arguments."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
        max_q: int, max_k: int, order: int, scale: float, total: bool,
    ) -> None:  # fmt: skip
        self.ragged = cu_q is not None
        self.order, self.D, E, self.dtype = order, q.shape[-1], v.shape[-1], q.dtype
        sequences = k.shape[0] if cu_k is None else cu_k.shape[0] - 1
        heads_at = -2 if self.ragged else -3
        self.Hq, self.H = q.shape[heads_at], k.shape[heads_at]
        self.Lq, self.Lk = max_q, max_k
        self.pairs, self.group = sequences * self.H, self.Hq // max(1, self.H)
        self.span, self.splits = cut(self.pairs, max(self.Lq, self.Lk), q.device)
        self.BD, self.BE = padded(self.D), min(padded(E), value_block(order, self.D, self.dtype))
        self.state = (order - 1) * self.BD * self.BE + 3 * self.BD + 2 * self.BE + 16
        self.sums = (order - 1) * self.BD * self.BE + 2 * self.BD + self.BE
        self.columns = [slice(e, min(e + self.BE, E)) for e in range(0, E, self.BE)]
        self.sizes = (self.Lq, self.Lk, self.H, self.span, self.splits)
        self.scan = {"ORDER": order, "RAGGED": self.ragged, "BD": self.BD, "BE": self.BE, "STATE": self.state}
        self.walk = {**self.scan, "D": self.D, "WEIGHTED": weights is not None, "PRECISION": dot_precision(q.dtype)}
        self.rows = {"GROUP": self.group, "SUM": total}

    def state_shape(self) -> tuple[int, ...]:
        """Sums before each part, for each range of value columns."""
        return len(self.columns), self.pairs, self.splits, self.state

    def at_rows(self, query: Tensor) -> tuple[int, int]:
        """Steps from one batch and head to the next in numbers of one for each row and head."""
        return (0, query.shape[0]) if self.ragged else (self.Hq * self.Lq, self.Lq)

    def launch(self, kernel: str) -> dict[str, Any]:
        c = config(kernel, self.order, max(self.BD, self.BE), self.dtype)
        return {"N": c.block, "num_warps": c.warps, "num_stages": c.stages, "maxnreg": c.registers}


def _masked(plan: _Plan, weights: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None) -> bool:
    """Whether a row may come after the last key, or keys may not count: else tails of tiles need no masks."""
    if weights is not None or cu_q is None or cu_k is None:
        return weights is not None or plan.Lq > plan.Lk
    return cu_q.data_ptr() != cu_k.data_ptr()


def _weights(weights: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Weights as kernels read them with their (batch, token) strides."""
    if weights is None:
        return None, 0, 0
    return token_weights(weights), weights.stride(0) if weights.ndim == 2 else 0, weights.stride(-1)


def _float32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def run_forward(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, order: int, scale: float, total: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, and what the backward pass needs: the sums before each part, and ubar of each row and head."""
    p = _Plan(query, key, value, weights, cu_q, cu_k, max_q, max_k, order, scale, total)
    out, state = empty_like_rows(query, value.shape[-1]), _float32(query, *p.state_shape())
    means = _float32(query, query.numel() // p.D)
    if out.numel() == 0:
        return out, state, means
    query, key, value = rows(query), rows(key), rows(value)
    w, *w_strides = _weights(weights)
    masked = _masked(p, weights, cu_q, cu_k)
    parts = _float32(query, *p.state_shape()[1:]) if p.splits > 1 else state
    with on_device(query.device):
        for e, columns in enumerate(p.columns):
            v, o = value[..., columns], out[..., columns]
            unit = stride_unit(query, key, v, o)
            at_q, at_k, at_v, at_o = (strides(x, unit) for x in (query, key, v, o))
            walk = {**p.walk, "E": v.shape[-1], "UNIT": unit, "MASKED": masked}
            if p.splits > 1:
                kernels.part_sums[(p.pairs * (p.splits - 1),)](
                    key, v, w, parts, cu_q, cu_k, *at_k, *at_v, *w_strides, *p.sizes, **walk, **p.launch("part_sums")
                )
                kernels.prefixes[(p.pairs, p.BD // ROWS)](
                    key, parts, state[e], cu_q, p.Lq, *p.sizes[2:], ROWS=ROWS, **p.scan, num_warps=SCAN_WARPS[0]
                )
            kernels.outputs[(p.pairs * p.group * p.splits,)](
                query, key, v, w, o, means, state[e], cu_q, cu_k,
                *at_q, *at_k, *at_v, *w_strides, *at_o, *p.at_rows(query), *p.sizes, scale,
                **walk, **p.rows, **p.launch("outputs"),
            )  # fmt: skip
    return out, state, means


def run_backward(
    grad: Tensor, state: Tensor, means: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, order: int, scale: float, total: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    p = _Plan(query, key, value, weights, cu_q, cu_k, max_q, max_k, order, scale, total)
    dq, dk, dv = (empty_like_rows(x, x.shape[-1]) for x in (query, key, value))
    if grad.numel() == 0 or key.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    grad, query, key, value = rows(grad), rows(query), rows(key), rows(value)
    w, *w_strides = _weights(weights)
    masked, third = _masked(p, weights, cu_q, cu_k), order == 3
    count = query.numel() // p.D
    at_rows = p.at_rows(query)
    gains = _float32(query, 2 if w is None else 3, count)
    tiles = p.span // p.launch("query_gradients")["N"]
    before = _float32(query, p.pairs, p.splits, tiles, p.BD) if third else gains
    y = torch.empty_like(dq) if third else dq
    sums = _float32(query, p.pairs, p.splits, p.group, p.sums) if p.splits > 1 else gains
    later = _float32(query, p.pairs, p.splits, p.sums) if p.splits > 1 else gains
    pieces = []
    with on_device(query.device):
        for e, columns in enumerate(p.columns):
            v, g, dv_e = value[..., columns], grad[..., columns], dv[..., columns]
            dq_e, dk_e = (torch.empty_like(x, dtype=torch.float32) if len(p.columns) > 1 else x for x in (dq, dk))
            unit = stride_unit(query, key, v, g, dq_e, dk_e, dv_e)
            at_q, at_k, at_v, at_g = (strides(x, unit) for x in (query, key, v, g))
            at_dq, at_dk, at_dv = (strides(x, unit) for x in (dq_e, dk_e, dv_e))
            walk = {**p.walk, **p.rows, "E": v.shape[-1], "UNIT": unit, "MASKED": masked, "SUMS": p.sums}
            kernels_back.query_gradients[(p.pairs * p.group * p.splits,)](
                query, key, v, w, g, dq_e, y, means, gains, before, sums, state[e], cu_q, cu_k,
                *at_q, *at_k, *at_v, *w_strides, *at_g, *at_dq, *at_rows, count, *p.sizes, scale,
                CARRY=p.splits > 1, **walk, **p.launch("query_gradients"),
            )  # fmt: skip
            if p.splits > 1:
                kernels_back.suffixes[(p.pairs,)](
                    sums, later, state[e], cu_q, p.Lq, *p.sizes[2:],
                    GROUP=p.group, SUMS=p.sums, **p.scan, num_warps=SCAN_WARPS[1],
                )  # fmt: skip
            kernels_back.key_gradients[(p.pairs * p.splits,)](
                query, key, v, w, g, dk_e, dv_e, y, gains, before, later, state[e], cu_q, cu_k,
                *at_q, *at_k, *at_v, *w_strides, *at_g, *at_dk, *at_dv, *at_dq, *at_rows, count, *p.sizes, scale,
                **walk, **p.launch("key_gradients"),
            )  # fmt: skip
            pieces.append((dq_e, dk_e))
    if len(pieces) > 1:
        for x, parts in zip((dq, dk), zip(*pieces, strict=True), strict=True):
            x.copy_(sum(parts[1:], parts[0]))
    return dq, dk, dv


forward = torch.library.custom_op("cumulant::causal_forward", run_forward, mutates_args=())
backward = torch.library.custom_op("cumulant::causal_backward", run_backward, mutates_args=())


@forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = _Plan(query, key, value, *rest).state_shape()
    means = _float32(query, query.numel() // query.shape[-1])
    return empty_like_rows(query, value.shape[-1]), _float32(query, *shape), means


@backward.register_fake
def _(
    grad: Tensor, state: Tensor, means: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(empty_like_rows(x, x.shape[-1]) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:6])
    ctx.numbers = inputs[6:]


def _gradients(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*backward(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 8)


forward.register_autograd(partial(_gradients, backward), setup_context=_setup_context)
_Attention = direct(run_forward, _setup_context, partial(_gradients, run_backward))
