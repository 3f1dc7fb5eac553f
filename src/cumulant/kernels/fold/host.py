"""Mean and covariance of tokens on the GPU: x^T x without the half that symmetry gives.

Shape legend: B batch, L tokens, C width; BM x BM the tile of one program, N tokens of a block.

The folded layer needs <x~ x~^T> of 16-bit tokens. Their products are exact in float32, so the sums run on the tokens
as they are, straight from memory to the tensor cores, and the mean is taken out at the end in float32: for means up to
100 spreads, beyond which 16-bit tokens have no digits left, that costs less than rounding a key projection does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, multiprocessors, on_device
from .forward import finish_kernel, sums_kernel

BLOCK, TOKENS, WARPS, STAGES = 128, 32, 8, 3  # within 1 % of the best of 18 on an H200, C 768
LEAST = 1024  # tokens, at least, of a program: partial sums cost memory


def _splits(work: int, L: int, processors: int) -> int:
    """How often to cut the tokens so that the last round of programs leaves few multiprocessors idle."""
    most = max(1, min(L // LEAST, cdiv(4 * processors, work)))
    return min(range(1, most + 1), key=lambda s: (cdiv(work * s, processors) / s, s))


@torch.library.custom_op("cumulant::covariance", mutates_args=())
def covariance(x: Tensor) -> tuple[Tensor, Tensor]:
    """<x~ x~^T> (B, C, C) in the dtype of x (B, L, C), which has contiguous rows, and the mean (B, C) in float32.

    Cost: L C^2 / 2 multiply-adds (only tiles on and below the diagonal); tiles of x are read again from the cache.
    """
    B, L, C = x.shape
    side = cdiv(C, BLOCK)
    tiles = side * (side + 1) // 2
    splits = _splits(tiles * B, L, multiprocessors(x.device))
    share = cdiv(cdiv(L, splits), TOKENS) * TOKENS
    splits = cdiv(L, share)
    products = torch.empty(B, splits, C, C, dtype=torch.float32, device=x.device)
    sums = torch.empty(B, splits, C, dtype=torch.float32, device=x.device)
    G = torch.empty(B, C, C, dtype=x.dtype, device=x.device)
    mean = torch.empty(B, C, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        sums_kernel[(B * splits * tiles,)](
            x, products, sums, L, C, x.stride(0), x.stride(1), share, tiles, splits,
            BM=BLOCK, N=TOKENS, EVEN=C % BLOCK == 0, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        finish_kernel[(B * tiles,)](products, sums, G, mean, L, C, tiles, splits, BM=BLOCK, num_warps=WARPS)
    return G, mean


@covariance.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    B, _, C = x.shape
    return x.new_empty(B, C, C), x.new_empty(B, C, dtype=torch.float32)
