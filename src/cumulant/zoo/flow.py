"""Flow-Attention (Flowformer): attention as a flow from values to outputs that is conserved on either side.

Shape legend: ... leading dimensions, H heads, Lq queries (sinks), Lk keys (sources), D key width, E value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import shards
from ..call import Call, check_scale
from ..held import Held, check_step
from ..tensors import wide
from ..tracing import outside_autocast
from .products import TINY, count_of, factor, feature_product, one_hot_weights, ones_for, peak, running, weighted
from .registry import can, register

EPS = 1e-6


class Flow(NamedTuple):
    """out_i = allocation_i (rows_i . sum_j sources_j v_j^T); in the causal form over j <= i."""

    rows: Tensor  # sigmoid(q_i) over its incoming flow, (..., H, Lq, D)
    sources: Tensor  # w_j sigmoid(k_j) competition_j, (..., H, Lk, D)
    allocation: Tensor  # sigmoid of the conserved incoming flow, (..., H, Lq, 1)


def flow_attention(call: Call, *, clamp: float | None = 1.0, chunk: int = 128, eps: float = EPS) -> Tensor:
    """out_i = sigmoid(cs_i L/S) (q_i I_i).sum_j k_j comp_j v_j^T, comp = S softmax_j(clamp(cr)); q, k after a sigmoid.

        I_i = 1 / (q_i.sum_j k_j),  O_j = 1 / (k_j.sum_i q_i),  cs_i = q_i.sum_j k_j O_j,  cr_j = k_j.sum_i q_i I_i

    with eps added to each channel of both factors. Rows do not sum to 1, and they look at the other queries: the query
    mask says which of them count. The clamp of cr at 1 is that of the released core file; None takes it off. The causal
    form has all sums over s <= t and comp_s fixed at time s, so its last row is not that of the full form.
    There is no scaling: `scale` multiplies the query before the sigmoid. A row without any key gives 0.
    Cost: 2 L D E, and L C (D + E) more for the causal form in chunks of C tokens.
    """
    dtype = call.query.dtype
    rows, sources, allocation = flow(call, clamp, eps)
    return allocation * feature_product(rows, sources, call.value, dtype, is_causal=call.is_causal, chunk=chunk)


def flow(call: Call, clamp: float | None, eps: float) -> Flow:
    """The parts of flow attention for a prepared call. Cost: L D."""
    query, w_q = call.present_queries()
    query = query if call.scale is None else query * call.scale
    q, k = (wide(factor(torch.sigmoid(wide(x)), query.dtype)) for x in (query, call.key))
    return (_causal_flow if call.is_causal else _full_flow)(q, k, w_q, call.key_weights(k.dtype), clamp, eps)


def _full_flow(q: Tensor, k: Tensor, w_q: Tensor | None, w_k: Tensor | None, clamp: float | None, eps: float) -> Flow:
    L, S = count_of(q, w_q), count_of(k, w_k)
    sum_k, sum_q = shards.summed(*(weighted(x, w).sum(-2, keepdim=True) for x, w in ((k, w_k), (q, w_q))))
    incoming, outgoing = 1 / _dot(q, sum_k, eps), 1 / _dot(k, sum_q, eps)
    flows = (k * weighted(outgoing, w_k), q * weighted(incoming, w_q))
    flow_k, flow_q = shards.summed(*(x.sum(-2, keepdim=True) for x in flows))
    conserved_in = _dot(q, flow_k, eps)
    conserved_out = _clamped(_dot(k, flow_q, eps), clamp)
    logits = conserved_out if w_k is None else conserved_out.masked_fill(w_k == 0, torch.finfo(k.dtype).min)
    kernel = weighted((logits - peak(logits)).exp(), w_k)
    (mass,) = shards.summed(kernel.sum(-2, keepdim=True))
    competition = kernel / mass.clamp(min=torch.finfo(k.dtype).tiny) * S
    return Flow(q * incoming, k * competition, torch.sigmoid(conserved_in * (L / S)))


def _causal_flow(q: Tensor, k: Tensor, w_q: Tensor | None, w_k: Tensor | None, clamp: float | None, eps: float) -> Flow:
    w_q, w_k = (ones_for(x) if w is None else w for x, w in ((q, w_q), (k, w_k)))
    count_q, count_k, seen_k, seen_q = running([w_q, w_k, w_k * k, w_q * q])
    count_q, count_k = count_q.clamp(min=TINY), count_k.clamp(min=TINY)
    incoming, outgoing = 1 / _dot(q, seen_k, eps), 1 / _dot(k, seen_q, eps)
    flow_k, flow_q = running([w_k * k * outgoing * count_q, w_q * q * incoming * count_k])
    conserved_in = _dot(q, flow_k, eps) / count_k
    # Keys before the first query that counts have no flow to conserve: eps over no queries would be a huge logit.
    sinks = torch.where(count_q > TINY, count_q, 1)
    conserved_out = _clamped(_dot(k, flow_q, eps) / sinks, clamp)
    # log w + cr, so that the running sum of exponentials is safe without a clamp, too.
    logits = (conserved_out + w_k.clamp(min=TINY).log()).masked_fill(w_k == 0, -1e30)
    competition = count_k * (logits - _running_log_sum(logits)).exp()
    return Flow(q * incoming, k * competition * (w_k != 0), torch.sigmoid(conserved_in))


def _running_log_sum(logits: Tensor) -> Tensor:
    """log of the sum of exp over the tokens up to each one, (..., L, 1)."""
    sums = torch.logcumsumexp(logits, -2)
    if shards.answerer() is None:
        return sums
    top = peak(logits).clamp(min=-1e30)  # that of all workers
    (before,) = shards.after((logits - top).exp().sum(-2, keepdim=True)) or (None,)
    there = before > 0
    return torch.logaddexp(sums, torch.where(there, torch.where(there, before, 1).log() + top, -2e30))


def _dot(x: Tensor, y: Tensor, eps: float) -> Tensor:
    """(x + eps).(y + eps) over the channels, (..., 1)."""
    return ((x + eps) * (y + eps)).sum(-1, keepdim=True)


def _clamped(x: Tensor, clamp: float | None) -> Tensor:
    if clamp is not None and not clamp >= 0:
        raise ValueError(f"clamp must not be negative (None takes it off), got {clamp}")
    return x if clamp is None else x.clamp(-clamp, clamp)


class FlowState(NamedTuple):
    """Sums over the tokens so far: keys, queries, both by their flows, exp(cr - max), k comp v^T, and their number."""

    k: Tensor  # (..., 1, D), as the next three
    q: Tensor
    k_out: Tensor
    q_in: Tensor
    peak: Tensor  # (..., 1, 1): the largest cr, so that exponentials stay in range without a clamp
    exp: Tensor  # (..., 1, 1)
    KV: Tensor  # (..., D, E)
    tokens: Tensor  # ()


class FlowStream:
    """Causal flow attention token by token, exactly. Cost: 2 D E a token."""

    def __init__(self, *, clamp: float | None = 1.0, eps: float = EPS, scale: float | None = None) -> None:
        check_scale(scale)
        self.clamp, self.eps, self.scale = clamp, eps, scale
        self.state: FlowState | None = None

    @property
    def held(self) -> Held | None:
        """What new tokens must agree with."""
        if self.state is None:
            return None
        k, KV = self.state.k, self.state.KV
        return Held(k.shape[:-2], KV.shape[-2], KV.shape[-1], k.dtype, k.device)

    @outside_autocast
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (..., H, 1, D), key (..., H, 1, D), value (..., H, 1, E) -> (..., H, 1, E)."""
        check_step(query, key, value, self.held)
        if query.shape[-3] != key.shape[-3]:
            raise ValueError(f"query must have as many heads as key, {key.shape[-3]}, got {query.shape[-3]}")
        scaled = wide(query) if self.scale is None else wide(query) * self.scale
        q, k, v = torch.sigmoid(scaled), torch.sigmoid(wide(key)), wide(value)
        old = self.state
        if old is None:
            none, low = torch.zeros_like(k), k.new_full((*k.shape[:-1], 1), -float("inf"))
            KV = k.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
            old = FlowState(none, none, none, none, low, torch.zeros_like(low), KV, k.new_zeros(()))
        t = old.tokens + 1
        sum_k, sum_q = old.k + k, old.q + q
        incoming, outgoing = 1 / _dot(q, sum_k, self.eps), 1 / _dot(k, sum_q, self.eps)
        k_out, q_in = old.k_out + k * outgoing * t, old.q_in + q * incoming * t
        conserved_in = _dot(q, k_out, self.eps) / t
        conserved_out = _clamped(_dot(k, q_in, self.eps) / t, self.clamp)
        peak = torch.maximum(old.peak, conserved_out).detach()
        total = old.exp * (old.peak - peak).exp() + (conserved_out - peak).exp()
        competition = t * (conserved_out - peak).exp() / total
        KV = old.KV + (k * competition).mT @ v
        self.state = FlowState(sum_k, sum_q, k_out, q_in, peak, total, KV, t)
        return (torch.sigmoid(conserved_in) * (q * incoming @ KV)).to(query.dtype)


FLOW = register(
    name="flow",
    summary="attention as a conserved flow: sources compete, sinks are gated",
    paper="Flowformer: Linearizing Transformers with Conservation Flows (Wu et al.)",
    year=2022,
    arxiv="2202.06258",
    cost="2 L D E",
    function=flow_attention,
    row_weights=one_hot_weights(flow_attention),
    stream=FlowStream,
    independent_rows=False,
    value_shift=False,
    **can("causal cross key_mask subquadratic streaming ragged wants_query_mask mergeable"),
)
