"""One call of an attention layer, of which any rows of its weights can be had without forming the others.

Shape legend: ... leading dimensions, H heads, L queries, M keys, C width, D head width, n rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import zoo
from ..call import Call
from ..nn import AxialAttention, MultiheadAttention
from ..nn.swapped.choice import Choice, weights
from ..tensors import wide
from ..tracing import without_autocast
from ..zoo.registry import Mechanism

Some = list[int] | None  # numbers of rows or heads; None: all
Weigh = Callable[[Call, Some, Some], Tensor]


class Seen:
    """What a layer was asked to compute, and `weigh(call, rows, heads)`, which makes its weights.

    `needs` is a tensor besides query and key that the weights follow from.
    """

    def __init__(self, call: Call, weigh: Weigh, needs: Tensor | None = None) -> None:
        self.call, self._weigh, self._needs = call, weigh, needs
        self.batch, self.queries = call.query.shape[0], call.query.shape[-2]
        self._kept = False

    def keep(self) -> None:
        """Hold on to query and key alone, for rows that will be asked for: as views they would hold the value too."""
        query, key = self.call.query.clone(), self.call.key.clone()
        self.call, self._kept = self.call._replace(query=query, key=key, value=key), True

    @property
    def kept(self) -> list[Tensor]:
        """Tensors that this call holds on to."""
        value = None if self._kept else self.call.value
        return [z for z in (self.call.query, self.call.key, value, self._needs) if z is not None]

    def query_key(self) -> tuple[Tensor, Tensor, float]:
        """Query and key (..., H, L or M, D), and the scale of their products."""
        return self.call.query, self._of_every_head(self.call.key), self.call.softmax_scale

    def value(self) -> Tensor:
        """(..., H, M, D), in the order of the keys of `weights`."""
        if self._kept:
            raise RuntimeError("this call kept its query and key alone; its input and value are gone")
        return self._of_every_head(self.call.value)

    def weights(self, rows: Some = None, heads: Some = None) -> Tensor:
        """(..., h, n, M) for some query rows and heads, or all."""
        key, value = self._of_every_head(self.call.key), self._of_every_head(self.call.value)
        return self._weigh(self.call._replace(key=key, value=value, enable_gqa=False), rows, heads)

    def _of_every_head(self, z: Tensor) -> Tensor:
        return z.repeat_interleave(self.call.query.shape[-3] // z.shape[-3], -3)


def seen_in(layer: MultiheadAttention, x: Tensor, *args: Any, **kwargs: Any) -> Seen:
    """A `MultiheadAttention` that received x (..., L, C) and further arguments of `forward`.

    Rows that stand alone cost M D each; other mechanisms form the matrix of this layer.
    """
    call = layer.asked(x, *args, **kwargs)
    options = layer.attention_options  # the mean query is that of all; the first ones may stand apart
    whole = options.get("around") == "mean" or options.get("apart")
    alone = layer.rows_alone and _rows_alone(layer.mechanism, call) and not whole
    alone = alone and not isinstance(layer.mix, nn.Module)
    axial = isinstance(layer, AxialAttention)
    held = x if layer.mechanism.wants_input else None  # not to keep what nobody needs

    def weigh(call: Call, rows: Some, heads: Some) -> Tensor:
        if axial and alone and rows is not None and call.key_mask is None:
            return _axial(layer, call, rows, heads)
        if not alone or axial:
            return _select(layer.scores_of(call, held), rows, heads)
        with without_autocast(call.query.device.type):  # which would round wide numbers again
            return layer.weights(layer.mix, _part(call, rows, heads), heads=_all(heads))

    return Seen(call, weigh, held)


def _axial(layer: MultiheadAttention, call: Call, rows: list[int], heads: Some) -> Tensor:
    """Half of the heads look along time, the others within a frame: only those sequences are formed."""
    assert call.grid is not None
    places, half = call.grid[1] * call.grid[2], layer.num_heads // 2
    A = wide(call.query).new_zeros(*call.query.shape[:-2], len(rows), call.key.shape[-2])
    for n, row in enumerate(rows):
        t, s = divmod(row, places)
        across, within = slice(s, None, places), slice(t * places, (t + 1) * places)
        for some, keys in ((slice(0, half), across), (slice(half, None), within)):
            query, key = wide(call.query[..., some, [row], :]), wide(call.key[..., some, keys, :])
            with without_autocast(query.device.type):
                A[..., some, n : n + 1, keys] = layer.weights(layer.mix, Call(query, key, key), heads=some)
    return _select(A, None, heads)


def seen_fused(*args: Any, **kwargs: Any) -> Seen:
    """A call of `F.scaled_dot_product_attention`, whose probabilities are formed again for the rows asked for."""
    asked, attn_mask = Call.fused(*args, **kwargs)

    def weigh(call: Call, rows: Some, heads: Some) -> Tensor:
        """softmax(q k^T scale + mask) for those rows. Cost: M D each."""
        part, (queries, keys) = _part(call, rows, heads), (call.query.shape[-2], call.key.shape[-2])
        with without_autocast(call.query.device.type):
            logits = (part.query * call.softmax_scale) @ part.key.mT
        if call.is_causal:
            at = torch.tensor(range(queries) if rows is None else rows, device=logits.device)
            logits = logits.masked_fill(torch.arange(keys, device=logits.device) > at[:, None], -torch.inf)
        if attn_mask is not None:
            mask = _select(attn_mask.expand(*call.query.shape[:-1], keys), rows, heads)
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + wide(mask)
        return logits.softmax(-1).nan_to_num(0.0)  # a row that sees nothing mixes nothing

    return Seen(asked, weigh, attn_mask)


def seen_converted(choice: Choice, call: Call) -> Seen:
    """What a converted layer was asked to mix, and its choice of mechanism."""
    alone = _rows_alone(zoo.get(choice.attention), call) and not choice.whole

    def weigh(call: Call, rows: Some, heads: Some) -> Tensor:
        with without_autocast(call.query.device.type):
            A = weights(choice, _part(call, rows if alone else None, None))
        return _select(A, None if alone else rows, heads)

    return Seen(call, weigh)


def _rows_alone(mechanism: Mechanism, call: Call) -> bool:
    """Whether a row of weights follows from its own query and all keys, wherever the query stands."""
    free = mechanism.module is None and not mechanism.wants_grid and mechanism.order_free
    return free and mechanism.independent_rows and mechanism.cross and not call.is_causal


def _part(call: Call, rows: Some, heads: Some) -> Call:
    """The call of some rows and heads, in float32 at least: a map is looked at, and bfloat16 has three digits."""
    query, key = (wide(_select(z, chosen, heads)) for z, chosen in ((call.query, rows), (call.key, None)))
    there = call.query_mask if rows is None else None
    return call._replace(query=query, key=key, value=key, query_mask=there)


def _select(z: Tensor, rows: Some, heads: Some) -> Tensor:
    z = z if heads is None else z[..., heads, :, :]
    return z if rows is None else z[..., rows, :]


def _all(heads: Some) -> Any:
    return slice(None) if heads is None else heads
