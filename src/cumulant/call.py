"""One attention call: its tensors, masks and layout, carried as one value and checked in one place.

Shape legend: ... leading dimensions, H query heads, Hk key heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from .tensors import heads_of, one_batch, wide
from .tracing import can_be_read, in_autocast_dtype

NORMALIZATIONS = ("mean", "sum")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FINITE = sys.float_info.max
Grid = tuple[int, ...]
Kind = TypeVar("Kind", bound=Hashable)


class Call(NamedTuple):
    """What an attention is asked to compute. A tuple, so that it passes through compile and pytrees.

    A mechanism reads what it needs: `grid` and `prefix` say how tokens are laid out, `query_mask` which queries are
    there for those whose rows look at other queries. `scale=None` is the mechanism's own default.
    """

    query: Tensor  # (..., H, Lq, D)
    key: Tensor  # (..., Hk, Lk, D)
    value: Tensor  # (..., Hk, Lk, E); the key again where only weights are wanted
    key_mask: Tensor | None = None  # (..., Lk), bool or weights
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    query_mask: Tensor | None = None  # (..., Lq), bool or weights
    grid: Grid | None = None  # (rows, cols) or (frames, rows, cols) of the tokens after the first `prefix`
    prefix: int = 0
    offset: int = 0  # place of the first causal query among the keys
    dropout_p: float = 0.0  # on the probabilities, where there are any

    @classmethod
    def split(
        cls, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
    ) -> tuple[Call, dict[str, Any]]:
        """The call that keyword arguments describe, and those that are none of its own: options of a mechanism."""
        own = {name: given for name, given in arguments.items() if name in cls._fields}
        return cls(query, key, value, **own), {name: x for name, x in arguments.items() if name not in own}

    @classmethod
    def fused(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> tuple[Call, Tensor | None]:  # fmt: skip
        """The call that arguments of `F.scaled_dot_product_attention` describe, and the mask of its logits."""
        call = cls(query, key, value, None, is_causal, scale, enable_gqa, dropout_p=dropout_p)
        return call, attn_mask

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions, broadcast."""
        return leading(self.query, self.key)

    @property
    def softmax_scale(self) -> float:
        """The factor on q.k, D**-0.5 unless given."""
        return (self.query.shape[-1] ** -0.5 if self.query.shape[-1] else 1.0) if self.scale is None else self.scale

    def checked(self) -> Call:
        """The same in autocast's dtype; raises for tensors that do not belong together."""
        query, key, value = in_autocast_dtype(self.query, self.key, self.value)
        check_flag("is_causal", self.is_causal)
        check_flag("enable_gqa", self.enable_gqa)
        scale = check_tensors(query, key, value, self.key_mask, self.scale, self.enable_gqa)
        self.check_prefix()
        if self.query_mask is not None:
            known = self.query_mask is self.key_mask and query.shape[-2] == key.shape[-2]  # seen as the key mask
            if not known:
                check_mask(self.query_mask, query, query.shape[:-3], "query_mask")
        as_given = query is self.query and key is self.key and value is self.value
        if as_given and (self.scale is None or type(self.scale) is float):
            return self  # each copy costs a microsecond
        return self._replace(query=query, key=key, value=value, scale=None if self.scale is None else scale)

    def check_prefix(self) -> None:
        if not isinstance(self.prefix, torch.SymInt) and not whole(self.prefix):
            raise ValueError(f"prefix must be a number of tokens, 0 or more, got {self.prefix!r}")

    def prepared(self) -> Call:
        """Checked, with leading dimensions broadcast and 0 in absent keys and values, whatever they held (NaN too)."""
        call = self.checked()
        lead, mask = call.lead, call.key_mask
        if mask is None and all(x.shape[:-3] == lead for x in call[:3]):
            return call
        query, key, value = (x.expand(*lead, *x.shape[-3:]) for x in call[:3])
        if mask is not None:
            mask = mask.expand(*lead, key.shape[-2])
            absent = (mask == 0)[..., None, :, None]
            key, value = key.masked_fill(absent, 0), value.masked_fill(absent, 0)
        return call._replace(query=query, key=key, value=value, key_mask=mask)

    def in_one_batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query (B, H, Lq, D), key, value and key mask (B, Lk), with all leading dimensions as one."""
        lead, mask, Lk = self.lead, self.key_mask, self.key.shape[-2]
        query, key, value = (one_batch(x, lead) for x in self[:3])
        return query, key, value, None if mask is None else mask.expand(*lead, Lk).reshape(math.prod(lead), Lk)

    def present_queries(self) -> tuple[Tensor, Tensor | None]:
        """Query with absent rows set to 0, and the query mask as a factor (..., 1, Lq, 1), of a checked call."""
        query, query_mask = self.query, self.query_mask
        if query_mask is None:
            return query, None
        factor = query_mask.expand(*query.shape[:-3], query.shape[-2])[..., None, :, None]
        return query.masked_fill(factor == 0, 0), factor.to(wide(query).dtype)

    def by_heads(self, kinds: Sequence[Kind], run: Callable[[Kind, Call], Tensor]) -> Tensor:
        """Outputs (..., H, Lq, X) of heads that are of several kinds: run(kind, call) with all heads of a kind at once.

        Key heads are repeated for the query heads they serve.
        """
        places: dict[Kind, list[int]] = {}
        for head, kind in enumerate(kinds):
            places.setdefault(kind, []).append(head)
        if len(places) == 1:
            return run(kinds[0], self)
        served = self.query.shape[-3] // self.key.shape[-3]
        rows: dict[int, Tensor] = {}
        for kind, heads in places.items():
            key, value = (heads_of(x, [head // served for head in heads]) for x in (self.key, self.value))
            own = self._replace(query=heads_of(self.query, heads), key=key, value=value, enable_gqa=False)
            rows.update(zip(heads, run(kind, own).unbind(-3), strict=True))
        return torch.stack([rows[head] for head in range(len(kinds))], -3)

    def key_weights(self, dtype: torch.dtype) -> Tensor | None:
        """The key mask as a factor (..., 1, Lk, 1), or None."""
        return None if self.key_mask is None else self.key_mask.to(dtype)[..., None, :, None]


def check_tensors(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> float:
    """Raises for tensors that do not belong together; returns the scale, D**-0.5 unless given."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        check_dtype(name, x)
        if x.ndim < 3:
            raise ValueError(f"{name} must have shape (..., heads, length, width), got {tuple(x.shape)}")
        if x.dtype != query.dtype:
            raise TypeError(f"query, key and value must share a dtype, got {name} {x.dtype}, query {query.dtype}")
        if x.device != query.device:
            raise ValueError(f"query, key and value must share a device, got {name} {x.device}, query {query.device}")
    D, heads = query.shape[-1], query.shape[-3]
    if key.shape[-1] != D:
        raise ValueError(f"key must have the width of the query, {D}, got {key.shape[-1]} (shape {tuple(key.shape)})")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have as many tokens as key, {key.shape[-2]}, got {value.shape[-2]}")
    if value.shape[-3] != key.shape[-3]:
        raise ValueError(f"value must have as many heads as key, {key.shape[-3]}, got {value.shape[-3]}")
    if heads != key.shape[-3]:
        if not enable_gqa:
            raise ValueError(
                f"query has {heads} heads and key {key.shape[-3]}: they must agree, or pass enable_gqa=True"
            )
        if key.shape[-3] == 0 or heads % key.shape[-3]:
            raise ValueError(
                f"with enable_gqa, query heads ({heads}) must be a multiple of key heads ({key.shape[-3]})"
            )
    if value.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"value must have the leading dimensions of key, {tuple(key.shape[:-3])}, got {tuple(value.shape[:-3])}"
        )
    lead = leading(query, key)
    if key_mask is not None:
        check_mask(key_mask, key, lead)
    check_scale(scale)
    return (float(D) ** -0.5 if D else 1.0) if scale is None else float(scale)


