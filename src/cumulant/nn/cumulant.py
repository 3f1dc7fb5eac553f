"""Cumulant attention as a layer that fits timm's `attn_layer`, folded where that is cheaper.

Shape legend: B batch, L tokens, T packed tokens, C width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..attention import attention_varlen
from ..call import NORMALIZATIONS, Call, check_longest, check_offsets, check_order, offsets
from .arguments import EXTRAS, as_key_mask, check_extras
from .attention import MultiheadAttention
from .fold import folds

UNFOLDABLE = ("v_conv", "gate", "temperature")
KNOWN = (*EXTRAS, "grid_size", "prefix", "proj_bias", "attn_drop", "proj_drop", "norm_layer", "device", "dtype")


def _left_out(extra: Any) -> bool:
    return extra is None or (isinstance(extra, int) and not extra)


class CumulantAttention(MultiheadAttention):
    """Cumulant attention with the arguments and state-dict names of timm's `Attention`: an `attn_layer`.

    Arguments that are not explained here, and all of `layer`, are those of `MultiheadAttention`.

    Args:
        order: 1, 2 or 3; `full=True` takes the whole third cumulant instead of its diagonal.
        normalization: "mean", or "sum" for the form that the paper prints.
        fold: whether the second-order layer is computed from the token covariance, without forming query, key
            and value (`nn/fold.py`): True, False, or "auto", where a cost model says that it is faster. Only
            order 2 in the mean form folds, without normalisation of queries and keys and without v_conv, gate and
            temperature; causal calls do not.
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
        *,
        scale_norm: bool = False,
        **layer: Any,
    ) -> None:
        check_order(order, full)
        if not isinstance(fold, str | bool) or fold not in ("auto", True, False):
            raise ValueError(f'fold must be "auto", True or False, got {fold!r}')
        if not isinstance(normalization, str) or normalization not in NORMALIZATIONS:
            raise ValueError(f'normalization must be "mean" or "sum", got {normalization!r}')
        check_extras(layer, KNOWN)
        active = sorted(name for name in UNFOLDABLE if not _left_out(layer.get(name)))
        foldable = order == 2 and normalization == "mean" and not qk_norm and not scale_norm and not active
        if fold is True and not foldable:
            raise ValueError(
                "fold=True needs order=2, normalization='mean', qk_norm=False, scale_norm=False and none of "
                f"{', '.join(UNFOLDABLE)}, got order={order}, normalization={normalization!r}, qk_norm={qk_norm}, "
                f"scale_norm={scale_norm}" + "".join(f", {name}={layer[name]!r}" for name in active)
            )
        super().__init__(
            dim,
            num_heads,
            attention=f"cumulant{order}",
            attention_options={"full": full, "normalization": normalization},
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            scale_norm=scale_norm,
            **layer,
        )
        self.order, self.fold = order, fold if foldable else False
        self.packs_not = active

    def forward(  # type: ignore[override]  # timm's signature: no cross-attention, a mask in place of key_mask
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Tensor:
        """x (B, L, C) -> (B, L, C). attn_mask marks keys: (B, L) bool or weights, or (B, 1, 1, L) bool."""
        return super().forward(x, key_mask=as_key_mask(attn_mask, x), is_causal=is_causal, grid=grid, prefix=prefix)

    def asked(self, x: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Call:  # type: ignore[override]
        return self.call(x, None, as_key_mask(attn_mask, x), *args, **kwargs)

    def forward_packed(self, x: Tensor, cu_seq: Tensor, longest: int | None = None, is_causal: bool = False) -> Tensor:
        """Sequences of different lengths end to end, x (T, C), without padding -> (T, C); equal to a loop over them.

        Sequence i is x[cu_seq[i] : cu_seq[i + 1]]; `longest`, their greatest length, spares a GPU the wait for the
        offsets where nothing is folded. They are folded one by one where that pays at their mean length.
        """
        self._check_width("x", x)
        if x.ndim != 2:
            raise ValueError(f"x must be packed as (tokens, {self.dim}), got {tuple(x.shape)}")
        if self.packs_not:
            raise ValueError(
                f"packed sequences have no form with {', '.join(self.packs_not)}; pad them and pass a mask"
            )
        check_offsets("cu_seq", cu_seq, x.shape[0])
        check_longest("longest", longest)
        mean = x.shape[0] // max(1, cu_seq.numel() - 1)
        if folds(self.fold, x, self.num_heads, self.num_kv_heads, is_causal=is_causal, length=mean):
            at = offsets("cu_seq", cu_seq, x.shape[0], longest, "longest")
            parts = [self.folded(x[a:b].unsqueeze(0))[0] for a, b in pairwise(at) if a < b]
            return self.proj_drop(torch.cat(parts)) if parts else x.new_zeros(x.shape)
        query, key, value = (part.transpose(0, 1) for part in self.project(x))
        out = attention_varlen(
            query, key, value, cu_seq, cu_seq, longest, longest, order=self.order, is_causal=is_causal,
            enable_gqa=self.enable_gqa, **self.attention_options,
        )  # fmt: skip
        return self.proj_drop(self.proj(self.norm(out.flatten(-2))))
