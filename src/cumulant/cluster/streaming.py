"""A stream of tokens under causal cluster attention: exact near the present, moments of ever larger blocks behind.

Shape legend: B batch, H key heads, G query heads of each, L tokens appended at once, D, E widths.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from ..call import check_choice, check_dtype, check_scale, whole
from ..closures import check_closure
from ..held import Held, check_rows, check_step, check_tokens
from ..moments import Moments, statistics_dtype
from .backend import Form
from .fields import Exact, Far, Seen, mix
from .layout import Blocks
from .statistics import VARIANCES, joined, merge, moments_of


class ClusterStream:
    """All tokens so far in memory that grows with their logarithm; no gradients.

        stream = ClusterStream(Blocks(64, keep=4, recent=1))
        stream.append(k, v)                             # a prompt, (..., H, L, D) and (..., H, L, E)
        out = stream.step(q, k_next, v_next)            # one token of each: (..., G H, 1, E)

    `step` gives the row that `cluster_attention(..., clusters=blocks, is_causal=True)` gives. Of the current and the
    `recent` blocks the tokens are kept, of older ones `Moments`: a counter with at most keep + 1 clusters of each
    size, the oldest two of a size merging when there would be keep + 2. With keep=None nothing merges and memory
    grows with L / size. The first `prefix` tokens (sinks) are kept for good. Cost a token: (recent + 1) size (D + E) +
    (keep + 1) log2(L / size) D E.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        closure: str = "tanh",
        variance: str = "diagonal",
        response: int | None = None,
        scale: float | None = None,
        prefix: int = 0,
    ) -> None:
        if not isinstance(blocks, Blocks):
            raise TypeError(f"blocks must be Blocks(size, keep, recent), got {type(blocks).__name__}")
        check_closure(closure)
        check_choice("variance", variance, VARIANCES)
        if response is not None and not whole(response):
            raise ValueError(f"response must be None (all clusters) or a number, 0 or more, got {response!r}")
        check_scale(scale)
        if not whole(prefix):
            raise ValueError(f"prefix must be a number of tokens, 0 or more, got {prefix!r}")
        self.blocks, self.scale, self.prefix = blocks, scale, prefix
        self.form = Form(0, closure, "mass", variance == "full", response, near_rows=1)
        self.levels: list[list[Moments]] = []  # of each size the clusters still apart, the oldest first
        self.key: Tensor | None = None  # tokens of the recent blocks and the current one, (B, H, l, D)
        self.value: Tensor | None = None
        self.origin: Tensor | None = None  # the first key: all are measured from it
        self.first: tuple[Tensor, Tensor] | None = None  # sinks of blocks that are clusters now, (B, H, n, D or E)
        self.length = 0
        self._far: Far | None = None

    @property
    def state(self) -> tuple[Tensor, ...] | None:
        """Every tensor that is kept."""
        if self.key is None or self.value is None:
            return None
        kept = [x for level in self.levels for cluster in level for x in cluster if x is not None]
        return self.key, self.value, *(self.first or ()), *kept

    @property
    def clusters(self) -> int:
        """How many clusters stand for the tokens that are not kept."""
        return sum(map(len, self.levels))

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Puts change(x) in the place of every tensor x that is kept: sequences selected or repeated, other devices."""
        if self.key is None or self.value is None or self.origin is None:
            return
        self.key, self.value, self.origin = change(self.key), change(self.value), change(self.origin)
        self.first = None if self.first is None else (change(self.first[0]), change(self.first[1]))
        self.levels = [
            [Moments._make(None if x is None else change(x) for x in cluster) for cluster in level]
            for level in self.levels
        ]
        self._far = None

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        """Takes in key (..., H, L, D) and value (..., H, L, E)."""
        check_tokens(key, value)
        key, value = _one_batch(key), _one_batch(value)
        check_tokens(key, value, self.held)
        dtype = statistics_dtype(key.dtype)
        key, value = key.to(dtype), value.to(dtype)
        if self.key is None or self.value is None or self.origin is None:
            if not key.shape[-2]:
                return
            self.origin, self.key, self.value = key[..., :1, :], key[..., :0, :], value[..., :0, :]
        C = self.blocks.size
        self.key = torch.cat((self.key, key - self.origin), -2)
        self.value = torch.cat((self.value, value), -2)
        self.length += key.shape[-2]
        # The last block, whole or not, is the current one: it becomes a past block when a token follows it.
        leaving = (self.key.shape[-2] - 1) // C - self.blocks.recent
        for _ in range(max(0, leaving)):
            self._push(
                moments_of(*self._without_sinks(*self._block(C)), full=self.form.full, response=self.form.response != 0)
            )
            self.key, self.value, self._far = self.key[..., C:, :], self.value[..., C:, :], None

    @torch.no_grad()
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Takes in one token, key (..., H, 1, D) and value (..., H, 1, E), and answers query (..., G H, 1, D)."""
        check_step(query, key, value)  # all before anything is taken in: a step that fails leaves no token behind
        check_tokens(_one_batch(key), _one_batch(value), self.held)
        self.append(key, value)
        return self.apply(query)

    @property
    def held(self) -> Held | None:
        """What new tokens (B, H, L, D) must agree with."""
        return None if self.key is None or self.value is None else Held.of(self.key, self.value)

    @torch.no_grad()
    def apply(self, query: Tensor) -> Tensor:
        """Attention of query (..., G H, Q, D) over all tokens so far, (..., G H, Q, E)."""
        if self.key is None or self.value is None:
            raise ValueError("the stream has seen no token yet: append one before apply")
        check_dtype("query", query)
        lead = query.shape[:-3]
        query = _one_batch(query) if query.ndim > 2 else query
        check_rows(query, Held.of(self.key, self.value))
        H, D = self.key.shape[1], self.key.shape[-1]
        scale = D**-0.5 if self.scale is None else self.scale
        rows = (query.to(self.key.dtype) * scale).unflatten(1, (H, -1)).flatten(2, 3).unsqueeze(2)  # (B, H, 1, G Q, D)
        key, value = self.key, self.value
        if self.first is not None:
            key, value = torch.cat((self.first[0], key), -2), torch.cat((self.first[1], value), -2)
        exact = Exact(key.unsqueeze(2), value.unsqueeze(2), key.new_zeros(1, 1, 1, 1, 1))
        out = mix(rows, self._clusters(), None, Seen(exact), self.form, by_row=True)  # each row, as in a batch
        return out.reshape(*lead, *query.shape[1:3], self.value.shape[-1]).to(query.dtype)

    def _block(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        assert self.key is not None
        assert self.value is not None
        key, value = (x[..., :tokens, :].unsqueeze(2) for x in (self.key, self.value))
        return key, value, key.new_ones(key.shape[:-1])

    def _without_sinks(self, key: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps the sinks of a block that becomes a cluster, and takes them out of it."""
        assert self.key is not None
        count = min(key.shape[-2], self.prefix - (self.length - self.key.shape[-2]))  # of which so many have left
        if count > 0:
            new = key[:, :, 0, :count], value[:, :, 0, :count]
            old = self.first
            self.first = new if old is None else (torch.cat((old[0], new[0]), -2), torch.cat((old[1], new[1]), -2))
            weight[..., :count] = 0
        return key, value, weight

    def _push(self, cluster: Moments) -> None:
        keep, level = self.blocks.keep, 0
        while True:
            if level == len(self.levels):
                self.levels.append([])
            here = self.levels[level]
            here.append(cluster)
            if keep is None or len(here) < keep + 2:
                return
            cluster, level = merge(here.pop(0), here.pop(0)), level + 1

    def _clusters(self) -> Far:
        """The clusters side by side; built once a block."""
        if self._far is None:
            together = [cluster for level in reversed(self.levels) for cluster in level]
            if not together:
                together = [moments_of(*self._block(0), full=self.form.full, response=self.form.response != 0)]
            self._far = Far.of(joined(together))
        return self._far


def _one_batch(x: Tensor) -> Tensor:
    """(..., H, L, D) as (B, H, L, D)."""
    return x if x.ndim == 4 else x.reshape(prod(x.shape[:-3]), *x.shape[-3:])
