"""A stream of tokens in so many places: of too many, those that recent queries tell apart least become one.

Shape legend: B batch, H key heads, G query heads of each, N tokens or clusters, L new tokens, S sampled queries, D, E
widths.

A cluster is W tokens that stand as one, with their mean key and value: its logit is q.k_mean + log W. Two become one
where that costs least, for S queries of late and p, the mean attention that they give to each (Ward's rule):

    cost = p_a p_b / (p_a + p_b) sum_s (q_s.k_a - q_s.k_b)^2 (|v_a - v_b|^2 + 0.3 mean |v - v'|^2)
    p_a += prior W_a age_a^-1/2 / sum_b W_b age_b^-1/2

What nobody looks at merges first, and a token that is looked at (a sink, a name) stays itself; `prior` is the attention
that may still come, to young tokens more than to old ones. No second moments are kept: keys turned by rotary positions
are spread widely in directions that no query has, and an expansion would count them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import check_count, check_mask, check_scale, is_finite
from ..held import Held, check_rows, check_tokens
from ..moments import ratio
from ..tensors import ABSENT, fold_groups, softmax_or_zero, wide
from .statistics import log

ROOM = 1 << 26  # logits at once
PAIRS = 1 << 20  # of tokens that may become one, at once on a CPU
LEVEL = 0.3  # of the mean squared distance of values: two tokens of one value still have two keys


class MergedStream:
    """All tokens so far in at most `tokens` places of a key and a value; no gradients.

        stream = MergedStream(1024)
        out = stream.step(q, k, v)                      # a prompt or the next tokens, (B, G H, L, D) and (B, H, L, D)

    The first `sinks` and the last `recent` tokens are exact, and `chunk` more come in before some are merged. `sample`
    queries of the last `span` tokens are kept, and take places too. The first tokens given, however many, are answered
    as softmax does; those given later meet what was kept, `chunk` at a time. `softcap` c bounds logits x as Gemma 2
    does, c tanh(x / c). Cost a token: G tokens (D + E), and a share of a merge, tokens^2 (sample + E) / (4 chunk).
    """

    def __init__(
        self,
        tokens: int,
        *,
        sinks: int = 4,
        recent: int | None = None,
        chunk: int = 64,
        sample: int = 64,
        span: int = 512,
        prior: float = 0.3,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        recent = max(1, min(64, tokens // 8)) if recent is None and isinstance(tokens, int) else recent
        for name, number, least in (
            ("tokens", tokens, 1),
            ("sinks", sinks, 0),
            ("recent", recent, 1),
            ("chunk", chunk, 1),
            ("sample", sample, 1),
            ("span", span, 1),
        ):
            check_count(name, number, least)
        if isinstance(prior, bool) or not isinstance(prior, int | float) or not (is_finite(prior) and prior >= 0):
            raise ValueError(f"prior must be a number, 0 or more, got {prior!r}")
        check_scale(scale)
        number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
        if softcap is not None and not (number and is_finite(softcap) and softcap > 0):
            raise ValueError(f"softcap must be None or a number above 0, got {softcap!r}")
        assert recent is not None
        self.tokens, self.sinks, self.recent, self.chunk, self.sample = tokens, sinks, recent, chunk, sample
        self.span, self.prior, self.scale, self.softcap = span, prior, scale, softcap
        self.length = 0
        self.key: Tensor | None = None  # (B, H, places, D): sinks, clusters, exact tokens, and free places
        self.value: Tensor | None = None
        self.weight: Tensor | None = None  # (B, H, places)
        self.place: Tensor | None = None  # (B, H, places), where in the sequence, on average
        self.queries: Tensor | None = None  # (B, H, S, D), the sampled ones of late, scaled
        self.used = 0

    @property
    def state(self) -> tuple[Tensor, ...] | None:
        """Every tensor that is kept."""
        if self.key is None or self.value is None or self.weight is None or self.place is None or self.queries is None:
            return None
        return self.key, self.value, self.weight, self.place, self.queries

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Puts change(x) in the place of every tensor x that is kept: sequences selected or repeated, other devices."""
        if self.state is not None:
            self.key, self.value, self.weight, self.place, self.queries = map(change, self.state)

    @torch.no_grad()
    def step(self, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None) -> Tensor:
        """Takes in key (B, H, L, D), value (B, H, L, E) and answers query (B, G H, L, D), each row up to itself.

        weights (B, L) are 0 for tokens that are not there.
        """
        held = None if self.key is None or self.value is None else Held.of(self.key, self.value)
        check_tokens(key, value, held)
        check_rows(query, Held.of(key, value))
        if query.shape[-2] != key.shape[-2] or key.ndim != 4:
            raise ValueError(
                f"a step takes (B, heads, L, width) with as many queries as keys, got query {tuple(query.shape)} and "
                f"key {tuple(key.shape)}"
            )
        if query.dtype != key.dtype:
            raise TypeError(f"query and key must share a dtype, got {query.dtype} and {key.dtype}")
        if weights is not None:
            check_mask(weights, key, key.shape[:1], "weights")
        B, H, L, D = key.shape
        weight = key.new_ones(B, L, dtype=torch.float32) if weights is None else weights.float().expand(B, L)
        place = torch.arange(self.length, self.length + L, device=key.device, dtype=torch.float32).expand(B, H, L)
        weight, scale = weight[:, None].expand(B, H, L), D**-0.5 if self.scale is None else self.scale
        if self.state is None:
            self._begin(key, value)
            self._note(query * scale, H)
            at_once = max(self.places, isqrt(4 * ROOM // (B * H)))  # a merge holds a quarter of the square of them
            for new in _pieces(at_once, key, value, weight, place):
                self._put(*new)
            plain = weights is None and self.softcap is None
            return _causal(query, key, value, None if plain else weight, scale, self.softcap)
        outs = []
        for some, k, v, w, t in _pieces(self.chunk, query, key, value, weight, place):
            if self.used + k.shape[2] > self.places:
                self._merge(*self._held())
            self._put(k, v, w, t)
            held_key, held_value, counts, _ = self._held()
            outs.append(_causal(some, held_key, held_value, counts, scale, self.softcap))
            self._note(some * scale, H)
        return torch.cat(outs, 2) if outs else query.new_zeros(*query.shape[:3], value.shape[-1])

    @property
    def places(self) -> int:
        """Places for tokens: what the sampled queries leave."""
        assert self.key is not None
        return self.key.shape[2]

    def _begin(self, key: Tensor, value: Tensor) -> None:
        """Room for everything."""
        B, H, _, D = key.shape
        E = value.shape[-1]
        places = (self.tokens * (D + E) - self.sample * D) // (D + E + 2)  # with a weight and a place in the text each
        aside = self.tokens - max(0, places)
        if places < self.sinks + self.recent + self.chunk + 1:
            raise ValueError(
                f"tokens={self.tokens} leaves no cluster beside sinks={self.sinks}, recent={self.recent}, chunk="
                f"{self.chunk} and {aside} for sample={self.sample} queries and weights: take more tokens, or less"
            )
        self.key, self.value = key.new_zeros(B, H, places, D), value.new_zeros(B, H, places, E)
        self.weight = key.new_zeros(B, H, places, dtype=torch.float32)
        self.place = torch.zeros_like(self.weight)
        self.queries = key.new_zeros(B, H, 0, D)
        self.used = self.length = 0

    def _held(self) -> tuple[Tensor, ...]:
        assert self.state is not None
        return tuple(x[:, :, : self.used] for x in self.state[:4])

    def _note(self, rows: Tensor, key_heads: int) -> None:
        """Keeps one position in so many of the rows that were answered, those of late."""
        assert self.queries is not None
        groups, L = rows.shape[1] // key_heads, rows.shape[2]
        every = max(1, self.span * groups // self.sample)
        picked = rows[:, :, (-self.length) % every :: every]
        picked = picked[:, :, -max(1, self.sample // groups) :].unflatten(1, (key_heads, groups))
        new = picked.transpose(2, 3).flatten(2, 3)
        self.queries = torch.cat((self.queries, new.to(self.queries.dtype)), 2)[:, :, -self.sample :]
        self.length += L

    def _put(self, *new: Tensor) -> None:
        """Further tokens take the next places; where there are too few, all are brought down to leave a chunk free."""
        if self.used + new[0].shape[2] > self.places:
            self._merge(*(torch.cat(pair, 2) for pair in zip(self._held(), new, strict=True)))
            return
        self._write(new, self.used)

    def _merge(self, *parts: Tensor) -> None:
        assert self.queries is not None
        old = slice(self.sinks, parts[0].shape[2] - self.recent)
        count = self.places - self.sinks - self.recent - self.chunk
        key, value, weight, place = (x[:, :, old] for x in parts)
        later = weight * (self.length + 1 - place).rsqrt()
        prior = self.prior * ratio(later, later.sum(-1, keepdim=True))
        seen = parts[0], parts[2]
        clusters = merged(key, value, weight, place, self.queries, count, seen, prior, self.softcap)
        kept = zip(parts, clusters, strict=True)
        self._write([torch.cat((x[:, :, : self.sinks], y.to(x.dtype), x[:, :, old.stop :]), 2) for x, y in kept], 0)

    def _write(self, parts: Sequence[Tensor], start: int) -> None:
        assert self.state is not None
        self.used = start + parts[0].shape[2]
        for place, new in zip(self.state, parts, strict=False):
            place[:, :, start : self.used] = new


def _pieces(size: int, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors (B, H, L, ...) in pieces of at most so many tokens."""
    return zip(*(x.split(size, 2) for x in parts), strict=True)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def _causal(
    rows: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Softmax of rows (B, G H, L, D) over key (B, H, N, D), of which they are the last L.

    Without weights all are 1, and there is no softcap. Logits are never rounded to 16 bits: in the tens, that is 0.1.
    """
    H, N, L = key.shape[1], key.shape[2], rows.shape[2]
    if weight is None:
        return F.scaled_dot_product_attention(
            rows, key, value, is_causal=True, scale=scale, enable_gqa=rows.shape[1] != H
        )
    outs, at_once = [], max(1, ROOM // max(1, rows.shape[0] * rows.shape[1] * N))
    given, key, value = rows.dtype, wide(key), wide(value)
    places = torch.arange(N, device=key.device)
    for start in range(0, L, at_once):
        some = rows[:, :, start : start + at_once]
        n = some.shape[2]
        logits = wide(fold_groups(some, H)) * scale @ key.mT  # (B, H, G n, N)
        logits = _capped(logits, softcap) + log(weight).unsqueeze(2)
        last = torch.arange(N - L + start, N - L + start + n, device=key.device).repeat(rows.shape[1] // H)
        w = softmax_or_zero(logits.masked_fill(places > last[:, None], ABSENT))
        outs.append((w @ value).to(given).unflatten(2, (-1, n)).flatten(1, 2))
    return torch.cat(outs, 2)


class Clusters(NamedTuple):
    """What stands as one: means, weights W, mean places, and the attention p that each gets."""

    key: Tensor  # (B, H, N, D)
    value: Tensor  # (B, H, N, E)
    weight: Tensor  # (B, H, N)
    place: Tensor  # (B, H, N)
    share: Tensor  # (B, H, N)


def merged(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    place: Tensor,
    queries: Tensor,
    count: int,
    beside: tuple[Tensor, Tensor] | None = None,
    prior: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, ...]:
    """`count` clusters of key (B, H, N, D), value (B, H, N, E), weight and place (B, H, N), for queries (B, H, S, D).

    Queries carry the scale. `beside`, keys and weights, is all that they look at, these among it; these alone unless
    given. Tokens are parted in two, each of one half finds its nearest in the other, and the cheapest of these pairs
    merge, a quarter of all in one round (a half, while there are more than twice too many): N^2 (S + E) / 4 a round.
    """
    seen, weights = (key, weight) if beside is None else beside
    queries, key, value = wide(queries), wide(key), wide(value)
    total = (_capped(queries @ wide(seen).mT, softcap) + log(weights).unsqueeze(-2)).logsumexp(-1, keepdim=True)
    logits = _capped(queries @ key.mT, softcap) + log(weight).unsqueeze(-2)
    share = (logits - total).exp().nan_to_num(0.0, 0.0, 0.0).mean(-2)  # (B, H, N)
    found = Clusters(key, value, weight, place, share if prior is None else share + prior)
    count = max(1, count)
    while (N := found.key.shape[2]) > count:
        found = _round(found, queries, softcap, min(N - count, max(1, N // (2 if N > 2 * count else 4))))
    return found[:4]


def _round(parts: Clusters, queries: Tensor, softcap: float | None, count: int) -> Clusters:
    """The `count` cheapest pairs become one each. Tokens that get as much attention stand in different halves."""
    alike = ratio(parts.share, parts.weight).argsort(-1)
    key, value, weight, place, share = parts = Clusters(*(_taken(x, alike) for x in parts))
    least, partner = _cheapest(_capped(queries @ key.mT, softcap).mT, value, share)
    order = least.argsort(-1)
    gone, stay = order[..., :count], order[..., count:]
    partner = partner.gather(-1, gone)

    def sums(x: Tensor) -> Tensor:
        new = _taken(x[:, :, ::2], gone)
        return x[:, :, 1::2].scatter_add(2, partner if x.ndim == 3 else partner.unsqueeze(-1).expand(new.shape), new)

    total = sums(weight)
    k_mean, v_mean = (ratio(sums(x * weight.unsqueeze(-1)), total.unsqueeze(-1)) for x in (key, value))
    where = ratio(sums(place * weight), total)
    new = Clusters(k_mean, v_mean, total, where, sums(share))
    return Clusters(*(torch.cat((x, _taken(old[:, :, ::2], stay)), 2) for x, old in zip(new, parts, strict=True)))


def _cheapest(logits: Tensor, value: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Of places ::2 the cost of each (B, H, N / 2) with the cheapest of places 1::2, and which that is.

    logits (B, H, N, S), value (B, H, N, E), share (B, H, N). p_a p_b / (p_a + p_b) is 1 / (1 / p_a + 1 / p_b), 0
    where nobody looks.
    """
    p_a, p_b = (share[..., start::2].reciprocal() for start in (0, 1))
    first, second = value[:, :, ::2], value[:, :, 1::2]
    squares = first.square().sum(-1).mean(-1) + second.square().sum(-1).mean(-1)
    apart = squares - 2 * (first.mean(2) * second.mean(2)).sum(-1)  # mean of all pairs
    level = LEVEL * apart.clamp(min=0)[..., None]  # (B, H, 1)
    (looks, looked), (values, valued) = _factors(logits, torch.zeros_like(level)), _factors(value, level)
    # A CPU meets as many pairs at once as its cache holds, and goes over them while they are there.
    room = PAIRS if share.device.type == "cpu" else ROOM
    at_once = max(1, room // max(1, p_b.numel()))
    found = []
    for rows in range(0, p_a.shape[-1], at_once):
        here = slice(rows, rows + at_once)
        cost = (looks[:, :, here] @ looked).clamp_(min=0)
        cost *= torch.maximum(values[:, :, here] @ valued, level[..., None])
        cost /= p_a[..., here, None] + p_b.unsqueeze(-2)
        found.append(cost.nan_to_num_(0.0).min(-1))
    return torch.cat([x.values for x in found], -1), torch.cat([x.indices for x in found], -1)


def _factors(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices whose product is the squared distances of places ::2 of x (B, H, N, W) from places 1::2, + level."""
    a, b = x[:, :, ::2], x[:, :, 1::2]
    one = torch.ones_like(a[..., :1]), torch.ones_like(b[..., :1])
    squares = a.square().sum(-1) + level, b.square().sum(-1)
    left = torch.cat((-2 * a, squares[0].unsqueeze(-1), one[0]), -1)
    return left, torch.cat((b, one[1], squares[1].unsqueeze(-1)), -1).mT


def _taken(x: Tensor, which: Tensor) -> Tensor:
    """Places `which` (B, H, n) of x (B, H, N) or (B, H, N, W)."""
    return x.gather(2, which if x.ndim == 3 else which.unsqueeze(-1).expand(*which.shape, x.shape[-1]))
