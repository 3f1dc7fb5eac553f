"""Causal cumulant attention in plain torch: chunks, a prefix of centred moments, O(L) memory.

Shape legend: ... leading dimensions, K key heads, G query heads per key head, N chunks of C tokens, D, E widths.

Row i sees the tokens j <= i. With running weight W_i, running means m_i = <k'>_i and <k'^2>_i of the keys
k' = k - c measured from any reference point c, the order-3 output is sum_j A_ij v_j with

    A_ij = w_j / W_i [ (q - q^2 m).k'_j + 1/2 q^2.k'_j^2 + 1 - q.m + q^2.m^2 - 1/2 q^2.<k'^2> ]

Inside a chunk this is a C x C matrix; what came before the chunk enters through its moments alone. The
reference point of a chunk is the mean of everything before it: near the data, and blind to the future.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .moments import (
    FEW,
    Moments,
    _shifted,
    _uncentred,
    added,
    centred_sums,
    exact_dtype,
    means_dtype,
    ratio,
    statistics_dtype,
)

Carry = Callable[[Moments], Callable[[], Moments]]
DIAGONAL_CHUNK = 64  # at D = E = 64 the chunk states then take no more room than the values
FULL_CHUNK = 256  # the full third order carries D^2 E numbers a chunk, so fewer chunks


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    order: int,
    full: bool,
    weights: Tensor | None,
    scale: float,
    gain: Tensor | None = None,
    chunk: int | None = None,
    carry: Carry | None = None,
) -> Tensor:
    """query (..., K, G, Lq, D), key (..., K, Lk, D), value (..., K, Lk, E), weights (..., K or 1, Lk) -> like query.

    Rows and keys are aligned at the first token; a row whose visible keys all have weight 0 gives 0. With `gain`
    (..., 1) rows are sums instead of means: multiplied by it and by the weight that they see. `carry` takes the moments
    of all tokens and gives, when it is asked, those of tokens before the first (..., K): a sequence goes on.
    Cost: L (C (D + E) + D E) a head, memory O(L) (times D^2 E / C when full).
    """
    length, dtype = query.shape[-2], statistics_dtype(query.dtype)
    traced = torch.compiler.is_compiling()  # of any length
    if (not traced and length <= FEW) or (weights is not None and weights.is_floating_point()):
        # One heavy token moves the mean of its row far from the point of its chunk: large terms then nearly cancel.
        # So does the third order of two tokens, which is 0.
        dtype = exact_dtype(query)
    C = chunk or (FULL_CHUNK if full else DIAGONAL_CHUNK)
    if not traced:
        C = min(C, max(1, length))
    N = max(1, -(-length // C))
    key, value = key[..., :length, :].to(dtype), value[..., :length, :].to(dtype)
    if weights is None:
        weights = key.new_ones(()).expand(key.shape[:-1])
    else:
        weights = weights[..., :length].to(dtype).expand(key.shape[:-1])
        absent = (weights == 0).unsqueeze(-1)
        key, value = key.masked_fill(absent, 0), value.masked_fill(absent, 0)

    # The first token that counts is the origin: known to every row that gives anything but 0. The result does not
    # depend on it, so it has no gradient: summed over all rows, that 0 would be left as rounding in the first token.
    first = (weights > 0).int().argmax(-1, keepdim=True).unsqueeze(-1)
    # (take_along_dim would fix every size under torch.compile.)
    key_origin, value_origin = (
        x.detach().gather(-2, first.expand(*x.shape[:-2], 1, x.shape[-1])) for x in (key, value)
    )
    key, value = key - key_origin, value - value_origin

    rows = N * C
    key, value, weights = (
        F.pad(key, (0, 0, 0, rows - key.shape[-2])).unflatten(-2, (N, C)),
        F.pad(value, (0, 0, 0, rows - value.shape[-2])).unflatten(-2, (N, C)),
        F.pad(weights, (0, rows - weights.shape[-1])).unflatten(-1, (N, C)),
    )
    q = F.pad(query.to(dtype) * scale, (0, 0, 0, rows - length)).unflatten(-2, (N, C))
    q = q.movedim(-4, -3)  # (..., K, N, G, C, D): a chunk's query heads share its keys

    chunks = centred_sums(key, value, order, full, weights, keep=True)
    first_moments = None if carry is None else _carried(carry, chunks, key_origin, value_origin)
    before = _prefix(chunks, first_moments)
    tensors = (q, key, value, weights, *before.kept())
    if carry is None and query.dtype == torch.float32 and dtype != exact_dtype(query):
        # The point of the first chunk is its first token, not a mean: rows of keys that drift lie far from it.
        own, others = zip(*(x.split((1, N - 1), before.weight.ndim - 1) for x in tensors), strict=True)
        q, key, value, weights, *rest = (x.to(exact_dtype(query)) for x in own)
        out = _within(q, key, value, weights, before.filled(rest), gain, value_origin, first=True).to(dtype)
        if traced or N > 1:
            q, key, value, weights, *rest = others
            out = torch.cat((out, _within(q, key, value, weights, before.filled(rest), gain, value_origin)), -4)
    else:
        out = _within(q, key, value, weights, before, gain, value_origin)
    return out.movedim(-3, -4).flatten(-3, -2)[..., :length, :].to(query.dtype)


def _within(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    before: Moments,
    gain: Tensor | None,
    value_origin: Tensor,
    first: bool = False,
) -> Tensor:
    """Rows (..., N, G, C, E) of chunks, over their own tokens (..., N, C, D or E) and the moments before them.

    The `first` chunk has nothing before it.
    """
    dtype, C = key.dtype, key.shape[-2]
    key, value = _from(before.key_mean, key), _from(before.value_mean, value)
    W = before.weight.unsqueeze(-1) + weights.cumsum(-1)
    over_W = ratio(torch.ones_like(W), W)
    A, past = _scores(q, key, weights, over_W.unsqueeze(-1), before, first)

    visible = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    A = torch.where(visible, A, 0) * weights[..., None, None, :]
    out = A.flatten(-3, -2) @ value  # (..., K, N, G C, E): grouped heads need no copy of the values
    if past is not None:
        out = out + past.flatten(-3, -2)
    # The point of the values may lie near 0 where origin and mean do not: their sum is rounded once.
    point = (before.value_mean + value_origin).to(dtype)
    out = out.unflatten(-2, A.shape[-3:-1]) * over_W[..., None, :, None] + point[..., None, None, :]
    seen = (W > 0).to(dtype) if gain is None else W * gain.to(dtype)[..., None, None]
    return out * seen[..., None, :, None]


def _from(point: Tensor, x: Tensor) -> Tensor:
    """x (..., C, D) - point (..., D), whose digits beyond those of x are not lost: the sums before are about it."""
    near = point.to(x.dtype)
    return x - near.unsqueeze(-2) - (point - near).to(x.dtype).unsqueeze(-2)


def _scores(
    q: Tensor, key: Tensor, weights: Tensor, over_W: Tensor, before: Moments, first: bool
) -> tuple[Tensor, Tensor | None]:
    """A (..., N, G, C, C) before masking and division by W, and the sum over the tokens before the chunk.

    q (..., N, G, C, D), key (..., N, C, D) from the reference point, over_W (..., N, C, 1).
    """
    if before.S is None:
        # Every visible token counts the same; `where` keeps query and key in the graph, with gradient zero.
        never = torch.zeros((), dtype=torch.bool, device=q.device)
        unused = q.sum(-1, keepdim=True) + key.sum(-1)[..., None, None, :]
        return torch.where(never, unused, 1), None
    G, C = q.shape[-3:-1]
    mean = ((weights.unsqueeze(-1) * key).cumsum(-2) * over_W).unsqueeze(-3)  # (..., N, 1, C, D)
    qm = (q * mean).sum(-1, keepdim=True)

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x.flatten(-3, -2) @ y).unflatten(-2, (G, C))

    if before.T is None or before.P is None:
        return product(q, key.mT) + (1 - qm), None if first else product(q, before.S)
    if before.full:
        u = product(q, key.mT)
        visible = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        own = torch.where(visible, u * u, 0) * weights[..., None, None, :]
        square = (product(q, before.P) * q).sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
        A = u * (1 - qm) + 0.5 * u * u + (1 - qm + qm * qm - 0.5 * square * over_W.unsqueeze(-3))
        if first:
            return A, None
        pairs = (q.unsqueeze(-1) * q.unsqueeze(-2)).flatten(-2)
        return A, (1 - qm) * product(q, before.S) + 0.5 * product(pairs, before.T.flatten(-3, -2))
    half = 0.5 * q * q
    P = (before.P.unsqueeze(-2) + (weights.unsqueeze(-1) * key * key).cumsum(-2)) * over_W
    constant = 1 - qm + (half * (2 * mean * mean - P.unsqueeze(-3))).sum(-1, keepdim=True)
    features = torch.cat((q - 2 * half * mean, half), -1)
    A = product(features, torch.cat((key, key * key), -1).mT) + constant
    return A, None if first else product(features, torch.cat((before.S, before.T), -2))


def _carried(carry: Carry, chunks: Moments, *origins: Tensor) -> Callable[[], Moments]:
    """What comes before all chunks, (..., K), measured from the origins (..., K, 1, D or E) as they are."""
    dim = chunks.weight.ndim - 1
    own = chunks.filled(x.movedim(dim, 0) for x in chunks.kept()).union(added)
    points = [x.squeeze(-2).to(means_dtype(x)) for x in origins]
    waiting = carry(own._replace(key_mean=own.key_mean + points[0], value_mean=own.value_mean + points[1]))

    def moved() -> Moments:
        first = waiting()
        return first._replace(key_mean=first.key_mean - points[0], value_mean=first.value_mean - points[1])

    return moved


def _sums(moments: Moments, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    W, k, v, *rest = moments.to(dtype)
    return W, W.unsqueeze(-1) * k, W.unsqueeze(-1) * v, *_shifted(W, k, v, *rest)


def _prefix(chunks: Moments, first: Callable[[], Moments] | None = None) -> Moments:
    """Moments of everything before each chunk, from those of the chunks along the last leading dimension; means wide.

    The sums run in float64 where the device has it: raw sums about the first token, which a drifting sequence
    can take far off centre, then lose nothing before they are centred again. `first` gives what comes before all; it is
    asked last, since it may have to be waited for.
    """
    dtype = chunks.weight.dtype
    wide = dtype if chunks.weight.device.type == "mps" else torch.float64
    dim = chunks.weight.ndim - 1

    def before(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.cat((torch.zeros_like(x.narrow(dim, 0, 1)), x.cumsum(dim).narrow(dim, 0, x.shape[dim] - 1)), dim)

    sums = [before(x) for x in _sums(chunks, wide)]
    if first is not None:
        both = zip(sums, _sums(first(), wide), strict=True)
        sums = [None if x is None or y is None else x + y.unsqueeze(dim) for x, y in both]
    W, k, v, *rest = sums
    assert W is not None
    assert k is not None
    assert v is not None
    k, v = ratio(k, W.unsqueeze(-1)), ratio(v, W.unsqueeze(-1))
    return Moments(W, k, v, *_uncentred(W, k, v, *rest)).to(dtype)._replace(key_mean=k, value_mean=v)
