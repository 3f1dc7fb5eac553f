"""LAMA, low-rank attention over one context vector: a head is a pair of vectors, and its scores are bounded.

Shape legend: ... leading dimensions, L tokens, M context tokens, C width, m heads, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import zoo
from ...call import Call, check_choice, check_count, check_flag
from ...grammar import parse
from ...tensors import wide
from ...zoo.options import number
from ...zoo.registry import can
from ..registry import registered
from ..streams import LayerStream
from .base import HeadsLayer, refuse

CONTEXTS = ("mean", "learned")
EPS = 1e-12
PARTS = "its parts are made for keys and values of a head's width; here a key is one number and a value a whole token"


@registered(
    "lama",
    "tokens scored against one context vector by a rank-one form for each head",
    paper="Low Rank Factorization for Compact Multi-Head Self-Attention (Mehta et al.)",
    year=2019,
    arxiv="1912.00835",
    cost="2 L C H",
    not_over={name: PARTS for name in zoo.names() if zoo.get(name).module is not None},
    **can("causal cross key_mask ragged streaming equivariant weights"),
)
class LowRankAttention(HeadsLayer):
    """Tokens scored against one context vector c, their mean or learned, by a rank-one form for each head.

        s_t^k = (p_k . c) (q_k . h_t),   f_t = tanh(s_t) / |tanh(s_t)| over the heads,   alpha^k = softmax_t(f^k)
        Z^k = sum_t alpha_t^k h_t,   y = W (Z^1, ..., Z^m) + b for every token

    The key of a token is one number in [-1, 1] and its value the token itself, so the softmax over tokens may be any
    mechanism: with `attention="cumulant3"` it is expanded where the expansion is at its best. A causal layer takes the
    mean and the softmax over the past, c_t of each token with its own past. Cost: 2 L C m, and m C^2 for W once a
    sequence, or for every token where it is causal.

    Args:
        context: "mean" of the tokens (of x, where `context=` is another sequence), or "learned", one vector for all.
        rank: pairs of vectors of each head, whose scores are summed after tanh.
        bounded: False leaves tanh and the norm out: then it is cross attention with one query (p_k . c) q_k a head.
        sharpness: factor on f; with 1 two weights never differ by more than e^2 = 7.4: long texts are nearly averaged.
        wide_start: vectors from U(-m^-1/2, m^-1/2), as a public implementation has it, in place of C^-1/2.
        diversity: weight of the loss |alpha alpha^T - 1|^2, which keeps heads apart.
    """

    takes_rotary = False
    rows_alone = False
    sums: Tensor | float | None = None  # of the tokens that a stream has seen

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        context: str = "mean",
        rank: int = 1,
        bounded: bool = True,
        sharpness: float = 1.0,
        wide_start: bool = False,
        diversity: float = 0.0,
        **layer: Any,
    ) -> None:
        check_choice("context", context, CONTEXTS)
        check_count("rank", rank)
        number("sharpness", sharpness)
        number("diversity", diversity)
        for extra in ("qk_norm", "v_conv", "rotary", "temperature", "num_kv_heads"):
            if layer.get(extra):
                raise ValueError(f"layer 'lama' has no projected query and key, and no {extra}, got {layer[extra]!r}")
        mechanism = zoo.get(parse(layer.get("attention", "softmax"))[0])
        if mechanism.module is not None:
            refuse("lama", mechanism, PARTS)
        super().__init__(dim, num_heads, head_dim=1, **layer)
        self.rank, self.bounded, self.sharpness = rank, bounded, sharpness
        self.wide_start, self.diversity = wide_start, diversity
        self.qkv = nn.Identity()  # type: ignore[assignment]  # tokens are their own values, their scores the keys
        self.P = nn.Parameter(torch.empty(dim, num_heads * rank, **self.place))
        self.Q = nn.Parameter(torch.empty(dim, num_heads * rank, **self.place))
        self.c = nn.Parameter(torch.empty(dim, **self.place)) if context == "learned" else None
        self.reset_extras()

    @property
    def inner_dim(self) -> int:
        return self.num_heads * self.dim

    def stream(self) -> LayerStream:
        stream: Any = super().stream()
        stream.layer.sums = 0.0
        return stream

    def reset_extras(self) -> None:
        super().reset_extras()
        bound = (self.num_heads * self.rank if self.wide_start else self.dim) ** -0.5
        for vectors in (self.P, self.Q):
            nn.init.uniform_(vectors, -bound, bound)
        if self.c is not None:
            nn.init.normal_(self.c, std=0.02)

    def pool(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Z (..., m, C), one vector a head, of tokens x (..., L, C)."""
        call = self.asked(x, attn_mask)
        return self.mix_tokens(call, x).squeeze(-2)

    def call(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None, is_causal: bool = False,
        **layout: Any,
    ) -> Call:  # fmt: skip
        """One query of ones a head, f as keys (..., m, M, 1), the tokens themselves as values (..., m, M, C)."""
        self._check_width("x", x)
        tokens = x if context is None else context
        self._check_width("context", tokens)
        check_flag("is_causal", is_causal)
        if tokens.shape[:-2] != x.shape[:-2]:
            shapes = f"{tuple(x.shape[:-2])} and {tuple(tokens.shape[:-2])}"
            raise ValueError(f"leading dimensions of x and context must agree, got {shapes}")
        if is_causal and context is not None:
            raise ValueError("layer 'lama' pools: is_causal=True goes with its own tokens, got a context too")
        f = self.keys(tokens, self._context(x, key_mask if context is None else None, is_causal))
        key = f.mT.unsqueeze(-1).to(x.dtype)
        value = tokens.unsqueeze(-3).expand(*tokens.shape[:-2], self.num_heads, *tokens.shape[-2:])
        rows = x.shape[-2] if is_causal else 1
        query = key.new_ones(*key.shape[:-2], 1, 1).expand(*key.shape[:-2], rows, 1)
        dropout = self.attn_drop if self.training else 0.0
        # A scale of 1 is what every mechanism has for keys of width 1.
        return Call(query, key, value, key_mask, is_causal, dropout_p=dropout)

    def keys(self, tokens: Tensor, c: Tensor) -> Tensor:
        """The scores f (..., M, m) of tokens (..., M, C) against context vectors (..., 1 or M, C)."""
        s = wide(c @ self.P) * wide(tokens @ self.Q)
        s = s.tanh() if self.bounded else s
        s = s.unflatten(-1, (self.num_heads, self.rank)).sum(-1)
        if self.bounded:
            s = s / s.square().sum(-1, keepdim=True).clamp(min=EPS).sqrt()
        return s * self.sharpness

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.diversity and self.training:
            self.keep_loss("diversity", self.diversity * self._overlap(call))
        return self.mix.run(call, x)

    def attend(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        out = super().attend(call, x, context)
        return out if call.is_causal else out.expand(*out.shape[:-2], x.shape[-2], out.shape[-1])

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """alpha (..., m, L, M); without a causal mask all rows are alike."""
        A = self.mix.weigh(call, x)
        return A if call.is_causal or x is None else A.expand(*A.shape[:-2], x.shape[-2], A.shape[-1])

    def _context(self, x: Tensor, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """c as (..., 1, C), or (..., L, C) where each token has that of its past."""
        if self.c is not None:
            return self.c.expand(*x.shape[:-2], 1, x.shape[-1])
        weight = None if key_mask is None else wide(key_mask.to(x.dtype)).unsqueeze(-1)
        z = wide(x) if weight is None else wide(x.masked_fill(weight == 0, 0)) * weight
        count = wide(x).new_ones(*x.shape[:-1], 1) if weight is None else weight.expand(*x.shape[:-1], 1)
        if not is_causal:
            return (z.sum(-2, keepdim=True) / count.sum(-2, keepdim=True).clamp(min=1e-9)).to(x.dtype)
        total, number = z.cumsum(-2), count.cumsum(-2) + self.first_place
        if self.sums is not None:
            total = total + self.sums
            self.sums = total[..., -1:, :]
        return (total / number.clamp(min=1e-9)).to(x.dtype)

    def _overlap(self, call: Call) -> Tensor:
        """|alpha alpha^T - 1|^2 over the heads, the mean over sequences."""
        A = wide(self.mix.weigh(call, None))[..., -1, :]  # (..., m, M)
        off = A @ A.mT - torch.eye(self.num_heads, dtype=A.dtype, device=A.device)
        return off.square().sum((-2, -1)).mean()
