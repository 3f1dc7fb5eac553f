"""Packed sequences for mechanisms that know key masks: pad once, one call, take the padding out again.

Shape legend: T tokens of all sequences in a row, N sequences, M the longest of them, H heads, D, E widths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..call import check_packed, longest, offsets

if TYPE_CHECKING:
    from .registry import Mechanism


def padded(
    mechanism: Mechanism,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int | None = None,
    max_k: int | None = None,
    **arguments: Any,
) -> Tensor:
    """query (T, H, D), key (S, H, D), value (S, H, E) -> (T, H, E); cu_seq = [0, end of first, ..., T].

    Mechanisms whose rows look at other queries get a mask of the queries too; one with a `length_option`, which the
    unpacked form would set to max(Lq, Lk), gets it for each sequence. Cost: that of N sequences of the longest length.
    """
    check_packed(query, key, value, cu_seq_q, cu_seq_k)
    at_q = offsets("cu_seq_q", cu_seq_q, query.shape[0], max_q, "max_q")
    at_k = offsets("cu_seq_k", cu_seq_k, key.shape[0], max_k, "max_k")
    place_q, mask_q = places(at_q, query.device)
    place_k, mask_k = places(at_k, key.device)
    length = mechanism.length_option
    if length is not None and arguments.get(length) is None:
        arguments[length] = torch.maximum(mask_q.sum(-1), mask_k.sum(-1)).clamp(min=1)
    # Padding repeats some token of the pack: it is masked, so that it does not matter which.
    rows = (x[place].transpose(1, 2) for x, place in ((query, place_q), (key, place_k), (value, place_k)))
    out = mechanism(*rows, key_mask=mask_k, query_mask=mask_q, **arguments)
    return out.transpose(1, 2)[mask_q]


def places(at: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each sequence the places of its tokens in the pack, (N, M), and which of them are there, (N, M)."""
    start = torch.tensor(at[:-1], device=device, dtype=torch.long)
    length = torch.tensor(at[1:], device=device, dtype=torch.long) - start
    steps = torch.arange(longest(at), device=device)
    return (start[:, None] + steps).clamp(max=max(0, at[-1] - 1)), steps < length[:, None]
