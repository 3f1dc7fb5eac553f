"""Aaren, attention as an RNN: one query for all positions, attention over every prefix by a parallel scan.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, n chunks of C tokens.

A set of tokens is summarised by a triple (m, u, w): m = max s_i, u = sum exp(s_i - m), w = sum exp(s_i - m) v_i with
s_i = q.k_i. Triples merge, associatively, so that all prefixes come from one scan and a stream needs one triple.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Call, check_dtype, check_scale
from ..held import Held, check_rows, check_step, check_tokens
from ..moments import ratio
from ..tensors import ABSENT, log_weights, nothing, repeat_heads, softmax_or_zero, wide
from ..tracing import outside_autocast
from .mixing import Mixer
from .options import CHECKS, at_least
from .registry import can, options_of, register

CHUNK = 64


class Triple(NamedTuple):
    """Softmax sums of a set of tokens relative to their largest score. The empty set is (-inf, 0, 0)."""

    m: Tensor  # (...)
    u: Tensor  # (...)
    w: Tensor  # (..., E)

    @classmethod
    def leaf(cls, s: Tensor, value: Tensor) -> Triple:
        """Triples of single tokens with scores s (..., L) and values (..., L, E); a score of -inf is no token."""
        present = s != ABSENT
        u = present.to(value.dtype)
        return cls(s, u, value * u.unsqueeze(-1))

    def merge(self, other: Triple) -> Triple:
        """The triple of the union. Associative and commutative, with the empty set as identity."""
        m = torch.maximum(self.m, other.m)
        a, b = _relative(self.m, m), _relative(other.m, m)
        w = self.w * a.unsqueeze(-1) + other.w * b.unsqueeze(-1)
        return Triple(m, self.u * a + other.u * b, w)

    def read(self) -> Tensor:
        """Attention over the set, w / u, (..., E); 0 for the empty set. As u >= 1, no epsilon is needed."""
        return ratio(self.w, self.u.unsqueeze(-1))


def scan(leaves: Triple, *, chunk: int = CHUNK, detach: bool = True) -> Triple:
    """Triples of all prefixes, inclusive: m, u (..., L), w (..., L, E), in parallel.

    Within a chunk of C tokens prefixes are one masked C x C product; the totals of the chunks are scanned in the same
    way, one level up, and merged in: log_C(L) levels, L C (1 + E) multiply-adds, memory L (C + E). `detach` stops
    gradients through the maxima, in which they cancel exactly.
    """
    length = leaves.m.shape[-1]
    if length <= chunk:
        return _prefixes(leaves, detach)
    count = -(-length // chunk)
    missing = count * chunk - length
    m = F.pad(leaves.m, (0, missing), value=ABSENT).unflatten(-1, (count, chunk))
    u = F.pad(leaves.u, (0, missing)).unflatten(-1, (count, chunk))
    w = F.pad(leaves.w, (0, 0, 0, missing)).unflatten(-2, (count, chunk))
    inner = _prefixes(Triple(m, u, w), detach)
    totals = scan(Triple(inner.m[..., -1], inner.u[..., -1], inner.w[..., -1, :]), chunk=chunk, detach=detach)
    # Each chunk is preceded by the total of those before it; the first by the empty set.
    before = Triple(
        F.pad(totals.m[..., :-1], (1, 0), value=ABSENT).unsqueeze(-1),
        F.pad(totals.u[..., :-1], (1, 0)).unsqueeze(-1),
        F.pad(totals.w[..., :-1, :], (0, 0, 1, 0)).unsqueeze(-2),
    )
    m, u, w = before.merge(inner)
    return Triple(m.flatten(-2)[..., :length], u.flatten(-2)[..., :length], w.flatten(-3, -2)[..., :length, :])


def aaren_attention(call: Call, *, chunk: int = CHUNK) -> Tensor:
    """out_t = sum_{i<=t} w_i exp(q.k_i) v_i / sum_{i<=t} w_i exp(q.k_i), one q for all t, scaled by `scale`.

    The query does not depend on the position: it is the first row of `query` (the first that `query_mask` leaves);
    other rows only count the outputs. A layer learns it, see `AarenAttention`. The paper writes a bare dot product;
    `scale` is D**-0.5 unless given. Without `is_causal` every row is the same: attention pooling over all keys.
    A prefix without any key gives 0. Cost: L C (1 + E) in chunks of C.
    """
    query, key, value = call[:3]
    rows = query.shape[-2]
    if rows == 0 or key.shape[-2] == 0:
        return nothing((*query.shape[:-1], value.shape[-1]), query, key, value, call.key_mask)
    seen = min(rows, key.shape[-2]) if call.is_causal else key.shape[-2]
    s = _logits(call)[..., :seen]
    leaves = Triple.leaf(s, repeat_heads(wide(value[..., :seen, :]), query.shape[-3]))
    if call.is_causal:
        out = scan(leaves, chunk=chunk).read()
        # Rows beyond the last key see all of them.
        last = out[..., -1:, :].expand(*out.shape[:-2], rows - seen, out.shape[-1])
        return torch.cat((out, last), -2)
    pooled = softmax_or_zero(leaves.m).unsqueeze(-2) @ leaves.w
    return pooled.expand(*query.shape[:-1], value.shape[-1])


def aaren_weights(call: Call) -> Tensor:
    """The weights, (..., H, Lq, Lk): those of two keys keep their ratio in all rows that see both. Cost: Lq Lk."""
    query, key = call[:2]
    if query.shape[-2] == 0 or key.shape[-2] == 0:
        return nothing((*query.shape[:-1], key.shape[-2]), query, key, call.key_mask)
    logits = _logits(call).unsqueeze(-2).expand(*query.shape[:-1], key.shape[-2])
    if call.is_causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, ABSENT)
    return softmax_or_zero(logits)


def _logits(call: Call) -> Tensor:
    """s + log w of every key, (..., H, Lk), for the first query that the query mask leaves."""
    query, present = call.present_queries()
    first = query[..., :1, :]
    if present is not None:
        at = (present != 0).to(torch.int8).argmax(-2, keepdim=True)
        first = query.gather(-2, at.expand_as(first))
    s = scores_of(first, call.key, call.softmax_scale)
    added = log_weights(call.key_mask, s)
    return s if added is None else s + added


def scores_of(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """s = scale q.k in at least float32: query (..., H, 1, D), key (..., Hk, L, D) -> (..., H, L)."""
    query, key = wide(query), repeat_heads(wide(key), query.shape[-3])
    return ((query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT).squeeze(-2)


class StreamState(NamedTuple):
    """The query of the stream and the triple of all tokens so far: 2 D + 2 numbers a head (D = E)."""

    query: Tensor  # (..., H, 1, D)
    m: Tensor  # (..., H)
    u: Tensor  # (..., H)
    w: Tensor  # (..., H, E)


class AarenStream:
    """Token by token in constant memory: each step merges one leaf and reads. Gradients flow.

    The query is the one given here, (H, 1, D), or that of the first step. The empty state starts at m = -inf and not
    at the paper's 0, from which scores below about -88 underflow to 0 / 0 in float32.
    """

    def __init__(self, *, query: Tensor | None = None, scale: float | None = None) -> None:
        check_scale(scale)
        if query is not None:
            check_dtype("query", query)
        self.query, self.scale = query, scale
        self.state: StreamState | None = None

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises for tokens that are not of one kind, or not of that of those before."""
        check_tokens(key, value)
        check_rows(query, Held.of(key, value))
        wanted = (query.shape[-3], 1, query.shape[-1])
        if self.query is not None and self.query.shape != wanted:
            got = tuple(self.query.shape)
            raise ValueError(f"query of the stream must have shape (heads, 1, width), {wanted} here, got {got}")
        state = self.state
        if state is not None:
            before = Held(state.m.shape, state.query.shape[-1], state.w.shape[-1], state.w.dtype, state.w.device)

            heads = query.shape[-3]
            check_tokens(repeat_heads(key, heads), repeat_heads(value, heads), before)

    @outside_autocast
    def append(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Takes in a block of tokens, key (..., H, L, D) and value (..., H, L, E), in one reduction."""
        self.check(query, key, value)
        if key.shape[-2] == 0:
            return
        if self.state is None:
            first = query[..., :1, :] if self.query is None else self.query.to(key.dtype)
            first = first.expand(*query.shape[:-2], 1, query.shape[-1])
        else:
            first = self.state.query
        s = scores_of(first, key, self.scale)
        m = s.detach().amax(-1)
        weights = (s - m.unsqueeze(-1)).exp()
        block = Triple(m, weights.sum(-1), (weights.unsqueeze(-2) @ repeat_heads(wide(value), s.shape[-2])).squeeze(-2))
        old = self.state
        merged = block if old is None else Triple(old.m, old.u, old.w).merge(block)
        self.state = StreamState(first, *merged)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token of each, (..., H, 1, D), (..., H, 1, D), (..., H, 1, E) -> (..., H, 1, E). Cost: D + E."""
        check_step(query, key, value)
        self.append(query, key, value)
        assert self.state is not None
        return Triple(*self.state[1:]).read().unsqueeze(-2).to(query.dtype)


@options_of(aaren_attention)
class AarenAttention(Mixer):
    """Aaren with its learned query, for a layer that projects keys and values (and queries, which are not used).

    No code was released. From its parameter count the paper learns one vector of width `dim` and projects it by W_q.
    As W_q times that vector is one free vector of the same width, this vector is learned itself: the same functions
    and as many extra parameters (`dim`). It starts at normal(0, `query_std`); the paper's start is not known.
    """

    mechanism = "aaren"

    def __init__(self, dim: int, num_heads: int, *, query_std: float = 0.02, **rest: Any) -> None:
        super().__init__(dim, num_heads, **rest)
        self.query_std = query_std
        self.query = nn.Parameter(torch.empty(num_heads, 1, dim // num_heads, **self.place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.query, std=self.query_std)

    def asked(self, call: Call, x: Tensor | None) -> tuple[Call, dict[str, Any]]:
        """The learned query takes the place of the call's, whose rows are only counted."""
        learned = self.query.to(call.query.dtype).expand_as(call.query)
        return call._replace(query=learned, query_mask=None), self.options

    def stream(self, scale: float | None = None) -> AarenStream:
        """A stream with the learned query."""
        return AarenStream(query=self.query, scale=scale)


def _prefixes(leaves: Triple, detach: bool) -> Triple:
    """Inclusive prefixes of each chunk by a masked product: exp(m_j - max_{i<=t} m_i) for j <= t."""
    m = leaves.m.detach() if detach else leaves.m
    top = m.cummax(-1).values
    future = torch.ones(m.shape[-1], m.shape[-1], dtype=torch.bool, device=m.device).triu(1)
    reference = torch.where(top == ABSENT, 0, top)  # -inf - -inf would be NaN
    weights = (leaves.m.unsqueeze(-2) - reference.unsqueeze(-1)).masked_fill(future, ABSENT).exp()
    sums = weights @ torch.cat((leaves.w, leaves.u.unsqueeze(-1)), -1)
    return Triple(top, sums[..., -1], sums[..., :-1])


def _relative(m: Tensor, top: Tensor) -> Tensor:
    """exp(m - top), and 0 where m is -inf."""
    return torch.where(m == ABSENT, 0, (m - torch.where(top == ABSENT, 0, top)).exp())


AAREN = register(
    name="aaren",
    summary="one learned query, attention over every prefix by a parallel scan",
    paper="Attention as an RNN (Feng et al.)",
    year=2024,
    arxiv="2405.13956",
    cost="L (D + E)",
    function=aaren_attention,
    row_weights=aaren_weights,
    module=AarenAttention,
    stream=AarenStream,
    independent_rows=False,
    checks={**CHECKS, "chunk": at_least(2)},
    **can(
        "causal cross causal_cross key_mask grouped_queries subquadratic streaming ragged key_shift wants_query_mask"
    ),
)
