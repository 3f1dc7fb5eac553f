"""Combiner: every pair of tokens is attended to, near ones directly, far ones through summaries of their regions.

Shape legend: ... leading dimensions, H heads, L tokens, D, E widths, c tokens of a segment, C = H D width of a layer.
The partitions into direct keys and regions are in `combiner_parts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..inputs import without_autocast
from .combiner_parts import POOLINGS, SUMMARY_KEYS, axial, fixed, log_sparse, summarise
from .grid import Grid, resolve_grid
from .inputs import outside_autocast, prepare, wide
from .masking import log_weights, repeat_heads, softmax_or_zero, without_absent
from .registry import Mechanism, register

VARIANTS = ("fixed", "logsparse", "axial")


def combiner_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    grid: Grid | None = None,
    prefix: int = 0,
    variant: str = "fixed",
    segment: int | None = None,
    pooling: str = "max",
    exclude_own: bool = True,
    summary_key: str | Callable[[Tensor], Tensor] = "wsum",
) -> Tensor:
    """out_i = sum_{j direct} a_ij v_j + sum_r b_ir V_r, one softmax over q_i.k_j and q_i.K_r; V_r = softmax(Q_r.k) v.

    query, key (..., H, L, D), value (..., H, L, E) -> (..., H, L, E): self-attention only.
    variant "fixed": segments of `segment` tokens (default: the columns of the `grid`, or the root of L), direct within
    the own one; "axial": rows of that many tokens, direct in the own row, other rows by their summary in the own
    column; "logsparse", causal only: blocks of powers of two. K_r and Q_r are pooled over the region, by `pooling`
    "max" as in the released code, "mean" or "sum". A region counts as one entry of the softmax, whatever its size.
    Without a causal mask the own segment is no region; `exclude_own=False` counts it twice, as the released code does.
    `summary_key` of the axial variant: "wsum", "none", or a function of the summary values; a layer learns one, "proj".
    Tokens before the grid (`prefix`) are direct for all others, and all others for them (ours); "logsparse" takes them
    like any other token.
    key_mask (..., L) is bool, or weights; absent tokens are in no summary, and their own rows mean nothing.
    Cost: L (c + L / c)(D + E), that is 2 L^1.5 (D + E) for c = sqrt(L); "logsparse" L log2(L) (D + E).
    """
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    _check(variant, pooling, segment, summary_key)
    if query.shape[-2] != key.shape[-2]:
        lengths = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
        raise ValueError(f"regions are summarised by their own queries, got {lengths}: their numbers must agree")
    if variant == "logsparse" and not is_causal:
        raise ValueError("variant='logsparse' is causal only: pass is_causal=True, or variant='fixed' or 'axial'")
    shape = resolve_grid(query.shape[-2], grid, prefix)
    if query.shape[-2] == 0:
        return query.new_zeros((*query.shape[:-1], value.shape[-1]))
    if segment is None:
        patches = max(1, query.shape[-2] - prefix)
        segment = math.isqrt(patches - 1) + 1 if grid is None else max(1, shape[-1])
    with without_autocast(query.device.type):
        heads = query.shape[-3]
        q = wide(query) * (query.shape[-1] ** -0.5 if scale is None else scale)
        k, v = repeat_heads(key, heads), repeat_heads(value, heads)
        bias = log_weights(key_mask, q)
        if bias is None:
            bias = q.new_zeros(q.shape[:-1])
        else:
            assert key_mask is not None
            q, bias = without_absent(q, key_mask), bias.expand(q.shape[:-1])
        parts: dict[str, Any] = {"c": segment, "is_causal": is_causal, "prefix": prefix, "own": not exclude_own}
        parts["dtype"] = query.dtype
        if variant == "fixed":
            out = fixed(q, k, v, bias, pooling=pooling, **parts)
        elif variant == "axial":
            out = axial(q, k, v, bias, summary_key=summary_key, **parts)
        else:
            out = log_sparse(q, wide(k), wide(v), bias, pooling=pooling)
    return out.to(query.dtype)


def combiner_scores(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    grid: Grid | None = None,
    prefix: int = 0,
    variant: str = "fixed",
    segment: int | None = None,
    pooling: str = "max",
    exclude_own: bool = True,
    summary_key: str | Callable[[Tensor], Tensor] = "wsum",
) -> Tensor:
    """The weights a_ij, or b_ir p_rj, (..., H, L, L): positive for every pair, rows sum to 1. Cost: L^2 (c + L / c)."""
    L = key.shape[-2]
    tokens = torch.eye(L, dtype=key.dtype, device=key.device).expand(*key.shape[:-1], L)
    shared: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    layout: dict[str, Any] = {"grid": grid, "prefix": prefix, "variant": variant, "segment": segment}
    options: dict[str, Any] = {"pooling": pooling, "exclude_own": exclude_own, "summary_key": summary_key}
    return combiner_attention(query, key, tokens, **shared, **layout, **options)


class StreamState(NamedTuple):
    """The tokens of the segment that is open, and the summaries of those that are closed."""

    query: Tensor  # (..., H, t, D), t <= c, times the scale
    key: Tensor  # (..., H, t, D)
    value: Tensor  # (..., H, t, E)
    region_key: Tensor  # (..., H, r, D)
    region_value: Tensor  # (..., H, r, E)


class CombinerStream:
    """The causal "fixed" variant token by token. Memory c + L / c tokens, so it grows, slowly. Gradients flow."""

    def __init__(self, *, segment: int | None = None, pooling: str = "max", scale: float | None = None) -> None:
        if segment is None:
            raise ValueError("segment=None is the root of a length that a stream does not know; pass segment=c")
        _check("fixed", pooling, segment, "wsum")
        self.segment, self.pooling, self.scale = segment, pooling, scale
        self.state: StreamState | None = None

    @outside_autocast
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token of each, (..., H, 1, D), (..., H, 1, D), (..., H, 1, E) -> (..., H, 1, E)."""
        dtype, heads = query.dtype, query.shape[-3]
        q = wide(query) * (query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        k, v = repeat_heads(wide(key), heads), repeat_heads(wide(value), heads)
        if self.state is None:
            self.state = StreamState(q, k, v, k[..., :0, :], v[..., :0, :])
        else:
            old = self._closed(self.state)
            q_all, k_all, v_all = (torch.cat(pair, -2) for pair in zip(old[:3], (q, k, v), strict=True))
            self.state = StreamState(q_all, k_all, v_all, old.region_key, old.region_value)
        keys = torch.cat((self.state.key, self.state.region_key), -2)
        values = torch.cat((self.state.value, self.state.region_value), -2)
        return (softmax_or_zero(q @ keys.mT) @ values).to(dtype)

    def _closed(self, state: StreamState) -> StreamState:
        """The state with its segment turned into a summary, if it is full."""
        if state.key.shape[-2] < self.segment:
            return state
        q, k, v = (x.unsqueeze(-3) for x in state[:3])
        K, V, _ = summarise(q, k, v, q.new_zeros(q.shape[:-1]), self.pooling)
        q, k, v = (x[..., :0, :] for x in state[:3])
        return StreamState(q, k, v, torch.cat((state.region_key, K), -2), torch.cat((state.region_value, V), -2))


class CombinerAttention(nn.Module):
    """Combiner for a layer. Parameters only for the axial variant with `summary_key="proj"`, the published default:

        K = W_k LayerNorm(W_v merge_heads(V) + x), the key of the summary V at the token x

    Other arguments are the options of `combiner_attention`. Weights start at normal(0, 0.02), biases at 0.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: Grid | None = None,
        prefix: int = 0,
        device: Any = None,
        dtype: Any = None,
        variant: str = "fixed",
        segment: int | None = None,
        pooling: str = "max",
        exclude_own: bool = True,
        summary_key: str = "proj",
    ) -> None:
        super().__init__()
        if summary_key not in ("proj", *SUMMARY_KEYS):
            raise ValueError(f"summary_key must be 'proj', 'wsum' or 'none', got {summary_key!r}")
        _check(variant, pooling, segment, "wsum")
        self.num_heads, self.grid_size, self.prefix, self.summary_key = num_heads, grid_size, prefix, summary_key
        self.options: dict[str, Any] = {"variant": variant, "segment": segment, "pooling": pooling}
        self.options["exclude_own"] = exclude_own
        self.learned = variant == "axial" and summary_key == "proj"
        if self.learned:
            place: dict[str, Any] = {"device": device, "dtype": dtype}
            self.summary_value = nn.Linear(dim, dim, **place)
            self.summary_norm = nn.LayerNorm(dim, eps=1e-6, **place)
            self.summary_proj = nn.Linear(dim, dim, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learned:
            for linear in (self.summary_value, self.summary_proj):
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)
            self.summary_norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        grid: Grid | None = None,
        prefix: int | None = None,
        x: Tensor | None = None,
        **shared: Any,
    ) -> Tensor:
        """As `combiner_attention`; x (..., L, C) is the input of the layer, which "proj" needs."""
        grid, prefix = self.grid_size if grid is None else grid, self.prefix if prefix is None else prefix
        options = {**self.options, "grid": grid, "prefix": prefix, "key_mask": key_mask, **shared}
        if not self.learned:
            return COMBINER(query, key, value, summary_key=self._plain_key(), **options)
        return COMBINER(query, key, value, summary_key=self._summary_key(x, key_mask, prefix), **options)

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        *,
        value: Tensor | None = None,
        key_mask: Tensor | None = None,
        grid: Grid | None = None,
        prefix: int | None = None,
        x: Tensor | None = None,
        **shared: Any,
    ) -> Tensor:
        """The weights, (..., H, L, L). With "proj" they depend on the values, which must then be given, with x."""
        grid, prefix = self.grid_size if grid is None else grid, self.prefix if prefix is None else prefix
        options = {**self.options, "grid": grid, "prefix": prefix, "key_mask": key_mask, **shared}
        if not self.learned:
            return combiner_scores(query, key, summary_key=self._plain_key(), **options)
        if value is None:
            raise ValueError(
                "value=None, but with summary_key='proj' the weights depend on the values; pass value= and x=, or "
                "build the layer with summary_key='wsum'"
            )
        kept: list[Tensor] = []
        learned = self._summary_key(x, key_mask, prefix)

        def keep(V: Tensor) -> Tensor:
            kept.append(learned(V))
            return kept[0]

        COMBINER(query, key, value, summary_key=keep, **options)
        return combiner_scores(query, key, summary_key=lambda V: kept[0], **options)

    def _plain_key(self) -> str:
        return "wsum" if self.summary_key == "proj" else self.summary_key

    def _summary_key(self, x: Tensor | None, key_mask: Tensor | None, prefix: int) -> Callable[[Tensor], Tensor]:
        if x is None:
            raise ValueError(
                "x=None, but summary_key='proj' makes keys from the input of the layer; pass x (..., L, C)"
            )
        if key_mask is not None:
            x = x.masked_fill((key_mask == 0).unsqueeze(-1), 0)
        tokens = x[..., prefix:, :]

        def keys(V: Tensor) -> Tensor:
            merged = V.transpose(-3, -2).flatten(-2).to(self.summary_value.weight.dtype)
            y = self.summary_norm(self.summary_value(merged) + tokens.to(merged.dtype))
            K = self.summary_proj(y).unflatten(-1, (self.num_heads, -1))
            return K.transpose(-3, -2).to(V.dtype)

        return keys


def _check(variant: str, pooling: str, segment: int | None, summary_key: str | Callable[[Tensor], Tensor]) -> None:
    for name, given, known in (("variant", variant, VARIANTS), ("pooling", pooling, POOLINGS)):
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}")
    if segment is not None and segment < 1:
        raise ValueError(f"segment must be at least 1 token, got {segment}")
    if not callable(summary_key) and summary_key not in SUMMARY_KEYS:
        hint = "; 'proj' has parameters, which a layer holds" if summary_key == "proj" else ""
        raise ValueError(f"summary_key must be 'wsum', 'none' or a function, got {summary_key!r}{hint}")


COMBINER = register(
    Mechanism(
        name="combiner",
        summary="near tokens directly, all others through summaries of their regions (fixed, log-sparse, axial)",
        paper="Combiner (Ren et al.)",
        year=2021,
        arxiv="2107.05768",
        cost="2 L^1.5 (D + E)",
        function=combiner_attention,
        scores=combiner_scores,
        module=CombinerAttention,
        stream=CombinerStream,
        causal=True,
        independent_rows=False,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        order_free=False,
        key_shift=True,
        wants_grid=True,
        wants_input=True,
        length_option="segment",
    )
)
