"""Focused linear attention (FLatten): features sharpened by a power that keeps their norm, and a local convolution.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, C = H D, n key slots.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Call, Grid, expands_to
from ..tensors import repeat_heads, wide
from .grid import GridConv, check_one_grid, resize_table, resolve_grid, told_grid
from .mixing import Mixer
from .products import TINY, fraction, one_hot_weights, ones_for, sums_seen, weighted, written_down
from .registry import can, register
from .streams import FeatureStream, Sums

EPS = 1e-6


def focus(x: Tensor, power: float) -> Tensor:
    """f(x) = x^p |x| / |x^p| for x > 0 (..., H, L, D), norms over the channels of all heads together.

    Keeps the norm of a token and moves it towards its largest channels. f(c x) = c f(x), so it is taken of x over its
    largest channel: the plain power underflows. For the same reason that channel needs no gradient. Cost: L C.
    """
    if not x.numel():
        return x
    own = x.detach().amax(-1, keepdim=True)  # of a head: sums over heads then come last and x is looked at once
    peak = own.amax(-3, keepdim=True)
    relative, share = x / own, own / peak
    ratio = _over_heads(relative.square(), share.square()) / _over_heads(relative ** (2 * power), share ** (2 * power))
    gain = written_down(ratio.sqrt() * peak)
    return (x * written_down(1 / peak)) ** power * gain.expand(*x.shape[:-1], 1)


def focused_linear_attention(
    call: Call, *, power: float = 3.0, channel_scale: Tensor | None = None, chunk: int = 128, eps: float = EPS
) -> Tensor:
    """out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / (phi(q_i).(sum_j phi(k_j)) + eps N), phi(x) = f((relu(x) + 1e-6) / s).

    f is `focus` with its `power`, s the `channel_scale` (H, 1, D), 1 unless given; N the sum of the key weights.
    The norms of f run over the channels of all heads of a token, as released. Causal rows take sums and N over the
    keys up to their index. There is no scaling: `scale` multiplies the query before the map. A row without any key
    gives 0. Cost: 2 L D E, and L C (D + E) more for the causal form in chunks of C tokens.
    """
    query, key, is_causal = wide(call.query), wide(call.key), call.is_causal
    for x in (query, key):
        wanted = x.shape[-3], 1, x.shape[-1]
        if channel_scale is not None and not expands_to(channel_scale, wanted):
            raise ValueError(f"channel_scale must broadcast to {wanted}, got {tuple(channel_scale.shape)}")
    features_q = _map(query if call.scale is None else query * call.scale, power, channel_scale)
    features_k, weights = _map(key, power, channel_scale), call.key_weights(key.dtype)
    features_k = weighted(features_k, weights)
    sums, total = fraction(features_q, features_k, call.value, call.query.dtype, is_causal=is_causal, chunk=chunk)
    (count,) = sums_seen([ones_for(key) if weights is None else weights], query.shape[-2], is_causal)
    return sums / (total + eps * count.clamp(min=TINY))


def _map(x: Tensor, power: float, channel_scale: Tensor | None) -> Tensor:
    if not power > 0:
        raise ValueError(f"power must be positive, got {power}")
    x = F.relu(x) + 1e-6
    return focus(x if channel_scale is None else x / channel_scale.to(x.dtype), power)


def _over_heads(x: Tensor, share: Tensor) -> Tensor:
    """Sum over channels and heads, (..., 1, L, 1), of x (..., H, L, D) times a factor of each head."""
    return (x.sum(-1, keepdim=True) * share).sum(-3, keepdim=True)


class FocusedStream(FeatureStream):
    """Causal focused linear attention (the operator, without convolution) token by token."""

    def __init__(
        self, *, power: float = 3.0, channel_scale: Tensor | None = None, eps: float = EPS, scale: float | None = None
    ) -> None:
        super().__init__(scale=scale)
        self.power, self.channel_scale, self.eps = power, channel_scale, eps

    def phi(self, x: Tensor) -> Tensor:
        return _map(x, self.power, self.channel_scale)

    def rows(self, features: Tensor, sums: Sums) -> Tensor:
        return features @ sums.KV / (features @ sums.K + self.eps * sums.tokens)


class FocusedLinearAttention(Mixer):
    """FLatten in a layer: keys with learned positions, a learned scale for each channel, and DWC(v) added.

        out = phi(q) phi(k + P)^T v / (...) + DWC(v)

    P (1, n, C) starts at 0 and exists where the layer knows its grid (`grid_size`); other grids get it resized. The
    scale is softplus(g), g (C) from 0, so it starts at ln 2. DWC is a depthwise 5 x 5 convolution with bias whose D
    filters all heads share; prefix tokens get none. Extra parameters: n C + C + 26 D. Cost: 2 L D C + 25 L C.

    Args:
        power: exponent p of the focus.
        kernel: side of the convolution, odd.
        use_conv: the convolution; off for causal and cross attention.
        use_position: the learned positions of the keys.
    """

    mechanism = "focused_linear"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        power: float = 3.0,
        kernel: int = 5,
        use_conv: bool = True,
        use_position: bool = True,
        chunk: int = 128,
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, chunk=chunk, **layer)
        self.power, place = power, self.place
        self.gain = nn.Parameter(torch.zeros(dim, **place))
        slots = 0 if self.grid_size is None else self.prefix + math.prod(self.grid_size)
        self.position = nn.Parameter(torch.zeros(1, slots, dim, **place)) if use_position and slots else None
        self.conv = GridConv(dim, num_heads, kernel, per_head=True, **place) if use_conv else None

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gain)
        if self.position is not None:
            nn.init.zeros_(self.position)
        if self.conv is not None:
            self.conv.reset_parameters()

    def fit_loaded(self, state: dict[str, Any], name: str) -> None:
        table, own = state.get(f"{name}position"), self.position
        if own is None or table is None or table.shape == own.shape or table.shape[-1] != own.shape[-1]:
            return
        assert self.grid_size is not None
        old = told_grid(table.shape[1], self.prefix, self.grid_size, f"{name}position")
        state[f"{name}position"] = resize_table(table, old, self.grid_size, self.prefix)

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        if self.conv is not None:
            check_one_grid(call, FOCUSED)
        out = super().run(call, x)
        return out if self.conv is None else out + self.conv.of(self.on_grid(call))

    def asked(self, call: Call, x: Tensor | None) -> tuple[Call, dict[str, Any]]:
        """The call on its grid, its keys with their positions, and the options of the operator."""
        # Positions and scales are those of every query head; copies of a key head leave the norms of f as they are.
        key, value = (repeat_heads(z, call.query.shape[-3]) for z in call[1:3])
        call = call._replace(key=key, value=value)
        if self.position is not None or self.conv is not None:
            call = call._replace(grid=resolve_grid(key.shape[-2], call.grid, call.prefix, self.grid_size))
        if self.position is not None:
            assert call.grid is not None
            call = call._replace(key=key + self._slots(call.grid, call.prefix).to(key.dtype))
        channel_scale = F.softplus(self.gain).unflatten(0, (self.num_heads, 1, -1))
        return call, {"power": self.power, "channel_scale": channel_scale, **self.options}

    def _slots(self, grid: Grid, prefix: int) -> Tensor:
        """P of this grid, by head: (H, n, D)."""
        assert self.position is not None
        assert self.grid_size is not None
        if prefix != self.prefix:
            raise ValueError(f"prefix must be {self.prefix}, for which the key positions were made, got {prefix}")
        table = resize_table(self.position, self.grid_size, grid, prefix)
        return table[0].unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def extra_repr(self) -> str:
        return f"{self.dim}, power={self.power}, grid_size={self.grid_size}, prefix={self.prefix}"


FOCUSED = register(
    name="focused_linear",
    summary="linear attention with features sharpened by a norm-keeping power",
    paper="FLatten Transformer (Han et al.)",
    year=2023,
    arxiv="2308.00442",
    cost="2 L D E",
    function=focused_linear_attention,
    row_weights=one_hot_weights(focused_linear_attention),
    module=FocusedLinearAttention,
    stream=FocusedStream,
    pattern_options={"causal": {"use_conv": False}, "cross": {"use_conv": False, "use_position": False}},
    **can("causal cross key_mask grouped_queries subquadratic streaming ragged wants_grid mergeable"),
)
