"""MALA, magnitude-aware linear attention: scale and offset instead of a division, so that the length of a query acts.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width, N keys that count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..inputs import transformed, without_autocast
from .inputs import fold_groups, outside_autocast, prepare, weights_of, wide
from .lepe_gate import LepeGate, rotated
from .linear import feature_map
from .masking import repeat_heads
from .products import dot_with_one, feature_product, fit_length, multiplies_narrow, sum_of_tokens
from .products import factor as as_factor
from .ragged import padded
from .registry import Mechanism, register

EPS = 1e-6


def mala_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    use_rope: bool = False,
    scaled: bool = True,
    chunk: int = 128,
    eps: float = EPS,
) -> Tensor:
    """out_i = sum_j ((1 + 1/(S_i + eps)) s_ij - S_i / N) v_j, s_ij = (scale / N) phi(q_i).phi(k_j), S_i = sum_j s_ij.

    query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) -> (..., H, Lq, E). phi = elu + 1, `scale`
    defaults to D**-0.5. Rows of weights sum to 1; single weights may be negative. The factor scale / N is that of
    the released code; `scaled=False` is the printed form without it (`scale` 1), with weights about N times as large.
    `use_rope` turns phi(q) and phi(k) by their place on the grid where they meet the values, not in S (as
    released; rows then no longer sum to 1). Causal rows take N, S and the means over the keys up to their index.
    key_mask is bool or weights (N is their sum); a row without any key gives 0. Cost: 2 L D E.
    """
    query, key, value, key_mask = prepare(query, key, value, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        # The causal products are wide whatever the inputs: the terms of the formula are large and nearly cancel.
        dtype = torch.float32 if is_causal else query.dtype
        features_q, features_k = (wide(as_factor(feature_map(wide(x)), dtype)) for x in (query, key))
        weights = weights_of(key_mask, features_k)
        if weights is None:
            weights = features_k.new_ones(()).expand(*key.shape[:-3], 1, key.shape[-2], 1)
        features_k = features_k * weights
        turned_q, turned_k = features_q, features_k
        if use_rope:
            turned_q, turned_k = rotated(features_q, features_k, grid, prefix)

        def sums_of(x: Tensor) -> Tensor:
            """Of x (..., Hk, Lk, F) over the keys that each row sees, (..., Hk, 1 or Lq, F)."""
            return fit_length(x, query.shape[-2]).cumsum(-2) if is_causal else sum_of_tokens(x)

        count = sums_of(weights).clamp(min=1e-30)
        mean, keys = sums_of(wide(value) * weights) / count, repeat_heads(sums_of(features_k), query.shape[-3])
        factor = _factor(features_q.shape[-1], count, scale, scaled)
        total = (features_q * keys).sum(-1, keepdim=True) if is_causal else dot_with_one(features_q, keys)
        total = total * factor
        gain = factor * (1 + 1 / (total + eps))
        if is_causal or not multiplies_narrow(query, dtype) or transformed():
            out = gain * feature_product(turned_q, turned_k, wide(value), dtype, is_causal=is_causal, chunk=chunk)
        else:
            out = _centred_product(turned_q, turned_k, value, weights, count, mean.detach(), gain)
        out = out - total * repeat_heads(mean, query.shape[-3])
    return out.to(query.dtype)


def mala_scores(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    use_rope: bool = False,
    scaled: bool = True,
    eps: float = EPS,
) -> Tensor:
    """The signed weights (1 + 1/(S_i + eps)) s_ij - S_i / N, (..., H, Lq, Lk). Cost: Lq Lk D."""
    query, key, _, key_mask = prepare(query, key, key, key_mask=key_mask, scale=scale, enable_gqa=enable_gqa)
    with without_autocast(query.device.type):
        features_q, features_k = feature_map(wide(query)), feature_map(wide(key))
        seen = features_k.new_ones(query.shape[-2], key.shape[-2])
        seen = seen.tril() if is_causal else seen
        if key_mask is not None:
            seen = seen * key_mask.to(seen.dtype)[..., None, None, :]
        turned_q, turned_k = rotated(features_q, features_k, grid, prefix) if use_rope else (features_q, features_k)
        shape = (*query.shape[:-1], key.shape[-2])
        plain, turned = (
            (fold_groups(q, key.shape[-3]) @ k.mT).reshape(shape) * seen
            for q, k in ((features_q, features_k), (turned_q, turned_k))
        )
        count = seen.sum(-1, keepdim=True).clamp(min=1e-30)
        factor = _factor(features_q.shape[-1], count, scale, scaled)
        total = (plain * factor).sum(-1, keepdim=True)
        return (turned * factor * (1 + 1 / (total + eps)) - total * seen / count).to(query.dtype)


def _factor(width: int, count: Tensor, scale: float | None, scaled: bool) -> Tensor | float:
    """What s_ij has before phi(q_i).phi(k_j): scale / N, or in the printed form the scale alone, 1 unless given."""
    if scaled:
        return (width**-0.5 if scale is None else scale) / count
    return 1.0 if scale is None else scale


def _centred_product(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor, count: Tensor, mean: Tensor, gain: Tensor
) -> Tensor:
    """gain_i q_i (sum_j k_j v_j^T), with narrow products of the values less their mean (..., Hk, 1, E), added last.

    The mean of the values is most of the sum and is nearly taken off after it: rounded, it would be most of the error.
    What is added is the mean of what was taken off: v - mean rounds to v again where the mean is below its last digit.
    """
    near = (value - mean).to(value.dtype)
    centre = mean - sum_of_tokens(wide(near.detach()) * weights) / count
    rows, gain = (fold_groups(x, key.shape[-3]) for x in (query, gain))
    along = dot_with_one(rows, sum_of_tokens(key))
    out = _Centred.apply(rows.to(value.dtype), key.to(value.dtype), near, gain, centre, along)
    return out.reshape(*query.shape[:-1], value.shape[-1])


class _Centred(torch.autograd.Function):
    """g (q (k^T n) + s c) in float32, of narrow q, k, n = v - c and s = q.(sum k), with whose share of the gradients
    those of g and of what is taken off later nearly cancel: it stays wide."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, n: Tensor, gain: Tensor, c: Tensor, s: Tensor) -> Tensor:
        KV = k.mT @ n
        part = q @ KV
        ctx.save_for_backward(q, k, n, gain, c, s, KV, part)
        return gain * (wide(part) + s * c)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, n, gain, c, s, KV, part = ctx.saved_tensors
        d_part, along = (grad * gain).to(n.dtype), (grad * c).sum(-1, keepdim=True)
        d_KV = q.mT @ d_part
        d_gain = (grad * wide(part)).sum(-1, keepdim=True) + s * along
        return d_part @ KV.mT, n @ d_KV.mT, k @ d_KV, d_gain, None, gain * along


