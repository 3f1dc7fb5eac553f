"""Products of features with the sums of keys and values, over all keys or those up to each row: q (K^T V).

Shape legend: ... leading dimensions, H heads, Hk key heads, G = H / Hk, Lq queries, Lk keys, D, E widths, n chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import shards
from ..call import Call, check_count
from ..tensors import fold_groups, repeat_heads, wide, without_absent
from ..tracing import transformed

SPAN = 128  # tokens that are summed at a time
TINY = 1e-30  # the least number of keys: a row without any divides 0 by it


def feature_product(
    query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, *, is_causal: bool = False, chunk: int = 128,
    along: Tensor | None = None, centred: bool = False,
) -> Tensor:  # fmt: skip
    """out_t = sum_s (q_t.k_s) v_s over all keys, or over s <= t: (..., H, Lq, D), (..., Hk, Lk, D), (..., Hk, Lk, E).

    `dtype` is that of the mechanism's inputs, see `product`. Values are taken about their mean where gradients are
    recorded, or `centred` asks for it; `along` is q_t.(sum of k) where it is known. Cost: 2 L D E; the causal form
    L C (D + E) more with chunks of C tokens.
    """
    check_count("chunk", chunk)
    if is_causal:
        return _causal_product(query, key, value, dtype, chunk)
    rows = fold_groups(query, key.shape[-3])
    near, centre = about_mean(value, dtype) if centred or recorded(query, key) else (value, None)
    if shards.answerer() is not None:  # sums of all workers, each about a mean of its own
        sums = sums_of_products(key, near, dtype)
        sums = sums if centre is None else sums + sum_of_tokens(wide(key)).mT @ centre
        return product(rows, shards.summed(sums)[0], dtype).reshape(*query.shape[:-1], value.shape[-1])
    out = product(rows, sums_of_products(key, near, dtype), dtype).reshape(*query.shape[:-1], value.shape[-1])
    if centre is None:
        return out
    heads = query.shape[-3]
    along = dot_with_one(wide(query), repeat_heads(sum_of_tokens(wide(key)), heads)) if along is None else along
    return out + along * repeat_heads(centre, heads)


def recorded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def about_mean(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Values (..., L, E) less their mean where products are narrow, and what they lost (..., 1, E), or None.

    The mean of the values is most of a sum whose weights do not depend on it, and in the gradients of queries and keys
    it cancels: rounded with the products, it would be most of their error. Times the sum of the weights it is added
    last, wide. What is added is the mean of what was taken off: v - mean rounds to v again where the mean is below its
    last digit.
    """
    if not multiplies_narrow(value, dtype) or not value.shape[-2]:
        return value, None
    mean = sum_of_tokens(wide(value.detach())) / value.shape[-2]
    near = (value - mean).to(dtype)
    return near, mean - sum_of_tokens(wide(near.detach())) / value.shape[-2]


def fraction(
    query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, *, is_causal: bool = False, chunk: int = 128
) -> tuple[Tensor, Tensor]:
    """`feature_product` and the sum of its weights, (..., H, Lq, E) and (..., H, Lq, 1)."""
    E = value.shape[-1]
    if is_causal or shards.answerer() is not None:  # which sends both in one message
        columns = F.pad(value, (0, 1), value=1.0)  # ones: one product gives numerator and denominator
        if columns.is_cuda:
            columns = F.pad(columns, (0, -columns.shape[-1] % 8))  # tensor cores want rows of 16 bytes
        sums = feature_product(query, key, columns, dtype, is_causal=is_causal, chunk=chunk)
        return sums[..., :E], sums[..., E : E + 1]
    # The sum over keys comes first: no column of ones, for which the values would have to be copied. Written as a sum
    # and not as a product of matrices, a compiler takes it where it makes the features.
    # Features that learn are rounded as products take them and stay wide: gradients from above and below nearly cancel.
    query, key = factor(query, dtype), factor(key, dtype)
    if recorded(query, key):
        query, key = wide(query), wide(key)
    total = key.sum(-2, keepdim=True, dtype=wide(key).dtype)
    total = (query * repeat_heads(total, query.shape[-3])).sum(-1, keepdim=True)
    return feature_product(query, key, value, dtype, along=total), total


def sum_of_tokens(x: Tensor) -> Tensor:
    """x (..., L, F) summed over its tokens, (..., 1, F), span by span: one sum over all keeps little of a GPU busy."""
    return _in_spans(x).sum(-2).sum(-2, keepdim=True)


