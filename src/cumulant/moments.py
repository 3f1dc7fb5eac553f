"""Moments of keys and values: the state that cumulant attention needs, and the reference for every kernel.

Shape legend: ... leading dimensions, L tokens, D key width, E value width, Q queries.

A `Moments` holds centred sums over a set of weighted tokens (a tilde is "minus the weighted mean"):

    W = sum w    k_mean    v_mean    S = sum w k~ v~^T    P = sum w k~^2    T = sum w k~^2 v~^T

and, for the full third order, P = sum w k~ k~^T (D x D) and T = sum w k~ k~^T v~ (D x D x E). Merging two sets
needs only their moments (Chan's update, carried to third order), so chunks, streams, windows, ragged batches
and machines all reduce to `merge`. Nothing here is ever a raw sum, and means are kept in float64 where the device has
it: of two means far from the origin a merge needs the small difference. So keys and values anywhere cost no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import check_dtype, check_mask, check_order, check_scale
from .held import Held, check_tokens
from .held import statistics_dtype as statistics_dtype
from .tracing import can_be_read, without_autocast

Centred = tuple[tuple[Tensor, Tensor], Tensor]  # a mean as the sum of two, and the deviations from it


def means_dtype(x: Tensor) -> torch.dtype:
    """Means that merge: a float32 mean of keys at 1000 would be off by 1e-4 of their spread."""
    return x.dtype if x.device.type == "mps" else torch.float64


FEW = 16  # tokens up to which float64 costs next to nothing, and so few may cancel exactly


def exact_dtype(x: Tensor) -> torch.dtype:
    """For terms that nearly cancel: float64 where the device has it."""
    return statistics_dtype(x.dtype) if x.device.type == "mps" else torch.float64


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0; its gradient is finite in both cases."""
    return torch.where(b > 0, a, 0) / torch.where(b > 0, b, 1)


