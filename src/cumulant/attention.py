"""What a user calls: `attention`, `attention_varlen` and `scores`. Arguments are checked here, once.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from .causal import causal_attention
from .inputs import (
    check_offsets,
    check_order,
    check_tensors,
    in_autocast_dtype,
    leading,
    offsets,
    only_around_zero,
    positions_of,
    transformed,
    without_autocast,
)
from .kernels import launch
from .kernels.dense import cpu
from .moments import Moments, full_third_by_pairs, ratio, statistics_dtype

if launch.INTERPRET or torch.cuda.is_available():  # registers the custom operators before anything is traced
    with suppress(ImportError):  # without Triton, plain torch serves
        from .kernels.causal import host as triton_causal  # noqa: F401
        from .kernels.dense import host as triton_dense  # noqa: F401

BACKENDS = ("auto", "reference", "triton", "cpu")
LEAST_SCALE = 2.0**-12  # causal kernels of order 2 divide by the scale, and float16 ends at 65504


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    order: int = 3,
    full: bool = False,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    normalization: str = "mean",
    closure: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Cumulant attention: the Taylor polynomial of softmax attention in the query, cut after `order` terms.

        out = <v> + <(q.k~) v~> + 1/2 sum_i q_i^2 <k~_i^2 v~>        (orders 1, 2, 3; a tilde: minus the mean)

    Layout and meaning follow `F.scaled_dot_product_attention`.

    Args:
        query: (..., H, Lq, D).
        key: (..., H, Lk, D); fewer heads with `enable_gqa`.
        value: (..., H, Lk, E).
        order: 1 keeps the mean, 2 adds the covariance of keys and values, 3 the third cumulant.
        full: at order 3, take the whole third cumulant instead of its diagonal. Cost: 2 L D^2 E, and L^2 (D + E)
            where the pairs of tokens are fewer than the D^2 E numbers of the moments (L up to 512 for D = E = 64).
        key_mask: (..., Lk), leading dimensions those before H. Bool (True takes part) or non-negative weights.
            Tokens of weight 0 do not matter, NaN in them included. A row without any key gives 0.
        is_causal: query i sees the keys j <= i, aligned at the first token also when Lq != Lk.
        scale: factor on q.k, D**-0.5 unless given.
        enable_gqa: query heads may be a multiple of the key heads; keys are not copied.
        normalization: "mean" approximates softmax; "sum" is the paper's printed form, larger by the sum of weights.
        closure: at order 2, "tanh" or "langevin" let the response saturate, <v> + f(s) <(q.k~) v~> with the spread s
            of q.k, so that it cannot run away at large logits; None (or "gauss") is second order as it stands.
        backend: "auto", "reference" (plain torch), "cpu" (tiled) or "triton".

    Returns:
        (..., H, Lq, E), in the dtype of the query. Cost: 2 L D E a head at order 2, 4 L D E at order 3, never L^2.
    """
    if closure is not None:
        check_order(order, full, normalization)
        if order != 2:
            raise ValueError(f"closure={closure!r} closes the second order: pass order=2, got order={order!r}")
        from .cluster.saturated import saturated_attention

        return saturated_attention(
            query, key, value, closure=closure, key_mask=key_mask, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, normalization=normalization, backend=backend,
        )  # fmt: skip
    query, key, value = in_autocast_dtype(query, key, value)
    scale = check_tensors(query, key, value, key_mask, scale, enable_gqa)
    check_order(order, full, normalization)
    _check_backend(backend, query)
    lead = leading(query, key)
    q, k, v = (_one_batch(x, lead) for x in (query, key, value))
    weights = None if key_mask is None else key_mask.expand(*lead, k.shape[-2]).reshape(prod(lead), k.shape[-2])
    plain = partial(_reference, order=order, full=full, weights=weights, is_causal=is_causal, scale=scale)
    with without_autocast(query.device.type):  # statistics stay in float32
        path = path_for(backend, q, k, v, weights, order, full, is_causal, scale)
        if path == "triton":
            out = _triton(is_causal)(q, k, v, weights, order, scale, normalization)
        elif path == "cpu":
            out = cpu.attention(q, k, v, weights, order, scale, reference=plain)
            if normalization == "sum":
                out = (out * _total_weight(k, weights)).to(query.dtype)
        else:
            out = plain(q, k, v, normalization=normalization)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[-3:])


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    order: int = 3,
    full: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    normalization: str = "mean",
    backend: str = "auto",
    around: str = "zero",
) -> Tensor:
    """`attention` over sequences of different lengths packed end to end; equal to a loop over them.

    Args:
        query: (Tq, H, D), all sequences one after the other.
        key: (Tk, H, D).
        value: (Tk, H, E).
        cu_seq_q: (n + 1,) integer offsets: sequence i is query[cu_seq_q[i] : cu_seq_q[i + 1]].
        cu_seq_k: the same for keys and values.
        max_q: longest query sequence; kernels size their grid with it. Computed when not given.
        max_k: longest key sequence.

    The other arguments are those of `attention`. A sequence without keys gives 0. Returns (Tq, H, E).
    """
    only_around_zero(
        "attention_varlen",
        around,
        "the mean query weights the keys of each sequence and head in its own way, which packed kernels do not take",
        'pad the sequences and call zoo.get("cumulant3") with around="mean", key_mask and query_mask',
    )
    query, key, value = in_autocast_dtype(query, key, value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(f"{name} must be packed as (tokens, heads, width), got shape {tuple(x.shape)}")
    if value.shape[0] != key.shape[0]:
        raise ValueError(f"key and value must have as many tokens, got {key.shape[0]} and {value.shape[0]}")
    check_offsets("cu_seq_q", cu_seq_q, query.shape[0])
    check_offsets("cu_seq_k", cu_seq_k, key.shape[0])
    if len(cu_seq_q) != len(cu_seq_k):
        raise ValueError(
            f"cu_seq_q and cu_seq_k must describe as many sequences, got {len(cu_seq_q) - 1} and {len(cu_seq_k) - 1}"
        )
    _check_backend(backend, query)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    checked_scale = check_tensors(q, k, v, None, scale, enable_gqa)
    check_order(order, full, normalization)
    path = path_for(backend, q, k, v, None, order, full, is_causal, checked_scale)
    if path == "triton" and max_q is not None and max_k is not None:
        # Offsets on a GPU are taken at their word: looking at them would wait for everything before them.
        with without_autocast(query.device.type):
            packed = query, key, value, None, order, checked_scale, normalization
            cu_q, cu_k = (x.to(query.device, torch.int32).contiguous() for x in (cu_seq_q, cu_seq_k))
            return _triton(is_causal)(*packed, cu_q, cu_k, max_q, max_k)
    q_at = offsets("cu_seq_q", cu_seq_q, query.shape[0], max_q, "max_q")
    k_at = offsets("cu_seq_k", cu_seq_k, key.shape[0], max_k, "max_k")
    one = partial(
        attention,
        order=order,
        full=full,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        normalization=normalization,
        backend=backend,
    )
    parts = [
        one(q[:, a:b], k[:, c:d], v[:, c:d]) for (a, b), (c, d) in zip(pairwise(q_at), pairwise(k_at), strict=True)
    ]
    if not parts:
        return query.new_zeros(0, query.shape[1], value.shape[2])
    return torch.cat(parts, -2).transpose(0, 1)


def scores(
    query: Tensor,
    key: Tensor,
    *,
    order: int = 3,
    full: bool = False,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    normalization: str = "mean",
    positions: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The signed weights A (..., H, Lq, Lk) with which `attention` mixes the values: out = A v.

        A_l = w_l/W [ 1 + q.k~_l + 1/2 sum_i q_i^2 (k~_li^2 - <k~_i^2>) ]

    Each row sums to 1 (to the sum of weights with normalization="sum"). A row costs Lk D, so pass only the
    queries whose maps are wanted; `positions` (Lq,) then says where they stand when `is_causal` (default: 0, 1, ...).
    The other arguments are those of `attention`.
    """
    query, key = in_autocast_dtype(query, key)
    scale = check_tensors(query, key, key, key_mask, scale, enable_gqa)
    check_order(order, full, normalization)
    lead = leading(query, key)
    dtype, (heads, Lq, _), (groups, Lk, _) = statistics_dtype(query.dtype), query.shape[-3:], key.shape[-3:]
    with without_autocast(query.device.type):
        q = (query.to(dtype) * scale).expand(*lead, *query.shape[-3:])
        q = q.unflatten(-3, (groups, heads // max(1, groups))).flatten(-3, -2)  # grouped heads share their keys
        k, weights = key.to(dtype), q.new_ones(1, Lk)
        if key_mask is not None:
            weights = key_mask.to(dtype)[..., None, None, :]
            k = k.masked_fill(weights.mT == 0, 0)
        k = k - Moments.of(k, k, order=1, key_mask=weights.squeeze(-2)).key_mean.unsqueeze(-2)
        if is_causal:
            seen = torch.arange(Lk, device=q.device) <= positions_of(positions, Lq, q.device)[:, None]
            weights = weights * seen.repeat(heads // max(1, groups), 1)
        W = weights.sum(-1, keepdim=True)
        share = ratio(weights, W)

        def centred(x: Tensor) -> Tensor:
            return x - (share * x).sum(-1, keepdim=True)

        A = q.new_ones(*q.shape[:-1], 1)
        if order > 1:
            u = centred(q @ k.mT)
            A = A + u
            if order == 3 and full:
                A = A + centred(0.5 * u * u)
            elif order == 3:
                A = A + centred((0.5 * q * q) @ (k * k).mT - (q * q * (share @ k)) @ k.mT)
        A = A * (weights if normalization == "sum" else share)
        return A.unflatten(-2, (heads // max(1, groups), Lq)).flatten(-4, -3).to(query.dtype)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    order: int,
    full: bool,
    weights: Tensor | None,
    is_causal: bool,
    scale: float,
    normalization: str = "mean",
) -> Tensor:
    """Plain torch: differentiable any number of times, and what torch.compile and torch.export trace."""
    heads = key.shape[-3]
    q = query.unflatten(-3, (heads, query.shape[-3] // max(1, heads)))
    w = None if weights is None else weights.unsqueeze(-2)
    if is_causal and query.shape[-2] and key.shape[-2]:  # with nothing to see, or nobody to see it, all is 0
        out = causal_attention(
            q, key, value, order=order, full=full, weights=w, scale=scale, normalization=normalization
        )
        return out.flatten(-4, -3)
    rows = q.flatten(-3, -2)
    if full and rows.shape[-2] * key.shape[-2] <= key.shape[-1] ** 2 * value.shape[-1]:  # pairs are fewer than moments
        out = full_third_by_pairs(rows, key, value, w, scale)
    else:
        out = Moments.of(key, value, order=order, full=full, key_mask=w).apply(rows, scale)
    if normalization == "sum":
        out = (out * _total_weight(key, weights)).to(query.dtype)
    return out.unflatten(-2, q.shape[-3:-1]).flatten(-4, -3)


def _total_weight(key: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of the weights (B, 1, 1, 1), in the statistics' precision."""
    dtype = statistics_dtype(key.dtype)
    if weights is None:
        return torch.full((1, 1, 1, 1), float(key.shape[-2]), dtype=dtype, device=key.device)
    return weights.sum(-1, dtype=dtype)[:, None, None, None]


def _one_batch(x: Tensor, lead: torch.Size) -> Tensor:
    """x (..., H, L, D) as (B, H, L, D). What has that shape stays itself: each view costs time in the backward pass."""
    if len(lead) == 1 and x.shape[:-3] == lead:
        return x
    return x.expand(*lead, *x.shape[-3:]).reshape(prod(lead), *x.shape[-3:])


def _check_backend(backend: str, query: Tensor) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "cpu" and query.device.type != "cpu":
        raise ValueError(f'backend="cpu" needs tensors on the CPU, got {query.device}; use backend="auto"')


def path_for(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    order: int,
    full: bool,
    is_causal: bool,
    scale: float = 1.0,
) -> str:
    """The path that computes this case: "triton", "cpu" or "reference" (plain torch, which computes all)."""
    differentiable_only = transformed() or (weights is not None and weights.requires_grad)
    if backend == "reference" or order == 1 or full or differentiable_only:
        return "reference"
    if not (q.numel() and k.numel() and v.numel()):
        return "reference"
    if is_causal and order == 2 and abs(scale) < LEAST_SCALE:
        return "reference"
    if backend == "triton" or (backend == "auto" and q.is_cuda):
        obstacle = launch.obstacle(q, v, order, is_causal)
        if obstacle is None:
            return "triton"
        if backend == "triton":
            raise ValueError(f'backend="triton" cannot be used: {obstacle}; use backend="auto"')
        return "reference"
    return "cpu" if q.device.type == "cpu" and not is_causal and not torch.compiler.is_compiling() else "reference"


def _triton(is_causal: bool) -> Callable[..., Tensor]:
    if is_causal:
        from .kernels.causal.host import attention
    else:
        from .kernels.dense.host import attention
    return attention
