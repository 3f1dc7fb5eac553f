"""Sequences of different lengths end to end through a layer: on a GPU as they are, where its mechanism takes them so;
else through a mask: pad once, one call, take it out again.

Shape legend: T tokens of all sequences in a row, N sequences, M the longest of them, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..call import offsets
from ..zoo.mixing import Bound
from ..zoo.ragged import places

DEVICES, DTYPES = ("cuda",), (torch.bfloat16, torch.float16)


def forward_packed(
    layer: nn.Module, x: Tensor, cu_seq: Tensor, longest: int | None = None, is_causal: bool = False
) -> Tensor:
    """x (T, C) -> (T, C), sequence i being x[cu_seq[i] : cu_seq[i + 1]]; equal to a loop over them.

    Cost: that of N sequences of the longest length; of their own where `takes_packs`.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be packed as (tokens, width), got {tuple(x.shape)}")
    place, mask = places(offsets("cu_seq", cu_seq, x.shape[0], longest, "longest"), x.device)
    if place.numel() == 0:
        return x.new_zeros(x.shape)
    # Padding repeats some token of the pack: it is masked, so that it does not matter which.
    out: Tensor = layer(x[place], attn_mask=mask, is_causal=is_causal)
    return out[mask]


def takes_packs(layer: Any, x: Tensor) -> bool:
    """Whether a layer's mechanism takes these tokens end to end: in 16 bits on a GPU, and with nothing of the layer
    between its projections."""
    half = x.dtype in DTYPES or torch.is_autocast_enabled(x.device.type)
    free = layer.v_conv is None and layer.temperature is None and layer.rotary is None and not layer.enable_gqa
    return (
        x.device.type in DEVICES
        and half
        and free
        and isinstance(layer.mix, Bound)
        and layer.mechanism.packed is not None
        and not layer.mechanism.wants_grid
        and not (layer.training and layer.attn_drop)
    )


def attend_packed(layer: Any, x: Tensor, cu_seq: Tensor, longest: int) -> Tensor:
    """x (T, C) -> (T, C) of a layer that `takes_packs`: its projections around the packed mechanism. `longest` bounds
    the length of a sequence; nothing waits for the device."""
    query, key, value = (part.transpose(0, 1) for part in layer.project(x))
    options = layer.attention_options
    out = layer.mechanism.packed(query, key, value, cu_seq, cu_seq, longest, longest, **options)
    return layer.finished(out.flatten(1), x)
