"""RCMHA: relative positions in the scores, a short causal convolution of queries, keys and values, and a memory.

Shape legend: ... leading dimensions, L tokens, M memory tokens, S = M + L keys, H heads, D head width, C = H D, P half
of the table of offsets, w = 3 taps of the convolutions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...call import Call, check_count
from ...tensors import ABSENT, log_weights, softmax_or_zero, wide, without_absent
from ...zoo.registry import can, names
from ..registry import registered
from ..streams import Recomputed, check_next
from .base import HeadsLayer

TAPS = 3
NOT_OVER = {
    name: "a table of offsets is a term of each pair of tokens, which only scores hold; with relative=False, the "
    "convolutions alone, it runs"
    for name in names()
    if name != "softmax"
}


@registered(
    "rcmha",
    "relative positions, a short convolution of queries, keys and values, and a memory",
    paper="RCMHA: Relative Convolutional Multi-Head Attention for Natural Language Modelling (Sugiharto et al.)",
    year=2023,
    arxiv="2308.03429",
    cost="3 L^2 D",
    not_over=NOT_OVER,
    **can("causal key_mask ragged streaming weights"),
)
class RelativeConvolutional(HeadsLayer):
    """Softmax over content and distance, of queries, keys and values that look back two tokens.

        q, k, v = conv(W_q x), conv(W_k z), conv(W_v z)      z = (memory, x)
        conv(x)_t = b + w_0 x_{t-2} + w_1 x_{t-1} + w_2 x_t
        s_mn = ((q_m + u).k_n + q_m.E[n - m] + c[n - m]) D^-0.5

    One kernel for all heads, one each for q, k and v. E, c and u begin at 0: a fresh layer knows order by convolution
    and mask alone. Cost: 3 L S D a head; the convolutions 3 w S C.

    Args:
        offsets: half size P of the tables: distances up to P - 1 on both sides (the released code has 4,096, 1.1
            million parameters at width 128).
        relative: False leaves E, c and u out, which any mechanism can follow.
        convolve: False leaves the convolutions out: relative attention alone.
        carry_query: with a memory, also carry the last two query rows into the next segment, so that segments give what
            the whole sequence gives. False is as released: a segment's first queries see zeros.
    """

    own_positions = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        offsets: int = 512,
        relative: bool = True,
        convolve: bool = True,
        carry_query: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, **layer)
        if relative and self.mechanism.name != "softmax":
            raise ValueError(
                f"layer 'rcmha' adds a table of offsets to the score of each pair and needs attention='softmax', got "
                f"{self.mechanism.name!r}; take softmax, or relative=False, which runs over any mechanism"
            )
        self.check_ungrouped()
        check_count("offsets", offsets)
        self.offsets, self.carry_query = offsets, carry_query
        D, H = self.head_dim, num_heads
        self.convs = (
            nn.ModuleList(nn.Conv1d(D, D, TAPS, groups=D, **self.place) for _ in range(3)) if convolve else None
        )
        self.far_key = nn.Parameter(torch.zeros(2 * offsets, H, D, **self.place)) if relative else None
        self.far_bias = nn.Parameter(torch.zeros(2 * offsets, H, **self.place)) if relative else None
        self.query_bias = nn.Parameter(torch.zeros(H, D, **self.place)) if relative else None

    def reset_extras(self) -> None:
        super().reset_extras()
        for conv in self.convs or ():
            cast(nn.Conv1d, conv).reset_parameters()
        for table in (self.far_key, self.far_bias, self.query_bias):
            if table is not None:
                nn.init.zeros_(table)

    def call(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None, is_causal: bool = False,
        **layout: Any,
    ) -> Call:  # fmt: skip
        if context is not None:
            raise ValueError(
                "context was given, but layer 'rcmha' counts offsets within one sequence; see `attend_after`"
            )
        call = super().call(x, None, key_mask, is_causal, **layout)
        parts = (
            without_absent(part, key_mask) for part in call[:3]
        )  # before the convolutions, which would spread them
        query, key, value = self.convolved(*parts)
        return call._replace(query=query, key=key, value=value)

    def convolved(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value (..., H, L, D) convolved along their tokens, with zeros before the first."""
        return parts if self.convs is None else tuple(_look_back(c, x) for c, x in zip(self.convs, parts, strict=True))

    def stream(self) -> Any:
        return RCMHAStream(self) if self.far_key is not None else Recomputed(self)

    def attend_after(self, x: Tensor, memory: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Causal output (..., L, C) of a segment x that follows memory (..., M, C), and the query rows to carry.

        All of the memory is seen; it gets no gradient. `tail` is what the last segment returned, with `carry_query`.
        """
        memory = memory.detach()
        z = torch.cat((memory, x), -2)
        query, key, value = self.project(x, z)
        before, count = query, 0
        if self.carry_query and tail is not None:
            before, count = torch.cat((tail, query), -2), tail.shape[-2]
        query, key, value = self.convolved(before, key, value)
        call = Call(query[..., count:, :], key, value, is_causal=True, offset=memory.shape[-2])
        kept = before[..., -(TAPS - 1) :, :].detach() if self.carry_query else None
        return self.attend(call, x), kept

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.far_key is None:
            return super().mix_tokens(call, x, context)
        weights = self.scores_of(call, x)
        if call.dropout_p:
            weights = F.dropout(weights, call.dropout_p)
        return weights.to(call.value.dtype) @ without_absent(call.value, call.key_mask)

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if self.far_key is None or self.far_bias is None or self.query_bias is None:
            return super().scores_of(call, x, context)
        self.mechanism.check(call._replace(offset=0))
        call = call._replace(offset=0).prepared()._replace(offset=call.offset)
        query, key = wide(call.query), wide(call.key)
        L, S, m = query.shape[-2], key.shape[-2], call.offset
        if max(L + m, S) > self.offsets:
            raise ValueError(
                f"layer 'rcmha' was made for offsets below {self.offsets}, got {L + m} queries and {S} keys; make it "
                f"with offsets={max(L + m, S)} or more"
            )
        first = self.offsets - (L + m) + 1  # the offset of key 0 from the last query
        span = L + m + S - 1
        E, c = (wide(table[first : first + span]) for table in (self.far_key, self.far_bias))
        near = query @ key.mT + (wide(self.query_bias).unsqueeze(-2) * key).sum(-1).unsqueeze(-2)
        far = query @ E.permute(1, 2, 0) + c.mT.unsqueeze(-2)  # (..., H, L, span): column i is offset i - (L + m) + 1
        at = torch.arange(S, device=query.device) - torch.arange(m, m + L, device=query.device)[:, None] + (L + m) - 1
        logits = (near + far.gather(-1, at.expand(*far.shape[:-1], S))) * call.softmax_scale
        bias = log_weights(call.key_mask, logits)
        logits = logits if bias is None else logits + bias.unsqueeze(-3)
        if call.is_causal:
            seen = torch.ones(L, S, dtype=torch.bool, device=logits.device).tril(m)
            logits = logits.masked_fill(~seen, ABSENT)
        return softmax_or_zero(logits)


class RCMHAStream:
    """The layer token by token: keys and values so far, and the last two rows before each convolution."""

    def __init__(self, layer: RelativeConvolutional) -> None:
        self.layer, self.tokens = layer, 0
        self.lead: torch.Size | None = None  # of the tokens so far
        self.rows: list[Tensor] | None = None  # query, key and value before the convolutions
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """The rows of the next tokens x (B, n, C)."""
        self.lead = check_next(x, self.lead)
        n, fresh = x.shape[-2], list(self.layer.project(x))
        rows = fresh if self.rows is None else [torch.cat(pair, -2) for pair in zip(self.rows, fresh, strict=True)]
        query, key, value = (part[..., -n:, :] for part in self.layer.convolved(*rows))
        self.rows = [part[..., -(TAPS - 1) :, :] for part in rows]
        self.key = key if self.key is None else torch.cat((self.key, key), -2)
        self.value = value if self.value is None else torch.cat((self.value, value), -2)
        out = self.layer.attend(Call(query, self.key, self.value, is_causal=True, offset=self.tokens), x)
        self.tokens += n
        return out

    def numel(self) -> int:
        """Numbers that are held."""
        return sum(part.numel() for part in (*(self.rows or ()), self.key, self.value) if part is not None)


def _look_back(conv: nn.Module, x: Tensor) -> Tensor:
    """Depth-wise convolution of (..., L, D) over its last tokens, zeros before the first."""
    flat = x.reshape(-1, *x.shape[-2:]).mT
    return conv(F.pad(flat, (TAPS - 1, 0))).mT.reshape(x.shape)
