"""Multi-head attention layers: one for any registered mechanism, one that fits timm's `attn_layer`.

Shape legend: ... leading dimensions, L tokens, M context tokens, C width, H heads, D = C / H.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import zoo
from .fold import folded_attention, pays

LAYER_NORM = partial(nn.LayerNorm, eps=1e-6)


class MultiheadAttention(nn.Module):
    """Projections to query, key and value, a mechanism of the zoo between them, and an output projection.

        y = proj(mechanism(q_norm(W_q x), k_norm(W_k z), W_v z)),  z = context, or x itself

    Names in the state dict are timm's: qkv, q_norm, k_norm, proj (and norm with `scale_norm`).
    Cost: 4 L C^2 for the projections, plus the mechanism's own.

    Args:
        dim: width C of the tokens; must be a multiple of num_heads.
        attention: name of a mechanism, see `cumulant.zoo.names()`.
        attention_options: options of that mechanism, e.g. `{"full": True}` for "cumulant3".
        qk_norm: normalise queries and keys per head with `norm_layer` (LayerNorm unless given).
        scale_norm: normalise the mechanism's output before the last projection.
        attn_drop: dropout on the attention probabilities; an error for mechanisms that have none.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        attention: str = "softmax",
        attention_options: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ValueError(f"dim must be a positive multiple of num_heads, got dim={dim}, num_heads={num_heads}")
        self.mechanism = zoo.get(attention)
        if attn_drop and not self.mechanism.dropout:
            raise ValueError(
                f"attn_drop={attn_drop}, but {attention!r} forms no probabilities to drop; "
                "use attn_drop=0 with proj_drop or stochastic depth"
            )
        norm = LAYER_NORM if norm_layer is None else norm_layer
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **place)
        self.q_norm = norm(self.head_dim, **place) if qk_norm else nn.Identity()
        self.k_norm = norm(self.head_dim, **place) if qk_norm else nn.Identity()
        self.attention_options = dict(attention_options or {})
        self.mix = self.mechanism.build(dim, num_heads, **self.attention_options)
        self.norm = norm(dim, **place) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **place)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """x (..., L, C), context (..., M, C), key_mask (..., M) -> (..., L, C)."""
        query, key, value = self.project(x, context)
        options = {"dropout_p": self.attn_drop} if self.attn_drop and self.training else {}
        out = self.mix(query, key, value, key_mask=key_mask, is_causal=is_causal, **options)
        out = out.transpose(-3, -2).flatten(-2)
        return self.proj_drop(self.proj(self.norm(out)))

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Query (..., H, L, D) of x, and key and value (..., H, M, D) of the context, or of x itself."""
        self._check_width("x", x)
        if context is None:
            query, key, value = self._heads(self.qkv(x))
        else:
            self._check_width("context", context)
            bias = self.qkv.bias
            own, other = (None, None) if bias is None else bias.split((self.dim, 2 * self.dim))
            W_query, W_rest = self.qkv.weight.split((self.dim, 2 * self.dim))
            (query,) = self._heads(F.linear(x, W_query, own))
            key, value = self._heads(F.linear(context, W_rest, other))
        # Under autocast a norm may answer in float32; all three must be of one dtype.
        return self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype), value

    def scores(
        self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """The weights with which this layer mixes its tokens, (..., H, L, M). Cost: L M C."""
        if self.mechanism.scores is None:
            raise ValueError(f"{self.mechanism.name!r} has no scores to show")
        query, key, _ = self.project(x, context)
        options = self.mechanism.options_of_scores(self.attention_options)
        return self.mechanism.scores(query, key, key_mask=key_mask, is_causal=is_causal, **options)

    def extra_repr(self) -> str:
        return f"{self.dim}, num_heads={self.num_heads}, attention={self.mechanism.name!r}"

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., L, n C) as n tensors (..., H, L, D)."""
        split = x.unflatten(-1, (-1, self.num_heads, self.head_dim))
        return tuple(part.transpose(-3, -2) for part in split.unbind(-3))

    def _check_width(self, name: str, x: Tensor) -> None:
        if x.ndim < 2 or x.shape[-1] != self.dim:
            raise ValueError(f"{name} must have shape (..., tokens, {self.dim}), got {tuple(x.shape)}")


