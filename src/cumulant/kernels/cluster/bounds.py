"""Tables of clusters as the kernels read them (parts.py), for those who have no Triton too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, log2

import torch
from torch import Tensor

from ..launch import padded

SORTABLE = 256  # clusters that a program compares with a block of tokens at once


def padding(clusters: int) -> int:
    """KP. Products with 16 columns are miscompiled by the assembler that Triton 3.6 carries: nothing is below 32."""
    return padded(clusters, 32)


def tables(starts: Sequence[int], prefix: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bounds and logs of clusters that hold the tokens from starts[c] to starts[c + 1], of all heads alike."""
    sizes = [b - a for a, b in pairwise(starts)]
    more = [0] * (padding(len(sizes)) - len(sizes))
    bounds = [[*starts[:-1], *more, 0], [*starts[1:], *more, prefix]]
    logs = [log2(n) if n else -inf for n in (*sizes, *more)]
    return (
        torch.tensor([bounds], dtype=torch.int32, device=device),
        torch.tensor([logs], dtype=torch.float32, device=device),
    )
