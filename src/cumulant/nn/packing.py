"""Sequences of different lengths end to end through a layer that knows a mask: pad once, one call, take it out again.

Shape legend: T tokens of all sequences in a row, N sequences, M the longest of them, C width.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..call import offsets
from ..zoo.ragged import places


def forward_packed(
    layer: nn.Module, x: Tensor, cu_seq: Tensor, longest: int | None = None, is_causal: bool = False
) -> Tensor:
    """x (T, C) -> (T, C), sequence i being x[cu_seq[i] : cu_seq[i + 1]]; equal to a loop over them.

    Cost: that of N sequences of the longest length.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be packed as (tokens, width), got {tuple(x.shape)}")
    place, mask = places(offsets("cu_seq", cu_seq, x.shape[0], longest, "longest"), x.device)
    if place.numel() == 0:
        return x.new_zeros(x.shape)
    # Padding repeats some token of the pack: it is masked, so that it does not matter which.
    out: Tensor = layer(x[place], attn_mask=mask, is_causal=is_causal)
    return out[mask]
