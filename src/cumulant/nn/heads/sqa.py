"""SQA, sparse query attention: fewer query heads, each as wide as before.

Shape legend: ... leading dimensions, L tokens, M keys, C width, H heads of the layer it is compared with, D = C / H,
Hq query heads, Hk key heads.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import Tensor

from ... import zoo
from ...call import check_choice
from ...grammar import parse
from ...zoo.registry import can
from ..arguments import check_sizes
from ..registry import registered
from .base import HeadsLayer, need, refuse

# Query and key heads as parts of H; xsmqa has one key head.
VARIANTS: dict[str, tuple[Fraction, Fraction]] = {
    "sqa": (Fraction(1, 2), Fraction(1, 4)),
    "ssqa": (Fraction(1, 2), Fraction(1, 2)),
    "xsqa": (Fraction(1, 4), Fraction(1, 4)),
    "xsmqa": (Fraction(1, 4), Fraction(0)),
    "lsqa": (Fraction(3, 4), Fraction(1, 4)),
    "rsqa": (Fraction(1, 4), Fraction(1, 2)),
}

FLOW = "it has no grouped queries; `key_heads` equal to `query_heads` (ssqa, xsqa) works"
READS = "its parts read the layer's input, channel for channel of as many heads as there were"


@registered(
    "sqa",
    "fewer query heads of the same width: sqa, ssqa, xsqa, xsmqa, lsqa, rsqa",
    paper="Sparse Query Attention (Filipek)",
    year=2025,
    cost="Hq / H of the mechanism",
    not_over={"flow": FLOW, "rala": READS, "mala": READS, "combiner": READS},
    **can("causal cross key_mask ragged streaming equivariant weights"),
)
class SparseQueryAttention(HeadsLayer):
    """Attention with Hq < H query heads of width D = C / H over Hk key heads, and an output projection from Hq D.

        y = W_o concat_i(mechanism(W_q x, W_k z, W_v z)_i) + b_o,   query head i reads key head floor(i Hk / Hq)

    With Hq < Hk ("rsqa") queries are repeated instead, head j reading query j mod Hq. Cost: 2 L C D (Hq + Hk) for the
    projections, and Hq / H of the plain layer's mechanism.

    Args:
        variant: "sqa" (H/2 query heads, H/4 key heads), "ssqa" (H/2, H/2), "xsqa" (H/4, H/4), "xsmqa" (H/4, 1),
            "lsqa" (3H/4, H/4) or "rsqa" (H/4, H/2).
        query_heads: Hq in place of the variant's.
        key_heads: Hk in place of the variant's.
    """

    splits = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        variant: str = "sqa",
        query_heads: int | None = None,
        key_heads: int | None = None,
        attention: str = "softmax",
        qkv_bias: bool = False,
        **layer: Any,
    ) -> None:
        check_sizes(dim, num_heads)
        queries, keys = _heads(num_heads, variant, query_heads, key_heads)
        inner, mechanism = max(queries, keys), zoo.get(parse(attention)[0])
        if inner > keys:
            words = f"has {queries} query heads over {keys} key heads"
            need("sqa", mechanism, "grouped_queries", words, f"key_heads={queries}, which shares none")
        if inner != num_heads and mechanism.wants_input:
            refuse("sqa", mechanism, f"it reads the input of {num_heads} heads, of which {inner} are left")
        self.query_heads = queries
        grouped = None if keys == inner else keys
        width = dim // num_heads
        super().__init__(
            dim, inner, num_kv_heads=grouped, head_dim=width, attention=attention, qkv_bias=qkv_bias, **layer
        )

    @property
    def head_counts(self) -> tuple[int, int, int]:
        return self.query_heads, self.num_kv_heads, self.num_kv_heads

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(x, context)
        if self.query_heads < self.num_heads:
            query = query.repeat(*[1] * (query.ndim - 3), self.num_heads // self.query_heads, 1, 1)
        return query, key, value


def _heads(num_heads: int, variant: str, query_heads: int | None, key_heads: int | None) -> tuple[int, int]:
    """Query and key heads of a variant, or those given; raises where they do not divide."""
    check_choice("variant", variant, VARIANTS)
    parts = VARIANTS[variant]
    asked = [num_heads * part if given is None else Fraction(given) for part, given in
             zip(parts, (query_heads, key_heads), strict=True)]  # fmt: skip
    if variant == "xsmqa" and key_heads is None:
        asked[1] = Fraction(1)
    if any(count.denominator > 1 for count in asked):
        step = max(part.denominator for part in parts)
        near = max(step, round(num_heads / step) * step)
        raise ValueError(
            f"variant {variant!r} of layer 'sqa' needs num_heads to be a multiple of {step}, got num_heads={num_heads}"
            f"; nearest that works: num_heads={near}, or give query_heads and key_heads"
        )
    queries, keys = (int(count) for count in asked)
    if not (1 <= queries <= num_heads and 1 <= keys <= num_heads):
        raise ValueError(f"query_heads and key_heads must be from 1 to num_heads={num_heads}, got {queries} and {keys}")
    small, large = sorted((queries, keys))
    if large % small:
        near = max(n for n in range(1, large + 1) if large % n == 0 and n <= small)
        which = "key_heads" if keys < queries else "query_heads"
        raise ValueError(
            f"query_heads={queries} and key_heads={keys} must divide one another; nearest that works: {which}={near}"
        )
    return queries, keys
