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

from ..call import Call, check_choice, check_scale, whole
from ..held import Held, check_step, check_tokens
from ..tensors import broken, log_weights, nothing, repeat_heads, softmax_or_zero, spoiled, wide, without_absent
from ..tracing import outside_autocast
from .combiner_parts import POOLINGS, SUMMARY_KEYS, axial, fixed, log_sparse, segmented, summarise
from .grid import resolve_grid
from .mixing import Mixer
from .products import one_hot_weights
from .registry import can, options_of, register

VARIANTS = ("fixed", "logsparse", "axial")
SummaryKey = str | Callable[[Tensor], Tensor] | None


def combiner_attention(
    call: Call,
    *,
    variant: str = "fixed",
    segment: int | None = None,
    pooling: str = "max",
    exclude_own: bool = True,
    summary_key: SummaryKey = "wsum",
) -> Tensor:
    """out_i = sum_{j direct} a_ij v_j + sum_r b_ir V_r, one softmax over q_i.k_j and q_i.K_r; V_r = softmax(Q_r.k) v.

    variant "fixed": segments of `segment` tokens (default: the columns of the `grid`, or the root of L), direct within
    the own one; "axial": rows of that many tokens, direct in the own row, other rows by their summary in the own
    column; "logsparse", causal only: blocks of powers of two. K_r and Q_r are pooled over the region, by `pooling`
    "max" as in the released code, "mean" or "sum". A region counts as one entry of the softmax, whatever its size.
    Without a causal mask the own segment is no region; `exclude_own=False` counts it twice, as the released code does.
    `summary_key` of the axial variant: "wsum", "none", or a function of the summary values; a layer learns one, "proj".
    Tokens before the grid (`prefix`) are direct for all others, and all others for them (ours); "logsparse" takes them
    like any other token. Absent tokens are in no summary, and their own rows mean nothing.
    Every pair has a positive weight, and rows sum to 1.
    Cost: L (c + L / c)(D + E), that is 2 L^1.5 (D + E) for c = sqrt(L); "logsparse" L log2(L) (D + E).
    """
    _check(variant, segment, pooling, exclude_own, summary_key)
    if variant == "logsparse" and not call.is_causal:
        raise ValueError("variant='logsparse' is causal only: pass is_causal=True, or variant='fixed' or 'axial'")
    (*_, heads, tokens, _), dtype = call.query.shape, call.query.dtype
    shape = resolve_grid(tokens, call.grid, call.prefix)
    if tokens == 0:
        return nothing((*call.query.shape[:-1], call.value.shape[-1]), *call[:4])
    if segment is None:
        patches = max(1, tokens - call.prefix)
        segment = math.isqrt(patches - 1) + 1 if call.grid is None else max(1, shape[-1])
    q = without_absent(wide(call.query) * call.softmax_scale, call.key_mask)
    k, v = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    bias = log_weights(call.key_mask, q)
    bias = q.new_zeros(q.shape[:-1]) if bias is None else bias.expand(q.shape[:-1])
    if call.is_causal:
        lost = broken(q, k, v)
        q, k, v = (x.masked_fill(lost.unsqueeze(-1), 0) for x in (q, k, v))
    if variant == "logsparse":
        out = log_sparse(q, wide(k), wide(v), bias, pooling=pooling)
        return spoiled(out, lost, torch.arange(tokens, device=out.device))
    regions = fixed(pooling, dtype) if variant == "fixed" else axial(summary_key, dtype)
    parts: dict[str, Any] = {"c": segment, "is_causal": call.is_causal, "prefix": call.prefix, "own": not exclude_own}
    out = segmented(q, k, v, bias, regions=regions, dtype=dtype, **parts)
    return spoiled(out, lost, torch.arange(tokens, device=out.device)) if call.is_causal else out


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
        _check(segment=segment, pooling=pooling)
        check_scale(scale)
        self.segment, self.pooling, self.scale = segment, pooling, scale
        self.state: StreamState | None = None

    @outside_autocast
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token of each, (..., H, 1, D), (..., H, 1, D), (..., H, 1, E) -> (..., H, 1, E)."""
        check_step(query, key, value)
        dtype, heads = query.dtype, query.shape[-3]
        if self.state is not None:
            before = Held.of(self.state.key, self.state.value)
            check_tokens(repeat_heads(key, heads), repeat_heads(value, heads), before)
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


@options_of(combiner_attention)
class CombinerAttention(Mixer):
    """Combiner for a layer. Parameters only for the axial variant with `summary_key="proj"`, the published default:

        K = W_k LayerNorm(W_v merge_heads(V) + x), the key of the summary V at the token x

    Other arguments are the options of `combiner_attention`. Weights start at normal(0, 0.02), biases at 0.
    """

    mechanism = "combiner"

    def __init__(self, dim: int, num_heads: int, *, summary_key: str | None = "proj", **rest: Any) -> None:
        super().__init__(dim, num_heads, **rest)
        check_choice("summary_key", summary_key, ("proj", *SUMMARY_KEYS))
        _check(**self.options)
        self.learned = self.options.get("variant") == "axial" and summary_key == "proj"
        self.options["summary_key"] = "wsum" if summary_key == "proj" else summary_key
        if self.learned:
            self.summary_value = nn.Linear(dim, dim, **self.place)
            self.summary_norm = nn.LayerNorm(dim, eps=1e-6, **self.place)
            self.summary_proj = nn.Linear(dim, dim, **self.place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learned:
            for linear in (self.summary_value, self.summary_proj):
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)
            self.summary_norm.reset_parameters()

    def asked(self, call: Call, x: Tensor | None) -> tuple[Call, dict[str, Any]]:
        """x (..., L, C) is the input of the layer, which "proj" needs."""
        call = self.on_grid(call)
        return call, self.options | ({"summary_key": self._summary_key(call, x)} if self.learned else {})

    def weigh(self, call: Call, x: Tensor | None = None) -> Tensor:
        """The weights, (..., H, L, L). With "proj" they depend on the values and on x."""
        if not self.learned:
            return super().weigh(call, x)
        kept: list[Tensor] = []
        call, options = self.asked(call, x)
        learned = options["summary_key"]

        def keep(V: Tensor) -> Tensor:
            kept.append(learned(V))
            return kept[0]

        COMBINER.run(call, **options | {"summary_key": keep})
        return COMBINER.weigh(call, **options | {"summary_key": lambda V: kept[0].to(V.dtype)})

    def scores(self, query: Tensor, key: Tensor, *, x: Tensor | None = None, **fields: Any) -> Tensor:
        """As `weigh`."""
        if fields.get("value") is None and self.learned:
            raise ValueError(
                "value=None, but with summary_key='proj' the weights depend on the values; pass value= and x=, or "
                "build the layer with summary_key='wsum'"
            )
        return super().scores(query, key, x=x, **fields)

    def _summary_key(self, call: Call, x: Tensor | None) -> Callable[[Tensor], Tensor]:
        if x is None:
            raise ValueError(
                "x=None, but summary_key='proj' makes keys from the input of the layer; pass x (..., L, C)"
            )
        if call.key_mask is not None:
            x = x.masked_fill((call.key_mask == 0).unsqueeze(-1), 0)
        tokens = x[..., call.prefix :, :]

        def keys(V: Tensor) -> Tensor:
            if V.shape[-1] * V.shape[-3] != self.dim:
                own = self.dim // self.num_heads
                raise ValueError(f"value must be {own} wide for summary_key='proj', got {V.shape[-1]}")
            merged = V.transpose(-3, -2).flatten(-2).to(self.summary_value.weight.dtype)
            y = self.summary_norm(self.summary_value(merged) + tokens.to(merged.dtype))
            K = self.summary_proj(y).unflatten(-1, (self.num_heads, -1))
            return K.transpose(-3, -2).to(V.dtype)

        return keys


def _check(
    variant: str = "fixed",
    segment: int | None = None,
    pooling: str = "max",
    exclude_own: bool = True,
    summary_key: SummaryKey = "wsum",
) -> None:
    for name, given, known in (("variant", variant, VARIANTS), ("pooling", pooling, POOLINGS)):
        check_choice(name, given, known)
    if segment is not None and not whole(segment, 1):
        raise ValueError(f"segment must be at least 1 token, got {segment!r}")
    if not callable(summary_key) and summary_key not in SUMMARY_KEYS:
        hint = "; 'proj' has parameters, which a layer holds" if summary_key == "proj" else ""
        raise ValueError(f"summary_key must be 'wsum', 'none' or a function, got {summary_key!r}{hint}")


COMBINER = register(
    name="combiner",
    summary="near tokens directly, all others through summaries of their regions (fixed, log-sparse, axial)",
    paper="Combiner (Ren et al.)",
    year=2021,
    arxiv="2107.05768",
    cost="2 L^1.5 (D + E)",
    function=combiner_attention,
    row_weights=one_hot_weights(combiner_attention),
    module=CombinerAttention,
    stream=CombinerStream,
    length_option="segment",
    independent_rows=False,
    order_free=False,
    **can("causal key_mask grouped_queries subquadratic key_shift wants_grid wants_input"),
)
