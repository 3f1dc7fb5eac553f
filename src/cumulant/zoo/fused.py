"""torch's fused softmax attention, kept away from a backend whose gradients are wrong and from heads it is slow for."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..tensors import repeat_heads

# Of cuDNN, which torch takes first on an H200 (torch 2.11), all three gradients are noise at every length where that of
# the output is laid out by heads and the output by tokens, as behind a projection. Keys that fill half of a last tile
# of 128 give NaN where all logits of a row are very negative (pytorch issue 196678). benchmarks/gpu_softmax.py shows
# both; a run of docs/lab/results.md that diverged with cuDNN is sound without it.
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# A fused kernel gives each head a tile of 64 or 128 rows. Where a head is a handful of tokens, as the words of a patch
# in TNT, most of the tile is empty: with gradients, 100,352 heads of 16 tokens and 6 channels took 7.66 ms, and plain
# products 1.19 (H200, compiled). At 16 channels and values of 96 both took 1.1 ms; at 64 tokens the kernel was quicker.
SHORT, NARROW, MANY = 16, 16, 1024  # tokens, channels, heads in the whole batch
# Values of another width than keys keep the quick kernels away, or go in several parts: SHViT has 16 channels against
# 72 and 96, at 64 and 16 tokens. Two products and a softmax are less there, and where a head has one query: LAMA's keys
# of one channel under values of a token's width would go in as many parts as a token has channels.
UNEQUAL = 64  # tokens
MOST = 65_535  # sequences that a fused kernel takes: with more, CUDA answers "invalid argument"


def fused_softmax(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`F.scaled_dot_product_attention`; without cuDNN where gradients may be asked for, and by plain products for very
    many short and narrow heads on a GPU.

    Values some times as wide as keys go in parts: the quick kernels take one width, and with the others the gradients
    of a GDA layer took six times those of a plain one (H200, 8,192 tokens, benchmarks/gpu_heads.py).
    """
    width = query.shape[-1]
    if better_plain(query, key, value):
        return plain_softmax(query, key, value, **options)
    if query.is_cuda and query.ndim == 4 and isinstance(query.shape[0], int) and query.shape[0] > MOST:
        return in_parts(fused_softmax, query, key, value, **options)
    if query.is_cuda and value.shape[-1] > width > 0 and not value.shape[-1] % width and not options.get("dropout_p"):
        return torch.cat([fused_softmax(query, key, part, **options) for part in value.split(width, -1)], -1)
    with sdpa_kernel(WITHOUT_CUDNN) if may_need_gradients(key) else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, **options)


def may_need_gradients(key: Tensor) -> bool:
    """Whether gradients are recorded on a GPU."""
    return key.is_cuda and torch.is_grad_enabled()


def in_parts(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any
) -> Tensor:
    """`attend` for at most `MOST` sequences (B, H, L, D) at a time."""
    whole = attn_mask is None or attn_mask.ndim < 4 or attn_mask.shape[0] == 1  # one mask for all sequences
    outs = []
    for first in range(0, query.shape[0], MOST):
        part = slice(first, first + MOST)
        mask = attn_mask if whole else attn_mask[part]
        outs.append(attend(query[part], key[part], value[part], attn_mask=mask, **options))
    return torch.cat(outs)


def better_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether plain products are quicker than a fused kernel."""
    if not query.is_cuda:
        return False
    (tokens, channels), (keys, width) = query.shape[-2:], (key.shape[-2], value.shape[-1])
    if not all(isinstance(size, int) for size in (*query.shape, keys)):  # an export's open sizes are symbols
        return False
    if channels != width and (max(tokens, keys) <= UNEQUAL or tokens == 1):
        return True
    return max(tokens, keys) <= SHORT and max(channels, width) <= NARROW and math.prod(query.shape[:-2]) >= MANY


def plain_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` by two products and a softmax in at least float32. Cost: Lq Lk (D + E)."""
    if enable_gqa:
        key, value = (repeat_heads(x, query.shape[-3]) for x in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, float("-inf")) if hidden else logits + attn_mask
    weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(value.dtype)
    return F.dropout(weights, dropout_p) @ value
