"""`context_parallel`: within it, attention sees the whole sequence while each worker holds its part.

Shape legend: ... leading dimensions, H heads, L tokens of this worker, D, E widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import shards
from ..call import Call, check_choice, check_flag
from ..cluster.asked import Asked
from ..cluster.backend import Case
from ..expansion import Form, expand
from .attend import attend, check_form, varlen
from .blocks import Spread
from .clusters import clusters_over_workers
from .exchange import Workers
from .parts import ORDERS, Parts, check_lengths, held
from .softmax import TRAVELS
from .softmax import softmax as exact


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    dim: str = "cp",
    *,
    order: str = "rank",
    lengths: Sequence[int] | None = None,
    softmax: str = "ring",
    overlap: bool = False,
) -> Iterator[Workers]:
    """Within this, `attention` and what is built on it see the tokens of all workers along `dim` of the mesh.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))
        with context_parallel(mesh):
            loss(model(shard(tokens, mesh))).backward()

    Each worker holds a part of the sequence, of any length, none included. What it gets is its part of the whole
    output, and gradients of the sum of all workers' losses. The backward pass belongs inside, too: layers that are
    recomputed there ask again. All workers must make the same calls.

    Args:
        mesh: a `DeviceMesh`; `dim` names the dimension along which sequences are split.
        order: "rank", parts follow each other as workers do; "zigzag", worker r holds pieces r and 2 W - 1 - r of 2 W.
        lengths: tokens of every worker, for what needs to know places (packed sequences, softmax); gathered if None.
        softmax: exact attention sends keys and values round a "ring", or everywhere at once ("gather"): they grow with
            the sequence, all other messages do not.
        overlap: for slow links: on a CPU, full (not causal) `attention` sends its moments in two messages, half of the
            heads each, one on its way while the other half is computed.

    Yields the workers, for sums of one's own: `workers.add(x)`.
    """
    workers = Workers.of(mesh, dim)
    check_choice("order", order, ORDERS)
    check_choice("softmax", softmax, TRAVELS)
    check_flag("overlap", overlap)
    workers = workers.in_halves() if overlap else workers
    if lengths is not None:
        check_lengths(lengths, workers.size)
    with shards.answered_by(Answerer(Parts(workers, order == "zigzag", lengths), softmax)):
        yield workers


class Answerer:
    """Who answers attention calls inside `context_parallel`."""

    def __init__(self, parts: Parts, travel: str = "ring") -> None:
        self.parts, self.travel = parts, travel

    def attend(self, call: Call, form: Form, what: Callable[..., Tensor]) -> Tensor:
        """`cumulant.attention`."""
        if what is not expand:
            raise ValueError("weights need all keys, which no worker holds: ask for them outside the context")
        call = call.checked()
        self.agree("attention", call, form)
        with shards.answered_by(None):
            return attend(self.parts, call, form)

    def softmax(self, call: Call) -> Tensor:
        """The mechanism "softmax", of a prepared call."""
        self.agree("softmax", call, self.travel)
        with shards.answered_by(None):
            return exact(self.parts, call, self.travel)

    def add(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Sums over the tokens of this worker, over those of all."""
        return self.parts.workers.add(*sums)

    def earlier(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Sums over the tokens of this worker, over those of the workers before it."""
        if self.parts.zigzag:
            raise ValueError('causal sums follow the order of workers: pass order="rank" to context_parallel')
        return self.parts.sums_before(*sums)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all workers, without gradient."""
        return self.parts.workers.largest(x)

    def place(self, tokens: int) -> tuple[int, int]:
        """Of this worker's first token, and how many tokens there are in all."""
        if self.parts.zigzag:
            raise ValueError('places of tokens follow the order of workers: pass order="rank" to context_parallel')
        return self.parts.start(tokens), sum(self.parts.lengths(tokens))

    def varlen(self, call: Call, form: Form, cu_seq_q: Tensor, cu_seq_k: Tensor) -> Tensor:
        """`cumulant.attention_varlen` of a call (H, T, D); `cu_seq` cut the whole pack, of which it holds a part."""
        check_form(form)
        self.agree("attention_varlen", call, form)
        with shards.answered_by(None):
            return varlen(self.parts, call, form, cu_seq_q, cu_seq_k)

    def cluster(self, call: Call, asked: Asked) -> Tensor:
        """`cluster_attention`."""
        kind = tuple(asked.clusters.shape) if isinstance(asked.clusters, Tensor) else asked.clusters
        self.agree("cluster_attention", call, f"{kind} least {asked.least} grid {call.grid} prefix {call.prefix}")
        with shards.answered_by(None):
            spread = Spread.of(self.parts, call)
            form = asked.form(call, sum(spread.queries), sum(spread.keys))
            self.agree("cluster_attention", call, form)
            case = Case(call, asked.clusters, form, asked.least)
            return clusters_over_workers(self.parts, case, spread, lambda: exact(self.parts, call, self.travel))

    def cut(self, x: Tensor, axis: int) -> Tensor:
        pieces = held(x.shape[axis], self.parts, self.parts.workers.rank)
        return torch.cat([x.narrow(axis, one.start, one.stop - one.start) for one in pieces], axis)

    def agree(self, kind: str, call: Call, *facts: object) -> None:
        """Raises unless all workers have the same kind of tokens, whatever their number."""
        (H, _, D), key, value = call.query.shape[-3:], call.key, call.value
        self.parts.workers.agree(
            kind,
            f"batch {tuple(call.lead)}",
            f"heads {H} and {key.shape[-3]}",
            f"widths {D} and {value.shape[-1]}",
            call.query.dtype,
            f"causal {call.is_causal}",
            *facts,
        )
