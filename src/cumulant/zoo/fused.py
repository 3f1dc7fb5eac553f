"""torch's fused softmax attention, kept away from a backend whose gradients are wrong."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Of cuDNN, which torch takes first on an H200 (torch 2.11), all three gradients are noise at every length where that of
# the output is laid out by heads and the output by tokens, as behind a projection. Keys that fill half of a last tile
# of 128 give NaN where all logits of a row are very negative (pytorch issue 196678). benchmarks/gpu_softmax.py shows
# both; a run of docs/lab/results.md that diverged with cuDNN is sound without it.
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_softmax(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`F.scaled_dot_product_attention`; without cuDNN where gradients may be asked for.

    Values some times as wide as keys go in parts: the quick kernels take one width, and with the others the gradients
    of a GDA layer took six times those of a plain one (H200, 8,192 tokens, benchmarks/gpu_heads.py).
    """
    width = query.shape[-1]
    if query.is_cuda and value.shape[-1] > width > 0 and not value.shape[-1] % width and not options.get("dropout_p"):
        return torch.cat([fused_softmax(query, key, part, **options) for part in value.split(width, -1)], -1)
    with sdpa_kernel(WITHOUT_CUDNN) if may_need_gradients(key) else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, **options)


def may_need_gradients(key: Tensor) -> bool:
    """Whether gradients are recorded on a GPU."""
    return key.is_cuda and torch.is_grad_enabled()
