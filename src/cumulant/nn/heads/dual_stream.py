"""The attention of the Dual-Stream transformer: how much heads may say to each other, from nothing to everything.

Shape legend: ... leading dimensions, L tokens, C = H D width, H heads, D channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...call import check_choice
from ...zoo.registry import can
from ..registry import registered
from .base import HeadsLayer

STRATEGIES = ("identity", "independent", "kronecker", "kron_block", "dense")
STD = 0.02


class HeadMixing(nn.Module):
    """A projection C -> C whose blocks of D channels belong to heads.

    identity     y = x                            0 parameters   nothing between heads
    independent  y_h = W_h x_h                    C^2 / H        nothing
    kronecker    y_h = sum_g A_hg x_g             H^2            one number for each pair
    kron_block   y_h = sum_g A_hg W_g x_g         both           one number for each pair, a matrix for each head
    dense        y = W x                          C^2            everything
    """

    def __init__(self, dim: int, num_heads: int, strategy: str, bias: bool = False, **place: Any) -> None:
        super().__init__()
        check_choice("mixing", strategy, STRATEGIES)
        self.num_heads, self.strategy, D = num_heads, strategy, dim // num_heads
        paired, blocks = strategy in ("kronecker", "kron_block"), strategy in ("independent", "kron_block")
        self.pairs = nn.Parameter(torch.empty(num_heads, num_heads, **place)) if paired else None
        self.blocks = nn.Parameter(torch.empty(num_heads, D, D, **place)) if blocks else None
        self.weight = nn.Parameter(torch.empty(dim, dim, **place)) if strategy == "dense" else None
        self.bias = nn.Parameter(torch.zeros(dim, **place)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Numbers between heads begin at the identity, matrices at normal ones of deviation 0.02."""
        for table in (self.pairs, self.blocks, self.weight):
            if table is not None:
                nn.init.normal_(table, std=STD)
        if self.pairs is not None:
            with torch.no_grad():
                self.pairs.add_(torch.eye(self.num_heads, device=self.pairs.device, dtype=self.pairs.dtype))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        heads = x.unflatten(-1, (self.num_heads, -1))
        if self.blocks is not None:
            heads = torch.einsum("hed,...hd->...he", self.blocks.to(heads.dtype), heads)
        if self.pairs is not None:
            heads = torch.einsum("hg,...gd->...hd", self.pairs.to(heads.dtype), heads)
        out = heads.flatten(-2)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class ChannelNorm(nn.Module):
    """LayerNorm of each head's D channels by themselves, with a gain and bias of C: heads stay apart."""

    def __init__(self, dim: int, num_heads: int, eps: float = 1e-5, **place: Any) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.weight = nn.Parameter(torch.ones(dim, **place))
        self.bias = nn.Parameter(torch.zeros(dim, **place))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.num_heads, -1))
        return F.layer_norm(heads, heads.shape[-1:], eps=self.eps).flatten(-2) * self.weight + self.bias


@registered(
    "dual_stream",
    "value and output projections that let heads talk not at all, by one number, or freely",
    paper="The Dual-Stream Transformer: Channelized Architecture for Interpretable Language Modeling (Kerce, Fox)",
    year=2026,
    arxiv="2603.07461",
    cost="that of the mechanism",
    **can("causal cross key_mask ragged streaming equivariant weights"),
)
class DualStreamAttention(HeadsLayer):
    """Attention whose value and output projections let heads talk as a strategy says.

        y = mix_o(mechanism(alpha W_q x, W_k z, mix_v(z))),  z = context or x

    Cost: 2 L C^2 for W_q and W_k and, with kronecker, 2 L H C for the others; plus the mechanism's own.

    Args:
        mixing: "identity", "independent", "kronecker", "kron_block" or "dense", see `HeadMixing`; of values and output.
        mix_qk: queries and keys by the same strategy; else they are dense. "independent" everywhere isolates heads.
        alpha: factor on the logits, 1 in training; larger ones at test make the choice of keys hard.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        mixing: str = "kronecker",
        mix_qk: bool = False,
        alpha: float = 1.0,
        qkv_bias: bool = False,
        proj_bias: bool = False,
        **layer: Any,
    ) -> None:
        check_choice("mixing", mixing, STRATEGIES)
        if not 0 <= alpha < float("inf"):
            raise ValueError(f"alpha must be a finite factor of 0 or more, got {alpha}")
        super().__init__(dim, num_heads, qkv_bias=False, proj_bias=False, **layer)
        if self.enable_gqa or self.inner_dim != dim:
            raise ValueError("layer 'dual_stream' has a block of channels for each head: no num_kv_heads, no head_dim")
        self.mixing, self.alpha = mixing, alpha
        del self.qkv
        of_queries = mixing if mix_qk else "dense"
        self.q, self.k = (HeadMixing(dim, num_heads, of_queries, qkv_bias, **self.place) for _ in range(2))
        self.v = HeadMixing(dim, num_heads, mixing, qkv_bias, **self.place)
        self.proj = HeadMixing(dim, num_heads, mixing, proj_bias, **self.place)  # type: ignore[assignment]

    def reset_extras(self) -> None:
        super().reset_extras()
        for module in (self.q, self.k, self.v, self.proj):
            module.reset_parameters()

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        self._check_width("x", x)
        if context is not None:
            self._check_width("context", context)
        z = x if context is None else context
        count = (self.num_heads,)
        (query,), (key,), (value,) = (self._heads(part, count) for part in (self.q(x), self.k(z), self.v(z)))
        query, key = self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype)
        query = query if self.temperature is None else self.temperature.scale(query)
        return query if self.alpha == 1 else query * self.alpha, key, value

    def values_from(self, x: Tensor, tokens: Tensor, is_causal: bool = False) -> Tensor:
        """Output for queries and keys of x and values of `tokens`, both (..., L, C)."""
        (value,) = self._heads(self.v(tokens), (self.num_heads,))
        return self.attend(self.asked(x, is_causal=is_causal)._replace(value=value), x)
