"""The Dual-Stream language model: attention writes one residual stream, feed-forward layers the other.

Shape legend: B texts, L tokens, V symbols, C = H D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..call import check_choice
from ..nn.heads.dual_stream import ChannelNorm, DualStreamAttention, HeadMixing
from ..nn.streams import LayerStream, Recomputed
from ..zoo.registry import options_of
from .lm import CausalBlock, LanguageModel

NORMS, READS = ("channel", "full"), ("sum", "value_from_token")
# Arguments of `LanguageModel` that its streams decide.
FIXED = {"layer", "attention_extras", "qkv_bias", "qk_norm", "positions", "tie", "attn_drop", "drop_path", "gelu"}


class HeadMlp(nn.Module):
    """A feed-forward layer for each head's channels alone: D -> 4 D -> D, no word between heads. Cost: 8 L C D."""

    def __init__(self, dim: int, num_heads: int, hidden: int, **place: Any) -> None:
        super().__init__()
        self.num_heads, wide = num_heads, hidden // num_heads
        D = dim // num_heads
        self.up = nn.Parameter(torch.randn(num_heads, wide, D, **place) * 0.02)
        self.down = nn.Parameter(torch.randn(num_heads, D, wide, **place) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.num_heads, -1))
        inner = nn.functional.gelu(torch.einsum("hed,...hd->...he", self.up.to(heads.dtype), heads))
        return torch.einsum("hde,...he->...hd", self.down.to(inner.dtype), inner).flatten(-2)


@options_of(LanguageModel, without=FIXED)
class DualStream(LanguageModel):
    """Tokens (B, L) to logits (B, L, V), by two streams whose sum is what every part reads:

        x_t <- x_t + attention(norm(x_t + x_e))        x_e <- x_e + ffn(norm(x_t + x_e))

    x_t begins as the embedding, x_e as 0. With `mixing="dense"`, `norm="full"` and `read="sum"` their sum is that of an
    ordinary pre-norm transformer. Arguments beyond those of `LanguageModel`:

    Args:
        mixing, mix_qk, alpha: of the layer, see `cumulant.nn.heads.dual_stream`.
        frozen: the token stream stays the embedding; attention writes x_e too.
        norm: "channel", each head's channels by themselves, or "full".
        read: "sum", or "value_from_token": values are read from x_t alone (no cache then).
        head_ffn: feed-forward layers of each head's channels alone.
    """

    def __init__(
        self,
        *,
        mixing: str = "kronecker",
        mix_qk: bool = False,
        alpha: float = 1.0,
        frozen: bool = False,
        norm: str = "channel",
        read: str = "sum",
        head_ffn: bool = False,
        embed_dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        **rest: Any,
    ) -> None:
        if unknown := sorted(rest.keys() & FIXED):
            raise ValueError(f"a Dual-Stream model has its own {', '.join(unknown)}; leave it out")
        check_choice("norm", norm, NORMS)
        check_choice("read", read, READS)
        place: dict[str, Any] = {"device": rest.get("device"), "dtype": rest.get("dtype")}
        sizes: dict[str, Any] = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "mlp_ratio": mlp_ratio}
        own = {"mixing": mixing, "mix_qk": mix_qk, "alpha": alpha}
        super().__init__(layer="dual_stream", attention_extras=own, qkv_bias=False, **sizes, **rest)
        self.frozen, self.read = frozen, read
        for module in self.blocks:
            block = cast(CausalBlock, module)
            if norm == "channel":
                block.norm1, block.norm2 = (ChannelNorm(embed_dim, num_heads, **place) for _ in range(2))  # type: ignore[assignment]
            if head_ffn:
                block.mlp = HeadMlp(embed_dim, num_heads, int(embed_dim * mlp_ratio), **place)  # type: ignore[assignment]
            with torch.no_grad():  # what ends a branch begins smaller; identity and numbers between heads stay
                ends = cast(HeadMixing, block.attn.proj)
                for weight in (ends.weight, ends.blocks):
                    if weight is not None:
                        weight.mul_((2 * depth) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(sum(self.flows(tokens)))  # type: ignore[arg-type]

    def flows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams after the last block, each (B, L, C)."""
        x = self.embedded(tokens)
        return self._through(x, [None] * len(self.blocks))

    def lens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) that each stream alone would give: of tokens, and of context."""
        token, other = self.flows(tokens)
        return self.logits(token), self.logits(other)

    def streams(self) -> list[LayerStream | Recomputed]:
        if self.read != "sum":
            raise ValueError('read="value_from_token" has no cache; generate with cache=False')
        return super().streams()

    def take(self, tokens: Tensor, streams: Sequence[LayerStream | Recomputed], start: int) -> Tensor:
        return self.logits(sum(self._through(self.embedded(tokens, start), streams)))  # type: ignore[arg-type]

    def generate(self, prompt: str | Tensor, length: int = 200, **how: Any) -> Any:
        """As `LanguageModel.generate`."""
        return super().generate(prompt, length, **{**how, "cache": how.get("cache", True) and self.read == "sum"})

    def _through(self, token: Tensor, streams: Sequence[LayerStream | Recomputed | None]) -> tuple[Tensor, Tensor]:
        other = torch.zeros_like(token)
        for module, stream in zip(self.blocks, streams, strict=True):
            block = cast(CausalBlock, module)
            z = block.norm1(token + other)
            if stream is not None:
                moved = stream.step(z)
            elif self.read == "sum":
                moved = block.attn(z, is_causal=True)
            else:
                moved = cast(DualStreamAttention, block.attn).values_from(z, block.norm1(token), is_causal=True)
            if self.frozen:
                other = other + moved
            else:
                token = token + moved
            other = other + block.mlp(block.norm2(token + other))
        return token, other
