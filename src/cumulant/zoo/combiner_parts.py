"""The three partitions of Combiner: fixed segments, blocks of powers of two, rows of a grid.

Shape legend: ... leading dimensions with the heads, L tokens, D, E widths, c tokens of a segment or row, m segments or
rows, p prefix tokens. Queries carry the scale; `bias` (..., L) is the log of the key weights, -inf for absent tokens;
`dtype` is that of the mechanism's inputs, of which keys and values still are, see `products.product`.

Each query has direct keys and regions that, together, hold every key it may see once. One softmax goes over the direct
keys and the summary keys K_r; a region passes its weight on to its tokens by p_r = softmax_j(Q_r.k_j), the same for all
queries, so that its value is V_r = sum_j p_rj v_j. Q_r and K_r are pooled from the region's queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.once import once_differentiable
from ..moments import ratio
from ..tensors import ABSENT, softmax_or_zero, wide
from ..tracing import transformed
from .products import about_mean, factor, multiplies_narrow, pair_products, product, recorded, written_down

POOLINGS = ("max", "mean", "sum")
SUMMARY_KEYS = ("wsum", "none", None)  # names with options write None as "none"


class Segments(NamedTuple):
    """Tokens padded with absent ones to m segments of c, m at least 1."""

    q: Tensor  # (..., m, c, D)
    k: Tensor  # (..., m, c, D)
    v: Tensor  # (..., m, c, E)
    bias: Tensor  # (..., m, c)
    length: int  # L


# The segments and logits within each -> logits of the regions (..., m, c, m), and what weights make of their values.
Regions = Callable[[Segments, Tensor, Tensor | None], tuple[Tensor, Callable[[Tensor], Tensor]]]


def pool(x: Tensor, bias: Tensor, pooling: str) -> Tensor:
    """Tokens of each region x (..., r, t, D) pooled over t to (..., r, D); absent tokens do not count, none give 0."""
    absent = (bias == ABSENT).unsqueeze(-1)
    if pooling == "max":
        top = x.masked_fill(absent, ABSENT).amax(-2)
        return torch.where(top == ABSENT, 0, top)
    total = x.masked_fill(absent, 0).sum(-2)
    return total if pooling == "sum" else total / (~absent).sum(-2).clamp(min=1)


def summarise(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, pooling: str) -> tuple[Tensor, Tensor, Tensor]:
    """K_r (..., r, D), V_r (..., r, E) and which regions are empty (..., r), of regions (..., r, t, D)."""
    k, v = wide(k), wide(v)
    Q, K = pool(q, bias, pooling), pool(k, bias, pooling)
    p = softmax_or_zero((Q.unsqueeze(-2) * k).sum(-1) + bias)
    return K, (p.unsqueeze(-1) * v).sum(-2), (bias == ABSENT).all(-1)


def segmented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    regions: Regions,
    c: int,
    is_causal: bool,
    prefix: int,
    own: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Direct: the own segment of c tokens; regions: the other segments, the earlier ones if causal.

    With `own` the own segment is a region too, if not causal: its tokens then count twice. Cost: L (c + L / c)(D + E).
    """
    near_v, centre = about_mean(v, dtype) if recorded(q, k) and not is_causal else (v, None)
    first_k, first_v = (wide(x[..., :prefix, :]) for x in (k, near_v))
    tokens = _segments(q[..., prefix:, :], k[..., prefix:, :], near_v[..., prefix:, :], bias[..., prefix:], c)
    near = pair_products(tokens.q, tokens.k, dtype) + tokens.bias.unsqueeze(-2)
    far, read = regions(tokens, near, centre)
    empty = (tokens.bias == ABSENT).all(-1)
    hidden = empty[..., None, None, :] | _hidden_regions(near.shape[-3], is_causal, own, q.device)[:, None, :]
    if is_causal:
        near = near.masked_fill(_later(c, c, q.device), ABSENT)
    logits = [near, far.masked_fill(hidden, ABSENT)]
    if prefix:  # tokens before the grid: direct keys of all queries
        logits.append(tokens.q @ first_k.mT.unsqueeze(-3) + bias[..., None, None, :prefix])
    (a, b, *d), total = joint_exponentials(logits)
    out = product(a, tokens.v, dtype) + read(b)
    if prefix:
        out = out + d[0] @ first_v.unsqueeze(-3)
    narrow = multiplies_narrow(out, dtype) and not transformed()
    out = _Quotient.apply(out, total, dtype) if narrow else ratio(out, total)
    if centre is not None:
        out = out + (total > 0) * centre.unsqueeze(-3)
    out = out.flatten(-3, -2)[..., : tokens.length, :]
    return torch.cat((_direct(q[..., :prefix, :], k, v, bias, is_causal), out), -2) if prefix else out


def _direct(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, is_causal: bool) -> Tensor:
    """The rows of the tokens before the grid, which see every key directly, (..., p, E)."""
    logits = q @ wide(k).mT + bias.unsqueeze(-2)
    if is_causal:
        logits = logits.masked_fill(_later(q.shape[-2], k.shape[-2], q.device), ABSENT)
    return softmax_or_zero(logits) @ wide(v)


