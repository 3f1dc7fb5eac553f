"""Cluster attention of short clusters on the GPU: sizes, launches and the custom ops. Formulas: short_parts.py.

Shape legend: B sequences, H heads, Lq, Lk lengths, D, E widths, K clusters of at most m tokens, in MP slots each (a
power of two), p prefix tokens.

Bytes: forward reads q, v and twice k, and writes the output; backward, where all slots of a head fit one tile, reads q,
k, v and do and writes dq, dk and dv, else it reads those four twice, the output, and what its rounding lost. Beside
these only a number for each query and means and variances of the clusters, 2 K D a head, are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import inf, log2
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...tracing import is_plain
from ..cluster.parts import CLOSURE_NUMBER
from ..direct import direct
from ..launch import Config, cdiv, dot_precision, empty_like_rows, on_device, padded, rows, stride_unit, strides
from . import kernels

SLOTS = 64  # of a tile; a cluster has no more

# Kernel -> Config(queries of a tile, warps, stages of its loop), for 16-bit inputs and heads of up to 64, for 16-bit
# and up to 128, and for float32. "whole_gradients" are key_gradients that write dq too.
CONFIGS: dict[str, tuple[Config, Config, Config]] = {
    "attend": (Config(64, 4, 1, registers=128), Config(64, 4, 1), Config(16, 4, 1)),
    "query_gradients": (Config(64, 4, 2), Config(64, 4, 1), Config(16, 4, 1)),
    "key_gradients": (Config(64, 4, 2), Config(128, 8, 1), Config(16, 4, 1)),
    "whole_gradients": (Config(64, 4, 1), Config(64, 4, 1), Config(16, 4, 1)),
}


class Plan(NamedTuple):
    """What a launch needs beside its tensors."""

    heads: int  # B H
    length_q: int
    D: int
    E: int
    tiles: int  # of slots
    slots: int  # of a cluster
    prefix: int
    closure: str
    full: bool
    ragged: bool  # some slot of a cluster is empty
    dtype: torch.dtype

    @property
    def whole(self) -> bool:
        """Whether one kernel does the backward pass: all slots of a head are one tile, and its sums fit registers."""
        return self.tiles == 1 and max(self.widths) <= 64

    @property
    def clusters(self) -> int:
        return self.tiles * (SLOTS // self.slots)

    @property
    def widths(self) -> tuple[int, int]:
        # Products with 16 columns are miscompiled by the assembler that Triton 3.6 carries; 8 warps halve the columns.
        least = 64 if max(self.D, self.E) > 64 else 32
        return padded(self.D, least), padded(self.E, least)

    @property
    def square(self) -> torch.dtype:
        """What squares of queries and variances of keys are multiplied in: float16 has too small a range for them."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def config(self, name: str) -> Config:
        kinds = CONFIGS[name]
        if self.dtype == torch.float32:
            return kinds[2]
        return kinds[0] if max(self.widths) <= 64 else kinds[1]

    def queries(self, name: str) -> int:
        """Queries of a tile."""
        return min(self.config(name).block, padded(self.length_q, 32))

    def launch(self, name: str, prefix: bool = True) -> dict[str, Any]:
        """Constants and resources of a kernel that reads queries."""
        config, (BD, BE), usual = self.config(name), self.widths, dot_precision(self.dtype)
        return {
            "CLOSURE": CLOSURE_NUMBER[self.closure], "FULL": self.full, "RAGGED": self.ragged,
            "D": self.D, "E": self.E, "BD": BD, "BE": BE,
            "M": self.queries(name), "N": SLOTS, "MP": self.slots, "P": max(32, SLOTS // self.slots),
            "PP": padded(self.prefix, 32) if prefix and self.prefix else 0,
            "SQUARE": tl.bfloat16 if self.square == torch.bfloat16 else tl.float32, "STAGES": config.stages,
            "PRECISION": "tf32x3" if usual == "ieee" else usual,
            "num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers,
        }  # fmt: skip


def plan_of(
    query: Tensor, value: Tensor, places: Sequence[int], slots: int, prefix: int, closure: str, full: bool
) -> Plan:
    B, H, Lq, D = query.shape
    tiles = cdiv(len(places), SLOTS)
    return Plan(B * H, Lq, D, value.shape[-1], tiles, slots, prefix, closure, full, -1 in places, query.dtype)


@lru_cache(64)
def _tables(places: tuple[int, ...], slots: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token of each slot (tiles SLOTS,), -1 for none; log2 of the sizes of the clusters and 1 / size. Kept."""
    full = [*places, *[-1] * (tiles * SLOTS - len(places))]
    sizes = [sum(x >= 0 for x in full[c : c + slots]) for c in range(0, len(full), slots)]
    numbers = [[log2(n) if n else -inf for n in sizes], [1 / n if n else 0 for n in sizes]]
    return (
        torch.tensor(full, dtype=torch.int32, device=device),
        torch.tensor(numbers, dtype=torch.float32, device=device),
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Sequence[int],
    slots: int,
    *,
    scale: float,
    prefix: int = 0,
    closure: str = "tanh",
    full: bool = False,
) -> Tensor:
    """Cluster attention, differentiable in query, key and value.

    query (B, H, Lq, D), key (B, H, Lk, D), value (B, H, Lk, E) -> (B, H, Lq, E). The first `prefix` keys are exact.
    places: the keys of the clusters, `slots` (a power of two up to 64) for each cluster, -1 in those that are empty;
    every other key appears once. Cost a query: Lk (D + E).
    """
    keep = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    arguments = (query, key, value, list(places), slots, prefix, scale, closure, full)
    if not is_plain(query):
        return forward(*arguments, keep)[0]
    return _Attention.apply(*arguments) if keep else run_forward(*arguments, False)[0]


def _state(query: Tensor, plan: Plan, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """lse (B H, Lq), spread and means (B H, clusters, BD) unless full, origin (B H, BD) and, for a backward pass that
    needs delta before it has it, what the rounding of the output lost, (B, H, Lq, E)."""
    lost = keep and not plan.whole and query.dtype != torch.float32
    clusters = (0 if plan.full else plan.heads, plan.clusters, plan.widths[0])
    return (
        query.new_empty(plan.heads, plan.length_q, dtype=torch.float32),
        query.new_empty(clusters, dtype=plan.square),
        query.new_empty(clusters, dtype=torch.float32),
        query.new_empty(plan.heads, plan.widths[0]),
        empty_like_rows(rows(query), plan.E) if lost else query.new_empty(0),
    )


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Sequence[int],
    slots: int,
    prefix: int,
    scale: float,
    closure: str,
    full: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, and the state of a backward pass (`_state`)."""
    q, k, v = rows(query), rows(key), rows(value)
    plan = plan_of(query, value, places, slots, prefix, closure, full)
    lse, spread, means, origin, lost = _state(query, plan, keep)
    out = empty_like_rows(q, plan.E)
    tables = _tables(tuple(places), slots, plan.tiles, query.device)
    with on_device(query.device):
        unit, count = stride_unit(k), 1 if full else max(1, 16 // slots)
        tiles = 1 if full else plan.clusters // count
        kernels.statistics[(tiles * plan.heads,)](
            k, spread, means, origin, *tables, *strides(k, unit), key.shape[1], plan.clusters, tiles,
            FULL=full, D=plan.D, BD=plan.widths[0], MP=slots, COUNT=count, UNIT=unit,
            num_warps=max(1, slots * plan.widths[0] // 2048),  # sums of up to 32 rows stay within a warp
        )  # fmt: skip
        unit, tiles = stride_unit(q, k, v, out), cdiv(plan.length_q, plan.queries("attend"))
        kernels.attend[(tiles * plan.heads,)](
            q, k, v, out, lost, lse, spread, *tables,
            *strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(out, unit),
            plan.length_q, prefix, key.shape[1], plan.clusters, tiles, scale,
            KEEP=lost.numel() > 0, UNIT=unit, **plan.launch("attend"),
        )  # fmt: skip
    return out, lse, spread, means, origin, lost


def run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spread: Tensor,
    means: Tensor,
    origin: Tensor,
    lost: Tensor,
    places: Sequence[int],
    slots: int,
    prefix: int,
    scale: float,
    closure: str,
    full: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the gradient of the output and what the forward pass kept."""
    q, k, v, g = rows(query), rows(key), rows(value), rows(grad)
    plan = plan_of(query, value, places, slots, prefix, closure, full)
    dq, dk, dv = (empty_like_rows(x, x.shape[-1]) for x in (q, k, v))
    tables = _tables(tuple(places), slots, plan.tiles, query.device)
    name = "whole_gradients" if plan.whole else "query_gradients"
    tiles = cdiv(plan.length_q, plan.queries(name))
    partial = lse.new_empty(plan.heads, tiles, prefix, sum(plan.widths))
    deltas = lse if plan.whole else torch.empty_like(lse)
    last = plan.queries("whole_gradients" if plan.whole else "key_gradients")
    dxs = spread.new_empty(0 if full else plan.heads, plan.clusters, cdiv(plan.length_q, last) * last)
    numbers = (plan.length_q, prefix, key.shape[1], plan.clusters)
    with on_device(query.device):
        if not plan.whole:
            unit = stride_unit(q, k, v, out, g, dq)
            kernels.query_gradients[(tiles * plan.heads,)](
                q, k, v, out, lost, g, dq, lse, deltas, spread, origin, partial, *tables,
                *strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(out, unit), *strides(g, unit),
                *strides(dq, unit), *numbers, tiles, scale, UNIT=unit, **plan.launch(name),
            )  # fmt: skip
            name = "key_gradients"
        unit = stride_unit(q, k, v, g, dq, dk, dv)
        kernels.key_gradients[(plan.tiles * plan.heads,)](
            q, k, v, g, dq, dk, dv, lse, deltas, spread, means, origin, dxs, partial, *tables,
            *strides(q, unit), *strides(k, unit), *strides(v, unit), *strides(g, unit), *strides(dq, unit),
            *strides(dk, unit), *strides(dv, unit), *numbers, plan.tiles, scale,
            WHOLE=plan.whole, UNIT=unit, **plan.launch(name, plan.whole),
        )  # fmt: skip
        if prefix:
            unit, (BD, BE) = stride_unit(dk, dv), plan.widths
            kernels.add_prefix[(prefix * plan.heads,)](
                partial, dk, dv, *strides(dk, unit), *strides(dv, unit), prefix, key.shape[1], tiles,
                D=plan.D, E=plan.E, BD=BD, BE=BE, UNIT=unit, num_warps=1,
            )  # fmt: skip
    return dq, dk, dv


forward = torch.library.custom_op("cumulant::short_forward", run_forward, mutates_args=())
backward = torch.library.custom_op("cumulant::short_backward", run_backward, mutates_args=())


@forward.register_fake
def _(query, key, value, places, slots, prefix, scale, closure, full, keep):  # type: ignore[no-untyped-def]
    plan = plan_of(query, value, places, slots, prefix, closure, full)
    return empty_like_rows(rows(query), plan.E), *_state(query, plan, keep)


@backward.register_fake
def _(grad, query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(empty_like_rows(rows(x), x.shape[-1]) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, *ctx.numbers, _ = inputs
    ctx.save_for_backward(query, key, value, *output)


def _gradients(backward: Any, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*backward(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 7)


forward.register_autograd(partial(_gradients, backward), setup_context=_setup_context)
_Attention = direct(run_forward, _setup_context, partial(_gradients, run_backward), True)