def check_scale(scale: float | None) -> None:
    """Raises for what is no factor of q.k; None is the default one."""
    if scale is None or (type(scale) is float and abs(scale) < math.inf):
        return
    if isinstance(scale, Tensor):
        raise TypeError(
            "scale must be a number; multiply the query for a scale of its own per head or one that is learned"
        )
    if isinstance(scale, bool) or not isinstance(scale, Real | torch.SymFloat | torch.SymInt):
        raise TypeError(f"scale must be a number, got {scale!r}")
    if not is_finite(scale):
        raise ValueError(f"scale must be finite, got {scale!r:.60}")


def is_finite(number: Any) -> bool:
    """Whether a number is one in float64, too: NaN and 10**400 are not."""
    return bool(abs(number) <= FINITE)


def check_dense(name: str, x: Tensor) -> None:
    """Raises for what is no tensor with all its entries side by side."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested:
        told = "pad it and pass a mask, or pack its sequences end to end (attention_varlen, forward_packed)"
        raise TypeError(f"{name} must be a dense tensor, got a nested one: {told}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}: pass {name}.to_dense()")


def check_dtype(name: str, x: Tensor) -> None:
    check_dense(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be floating point (float64, float32, bfloat16, float16), got {x.dtype}")


def check_flag(name: str, flag: object) -> None:
    if flag is not True and flag is not False:
        raise TypeError(f"{name} must be True or False, got {flag!r}")


def whole(number: object, least: int = 0) -> TypeGuard[int]:
    """Whether it is a whole number, `least` or more."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def check_count(name: str, count: object, least: int = 1) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise ValueError(f"{name} must be a whole number, at least {least}, got {count!r}")
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")


