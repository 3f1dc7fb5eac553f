"""Softmax over logits of which some, or all, stand for nothing; shared by the mechanisms that are built on it.

Shape legend: ... leading dimensions, H query heads, Hk key heads, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ..cluster.choice import softmax_or_zero as softmax_or_zero  # one definition for both rooms

ABSENT = float("-inf")


def log_weights(key_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What a key mask (..., Lk), bool or weights w >= 0, adds to the logits: log w, -inf where absent; (..., 1, Lk)."""
    if key_mask is None:
        return None
    present = key_mask != 0
    if key_mask.dtype == torch.bool:
        added = torch.zeros((), dtype=like.dtype, device=like.device)
    else:
        # In the wider of both dtypes: a small weight is 0 in float16, its logarithm is not.
        weight = torch.where(present, key_mask, 1)
        added = weight.to(torch.promote_types(key_mask.dtype, like.dtype)).log().to(like.dtype)
    return torch.where(present, added, ABSENT).unsqueeze(-2)


def without_absent(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (..., H, L, D) with 0 in the tokens that a key mask (..., L) leaves out, whatever they hold."""
    return x if key_mask is None else x.masked_fill((key_mask == 0)[..., None, :, None], 0)


def joint_exponentials(parts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """exp(logits - the largest of all) of each part (..., n), and their sum over all parts, (..., 1); 0 of -inf alone.

    One softmax over parts that are never put side by side; what they weigh is divided by the sum afterwards.
    """
    top = reduce(torch.maximum, [x.detach().amax(-1, keepdim=True) for x in parts])
    top = torch.where(top == ABSENT, 0, top)
    kernels = [(x - top).exp() for x in parts]
    return kernels, sum(x.sum(-1, keepdim=True) for x in kernels)  # type: ignore[return-value]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key heads (..., Hk, L, D) as (..., H, L, D): each serves H / Hk query heads in a row, as in SDPA."""
    own = x.shape[-3]
    if own in (heads, 0):
        return x
    return x.unsqueeze(-3).expand(*x.shape[:-2], heads // own, *x.shape[-2:]).flatten(-4, -3)
