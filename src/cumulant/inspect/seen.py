"""One call of an attention layer, of which any rows of its weights can be had without forming the others.

Shape legend: ... leading dimensions, H heads, L queries, M keys, C width, D head width, n rows asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..nn import AxialAttention, MultiheadAttention
from ..nn.swapped.choice import weights
from ..tracing import without_autocast
from ..zoo.registry import Mechanism

Rows = list[int] | None


def rows_alone(mechanism: Mechanism, is_causal: bool) -> bool:
    """Whether a row of weights follows from its own query and all keys, wherever the query stands."""
    free = mechanism.module is None and not mechanism.wants_grid and mechanism.order_free
    return free and mechanism.independent_rows and mechanism.cross and not is_causal


class OwnCall:
    """A `MultiheadAttention` that received x (..., L, C).

    Rows that stand alone cost M D each, and the keys' projection; other mechanisms form the matrix of this layer.
    """

    def __init__(
        self,
        layer: MultiheadAttention,
        x: Tensor,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
        attn_mask: Tensor | None = None,
    ) -> None:
        from ..nn.cumulant import CumulantAttention, as_key_mask

        if isinstance(layer, CumulantAttention):  # its second argument is a mask, as in timm
            attn_mask, context = (attn_mask if context is None else context), None
            key_mask = as_key_mask(attn_mask, x)
        if grid is None:
            grid, prefix = layer.grid_size, layer.prefix
        self.layer, self.context, self.key_mask, self.is_causal = layer, context, key_mask, is_causal
        self._x: Tensor | None = x
        self.grid, self.prefix = grid, prefix
        self.batch, self.queries = x.shape[0], x.shape[-2]
        self._kept: tuple[Tensor, Tensor] | None = None

    def keep(self) -> None:
        """Project once for all rows that will be asked for. What these follow from is let go where it can be."""
        query, key, _ = self.layer.project(self.x, self.context)
        self._kept = query.clone(), key.clone()  # as views they would hold the value too
        if self._alone and not isinstance(self.layer, AxialAttention):
            self._x = self.context = None

    @property
    def kept(self) -> list[Tensor]:
        """Tensors that this call holds on to."""
        return [z for z in (self._x, self.context, *(self._kept or ())) if z is not None]

    @property
    def x(self) -> Tensor:
        if self._x is None:
            raise RuntimeError("this call kept its query and key alone; its input and value are gone")
        return self._x

    @property
    def _alone(self) -> bool:
        if self.layer.attention_options.get("around") == "mean":  # the mean is that of all queries
            return False
        return rows_alone(self.layer.mechanism, self.is_causal) and not isinstance(self.layer.mix, torch.nn.Module)

    def query_key(self) -> tuple[Tensor, Tensor, float]:
        """Query and key (..., H, L or M, D), and the scale of their products."""
        query, key = self._kept or self.layer.project(self.x, self.context)[:2]
        return query, key, query.shape[-1] ** -0.5

    def value(self) -> Tensor:
        """(..., H, M, D), in the order of the keys of `weights`."""
        return self.layer.project(self.x, self.context)[2]

    def weights(self, rows: Rows = None, heads: Rows = None) -> Tensor:
        """(..., h, n, M) for some query rows and heads, or all."""
        layer, alone = self.layer, self._alone
        if isinstance(layer, AxialAttention):
            if rows is None or not alone or self.key_mask is not None:
                return _select(self._full(), rows, heads)
            return self._axial(layer, rows, heads)
        if not alone:
            return _select(self._full(), rows, heads)
        some = slice(None) if heads is None else heads
        if self._kept is not None:
            query, key = self._kept
            return self._plain(query if rows is None else query[..., rows, :], key, some)
        chosen = self.x if rows is None else self.x[..., rows, :]
        query, key, _ = layer.project(chosen, self.x if self.context is None else self.context)
        return self._plain(query, key, some)

    def _full(self) -> Tensor:
        shared: dict[str, Any] = {"key_mask": self.key_mask, "is_causal": self.is_causal}
        return self.layer.scores(self.x, self.context, grid=self.grid, prefix=self.prefix, **shared)

    def _plain(self, query: Tensor, key: Tensor, heads: Any, mask: bool = True) -> Tensor:
        query, key = (_wide(z[..., heads, :, :]) for z in (query, key))
        call = Call(query, key, key, self.key_mask if mask else None)
        with without_autocast(query.device.type):  # which would round wide numbers again
            return self.layer.weights(self.layer.mix, call, heads=heads)

    def _axial(self, layer: AxialAttention, rows: list[int], heads: Rows) -> Tensor:
        """Half of the heads look along time, the others within a frame: only those sequences are formed."""
        assert self.grid is not None
        query, key = self._kept or layer.project(self.x)[:2]
        frames, places = self.grid[0], self.grid[1] * self.grid[2]
        half, count = layer.num_heads // 2, len(rows)
        A = _wide(query).new_zeros(*query.shape[:-2], count, frames * places)
        for n, row in enumerate(rows):
            t, s = divmod(row, places)
            for some, keys in (
                (slice(0, half), slice(s, None, places)),
                (slice(half, None), slice(t * places, (t + 1) * places)),
            ):
                A[..., some, n : n + 1, keys] = self._plain(query[..., [row], :], key[..., keys, :], some, mask=False)
        return A if heads is None else A[..., heads, :, :]


class FusedCall:
    """A call of `F.scaled_dot_product_attention`, whose probabilities are formed again for the rows asked for."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.query, self.key = query, key
        self._value: Tensor | None = value
        self.attn_mask, self.is_causal = attn_mask, is_causal
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.batch, self.queries = query.shape[0], query.shape[-2]

    def keep(self) -> None:
        """Query and key alone: as views they would hold the value too."""
        self.query, self.key, self._value = self.query.clone(), self.key.clone(), None

    @property
    def kept(self) -> list[Tensor]:
        return [z for z in (self.query, self.key, self._value, self.attn_mask) if z is not None]

    def query_key(self) -> tuple[Tensor, Tensor, float]:
        return self.query, self.key.repeat_interleave(self.query.shape[-3] // self.key.shape[-3], -3), self.scale

    def value(self) -> Tensor:
        if self._value is None:
            raise RuntimeError("this call kept its query and key alone; its input and value are gone")
        return self._value.repeat_interleave(self.query.shape[-3] // self._value.shape[-3], -3)

    def weights(self, rows: Rows = None, heads: Rows = None) -> Tensor:
        """softmax(q k^T scale + mask) for those rows. Cost: M D each."""
        _, key, _ = self.query_key()
        positions = list(range(self.queries)) if rows is None else rows
        some = slice(None) if heads is None else heads
        query, key = self.query[..., some, :, :][..., positions, :], key[..., some, :, :]
        with without_autocast(query.device.type):
            logits = (_wide(query) * self.scale) @ _wide(key).mT
        if self.is_causal:
            at = torch.tensor(positions, device=logits.device)
            seen = torch.arange(key.shape[-2], device=logits.device) <= at[:, None]
            logits = logits.masked_fill(~seen, float("-inf"))
        if self.attn_mask is not None:
            mask = self.attn_mask.expand(*self.query.shape[:-1], key.shape[-2])[..., some, :, :][..., positions, :]
            logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + _wide(mask)
        return logits.softmax(-1).nan_to_num(0.0)  # a row that sees nothing mixes nothing


class ConvertedCall:
    """What a converted layer was asked to mix, as `cumulant.convert` reports it, and its choice of mechanism."""

    def __init__(self, choice: Any, call: Any) -> None:
        self.choice, self.call = choice, call
        self.batch, self.queries = call.query.shape[0], call.query.shape[-2]

    def keep(self) -> None:
        """Query and key are here already."""

    @property
    def kept(self) -> list[Tensor]:
        return [self.call.query, self.call.key, self.call.value]

    def query_key(self) -> tuple[Tensor, Tensor, float]:
        query, key = self.call.query, self.call.key
        scale = query.shape[-1] ** -0.5 if self.call.scale is None else self.call.scale
        return query, key.repeat_interleave(query.shape[-3] // key.shape[-3], -3), scale

    def value(self) -> Tensor:
        value = self.call.value
        return value.repeat_interleave(self.call.query.shape[-3] // value.shape[-3], -3)

    def weights(self, rows: Rows = None, heads: Rows = None) -> Tensor:
        call, alone = self.call, not self.call.is_causal and not self.choice.around_mean
        query = call.query if rows is None or not alone else call.query[..., rows, :]
        own = call.key_mask if self.choice.around_mean and self.queries == call.key.shape[-2] else None
        with without_autocast(query.device.type):
            A = weights(self.choice, call._replace(query=_wide(query), key=_wide(call.key), query_mask=own))
        return _select(A, None if alone else rows, heads)


def _select(A: Tensor, rows: Rows, heads: Rows) -> Tensor:
    A = A if heads is None else A[..., heads, :, :]
    return A if rows is None else A[..., rows, :]


def _wide(x: Tensor) -> Tensor:
    """At least float32: a map is looked at, and bfloat16 has three digits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