def in_units(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (..., L) with a largest in [1, 2), and their unit (..., 1), 1 where all are 0; in float64 where there is.

    Averages do not depend on the unit, and sums of tiny or huge weights, or narrow products with them, do. The unit is
    a power of two, so that no weight is rounded: large terms of a row may cancel, and would leave that rounding. Nor is
    any lost, as in float32: a causal row may see none but weights 1e-60 times one that comes after it.
    """
    weights = weights.to(exact_dtype(weights))
    unit = weights.detach().amax(-1, keepdim=True).log2().floor().exp2()
    unit = torch.where(unit > 0, unit, 1)
    return weights / unit, unit


class Moments(NamedTuple):
    """Centred moments of a set of tokens. A tuple of tensors, so it passes through compile, vmap and pytrees.

    Fields that the order does not need are None: order 1 keeps no S, order 2 no P and T.
    """

    weight: Tensor  # (...)
    key_mean: Tensor  # (..., D)
    value_mean: Tensor  # (..., E)
    S: Tensor | None = None  # (..., D, E)
    P: Tensor | None = None  # (..., D), or (..., D, D) when full
    T: Tensor | None = None  # (..., D, E), or (..., D, D, E) when full

    @property
    def order(self) -> int:
        return 1 if self.S is None else 2 if self.T is None else 3

    @property
    def widths(self) -> tuple[int, int]:
        """D and E."""
        return self.key_mean.shape[-1], self.value_mean.shape[-1]

    @property
    def full(self) -> bool:
        return self.P is not None and self.P.ndim > self.key_mean.ndim

    @classmethod
    def of(
        cls, key: Tensor, value: Tensor, *, order: int = 3, full: bool = False, key_mask: Tensor | None = None
    ) -> Moments:
        """Moments of key (..., L, D) and value (..., L, E), in at least float32.

        key_mask, broadcastable to (..., L), is bool (True takes part) or non-negative weights. Tokens of weight
        zero do not matter, whatever they hold. The sum of weights is 0 or lies between 1e-30 and 1e30 (float64: 1e-246
        and 1e246), so that no sum leaves its range. L = 0 gives the identity of `merge`. Cost: L D E (L D^2 E full).
        """
        check_order(order, full)
        check_tokens(key, value, heads=False)
        if key_mask is not None:
            check_mask(key_mask, key, key.shape[:-2])
            _check_total(key_mask, statistics_dtype(key.dtype))
        return centred_sums(key, value, order, full, key_mask, keep=True)

    def merge(self, other: Moments) -> Moments:
        """Moments of the union of two disjoint sets. Associative, commutative; the empty set is the identity."""
        self._check_same_kind(other)
        W = self.weight + other.weight
        dk, dv = other.key_mean - self.key_mean, other.value_mean - self.value_mean
        part = ratio(other.weight, W).unsqueeze(-1)
        key_mean, value_mean = self.key_mean + part * dk, self.value_mean + part * dv
        if self.S is None or other.S is None:
            return Moments(W, key_mean, value_mean)
        a, b = self._about(key_mean, value_mean), other._about(key_mean, value_mean)
        return Moments(W, key_mean, value_mean, *(_sum(x, y) for x, y in zip(a, b, strict=True)))

    def union(self, add: Callable[..., tuple[Tensor, ...]]) -> Moments:
        """Moments of the union of many disjoint sets, over which `add` sums tensors: `added`, or a sum over workers.

        Means first, then sums about the mean of all: two sums, of 1 + D + E and of D + 2 D E numbers at order 3.
        """
        W, (k, v) = self.weight.to(self.key_mean.dtype), self[1:3]  # of a rounded sum means far from 0 would be off
        weight, *means = add(W, W.unsqueeze(-1) * k, W.unsqueeze(-1) * v)
        key_mean, value_mean = (ratio(x, weight.unsqueeze(-1)) for x in means)
        about = [x for x in self._about(key_mean, value_mean) if x is not None]
        return Moments(weight.to(self.weight.dtype), key_mean, value_mean, *(add(*about) if about else ()))

    def kept(self) -> tuple[Tensor, ...]:
        """The fields that are there."""
        return tuple(x for x in self if x is not None)

    def filled(self, fields: Iterable[Tensor]) -> Moments:
        """Moments of the same kind with other fields, in the order of `kept`."""
        new = iter(fields)
        return Moments._make(None if x is None else next(new) for x in self)

    def remove(self, other: Moments) -> Moments:
        """Moments of the set without the tokens of `other`, which must be in it: the inverse of `merge`.

        Subtraction loses digits when what is left is much smaller than what was taken away; for long windows
        use `SlidingWindow`, which rebuilds the state now and then.
        """
        self._check_same_kind(other)
        W = self.weight - other.weight
        _check_enough(self.weight, W)
        W = torch.where(4 * torch.finfo(W.dtype).eps * self.weight < W, W, 0)
        left = W > 0
        part = ratio(other.weight, W).unsqueeze(-1)
        key_mean = self.key_mean + part * (self.key_mean - other.key_mean)
        value_mean = self.value_mean + part * (self.value_mean - other.value_mean)
        key_mean, value_mean = key_mean * left.unsqueeze(-1), value_mean * left.unsqueeze(-1)
        if self.S is None or other.S is None:
            return Moments(W, key_mean, value_mean)
        # Second and third sums about a common point subtract; then that point moves to the new mean.
        taken = other._about(self.key_mean, self.value_mean)
        about_old = (_sum(x, None if y is None else -y) for x, y in zip(self[3:], taken, strict=True))
        a, b = ((new - old).to(W.dtype) for new, old in ((key_mean, self.key_mean), (value_mean, self.value_mean)))
        S, P, T = _uncentred(W, a, b, *about_old)

        def kept(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.where(left.reshape(left.shape + (1,) * (x.ndim - left.ndim)), x, 0)

        return Moments(W, key_mean, value_mean, kept(S), kept(P), kept(T))

    def apply(self, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention of query (..., Q, D) over the set: <v> + S^T q + 1/2 T^T q^2 with averages, (..., Q, E).

        The query is multiplied by `scale`, D**-0.5 unless given. An empty set gives 0. Cost: Q D E.
        """
        check_scale(scale)
        self._check_query(query)
        dtype = self.weight.dtype
        q = query.to(dtype) * (query.shape[-1] ** -0.5 if scale is None else scale)
        out = self.value_mean.to(dtype).unsqueeze(-2)
        if self.S is None:
            # Every query gets the mean; `where` keeps query and key in the graph, with gradient zero.
            never = torch.zeros((), dtype=torch.bool, device=query.device)
            unused = q.sum(-1, keepdim=True) + self.key_mean.sum(-1)[..., None, None].to(dtype)
            return torch.where(never, unused, out).to(query.dtype)
        over_W = ratio(torch.ones_like(self.weight), self.weight)[..., None, None]
        with without_autocast(query.device.type):
            out = out + q @ (self.S * over_W).to(dtype)
            if self.T is not None:
                features = (q.unsqueeze(-1) * q.unsqueeze(-2)).flatten(-2) if self.full else q * q
                T = self.T.flatten(-3, -2) if self.full else self.T
                out = out + features @ (T * (0.5 * over_W)).to(dtype)
        return out.to(query.dtype)

    def to(self, *args: Any, **kwargs: Any) -> Moments:
        """As `Tensor.to`, for every field; they stay floating point."""
        check_dtype("what moments become", self.weight[..., :0].to(*args, **kwargs))
        return Moments._make(None if x is None else x.to(*args, **kwargs) for x in self)

    def _about(self, key: Tensor, value: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """S, P and T with deviations from (key, value) in place of those from the means."""
        a, b = ((mean - to).to(self.weight.dtype) for mean, to in ((self.key_mean, key), (self.value_mean, value)))
        return _shifted(self.weight, a, b, self.S, self.P, self.T)

    def _check_same_kind(self, other: Moments) -> None:
        if not isinstance(other, Moments):
            raise TypeError(f"other must be a Moments, got {type(other).__name__}")
        if (self.order, self.full) != (other.order, other.full):
            raise ValueError(
                f"moments of order {self.order} (full={self.full}) do not combine with "
                f"order {other.order} (full={other.full}); make both with the same order and full"
            )
        mine, its = (Held(m.weight.shape, *m.widths, m.weight.dtype, m.weight.device) for m in (self, other))
        if (mine.key_width, mine.value_width) != (its.key_width, its.value_width):
            raise ValueError(f"other must be moments of widths {self.widths}, got {other.widths}")
        if mine[3:] != its[3:]:
            places = f"{mine.dtype} on {mine.device}, other {its.dtype} on {its.device}"
            raise TypeError(f"moments must share dtype and device, got {places}")
        if mine.lead != its.lead and not _broadcast(mine.lead, its.lead):
            raise ValueError(f"other must be moments of {tuple(mine.lead)}, got {tuple(its.lead)}")

    def _check_query(self, query: Tensor) -> None:
        check_dtype("query", query)
        wanted = (*self.weight.shape, "queries", self.key_mean.shape[-1])
        if query.ndim < 2 or query.shape[-1] != wanted[-1] or not _broadcast(query.shape[:-2], self.weight.shape):
            raise ValueError(f"query must have shape ({', '.join(map(str, wanted))}), got {tuple(query.shape)}")
        if query.device != self.weight.device:
            raise ValueError(f"query must be on the device of the moments, {self.weight.device}, got {query.device}")


def _broadcast(a: torch.Size, b: torch.Size) -> bool:
    """Whether leading dimensions go together."""
    if a == b:
        return True
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


def _check_total(key_mask: Tensor, dtype: torch.dtype) -> None:
    """Raises where sums with such weights would have few digits or none; on an accelerator nobody looks."""
    if not (key_mask.is_floating_point() and key_mask.numel() and can_be_read(key_mask)):
        return
    totals, range_ = key_mask.detach().sum(-1, dtype=torch.float64), torch.finfo(dtype)
    least, most = range_.tiny**0.8, range_.max**0.8
    outside = ((totals < least) & (totals > 0)) | (totals > most)
    if bool(outside.any()):
        raise ValueError(
            f"weights of key_mask must sum to 0 or to a number between {least:.0e} and {most:.0e} for {dtype} tokens, "
            f"got {float(totals[outside][0]):g}; multiply all by one number: averages do not depend on it"
        )


def _check_enough(before: Tensor, left: Tensor) -> None:
    """Raises where more is removed than there is; on an accelerator nobody looks."""
    if can_be_read(left):
        rounding = 64 * torch.finfo(left.dtype).eps
        if bool((left < -rounding * before).any()):
            most = float(before.max())
            raise ValueError(
                f"other holds more than these moments of weight {most:g}; remove only what was merged before"
            )


def centred_sums(
    key: Tensor, value: Tensor, order: int, full: bool, key_mask: Tensor | None, *, keep: bool = False
) -> Moments:
    """`Moments.of`. Without `keep` all is in the statistics' dtype: for moments that are read and never merge."""
    weights, weight, _, (k_mean, key), (v_mean, value) = _tokens(key, value, key_mask)
    dtype = means_dtype(key) if keep else key.dtype
    key_mean, value_mean = (mean.to(dtype) + rest for mean, rest in (k_mean, v_mean))
    if order == 1:
        return Moments(weight, key_mean, value_mean)
    weighted = weights.unsqueeze(-1) * key
    with without_autocast(key.device.type):
        S = weighted.mT @ value
        if order == 2:
            return Moments(weight, key_mean, value_mean, S)
        if full:
            P = weighted.mT @ key
            pairs = (weighted.unsqueeze(-1) * key.unsqueeze(-2)).flatten(-2)
            T = (pairs.mT @ value).unflatten(-2, P.shape[-2:])
        else:
            squares = weighted * key
            P, T = squares.sum(-2), squares.mT @ value
    return Moments(weight, key_mean, value_mean, S, P, T)


def full_third_by_pairs(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """What `Moments.of(key, value, full=True)` gives query (..., Q, D), by way of u = q.k~ for each pair of tokens:

        <v> + <(u + u^2 / 2) v~>

    Cost: Q L (D + E), and a (Q, L) tensor: for short sequences far below the (L + Q) D^2 E of the moments.
    """
    _, _, share, (_, key), (mean, value) = _tokens(key, value, key_mask)
    with without_autocast(query.device.type):
        u = (query.to(key.dtype) * scale) @ key.mT
        return ((mean[0] + mean[1]).unsqueeze(-2) + (u + 0.5 * u * u) @ (share * value)).to(query.dtype)


def _tokens(key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Centred, Centred]:
    """Weights (..., L), their sum (...), the share of each (..., L, 1), and mean and deviations of keys and of values,
    in at least float32."""
    dtype = statistics_dtype(key.dtype)
    key, value = key.to(dtype), value.to(dtype)
    if key_mask is None:
        weights = key.new_ones(()).expand(key.shape[:-1])
    else:
        weights = key_mask.to(dtype).expand(torch.broadcast_shapes(key_mask.shape, key.shape[:-1]))
        absent = (weights == 0).unsqueeze(-1)
        key, value = key.masked_fill(absent, 0), value.masked_fill(absent, 0)
    weight = weights.sum(-1)
    share = ratio(weights, weight.unsqueeze(-1)).unsqueeze(-1)
    return weights, weight, share, _centre(key, share), _centre(value, share)


def _centre(x: Tensor, share: Tensor) -> Centred:
    """Weighted mean, in two parts, and deviations from it; a second pass takes out what rounding left in the first."""
    mean = (share * x).sum(-2, keepdim=True)
    x = x - mean
    rest = (share * x).sum(-2, keepdim=True)
    return (mean.squeeze(-2), rest.squeeze(-2)), x - rest


def added(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each summed over its first dimension, that of the sets in `Moments.union`."""
    return tuple(x.sum(0) for x in tensors)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return None if x is None or y is None else x + y


def _shifted(
    W: Tensor, a: Tensor, b: Tensor, S: Tensor | None, P: Tensor | None, T: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Centred sums as sums about a point that lies (a, b) = mean - point away.

    S + W a b^T;  P + W a^2;  T + 2 a S + P b^T + W a^2 b^T (and the symmetric outer products when full).
    """
    if S is None:
        return None, None, None
    Wa, row = W.unsqueeze(-1) * a, b.unsqueeze(-2)
    S_about = S + Wa.unsqueeze(-1) * row
    if P is None or T is None:
        return S_about, None, None
    if T.ndim == S.ndim:
        P_about = P + Wa * a
        return S_about, P_about, T + 2 * a.unsqueeze(-1) * S + P_about.unsqueeze(-1) * row
    P_about = P + Wa.unsqueeze(-1) * a.unsqueeze(-2)
    cross = a[..., :, None, None] * S.unsqueeze(-3)
    T_about = T + cross + cross.transpose(-3, -2) + P_about.unsqueeze(-1) * row.unsqueeze(-2)
    return S_about, P_about, T_about


def _uncentred(
    W: Tensor, a: Tensor, b: Tensor, S: Tensor | None, P: Tensor | None, T: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The inverse of `_shifted`: sums about a point become sums about the mean, which lies (a, b) away from it."""
    Wa, row = W.unsqueeze(-1) * a, b.unsqueeze(-2)
    if S is None:
        return None, None, None
    S_centred = S - Wa.unsqueeze(-1) * row
    if P is None or T is None:
        return S_centred, None, None
    if T.ndim == S.ndim:
        P_centred = P - Wa * a
        return S_centred, P_centred, T - 2 * a.unsqueeze(-1) * S_centred - P.unsqueeze(-1) * row
    P_centred = P - Wa.unsqueeze(-1) * a.unsqueeze(-2)
    cross = a[..., :, None, None] * S_centred.unsqueeze(-3)
    T_centred = T - cross - cross.transpose(-3, -2) - P.unsqueeze(-1) * row.unsqueeze(-2)
    return S_centred, P_centred, T_centred
