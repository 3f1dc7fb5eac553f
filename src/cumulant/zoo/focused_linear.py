"""Focused linear attention (FLatten): features sharpened by a power that keeps their norm, and a local convolution.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, C = H D, n key slots.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inputs import without_autocast
from .grid import Grid, GridConv, resize_table, resolve_grid
from .inputs import fold_groups, outside_autocast, prepare, weights_of, wide
from .masking import without_absent
from .products import fit_length, fraction, with_ones, written_down
from .ragged import padded
from .registry import Mechanism, register

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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    power: float = 3.0,
    channel_scale: Tensor | None = None,
    chunk: int = 128,
    eps: float = EPS,
) -> Tensor:
    """out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / (phi(q_i).(sum_j phi(k_j)) + eps N), phi(x) = f((relu(x) + 1e-6) / s).

    f is `focus` with its `power`, s the `channel_scale` (H, 1, D), 1 unless given; N the number of keys.
    query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E). The norms of f run over the
    channels of all heads of a token, as released. Causal rows take sums and N over the keys up to their index.
    There is no scaling: `scale` multiplies the query before the map. key_mask is bool or weights (N is their sum);
    a row without any key gives 0. Cost: 2 L D E, and L C (D + E) more for the causal form in chunks of C tokens.
    """
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        features_q, features_k, weights = _features(query, key, key_mask, scale, power, channel_scale)
        sums, total = fraction(features_q, features_k, value, query.dtype, is_causal=is_causal, chunk=chunk)
        count = _count(weights, query.shape[-2], is_causal)
        return (sums / (total + eps * count)).to(query.dtype)


def focused_linear_scores(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    power: float = 3.0,
    channel_scale: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """The weights phi(q_i).phi(k_j) / (their sum + eps N), (..., H, Lq, Lk). Cost: Lq Lk D."""
    query, key, _, key_mask = prepare(query, key, key, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        features_q, features_k, weights = _features(query, key, key_mask, scale, power, channel_scale)
        scores = fold_groups(features_q, key.shape[-3]) @ features_k.mT
        scores = scores.reshape(*query.shape[:-1], key.shape[-2])
        scores = scores.tril() if is_causal else scores
        total = scores.sum(-1, keepdim=True) + eps * _count(weights, query.shape[-2], is_causal)
        return (scores / total).to(query.dtype)


def _features(
    query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float | None, power: float, channel_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), w phi(k) and the weights w as (..., 1, Lk, 1)."""
    features_q = _map(wide(query) if scale is None else wide(query) * scale, power, channel_scale)
    features_k = _map(wide(key), power, channel_scale)
    weights = weights_of(key_mask, features_k)
    if weights is None:
        return features_q, features_k, features_k.new_ones(()).expand(*key.shape[:-3], 1, key.shape[-2], 1)
    return features_q, features_k * weights, weights


def _count(weights: Tensor, rows: int, is_causal: bool) -> Tensor:
    """The number of keys that each row sees, (..., 1, 1 or Lq, 1); never 0, so that rows without any stay finite."""
    count = fit_length(weights, rows).cumsum(-2) if is_causal else weights.sum(-2, keepdim=True)
    return count.clamp(min=1e-30)


def _map(x: Tensor, power: float, channel_scale: Tensor | None) -> Tensor:
    if not power > 0:
        raise ValueError(f"power must be positive, got {power}")
    x = F.relu(x) + 1e-6
    return focus(x if channel_scale is None else x / channel_scale.to(x.dtype), power)


def _over_heads(x: Tensor, share: Tensor) -> Tensor:
    """Sum over channels and heads, (..., 1, L, 1), of x (..., H, L, D) times a factor of each head."""
    return (x.sum(-1, keepdim=True) * share).sum(-3, keepdim=True)


class FocusedState(NamedTuple):
    """Sums over the tokens so far: phi(k) [v, 1]^T, and their number."""

    KV: Tensor  # (..., D, E + 1)
    tokens: Tensor  # ()


