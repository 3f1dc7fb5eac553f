"""The inputs of the dense and the causal kernels, which are alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """One call. B sequences, H key heads, Hq = G H query heads, Lq, Lk lengths, D, E widths.

    Dense: query (B, Hq, Lq, D), key (B, H, Lk, D), value (B, H, Lk, E), weights (B, Lk), bool or floating point, or
    None. Ragged, with offsets cu_q and cu_k (B + 1): query (Tq, Hq, D), key (Tk, H, D), value (Tk, H, E), weights
    (Tk,). Query head h reads key head h // G.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int  # the longest sequences
    max_k: int
    order: int
    scale: float
    total: bool  # normalization="sum"

    @property
    def sequences(self) -> int:
        return self.key.shape[0] if self.cu_k is None else self.cu_k.shape[0] - 1

    @property
    def group(self) -> int:
        """Query heads of a key head; heads are the second dimension, dense or ragged."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    def weighing(self) -> tuple[Tensor | None, tuple[int, int]]:
        """Weights as kernels read them, bool as bytes, with their batch and token strides."""
        w = self.weights
        if w is None:
            return None, (0, 0)
        return w.view(torch.uint8) if w.dtype == torch.bool else w, (w.stride(0) if w.ndim == 2 else 0, w.stride(-1))


def batch_of(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, order: int, scale: float,
    normalization: str = "mean", cu_q: Tensor | None = None, cu_k: Tensor | None = None,
    max_q: int | None = None, max_k: int | None = None,
) -> Batch:  # fmt: skip
    """The longest sequences, where not given, are read from the device."""
    if cu_q is None or cu_k is None:
        max_q, max_k = query.shape[2], key.shape[2]
    else:
        max_q, max_k = _longest(cu_q) if max_q is None else max_q, _longest(cu_k) if max_k is None else max_k
    return Batch(query, key, value, weights, cu_q, cu_k, max_q, max_k, order, scale, normalization == "sum")


def _longest(offsets: Tensor) -> int:
    return int((offsets[1:] - offsets[:-1]).max()) if offsets.numel() > 1 else 0