def fixed(pooling: str, dtype: torch.dtype) -> Regions:
    """Regions that look the same from everywhere, see `summarise`."""

    def regions(tokens: Segments, near: Tensor, centre: Tensor | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        K, V, _ = summarise(*tokens[:4], pooling)
        # All rows of a sequence meet the same summaries: one product, for which nothing is repeated.
        rows = near.shape[-3:-1]
        far = pair_products(tokens.q.flatten(-3, -2), K, dtype).unflatten(-2, rows)
        return far, lambda b: product(b.flatten(-3, -2), V, dtype).unflatten(-2, rows)

    return regions


def axial(summary_key: str | Callable[[Tensor], Tensor] | None, dtype: torch.dtype) -> Regions:
    """Regions that are rows of c tokens, each through its summary in the own column.

    The summary at (row, column) weighs the whole row by softmax of the query there. Its key is the same mean of the
    keys ("wsum"), the key there ("none"), or what a function makes of the values V (..., L, E). An absent token
    summarises its row evenly.
    """

    def regions(tokens: Segments, near: Tensor, centre: Tensor | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        P = softmax_or_zero(near)
        V = product(P, tokens.v, dtype)
        if callable(summary_key):
            rows = near.shape[-3:-1]
            K = summary_key(
                (V if centre is None else V + centre.unsqueeze(-3)).flatten(-3, -2)[..., : tokens.length, :]
            )
            K = F.pad(K, (0, 0, 0, math.prod(rows) - tokens.length)).unflatten(-2, rows)
        else:
            K = product(P, tokens.k, dtype) if summary_key == "wsum" else tokens.k
        columns_q, columns_K, columns_V = (factor(x, dtype).transpose(-3, -2).contiguous() for x in (tokens.q, K, V))
        far = pair_products(columns_q, columns_K, dtype).transpose(-3, -2)
        return far, lambda b: product(b.transpose(-3, -2), columns_V, dtype).transpose(-3, -2)

    return regions


def log_sparse(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, pooling: str) -> Tensor:
    """Causal. Direct: the token itself; regions: a block of 2^l tokens for every bit l that is set in its index.

    These blocks tile all earlier tokens. There are (L - 1).bit_length() levels; the released code takes
    ceil(log2(L - 1)), one too few for L = 2^m + 1. Cost: L log2(L) (D + E).
    """
    length = q.shape[-2]
    levels = (length - 1).bit_length()
    missing = 2**levels - length
    q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
    bias = F.pad(bias, (0, missing), value=ABSENT)
    logits, values = [(q * k).sum(-1) + bias], []
    for level in range(levels):
        size = 2**level
        (Q0, Q1), (K0, _), (V0, _) = (x.unflatten(-2, (-1, 2, size)).unbind(-3) for x in (q, k, v))
        K, V, empty = summarise(Q0, K0, V0, bias.unflatten(-1, (-1, 2, size))[..., 0, :], pooling)
        logit = (Q1 @ K.unsqueeze(-1)).squeeze(-1).masked_fill(empty.unsqueeze(-1), ABSENT)
        # The first block of each pair is the region of the second and has none at this level.
        logits.append(torch.stack((torch.full_like(logit, ABSENT), logit), -2).flatten(-3))
        values.append(V)
    weights = softmax_or_zero(torch.stack(logits, -1)).unbind(-1)
    out = weights[0].unsqueeze(-1) * v
    for level, V in enumerate(values):
        b = weights[level + 1].unflatten(-1, (-1, 2, 2**level))[..., 1, :]
        out = out + F.pad((b.unsqueeze(-1) * V.unsqueeze(-2)).unsqueeze(-3), (0, 0, 0, 0, 1, 0)).flatten(-4, -2)
    return out[..., :length, :]


class _Quotient(torch.autograd.Function):
    """`ratio`, which remembers its result, narrow as it will be written anyway, and not x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
        out = ratio(x, total)
        ctx.save_for_backward(written_down(out.to(dtype)), total)
        return out

    @staticmethod
    @partial(once_differentiable, told="Combiner has first derivatives only, and its gradient is differentiated again")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, total = ctx.saved_tensors
        grad = ratio(grad, total)
        return grad, -(grad * out).sum(-1, keepdim=True), None


def _segments(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, c: int) -> Segments:
    length = q.shape[-2]
    missing = -length % c if length else c
    split = ((length + missing) // c, c)
    q, k, v = ((F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, split) for x in (q, k, v))
    return Segments(q, k, v, F.pad(bias, (0, missing), value=ABSENT).unflatten(-1, split), length)


def _later(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.ones(rows, cols, dtype=torch.bool, device=device).triu(1)


def _hidden_regions(m: int, is_causal: bool, own: bool, device: torch.device) -> Tensor:
    """Which regions a segment or row does not see, (m, m): those after it and itself if causal, else only itself."""
    everything = torch.ones(m, m, dtype=torch.bool, device=device)
    if is_causal:
        return everything.triu()
    return ~everything if own else torch.eye(m, dtype=torch.bool, device=device)


def joint_exponentials(parts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """exp(logits - the largest of all) of each part (..., n), and their sum over all parts, (..., 1); 0 of -inf alone.

    One softmax over parts that are never put side by side; what they weigh is divided by the sum afterwards.
    """
    top = reduce(torch.maximum, [x.detach().amax(-1, keepdim=True) for x in parts])
    top = torch.where(top == ABSENT, 0, top)
    kernels = [(x - top).exp() for x in parts]
    return kernels, sum(x.sum(-1, keepdim=True) for x in kernels)  # type: ignore[return-value]
