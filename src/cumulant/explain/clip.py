"""Rows of layers that see a part of a clip, laid out over all of it.

Shape legend: B clips, h heads, T frames, S = rows x cols places, p prefix tokens, L = p + T S, n rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..inspect.tokens import TokenLayout


def over_clip(axes: str, layout: TokenLayout, queries: list[int], rows: Callable[[list[int]], Tensor]) -> Tensor:
    """Maps (B, h, n, L) of a layer along `axes`; zero where it does not look.

    rows(local) gives (B', h, len(local), keys) with B' = B T within frames ("space"), B S at places ("time").
    - the class tokens of single frames are shown as one: the mean of their rows;
    - a layer over one token for each frame ("frames"): the weight of a frame is spread evenly over its patches.
    Either keeps the sum of a row.
    """
    frames, places, p = layout.grid[0], layout.grid[-2] * layout.grid[-1], layout.prefix

    def own(query: int) -> int:
        """The row of the layer's own sequences that a query of the clip stands for."""
        t, s = divmod(query - p, places)
        return query if query < p else {"space": p + s, "time": t, "frames": p + t}[axes]

    local = sorted({own(g) for g in queries})
    order = {row: i for i, row in enumerate(local)}
    at = {g: order[own(g)] for g in queries}
    A = rows(local)
    if axes == "frames":
        picked = A[:, :, [at[g] for g in queries]]
        first, later = picked[..., :p], picked[..., p:]
        return torch.cat([first, (later / places).repeat_interleave(places, -1)], -1)
    A = A.unflatten(0, (-1, frames if axes == "space" else places))  # (B, T or S, h, len(local), keys)
    out = A.new_zeros(A.shape[0], A.shape[2], len(queries), layout.count)
    for n, g in enumerate(queries):
        t, s = divmod(g - p, places)
        if g < p:
            every = A[:, :, :, at[g]]
            out[:, :, n, :p] = every[..., :p].mean(1)
            out[:, :, n, p:] = (every[..., p:] / frames).transpose(1, 2).flatten(2)
        elif axes == "space":
            row = A[:, t, :, at[g]]
            out[:, :, n, :p] = row[..., :p]
            out[:, :, n, p + t * places : p + (t + 1) * places] = row[..., p:]
        else:
            out[:, :, n, p + s :: places] = A[:, s, :, at[g]]
    return out