def check_share(name: str, share: object) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"{name} must be a probability between 0 and 1, got {share!r}")


def check_choice(name: str, choice: object, known: Iterable[object]) -> None:
    # By kind first: an array answers a comparison with an array, and True is 1.
    alike = [
        one for one in known if isinstance(choice, type(one)) and isinstance(choice, bool) is isinstance(one, bool)
    ]
    if choice not in alike:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {choice!r}")


def check_order(order: int, full: bool, normalization: str = "mean") -> None:
    if isinstance(order, bool) or not isinstance(order, Integral) or order not in (1, 2, 3):
        raise ValueError(f"order must be 1, 2 or 3, got {order!r}")
    if not isinstance(full, bool):
        raise TypeError(f"full must be True or False, got {full!r}")
    if full and order != 3:
        raise ValueError(f"full=True takes the whole third cumulant and needs order=3, got order={order}")
    check_choice("normalization", normalization, NORMALIZATIONS)


def leading(query: Tensor, key: Tensor) -> torch.Size:
    """The leading dimensions, broadcast."""
    if query.shape[:-3] == key.shape[:-3]:
        return query.shape[:-3]
    try:
        return torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    except RuntimeError:
        raise ValueError(
            f"leading dimensions of query {tuple(query.shape[:-3])} and key {tuple(key.shape[:-3])} must agree"
        ) from None


def expands_to(x: Tensor, wanted: tuple[int, ...]) -> bool:
    """Whether x broadcasts to that shape, with an entry of its own for each token at the end."""
    try:
        fits = x.ndim >= 1 and torch.broadcast_shapes(x.shape, wanted) == torch.Size(wanted)
    except RuntimeError:
        return False
    return fits and x.shape[-1] == wanted[-1]


def check_mask(key_mask: Tensor, key: Tensor, lead: torch.Size, name: str = "key_mask") -> None:
    """Raises for what cannot say which of the tokens (..., L, D) with those leading dimensions are there."""
    check_dense(name, key_mask)
    wanted, of = (*lead, key.shape[-2]), "query" if name == "query_mask" else "key"
    if not expands_to(key_mask, wanted):
        raise ValueError(
            f"{name} must have shape {wanted}, one entry for each {of}, got {tuple(key_mask.shape)}; masks that "
            "differ from query to query cannot be honoured in linear time (is_causal is the one exception)"
        )
    if key_mask.device != key.device:
        raise ValueError(f"{name} must be on the device of the {of}, {key.device}, got {key_mask.device}")
    if key_mask.dtype == torch.bool:
        return
    if key_mask.dtype not in DTYPES:
        raise TypeError(f"{name} must be bool or floating point weights, got {key_mask.dtype}")
    if can_be_read(key_mask) and not bool(((key_mask >= 0) & (key_mask < float("inf"))).all()):
        raise ValueError(
            f"{name} weights must be finite and not negative, got values from {float(key_mask.min()):g} to "
            f"{float(key_mask.max()):g}; an additive mask (0 and -inf) becomes one by `mask == 0`"
        )