class FocusedStream:
    """Causal focused linear attention (the operator, without convolution) token by token. Cost: 2 D E a token."""

    def __init__(self, *, power: float = 3.0, channel_scale: Tensor | None = None, eps: float = EPS) -> None:
        self.power, self.channel_scale, self.eps = power, channel_scale, eps
        self.state: FocusedState | None = None

    @outside_autocast
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (..., H, 1, D), key (..., Hk, 1, D), value (..., Hk, 1, E) -> (..., H, 1, E)."""
        features = _map(wide(key), self.power, self.channel_scale)
        KV, one = features.mT @ with_ones(wide(value)), features.new_ones(())
        old = self.state
        self.state = FocusedState(KV, one) if old is None else FocusedState(old.KV + KV, old.tokens + one)
        rows = fold_groups(_map(wide(query), self.power, self.channel_scale), key.shape[-3])
        sums = rows @ self.state.KV
        out = sums[..., :-1] / (sums[..., -1:] + self.eps * self.state.tokens)
        return out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)


class FocusedLinearAttention(nn.Module):
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

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: Grid | None = None,
        prefix: int = 0,
        power: float = 3.0,
        kernel: int = 5,
        use_conv: bool = True,
        use_position: bool = True,
        chunk: int = 128,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.grid_size, self.prefix = dim, num_heads, grid_size, prefix
        self.power, self.chunk = power, chunk
        self.gain = nn.Parameter(torch.zeros(dim, **place))
        slots = prefix + math.prod(grid_size) if grid_size is not None else 0
        self.position = nn.Parameter(torch.zeros(1, slots, dim, **place)) if use_position and slots else None
        self.conv = GridConv(dim, num_heads, kernel, per_head=True, **place) if use_conv else None

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gain)
        if self.position is not None:
            nn.init.zeros_(self.position)
        if self.conv is not None:
            self.conv.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        grid: Grid | None = None,
        prefix: int | None = None,
    ) -> Tensor:
        """query (..., H, Lq, D), key and value (..., H, Lk, D) -> (..., H, Lq, D)."""
        prefix = self.prefix if prefix is None else prefix
        FOCUSED.check(query, key, key_mask=key_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        self._check(query, key, is_causal, enable_gqa)
        key, options = self._key_and_options(key, grid, prefix)
        shared: dict[str, Any] = {
            "key_mask": key_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        out = FOCUSED(query, key, value, **shared, **options, chunk=self.chunk)
        if self.conv is not None:
            value = without_absent(value, key_mask)
            out = out + self.conv(value, resolve_grid(key.shape[-2], grid, prefix, self.grid_size), prefix)
        return out

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        grid: Grid | None = None,
        prefix: int | None = None,
    ) -> Tensor:
        """The weights with which the operator mixes the values, (..., H, Lq, Lk); the convolution comes after."""
        prefix = self.prefix if prefix is None else prefix
        FOCUSED.check(query, key, key_mask=key_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        key, options = self._key_and_options(key, grid, prefix)
        shared: dict[str, Any] = {
            "key_mask": key_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        return focused_linear_scores(query, key, **shared, **options)

    def _key_and_options(self, key: Tensor, grid: Grid | None, prefix: int) -> tuple[Tensor, dict[str, Any]]:
        """The key with its positions, and the options of the operator."""
        if self.position is not None:
            grid = resolve_grid(key.shape[-2], grid, prefix, self.grid_size)
            key = key + self._slots(grid, prefix).to(key.dtype)
        channel_scale = F.softplus(self.gain).unflatten(0, (self.num_heads, 1, -1))
        return key, {"power": self.power, "channel_scale": channel_scale}

    def _slots(self, grid: Grid, prefix: int) -> Tensor:
        """P of this grid, by head: (H, n, D)."""
        assert self.position is not None
        assert self.grid_size is not None
        if prefix != self.prefix:
            raise ValueError(f"prefix must be {self.prefix}, for which the key positions were made, got {prefix}")
        table = resize_table(self.position, self.grid_size, grid, prefix)
        return table[0].unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def _check(self, query: Tensor, key: Tensor, is_causal: bool, enable_gqa: bool) -> None:
        if enable_gqa and query.shape[-3] != key.shape[-3]:
            raise ValueError(f"the layer form needs as many key heads as query heads, {query.shape[-3]}")
        if self.conv is None:
            return
        if is_causal:
            raise ValueError(
                "is_causal=True, but the convolution of 'focused_linear' looks ahead; build it with use_conv=False"
            )
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"the convolution of 'focused_linear' needs queries and keys on one grid, got {query.shape[-2]} and "
                f"{key.shape[-2]} tokens; build it with use_conv=False for cross attention"
            )

    def extra_repr(self) -> str:
        return f"{self.dim}, power={self.power}, grid_size={self.grid_size}, prefix={self.prefix}"


FOCUSED = register(
    Mechanism(
        name="focused_linear",
        summary="linear attention with features sharpened by a norm-keeping power",
        paper="FLatten Transformer (Han et al.)",
        year=2023,
        arxiv="2308.00442",
        cost="2 L D E",
        function=focused_linear_attention,
        scores=focused_linear_scores,
        module=FocusedLinearAttention,
        stream=FocusedStream,
        varlen=padded(focused_linear_attention),
        causal=True,
        cross=True,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        streaming=True,
        ragged=True,
        wants_grid=True,
        pattern_options={"causal": {"use_conv": False}, "cross": {"use_conv": False, "use_position": False}},
    )
)