class CumulantAttention(MultiheadAttention):
    """Cumulant attention with the arguments and state-dict names of timm's `Attention`: an `attn_layer`.

    Arguments that are not explained here are those of `MultiheadAttention`.

    Args:
        order: 1, 2 or 3; `full=True` takes the whole third cumulant instead of its diagonal.
        normalization: "mean", or "sum" for the form that the paper prints.
        fold: whether the second-order layer is computed from the token covariance, without forming query, key
            and value (`nn/fold.py`): True, False, or "auto", where a cost model says that it is faster. Only
            order 2 in the mean form, without normalisation of queries and keys, folds; causal calls do not.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        order: int = 3,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        fold: str | bool = "auto",
        full: bool = False,
        normalization: str = "mean",
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale_norm: bool = False,
    ) -> None:
        if order not in (1, 2, 3):
            raise ValueError(f"order must be 1, 2 or 3, got {order!r}")
        if fold not in ("auto", True, False):
            raise ValueError(f'fold must be "auto", True or False, got {fold!r}')
        foldable = order == 2 and normalization == "mean" and not qk_norm and not scale_norm
        if fold is True and not foldable:
            raise ValueError(
                "fold=True needs order=2, normalization='mean', qk_norm=False and scale_norm=False, "
                f"got order={order}, normalization={normalization!r}, qk_norm={qk_norm}, scale_norm={scale_norm}"
            )
        if normalization not in ("mean", "sum"):
            raise ValueError(f'normalization must be "mean" or "sum", got {normalization!r}')
        super().__init__(
            dim,
            num_heads,
            attention=f"cumulant{order}",
            attention_options={"full": full, "normalization": normalization},
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            scale_norm=scale_norm,
            proj_bias=proj_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            norm_layer=norm_layer,
            device=device,
            dtype=dtype,
        )
        self.order, self.fold = order, fold if foldable else False

    def forward(  # type: ignore[override]  # timm's signature: no cross-attention, a mask in place of key_mask
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """x (B, L, C) -> (B, L, C). attn_mask marks keys: (B, L) bool or weights, or (B, 1, 1, L) bool."""
        key_mask = as_key_mask(attn_mask, x)
        if self._folds(x, is_causal):
            self._check_width("x", x)
            y = folded_attention(
                x, self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias, self.num_heads,
                self.head_dim**-0.5, key_mask,
            )  # fmt: skip
            return self.proj_drop(y)
        return super().forward(x, key_mask=key_mask, is_causal=is_causal)

    def _folds(self, x: Tensor, is_causal: bool) -> bool:
        if self.fold is False:
            return False
        if self.fold is True:
            if is_causal:
                raise ValueError('fold=True has no causal form: use fold="auto" or False, or pass is_causal=False')
            return True
        return x.ndim == 3 and not is_causal and pays(x.shape[-2], self.dim, self.num_heads, x.device.type)


def as_key_mask(attn_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The key mask (..., L) that an attention mask for x (..., L, C) stands for; an error if it is none.

    Moments are taken once for all queries, so a mask that differs from query to query cannot be honoured.
    """
    if attn_mask is None or attn_mask.shape == x.shape[:-1]:
        return attn_mask
    per_key = (*x.shape[:-2], 1, 1, x.shape[-2])
    if attn_mask.shape == per_key and attn_mask.dtype == torch.bool:
        return attn_mask[..., 0, 0, :]
    raise ValueError(
        f"attn_mask of shape {tuple(attn_mask.shape)} and dtype {attn_mask.dtype} cannot be honoured: "
        f"cumulant attention takes one mask for all queries, {tuple(x.shape[:-1])} bool or weights, "
        f"or {per_key} bool; for a causal mask pass is_causal=True"
    )