def check_offsets(name: str, cu_seq: Tensor, tokens: int) -> None:
    """Raises for what cannot be sequence boundaries, without looking at the numbers."""
    if not is_whole(cu_seq) or cu_seq.ndim != 1 or cu_seq.numel() == 0:
        raise ValueError(f"{name} must be a 1-D integer tensor [0, ..., {tokens}], got {cu_seq!r}")


def is_whole(x: object) -> TypeGuard[Tensor]:
    """Whether it is a dense tensor of whole numbers."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
        return False
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_packed(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor) -> None:
    """Raises for what cannot be sequences end to end, (T, H, D), (S, H, D) and (S, H, E), with these boundaries."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
        if x.ndim != 3:
            raise ValueError(f"{name} must be packed as (tokens, heads, width), got shape {tuple(x.shape)}")
        if x.device != query.device:
            raise ValueError(f"query, key and value must share a device, got {name} {x.device}, query {query.device}")
    if value.shape[0] != key.shape[0]:
        raise ValueError(f"key and value must have equally many tokens, got {key.shape[0]} and {value.shape[0]}")
    check_offsets("cu_seq_q", cu_seq_q, query.shape[0])
    check_offsets("cu_seq_k", cu_seq_k, key.shape[0])
    if len(cu_seq_q) != len(cu_seq_k):
        counts = f"{len(cu_seq_q) - 1} and {len(cu_seq_k) - 1}"
        raise ValueError(f"cu_seq_q and cu_seq_k must describe equally many sequences, got {counts}")


def longest(at: Sequence[int]) -> int:
    """Tokens of the longest sequence between these boundaries."""
    return max((b - a for a, b in pairwise(at)), default=0)


def offsets(name: str, cu_seq: Tensor, tokens: int, most: int | None, most_name: str) -> list[int]:
    """Sequence boundaries as integers, checked against the tokens they cut and the longest sequence, where given."""
    check_offsets(name, cu_seq, tokens)
    check_longest(most_name, most)
    if cu_seq.is_meta:
        raise ValueError(f"{name} must hold numbers that can be read, got a tensor on the meta device")
    at = [int(i) for i in cu_seq.tolist()]
    if at[0] != 0 or at[-1] != tokens or any(a > b for a, b in pairwise(at)):
        raise ValueError(f"{name} must rise from 0 to the number of tokens, {tokens}, got {at}")
    if most is not None and most < longest(at):
        raise ValueError(f"{most_name} must be at least the longest sequence, {longest(at)}, got {most}")
    return at


def check_longest(name: str, most: object) -> None:
    if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
        raise TypeError(f"{name} must be a number of tokens or None, got {most!r}")


def positions_of(positions: Tensor | Sequence[int] | None, count: int, device: torch.device) -> Tensor:
    """The places (count,) of the queries, 0, 1, ... unless given; on a GPU their signs are not looked at."""
    if positions is None:
        return torch.arange(count, device=device)
    try:
        at = positions if isinstance(positions, Tensor) else torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"positions must be whole numbers, one for each query, got {positions!r}") from None
    if not is_whole(at):
        raise TypeError(f"positions must be whole numbers, one for each query, got {at.dtype}")
    if at.is_meta and device.type != "meta":
        raise ValueError("positions must hold numbers that can be read, got a tensor on the meta device")
    if at.shape != (count,):
        raise ValueError(f"positions must hold one place for each of the {count} queries, got {tuple(at.shape)}")
    if count and can_be_read(at) and bool((at < 0).any()):
        raise ValueError(f"positions must not be negative, got {int(at.min())}")
    return at.to(device)