def dot_with_one(x: Tensor, y: Tensor) -> Tensor:
    """x_t.y for x (..., L, F) and one y (..., 1, F), (..., L, 1). The gradient of y is a `sum_of_tokens`."""
    spans = _in_spans(x)
    y = y.unsqueeze(-3).expand(*y.shape[:-2], spans.shape[-3], *y.shape[-2:])
    return (spans * y).sum(-1, keepdim=True).flatten(-3, -2)


def sums_seen(tensors: Sequence[Tensor], rows: int, is_causal: bool) -> tuple[Tensor, ...]:
    """Each (..., Lk, F) summed over the keys that each row sees, (..., 1, F), or in the causal form (..., rows, F)."""
    if not is_causal:
        return shards.summed(*(sum_of_tokens(x) for x in tensors))
    return running([fit_length(x, rows) for x in tensors])


def running(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each (..., L, F) summed over the tokens up to each one."""
    sums, before = [x.cumsum(-2) for x in tensors], shards.after(*(x.sum(-2, keepdim=True) for x in tensors))
    return tuple(sums) if before is None else tuple(a + b for a, b in zip(sums, before, strict=True))


def peak(logits: Tensor) -> Tensor:
    """The largest of logits (..., L, 1), (..., 1, 1), without gradient; the least number where there are none."""
    least = logits.new_full((*logits.shape[:-2], 1, 1), torch.finfo(logits.dtype).min)
    found = logits.amax(-2, keepdim=True) if logits.shape[-2] else least
    top: Tensor = shards.largest(found)
    return top


def ones_for(x: Tensor) -> Tensor:
    """The weights (..., 1, L, 1) of tokens x (..., H, L, D) that all count."""
    return x.new_ones(()).expand(*x.shape[:-3], 1, x.shape[-2], 1)


def weighted(x: Tensor, weights: Tensor | None) -> Tensor:
    return x if weights is None else x * weights


def count_of(x: Tensor, weights: Tensor | None) -> Tensor | float:
    """The number of tokens of x (..., L, F) that count, or the sum of their weights (..., L, 1); never 0."""
    if shards.answerer() is not None:  # one worker may have weights and another none: the same shape from both
        weights = ones_for(x) if weights is None else weights
        return shards.summed(weights.expand(*x.shape[:-3], 1, -1, 1).sum(-2, keepdim=True))[0].clamp(min=TINY)
    return max(1, x.shape[-2]) if weights is None else weights.sum(-2, keepdim=True).clamp(min=TINY)


def for_every_token(x: Tensor, length: int) -> Tensor:
    """One token (..., 1, F) as (..., length, F), all of them the same memory where that is possible. Its gradient is a
    `sum_of_tokens`.
    """
    like = _in_spans(x.new_empty(()).expand(length, 1))
    x = x.unsqueeze(-3).expand(*x.shape[:-2], like.shape[0], 1, x.shape[-1])
    return x.expand(*x.shape[:-2], like.shape[1], x.shape[-1]).flatten(-3, -2)


def _in_spans(x: Tensor) -> Tensor:
    """x (..., L, F) as (..., n, L / n, F). An exported program, which may be for any length, keeps n = 1."""
    length = x.shape[-2]
    whole = torch.compiler.is_exporting() or length == 0 or length % SPAN != 0
    return x.unsqueeze(-3) if whole else x.unflatten(-2, (length // SPAN, SPAN))


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in at least float32. For bfloat16 inputs a GPU multiplies bfloat16 numbers and sums them in float32.

    Its range is that of float32, so that long sums do not overflow; float16 inputs are multiplied in float32.
    """
    return wide(factor(a, dtype) @ factor(b, dtype))


def sums_of_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a^T b as `product` takes it, (..., L, D), (..., L, E) -> (..., D, E); gradients as rows, see `_Sums`."""
    a, b = factor(a, dtype), factor(b, dtype)
    return wide(_Sums.apply(a, b) if _plain(a, b) else a.mT @ b)


def pair_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T as `product` takes it, (..., L, D), (..., S, D) -> (..., L, S); gradients as rows, see `_Sums`."""
    a, b = factor(a, dtype), factor(b, dtype)
    return wide(_Pairs.apply(a, b) if _plain(a, b) else a @ b.mT)


def _plain(a: Tensor, b: Tensor) -> bool:
    return a.shape[:-2] == b.shape[:-2] and not transformed()


class _Sums(torch.autograd.Function):
    """a^T b. Autograd would take it as a product with a^T, whose gradient (D, L) lies across the rows of `a`: all that
    reads it next would jump through memory.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.mT @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return _Pairs.apply(b, grad) if wanted[0] else None, a @ grad if wanted[1] else None


class _Pairs(torch.autograd.Function):
    """a b^T, with the gradient of `b` as rows, as in `_Sums`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wanted, grad = ctx.needs_input_grad, grad.contiguous()  # once for both products
        return grad @ b if wanted[0] else None, _Sums.apply(grad, a) if wanted[1] else None


def factor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `product` multiplies it.

    Features that have several uses, or are put together from parts (cat, stack), are taken to it early: a compiler
    then writes them down once, in the narrow dtype.
    """
    return x.to(dtype) if multiplies_narrow(x, dtype) else wide(x)


def multiplies_narrow(x: Tensor, dtype: torch.dtype) -> bool:
    return x.is_cuda and dtype == torch.bfloat16


def written_down(x: Tensor) -> Tensor:
    """x itself, which a compiler then computes once, into memory, and not again in every kernel that reads it."""
    return torch.as_strided(x, x.shape, x.stride()) if torch.compiler.is_compiling() else x


def fit_length(x: Tensor, length: int) -> Tensor:
    """x (..., L, D) cut off, or padded with zeros, to (..., length, D)."""
    x = x[..., :length, :]
    return F.pad(x, (0, 0, 0, length - x.shape[-2]))


def _causal_product(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, chunk: int) -> Tensor:
    """Sums over earlier chunks, plus a masked C x C product within each. Rows beyond the last key see all keys.

    Memory: L (D + E) + (L/C) D E.
    """
    length, key_heads = query.shape[-2], key.shape[-3]
    chunk = max(1, min(chunk, length))
    count = max(1, -(-length // chunk))
    # Keys that no row may see are cut off; missing ones are padded with zeros, which add nothing.
    key, value = (_chunks(fit_length(x, length), count, chunk) for x in (key, value))
    groups = query.shape[-3] // max(1, key_heads)
    query = _chunks(query.unflatten(-3, (key_heads, groups)), count, chunk)  # (..., Hk, G, n, C, D)
    rows = query.transpose(-4, -3).flatten(-3, -2)  # (..., Hk, n, G C, D)

    # Shift before summing: taking the own chunk off again would let the future in through rounding.
    chunk_sums = sums_of_products(key, value, dtype)
    earlier = F.pad(chunk_sums, (0, 0, 0, 0, 1, -1)).cumsum(-3)
    before = shards.after(chunk_sums.sum(-3, keepdim=True))
    earlier = earlier if before is None else earlier + before[0]
    within = pair_products(rows, key, dtype).unflatten(-2, (-1, chunk)).tril().flatten(-3, -2)
    out = product(rows, earlier, dtype) + product(within, value, dtype)
    out = out.unflatten(-2, (-1, chunk)).transpose(-4, -3)
    return out.flatten(-3, -2)[..., :length, :].flatten(-4, -3)


def _chunks(x: Tensor, count: int, chunk: int) -> Tensor:
    """(..., L, D) padded with zeros to (..., n, C, D)."""
    return F.pad(x, (0, 0, 0, count * chunk - x.shape[-2])).unflatten(-2, (count, chunk))


def pair_weights(features_q: Tensor, features_k: Tensor, is_causal: bool = False) -> Tensor:
    """q_i.k_j for queries (..., H, Lq, D) and keys (..., Hk, Lk, D), (..., H, Lq, Lk); causal ones 0 for later keys."""
    weights = (fold_groups(features_q, features_k.shape[-3]) @ features_k.mT).reshape(
        *features_q.shape[:-1], features_k.shape[-2]
    )
    return weights.tril() if is_causal else weights


def one_hot_weights(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The weights of a mechanism `function(call, **options)`, (..., H, Lq, Lk): what it makes of one-hot values.

    In at least float32. For mechanisms whose weights do not depend on the values.
    """

    @functools.wraps(function)
    def weights(call: Call, **options: Any) -> Tensor:
        query, key = wide(call.query), wide(call.key)
        tokens = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], key.shape[-2])
        tokens = without_absent(tokens, call.key_mask)
        return function(call._replace(query=query, key=key, value=tokens, dropout_p=0.0), **options)

    return weights
