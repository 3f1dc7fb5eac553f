"""The folded second-order layer: attention cheaper than its own projections.

Shape legend: B batch, L tokens, C width, H heads, Hk key heads, G = H / Hk, D = C / H, K = Hk D.

With q = Wq x + bq, k = Wk x + bk, v = Wv x + bv and the token covariance G = <x~ x~^T> (C x C), second-order
cumulant attention followed by the output projection is one affine map of each token:

    S_h = scale Wk_h G Wv_h^T        (key and value biases cancel)
    y = M x + c,   M = sum_h Wo_h S_h^T Wq_h,   c = Wo (Wv <x> + bv + [S_h^T bq_h]_h) + bo

With grouped queries S_h is that of its key head. No query, key or value is ever formed. Multiply-adds a sequence: plain
layer 2 L C (C + K) + 2 L C D, folded 2 L C^2 + C (C + K)^2 (1.5 L C^2 where one triangle of G is computed).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shards
from ..call import check_flag
from ..kernels import launch, notice
from ..kernels.once import once_differentiable
from ..moments import ratio, statistics_dtype
from ..tracing import in_autocast_dtype, transformed, without_autocast

# Time of a multiply-add in the folded layer over that in the plain one, so that `pays` compares times.
# Measured by benchmarks/fold.py; above 1 because the folded layer's products are smaller.
RELATIVE_COST = {"cpu": 1.1, "cuda": 1.3}
LOOPED = 8  # sequences up to which the last product runs one by one, each adding its constant as it writes


def pays(length: int, dim: int, num_heads: int, device: str, num_kv_heads: int | None = None) -> bool:
    """Whether the folded layer is expected to be faster for sequences of this length."""
    head = dim // num_heads
    keys = dim if num_kv_heads is None else num_kv_heads * head
    plain = 2 * length * dim * (dim + keys) + 2 * length * dim * head
    folded = 2 * length * dim**2 + dim * (dim + keys) ** 2
    return plain > RELATIVE_COST.get(device, 1.3) * folded


_plain_layers = 0
_counting = threading.Lock()  # the explorer watches several models at once


@contextmanager
def unfolded() -> Iterator[None]:
    """Within this, layers form query, key and value: for those who watch them, or export one graph for any length."""
    global _plain_layers
    with _counting:
        _plain_layers += 1
    try:
        yield
    finally:
        with _counting:
            _plain_layers -= 1


def folds(
    fold: str | bool,
    x: Tensor,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    is_causal: bool = False,
    length: int | None = None,
) -> bool:
    """Whether a layer of x (B, L, C), or of packed sequences of a mean `length`, is folded.

    `fold` is True, False, or "auto": where it is expected to be faster and nobody watches.
    """
    check_flag("is_causal", is_causal)
    if _plain_layers or shards.answerer() is not None:  # the tokens of other workers are in no covariance of ours
        return False
    if fold is True and is_causal:
        raise ValueError('fold=True has no causal form: use fold="auto" or False, or pass is_causal=False')
    if fold != "auto":
        return bool(fold)
    if is_causal or (length is None and x.ndim != 3):
        return False
    return pays(x.shape[-2] if length is None else length, x.shape[-1], num_heads, x.device.type, num_kv_heads)


def folded_attention(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    num_heads: int,
    key_mask: Tensor | None = None,
) -> Tensor:
    """x (..., L, C), qkv_weight (C + 2 K, C), proj_weight (C, C), key_mask (..., L) or None -> (..., L, C).

    Under autocast x takes its dtype, as it would in a projection; the statistics do not.
    """
    (x,) = in_autocast_dtype(x)
    rows = x if x.ndim == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    mask = None if key_mask is None else key_mask.expand(x.shape[:-1]).reshape(rows.shape[:-1])
    scale = (x.shape[-1] // num_heads) ** -0.5
    if _chain_obstacle(rows, mask, num_heads) is None:
        with without_autocast(x.device.type):
            weights = (w if w is None else w.to(x.dtype) for w in (qkv_weight, qkv_bias, proj_weight, proj_bias))
            y = _Folded.apply(rows, *weights, num_heads, scale)
        return y if x.ndim == 3 else y.reshape(x.shape)
    with without_autocast(x.device.type):
        G, mean, present, rows = _token_moments(rows, mask)
        dtype, C = G.dtype, x.shape[-1]
        qkv_weight, proj_weight, mean = qkv_weight.to(dtype), proj_weight.to(dtype), mean.to(dtype)
        K = (qkv_weight.shape[0] - C) // 2  # fewer than C with grouped queries
        Wq, Wk, Wv = qkv_weight.split((C, K, K))
        groups, kv_heads = C // K, K * num_heads // C
        bq, _, bv = (None, None, None) if qkv_bias is None else qkv_bias.to(dtype).split((C, K, K))
        if groups > 1:  # the first query head of every key head, then the second of each, ...
            places = torch.arange(C, device=x.device).view(kv_heads, groups, -1).transpose(0, 1).flatten()
            Wq, proj_weight, bq = Wq[places], proj_weight[:, places], None if bq is None else bq[places]
        # Every head's S_h lies on the diagonal of Wv G Wk^T. The other blocks are computed only to be dropped: that
        # costs less time than gathering the heads from strided memory.
        plain = type(rows) is Tensor and not torch.compiler.is_compiling() and not transformed()
        blocks = _kept_blocks if plain else _diagonal_blocks
        S = (_times(Wv, G) @ Wk.mT) * blocks(K, kv_heads, scale, dtype, x.device)  # (B, K, K): value, key
        read = S @ Wq.unflatten(0, (groups, K)).transpose(0, 1).flatten(1)  # (B, K, groups C)
        M = _times(proj_weight, read.unflatten(-1, (groups, C)).transpose(1, 2).flatten(1, 2))
        inner = F.linear(mean, Wv).unsqueeze(1)
        if bq is not None and bv is not None:
            inner = inner + (S @ bq.view(groups, K).mT).mT + (bv * present).unsqueeze(-2)
        inner = inner.expand(-1, groups, -1).flatten(1)
        c = F.linear(inner, proj_weight, None if proj_bias is None else proj_bias.to(dtype))
        M, c = M.to(x.dtype), c.to(x.dtype)
        y = torch.baddbmm(c.unsqueeze(-2), rows, M.mT) if transformed() else _Affine.apply(rows, M, c)
    return y if x.ndim == 3 else y.reshape(x.shape)


def _times(W: Tensor, X: Tensor) -> Tensor:
    """W (C, C) times each of X (B, C, C). `W @ X` would transpose X in memory first."""
    return torch.bmm(W.expand(X.shape[0], -1, -1), X)


def _diagonal_blocks(dim: int, num_heads: int, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`scale` where two channels belong to the same head, 0 elsewhere, (C, C)."""
    head = torch.arange(dim, device=device) // (dim // num_heads)
    return (head[:, None] == head).to(dtype) * scale


