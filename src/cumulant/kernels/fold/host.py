"""The folded layer on the GPU: covariance of the tokens, the small products that make a map of it, and the map.

Shape legend: B batch, L tokens, C width, heads and key heads of width D, K the width of all key heads; BM x BM the tile
of one program, N tokens of a block.

    G = <x~ x~^T>,  A = Wv G,  S_h = scale A_h Wk_h^T,  R_h = (S_h Wq_h | Wv_h <x> + bv_h + S_h bq_h),  M = Wo R
    y = x (first C columns of M)^T + column C of M + bo

R and M are C + 16 wide, the last 15 columns 0: constants travel as one more column of the same products. cuBLAS makes
`A` and `M`.

x^T x is computed without the half that symmetry gives. Products of 16-bit tokens are exact in float32, so its sums run
on the tokens as they are, straight from memory to the tensor cores, and the mean is taken out at the end in float32:
for means up to 100 spreads, beyond which 16-bit tokens have no digits left, that costs less than rounding a key
projection does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import cdiv, multiprocessors, on_device, padded, shared_memory
from .chain import affine_kernel, read_kernel, symmetric_kernel, turn_kernel, weights_kernel
from .forward import finish_kernel, sums_kernel

BLOCK, TOKENS, WARPS, STAGES = 128, 64, 8, 3
LONG = 4096  # tokens of a program beyond which a fourth stage pays, on devices that have the shared memory
LEAST = 1024  # tokens, at least, of a program
RATE, BYTES = 3.9e12, 4e12  # operations a second of a multiprocessor, bytes a second of partial sums, on an H200


def _splits(tiles: int, B: int, L: int, C: int, processors: int) -> int:
    """How often to cut the tokens: rounds of programs that leave few multiprocessors idle, against partial sums."""

    def seconds(splits: int) -> float:
        rounds = cdiv(tiles * B * splits, processors)
        return rounds * 2 * BLOCK**2 * L / splits / RATE + splits * 4 * B * C**2 / BYTES

    return min(range(1, max(1, L // LEAST) + 1), key=seconds)


@torch.library.custom_op("cumulant::covariance", mutates_args=())
def covariance(x: Tensor) -> tuple[Tensor, Tensor]:
    """<x~ x~^T> (B, C, C) in the dtype of x (B, L, C), which has contiguous rows, and the mean (B, C) in float32.

    Cost: L C^2 / 2 multiply-adds (only tiles on and below the diagonal); tiles of x are read again from the cache.
    """
    B, L, C = x.shape
    side = cdiv(C, BLOCK)
    tiles = side * (side + 1) // 2
    splits = _splits(tiles, B, L, C, multiprocessors(x.device))
    share = cdiv(cdiv(L, splits), TOKENS) * TOKENS
    splits = cdiv(L, share)
    deeper = share > LONG and (STAGES + 1) * 4 * BLOCK * TOKENS < shared_memory(x.device)
    products = torch.empty(B, splits, C, C, dtype=torch.float32, device=x.device)
    sums = torch.empty(B, splits, C, dtype=torch.float32, device=x.device)
    G = torch.empty(B, C, C, dtype=x.dtype, device=x.device)
    mean = torch.empty(B, C, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        sums_kernel[(B * splits * tiles,)](
            x, products, sums, L, C, x.stride(0), x.stride(1), share, tiles, splits,
            BM=BLOCK, N=TOKENS, STAGES=STAGES + deeper, EVEN=C % BLOCK == 0, num_warps=WARPS,
        )  # fmt: skip
        finish_kernel[(B * tiles,)](products, sums, G, mean, L, C, tiles, splits, BM=BLOCK, num_warps=WARPS)
    return G, mean


@covariance.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    B, _, C = x.shape
    return x.new_empty(B, C, C), x.new_empty(B, C, dtype=torch.float32)


WIDER = 16  # columns of R and M beyond C, of which the first is the constant: rows stay aligned
COLUMNS, CHUNK = 128, 64  # columns of a program, and those that a product takes at once
WIDEST = 128  # head


def _sizes(qkv: Tensor, heads: int) -> tuple[int, int, int, int, int]:
    """C, K, D, groups, padded D."""
    C = qkv.shape[1]
    K, D = (qkv.shape[0] - C) // 2, C // heads
    return C, K, D, C // K, padded(D)


@torch.library.custom_op("cumulant::fold_read", mutates_args=())
def read(A: Tensor, qkv: Tensor, bias: Tensor | None, mean: Tensor, heads: int, scale: float) -> Tensor:
    """R (B, C, C + 16) from A (B, K, C), the weights and bias of the projections, and the mean (B, C)."""
    (C, K, D, groups, BD), B = _sizes(qkv, heads), len(A)
    R, tiles = A.new_empty(B, C, C + WIDER), cdiv(C, COLUMNS)
    with on_device(A.device):
        read_kernel[(B * heads * tiles,)](
            A, qkv, bias, mean, R, C, K, D, heads, groups, tiles, C + WIDER, scale,
            BIAS=bias is not None, BD=BD, N=CHUNK, W=COLUMNS, num_warps=4,
        )  # fmt: skip
    return R


@read.register_fake
def _(A: Tensor, qkv: Tensor, bias: Tensor | None, mean: Tensor, heads: int, scale: float) -> Tensor:
    return A.new_empty(len(A), qkv.shape[1], qkv.shape[1] + WIDER)


@torch.library.custom_op("cumulant::fold_read_backward", mutates_args=())
def read_backward(
    dR: Tensor, A: Tensor, qkv: Tensor, bias: Tensor | None, heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dA (B, K, C), and the gradients of query weights, key weights and query bias in float32; without what reaches the
    mean and the value weights through column C of R."""
    (C, K, D, groups, BD), B = _sizes(qkv, heads), len(A)
    tiles = cdiv(C, COLUMNS)
    per = max(1, B * K // D * tiles // (2 * multiprocessors(A.device)))
    parts = cdiv(B, per)
    S, dS = A.new_empty(B, heads, D, D), A.new_empty(B, heads, D, D)
    dA = torch.empty_like(A)
    dWq, dWk, dbq = (A.new_empty(parts, *shape, dtype=torch.float32) for shape in ((C, C), (K, C), (C,)))
    options = {"BIAS": bias is not None, "BD": BD, "num_warps": 4}
    with on_device(A.device):
        turn_kernel[(B * heads,)](dR, A, qkv, bias, S, dS, C, K, D, heads, groups, C + WIDER, scale, N=CHUNK, **options)
        weights_kernel[(K // D * tiles * parts,)](
            dR, A, qkv, S, dS, dA, dWq, dWk, dbq, C, K, D, heads, groups, tiles, C + WIDER, B, per,
            W=COLUMNS, **options,
        )  # fmt: skip
    return dA, dWq.sum(0), dWk.sum(0), dbq.sum(0) if bias is not None else dbq.new_zeros(C)


@read_backward.register_fake
def _(
    dR: Tensor, A: Tensor, qkv: Tensor, bias: Tensor | None, heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    C, K = qkv.shape[1], A.shape[1]
    found = [A.new_empty(shape, dtype=torch.float32) for shape in ((C, C), (K, C), (C,))]
    return torch.empty_like(A), found[0], found[1], found[2]


@torch.library.custom_op("cumulant::fold_symmetric", mutates_args=())
def symmetric(dG: Tensor, mean: Tensor, inner: Tensor, value: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """D = (dG + dG^T) / L (B, C, C) and inner Wv / L - <x> D (B, C) in float32: of dx what comes through the moments is
    x D + that. inner (B, K) is the gradient of Wv <x>, value (K, C) is Wv."""
    (B, C, _), K = dG.shape, len(value)
    D, constant, tiles = torch.empty_like(dG), mean.new_empty(B, C), cdiv(C, CHUNK)
    with on_device(dG.device):
        symmetric_kernel[(B * tiles,)](
            dG, mean, inner, value, D, constant, 1.0 / L, C, K, tiles, W=CHUNK, num_warps=4
        )  # fmt: skip
    return D, constant


@symmetric.register_fake
def _(dG: Tensor, mean: Tensor, inner: Tensor, value: Tensor, L: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dG), torch.empty_like(mean)


@torch.library.custom_op("cumulant::fold_affine", mutates_args=())
def affine(
    x: Tensor, M: Tensor, turned: bool, c: Tensor, extra: Tensor | None, z: Tensor | None, D: Tensor | None
) -> Tensor:
    """x M^T (`turned`) or x M, + z D, + c + extra: x, z (B, L, C), M (B, C, C) with any strides but the last, D
    contiguous, c (B, C), extra (C,) -> (B, L, C)."""
    B, L, C = x.shape
    y = x.new_empty(B, L, C)
    rows, columns = cdiv(L, 128), cdiv(C, TILE[0])
    with on_device(x.device):
        affine_kernel[(B * rows * columns,)](
            x, M, x if z is None else z, M if D is None else D, c, extra, y, L, C, x.stride(0), x.stride(1),
            M.stride(0), M.stride(1), *(x if z is None else z).stride()[:2], *c.stride(), rows, columns,
            TURNED=turned, TWO=z is not None, EXTRA=extra is not None, EVEN=C % TILE[0] == 0 and C % TILE[1] == 0,
            BM=128, BN=TILE[0], BK=TILE[1], STAGES=TILE[2], num_warps=TILE[3],
        )  # fmt: skip
    return y


TILE = (128, 64, 3, 8)  # columns, columns of x at once, stages, warps


@affine.register_fake
def _(
    x: Tensor, M: Tensor, turned: bool, c: Tensor, extra: Tensor | None, z: Tensor | None, D: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape)
