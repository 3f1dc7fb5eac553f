"""Second order that cannot run away: one cluster, closed by tanh or langevin.

Shape legend: ... leading dimensions, H heads, L tokens, D, E widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import attention
from ..inputs import in_autocast_dtype, without_autocast
from ..moments import ratio, statistics_dtype
from .closures import check_closure, gain


def saturated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    closure: str = "tanh",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    normalization: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """out = <v> + f(s) <(q.k~) v~> with s^2 = sum_i q_i^2 <k~_i^2>: order 2 whose response saturates as 1 / s.

    Arguments are those of `cumulant.attention`; closure "gauss" is order 2 itself. The response is the difference of
    orders 2 and 1, so that every kernel of `attention` serves. Cost: that of order 2 and L D more.
    """
    check_closure(closure)
    query, key, value = in_autocast_dtype(query, key, value)
    shared: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    shared |= {"normalization": normalization, "backend": backend}
    second = attention(query, key, value, order=2, **shared)
    if closure == "gauss" or not (query.numel() and key.numel()):
        return second
    mean = attention(query, key, value, order=1, **shared)
    with without_autocast(query.device.type):
        f = gain(_variance(query, key, key_mask, is_causal, scale), closure)
        return (mean + f * (second.to(f.dtype) - mean)).to(query.dtype)


def _variance(query: Tensor, key: Tensor, key_mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """s^2 (..., H, Lq, 1) of each row over the keys that it sees, at least float32."""
    dtype = statistics_dtype(query.dtype)
    q = query.to(dtype) * (query.shape[-1] ** -0.5 if scale is None else scale)
    k, w = key.to(dtype), key.new_ones(key.shape[-2:-1], dtype=dtype).unsqueeze(-1)
    if key_mask is not None:
        w = key_mask.to(dtype)[..., None, :, None]
        k = k.masked_fill(w == 0, 0)
    first = (w > 0).int().argmax(-2, keepdim=True)
    # Any origin near the keys will do. (take_along_dim would fix every size under torch.compile.)
    k = k - k.detach().gather(-2, first.expand(*k.shape[:-2], 1, k.shape[-1]))
    if is_causal:
        # Running sums in float64: a difference of squares far from the first key costs digits.
        wide = torch.float64 if k.device.type != "mps" else dtype
        k, w = k.to(wide)[..., : q.shape[-2], :], w.to(wide)[..., : q.shape[-2], :]
        W = w.cumsum(-2)
        m, square = (ratio((w * x).cumsum(-2), W.expand_as(x)) for x in (k, k * k))
        spread = (square - m * m).clamp(min=0).to(dtype)
        missing = q.shape[-2] - spread.shape[-2]
        if missing > 0:
            spread = torch.cat((spread, spread[..., -1:, :].expand(*spread.shape[:-2], missing, -1)), -2)
    else:
        share = ratio(w, w.sum(-2, keepdim=True))
        k = k - (share * k).sum(-2, keepdim=True)
        spread = (share * k * k).sum(-2, keepdim=True)
    groups = query.shape[-3] // max(1, key.shape[-3])
    return (q * q * spread.repeat_interleave(groups, -3)).sum(-1, keepdim=True)