class MalaState(NamedTuple):
    """Sums over the tokens so far: phi(k) v^T, phi(k) and v, and their number."""

    KV: Tensor  # (..., D, E)
    K: Tensor  # (..., D, 1)
    V: Tensor  # (..., 1, E)
    tokens: Tensor  # ()


class MalaStream:
    """Causal MALA (without rotary turns) token by token. Cost: 2 D E a token."""

    def __init__(self, *, scaled: bool = True, eps: float = EPS) -> None:
        self.scaled, self.eps = scaled, eps
        self.state: MalaState | None = None

    @outside_autocast
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (..., H, 1, D), key (..., Hk, 1, D), value (..., Hk, 1, E) -> (..., H, 1, E)."""
        features, rows, v = feature_map(wide(key)), fold_groups(feature_map(wide(query)), key.shape[-3]), wide(value)
        new = MalaState(features.mT @ v, features.mT, v, torch.ones((), device=v.device, dtype=v.dtype))
        self.state = new if self.state is None else MalaState(*(a + b for a, b in zip(self.state, new, strict=True)))
        KV, K, V, count = self.state
        factor = _factor(query.shape[-1], count, None, self.scaled)
        total = rows @ K * factor
        out = rows @ KV * factor * (1 + 1 / (total + self.eps)) - total * (V / count)
        return out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)


class MagnitudeAwareAttention(LepeGate):
    """MALA as published in a layer: (attention with rotary turns + LePE(v)) * (W_g x + b_g), then the projection.

    The released code takes q, k, v and the gate from one projection C -> 4 C; here the gate is a Linear of its own.

    Args:
        use_rope: 2-D rotary positions; needs a head width that is a multiple of 4. Off for cross attention.
        use_lepe: depthwise 5 x 5 convolution of the values on the patch grid. Off for causal and cross attention.
        use_gate: the gate, a Linear of the layer's input without activation.
        scaled: the released form; False: the printed one, see `mala_attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: tuple[int, ...] | None = None,
        prefix: int = 0,
        use_rope: bool = True,
        use_lepe: bool = True,
        use_gate: bool = True,
        scaled: bool = True,
        chunk: int = 128,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, MALA.name, grid_size, prefix, use_rope, use_lepe, use_gate, device, dtype)
        self.operator_options = {"scaled": scaled, "chunk": chunk}


MALA = register(
    Mechanism(
        name="mala",
        summary="linear attention in which the length of a query sharpens its weights",
        paper="Rectifying Magnitude Neglect in Linear Attention (Fan et al.)",
        year=2025,
        arxiv="2507.00698",
        cost="2 L D E",
        function=mala_attention,
        scores=mala_scores,
        module=MagnitudeAwareAttention,
        stream=MalaStream,
        varlen=padded(mala_attention),
        causal=True,
        cross=True,
        causal_cross=True,
        key_mask=True,
        grouped_queries=True,
        subquadratic=True,
        streaming=True,
        ragged=True,
        wants_grid=True,
        wants_input=True,
        pattern_options={"causal": {"use_lepe": False}, "cross": {"use_lepe": False, "use_rope": False}},
    )
)
