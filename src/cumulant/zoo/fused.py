"""torch's fused softmax attention, kept away from a backend that returns NaN gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Training a ViT of 64 tokens with softmax on an H200 (torch 2.11) ended in NaN twice, with 65 tokens never. torch
# chooses cuDNN there, whose backward kernel is known to score the empty half of a last tile of 128 keys as 0 instead of
# -inf, which overflows where all logits of a row are very negative (pytorch issue 196678).
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_softmax(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`F.scaled_dot_product_attention`; without cuDNN where its gradients cannot be trusted."""
    trusted = nullcontext() if not half_tile(key) else sdpa_kernel(WITHOUT_CUDNN)
    with trusted:
        return F.scaled_dot_product_attention(query, key, value, **options)


def half_tile(key: Tensor) -> bool:
    """Whether gradients are wanted on a GPU of so many keys that the last tile of 128 is half empty."""
    return key.is_cuda and torch.is_grad_enabled() and key.shape[-2] % 128 == 64
