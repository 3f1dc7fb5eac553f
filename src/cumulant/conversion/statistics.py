"""How far each order of cumulant attention is from softmax in one layer, on a few of its queries.

Shape legend: B batch, H query heads, Lk keys, m sampled queries, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..around import mean_logits, means
from ..attention import scores
from ..call import Call
from ..tensors import log_weights, softmax_or_zero

ORDERS = (1, 2, 3)


@dataclass
class HeadSums:
    """Sums over sampled queries, each (H,): squared sizes of errors, terms and outputs; counts; moments of logits."""

    queries: Tensor
    size: Tensor  # ||softmax output||^2
    error: dict[int, Tensor]  # ||order n - softmax||^2
    mean_error: dict[int, Tensor]  # the same around the mean query; empty for causal rows
    left_out: dict[int, Tensor]  # ||what order n leaves out, to fourth order||^2
    negative: dict[int, Tensor]  # share of negative weight, summed over queries
    variance: Tensor  # of the logits over the keys
    largest: Tensor  # |logit - mean| at its largest

    def add(self, other: HeadSums) -> HeadSums:
        """The sums over the queries of both."""
        return self._with(other, lambda name, a, b: torch.maximum(a, b) if name == "largest" else a + b)

    def beside(self, other: HeadSums) -> HeadSums:
        """The heads of both, those of `other` last."""
        return self._with(other, lambda _, a, b: torch.cat((a, b)))

    def _with(self, other: HeadSums, both: Callable[[str, Tensor, Tensor], Tensor]) -> HeadSums:
        made: dict[str, Any] = {}
        for name, a in vars(self).items():
            b = getattr(other, name)
            made[name] = {n: both(name, a[n], b[n]) for n in a} if isinstance(a, dict) else both(name, a, b)
        return HeadSums(**made)

    def spread(self) -> list[float]:
        """Root mean variance of the logits over the keys: the small parameter of the expansion."""
        return (self.variance / self.queries).sqrt().tolist()

    def relative(self, sums: Tensor) -> list[float]:
        return (sums / self.size).sqrt().tolist()


def head_sums(call: Call, queries: int, generator: torch.Generator, prefix: int = 0) -> HeadSums:
    """Statistics of one call on up to `queries` sampled queries. Cost: m Lk (D + E) a head and sequence.

    The first `prefix` queries have a mean of their own.

    With u = q.k - <q.k> (averages over the keys), softmax is  <v> + <u v~> + 1/2 <u^2 v~> +
    1/6 (<u^3 v~> - 3 <u^2> <u v~>) + ...; order 3 keeps of the third term its part that is diagonal in the keys.
    """
    q, k, v = (x.detach().double() for x in (call.query, call.key, call.value))
    groups, Lq, Lk = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    at = torch.randperm(Lq, generator=generator)[:queries].sort().values.to(q.device)
    k, v, every, q = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), q, q.index_select(2, at)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    W = torch.ones(q.shape[0], 1, len(at), Lk, dtype=q.dtype, device=q.device)
    valid = torch.ones(q.shape[0], len(at), dtype=torch.bool, device=q.device)
    if call.key_mask is not None:
        W = W * call.key_mask.double()[:, None, None, :]
        if Lq == Lk:
            valid = (call.key_mask != 0)[:, at]
    if call.is_causal:
        W = W * (torch.arange(Lk, device=q.device) <= at[:, None])
    share = W / W.sum(-1, keepdim=True).clamp(min=torch.finfo(W.dtype).tiny)
    logits = q @ k.mT * scale
    u = logits - (share * logits).sum(-1, keepdim=True)
    exact = torch.softmax(u.masked_fill(W == 0, -torch.inf) + W.clamp(min=1e-300).log(), -1).nan_to_num() @ v
    variance = (share * u * u).sum(-1)
    full = share * (1 + u + 0.5 * (u * u - variance.unsqueeze(-1)))
    cube = u**3 - 3 * variance.unsqueeze(-1) * u
    fourth = share / 6 * (cube - (share * cube).sum(-1, keepdim=True))
    beyond = {1: share * u, 2: full - share * (1 + u), 3: full + fourth}
    keep = valid[:, None, :].expand(-1, q.shape[1], -1)

    def total(x: Tensor) -> Tensor:
        """Sum of x (B, H, m) over valid queries."""
        return x.masked_fill(~keep, 0).sum((0, 2))

    error, left_out, negative = {}, {}, {}
    for order in ORDERS:
        A = scores(q, k, order=order, key_mask=call.key_mask, is_causal=call.is_causal, scale=scale, positions=at)
        error[order] = total((A @ v - exact).square().sum(-1))
        rest = beyond[order] if order < 3 else beyond[3] - A
        left_out[order] = total((rest @ v).square().sum(-1))
        negative[order] = total(A.clamp(max=0).abs().sum(-1) / A.abs().sum(-1).clamp(min=1e-300))
    mean_error = {}
    if not call.is_causal:
        present = None if call.key_mask is None or Lq != Lk else call.key_mask
        for order in ORDERS:
            A = _around_mean(every, k, order, at, present, call.key_mask, scale, min(prefix, Lq))
            mean_error[order] = total((A @ v - exact).square().sum(-1))
    largest = u.masked_fill(W == 0, 0).abs().amax(-1).masked_fill(~keep, 0).amax((0, 2))
    counts = keep.sum((0, 2)).double()
    size = total(exact.square().sum(-1))
    return HeadSums(counts, size, error, mean_error, left_out, negative, total(variance), largest)


def _around_mean(
    query: Tensor,
    key: Tensor,
    order: int,
    at: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    prefix: int,
) -> Tensor:
    """Weights (B, H, m, Lk) of the expansion around the mean query, for the queries `at`: the mean is over all."""
    query, present = Call(query, key, key, query_mask=query_mask).present_queries()
    added, rows, start = log_weights(key_mask, key[..., 0]), [], 0
    for part, mean in means(query, present, prefix):
        mine = at[(start <= at) & (at < start + part.shape[-2])] - start
        w = softmax_or_zero(mean_logits(mean, key, added, scale))
        d = (part.index_select(2, mine) - mean).flatten(0, 1).unsqueeze(1)
        A = scores(d, key.flatten(0, 1).unsqueeze(1), order=order, key_mask=w.flatten(0, 1), scale=scale)
        rows.append(A.view(*query.shape[:2], len(mine), key.shape[-2]))
        start += part.shape[-2]
    return torch.cat(rows, 2)
