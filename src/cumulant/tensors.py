"""What several rooms do with tensors of heads and tokens.

Shape legend: ... leading dimensions, H query heads, Hk key heads, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from .tracing import is_plain

ABSENT = float("-inf")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch on `count` threads for a while. On small tensors several only wait for each other: take 1."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wide(x: Tensor) -> Tensor:
    """x in at least float32, in which sums are kept."""
    return x if x.dtype == torch.float64 else x.float()


def one_batch(x: Tensor, lead: torch.Size) -> Tensor:
    """x (..., H, L, D) as (B, H, L, D). What has that shape stays itself: each view costs time in the backward pass."""
    if len(lead) == 1 and x.shape[:-3] == lead:
        return x
    return x.expand(*lead, *x.shape[-3:]).reshape(prod(lead), *x.shape[-3:])


def in_line(x: Tensor) -> Tensor:
    """x with the entries of a token side by side, which torch's fused kernels take for granted where they are called
    past `F.scaled_dot_product_attention`: they would read whatever lies there."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fold_groups(query: Tensor, key_heads: int) -> Tensor:
    """Query (..., H, Lq, D) as (..., Hk, G Lq, D): heads that share a key head become more rows of it."""
    return query.unflatten(-3, (key_heads, query.shape[-3] // max(1, key_heads))).flatten(-3, -2)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key heads (..., Hk, L, D) as (..., H, L, D): each serves H / Hk query heads in a row, as in SDPA."""
    own = x.shape[-3]
    if own in (heads, 0):
        return x
    return x.unsqueeze(-3).expand(*x.shape[:-2], heads // own, *x.shape[-2:]).flatten(-4, -3)


def heads_of(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Heads of x (..., H, L, D) by their numbers; a view where these are evenly spaced. No index travels to a GPU."""
    steps = {b - a for a, b in pairwise(heads)}
    if len(steps) <= 1 and min(steps, default=1) > 0:
        return x[..., heads[0] : heads[-1] + 1 : min(steps, default=1), :, :]
    return torch.stack([x.select(-3, head) for head in heads], -3)


def nothing(shape: Sequence[int], first: Tensor, *others: Tensor | None) -> Tensor:
    """Zeros of a shape, of the kind of the first input, that stay in the graph of all, which get gradients of 0.

    Inputs are tokens (..., L, D) and masks (..., L), of which only weights have a gradient.
    """
    inputs = [x for x in (first, *others) if x is not None and x.is_floating_point()]
    way_back = sum(x[..., :0].sum().to(first.dtype) for x in inputs)
    return first.new_zeros(shape) + way_back


def broken(*tensors: Tensor) -> Tensor:
    """Which tokens (..., L) of tensors (..., L, D) have an entry that is no finite number in one of them."""
    found = [~x.isfinite().all(-1) for x in tensors]
    return reduce(torch.logical_or, found)


def spoiled(rows: Tensor, tokens: Tensor, last: Tensor) -> Tensor:
    """Rows (..., Lq, E) with NaN in those that see one of the `tokens` (..., Lk), true or not: row i sees those up to
    `last` (Lq,). With 0 in such tokens themselves, no row before them hears of them: 0 times NaN would be NaN."""
    if not tokens.shape[-1]:
        return rows
    seen = tokens.cumsum(-1)[..., last.clamp(max=tokens.shape[-1] - 1)] > 0
    return rows.masked_fill(seen.unsqueeze(-1), float("nan"))


def without_absent(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (..., H, L, D) with 0 in the tokens that a key mask (..., L) leaves out, whatever they hold."""
    return x if key_mask is None else x.masked_fill((key_mask == 0)[..., None, :, None], 0)


def log_weights(key_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What a key mask (..., Lk), bool or weights w >= 0, adds to the logits: log w, -inf where absent; (..., 1, Lk)."""
    if key_mask is None:
        return None
    present = key_mask != 0
    if key_mask.dtype == torch.bool:
        added = torch.zeros((), dtype=like.dtype, device=like.device)
    else:
        # In the wider of both dtypes: a small weight is 0 in float16, its logarithm is not.
        weight = torch.where(present, key_mask, 1)
        added = weight.to(torch.promote_types(key_mask.dtype, like.dtype)).log().to(like.dtype)
    return torch.where(present, added, ABSENT).unsqueeze(-2)


def inverse(order: Tensor) -> Tensor:
    """Where each place of the orders (N, L), permutations, went: `x[order][inverse(order)]` is x."""
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(1, order, places)


def softmax_or_zero(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; a row of -inf alone gives 0, and gradients that are 0 instead of NaN."""
    if not logits.shape[-1]:
        return logits.softmax(-1)
    empty = logits.detach().amax(-1, keepdim=True) == ABSENT
    if logits.device.type == "cpu" and is_plain(logits) and not empty.any():  # elsewhere that waits for the device
        return logits.softmax(-1)
    return logits.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