@lru_cache(maxsize=64)
def _kept_blocks(dim: int, num_heads: int, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same, kept between calls; a tensor made in inference mode could never be used in training."""
    with torch.inference_mode(False):
        return _diagonal_blocks(dim, num_heads, scale, dtype, device)


def _token_moments(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | float, Tensor]:
    """Covariance <x~ x~^T> (B, C, C), mean (B, C), whether any token is there, and x with absent tokens as they were.

    Centred before the product, sums in at least float32; tokens of weight 0 do not matter. 16-bit tokens on a GPU
    take a kernel that computes one triangle, and keep the covariance in 16 bits, as a plain layer keeps its keys.
    """
    dtype, obstacle = statistics_dtype(x.dtype), _obstacle(x, weights)
    if obstacle is None:
        G, mean, x = _TokenMoments.apply(x)
        return G, mean, 1.0, x
    notice.plain_torch("the folded layer", x, obstacle)
    if weights is None:
        mean = x.mean(-2, dtype=dtype) if x.shape[-2] else x.sum(-2, dtype=dtype)
        centred = x.to(dtype) - mean.unsqueeze(-2)
        return centred.mT @ centred / max(1, x.shape[-2]), mean, float(x.shape[-2] > 0), x
    weights = weights.to(dtype)
    W = weights.sum(-1, keepdim=True)
    share = ratio(weights, W).unsqueeze(-1)
    seen = x.to(dtype).masked_fill(share == 0, 0)
    mean = (share * seen).sum(-2)
    centred = seen - mean.unsqueeze(-2)
    return (share * centred).mT @ centred, mean, (W > 0).to(dtype), x


def _obstacle(x: Tensor, weights: Tensor | None) -> str | None:
    """Why the kernel cannot take tokens x (B, L, C), or None."""
    if weights is not None:
        return "its kernel takes no mask"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel takes bfloat16 and float16 tokens, got {x.dtype}"
    if not launch.available(x):
        return "Triton and a CUDA device are needed"
    if not x.shape[1] or transformed():
        return "no tokens, or torch.func transforms and forward-mode gradients, need plain torch"
    return None


class _TokenMoments(torch.autograd.Function):
    """Covariance, mean and x itself: with all three leaving together, their gradients meet in one product.

    dx = dx_out + (x - mean) (dG + dG^T) / L + dmean / L
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from ..kernels.fold.host import covariance

        x = x if x.stride(-1) == 1 else x.contiguous()
        G, mean = covariance(x)
        ctx.save_for_backward(x, mean)
        return G, mean, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dG: Tensor, d_mean: Tensor, dx: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        L = x.shape[-2]
        D = ((dG + dG.mT) / L).to(x.dtype)
        constant = d_mean / L - (mean.unsqueeze(-2) @ D.float()).squeeze(-2)
        # dx is ours alone: it comes from _Affine, to which nothing else leads.
        return dx.baddbmm_(x, D).add_(constant.unsqueeze(-2).to(x.dtype))


def _chain_obstacle(x: Tensor, weights: Tensor | None, num_heads: int) -> str | None:
    """Why the kernels cannot take the whole layer of tokens x (B, L, C), or None."""
    if x.shape[-1] // num_heads > 128:
        return "heads are wider than 128"
    return _obstacle(x, weights)


class _Folded(torch.autograd.Function):
    """The whole layer as one pipeline (`kernels/fold/host.py`), of 16-bit tokens x (B, L, C) and weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, qkv: Tensor, bias: Tensor | None, proj: Tensor, proj_bias: Tensor | None,
        heads: int, scale: float,
    ) -> Tensor:  # fmt: skip
        from ..kernels.fold import host

        x = x if x.stride(-1) == 1 else x.contiguous()
        qkv, (B, _, C) = qkv.contiguous(), x.shape
        G, mean = host.covariance(x)
        A = _times(qkv[-((len(qkv) - C) // 2) :], G)
        R = host.read(A, qkv, bias, mean, heads, scale)
        M = _times(proj, R)
        ctx.save_for_backward(x, qkv, bias, proj, G, mean, A, R, M)
        ctx.heads, ctx.scale, ctx.biased = heads, scale, proj_bias is not None
        if B > LOOPED:
            return host.affine(x, M[..., :C], True, M[..., C], proj_bias, None, None)
        c = M[..., C].contiguous() if proj_bias is None else M[..., C] + proj_bias
        y = x.new_empty(x.shape)
        for b in range(B):
            torch.addmm(c[b], x[b], M[b, :, :C].mT, out=y[b])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from ..kernels.fold import host

        x, qkv, bias, proj, G, mean, A, R, M = ctx.saved_tensors
        (B, L, C), K = x.shape, A.shape[1]
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dc = dy.sum(-2, dtype=torch.float32)
        if torch.compiler.is_compiling():  # it writes to no part of a tensor
            column = F.pad(dc.to(x.dtype).unsqueeze(-1), (0, host.WIDER - 1))
            dM = torch.cat((torch.bmm(dy.mT, x), column), -1)
        else:
            dM = x.new_zeros(B, C, C + host.WIDER)
            torch.bmm(dy.mT, x, out=dM[..., :C])
            dM[..., C] = dc
        dR = _times(proj.mT, dM)
        d_proj = torch.bmm(dM, R.mT).sum(0)
        dA, dWq, dWk, dbq = host.read_backward(dR, A, qkv, bias, ctx.heads, ctx.scale)
        value = qkv[-K:]
        inner = dR[..., C].float().view(B, K // (C // ctx.heads), -1, C // ctx.heads).sum(2).flatten(1)  # (B, K)
        d_value = torch.bmm(dA, G).sum(0, dtype=torch.float32) + inner.mT @ mean
        d_qkv = torch.cat((dWq, dWk, d_value)).to(qkv.dtype)
        d_bias = None
        if bias is not None:
            d_bias = torch.cat((dbq, dbq.new_zeros(K), inner.sum(0))).to(bias.dtype)
        dG = _times(value.mT, dA)
        D, constant = host.symmetric(dG, mean, inner, value, L)
        dx = host.affine(dy, M[..., :C], False, constant, None, x, D)
        d_proj_bias = dc.sum(0).to(x.dtype) if ctx.biased else None
        return dx, d_qkv, d_bias, d_proj, d_proj_bias, None, None


class _Affine(torch.autograd.Function):
    """y = x M^T + c for a batch of matrices, without a pass over y for c where the batch is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, M: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(x, M)
        B, L, C = x.shape
        if B > LOOPED:
            return torch.bmm(x, M.mT).add_(c.unsqueeze(-2))
        y = x.new_empty(B, L, C)
        for b in range(B):
            torch.addmm(c[b], x[b], M[b].mT, out=y[b])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, M = ctx.saved_tensors
        return torch.bmm(dy, M), torch.bmm(dy.mT, x), dy.sum(-2, dtype=statistics_dtype(dy.dtype)).to(M.dtype)
