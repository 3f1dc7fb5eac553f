"""The multi-head attention layer for any registered mechanism.

Shape legend: ... leading dimensions, L tokens, M context tokens, C width, H heads, Hk key heads, D = C / H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import shards, zoo
from ..call import Call, Grid, check_choice, check_count, check_dtype, check_flag, check_mask, check_share
from ..expansion import weigh
from ..grammar import parse
from ..kinds import check_kinds
from ..tensors import repeat_heads, without_absent
from ..zoo.mixing import Mix
from .arguments import check_beside, check_kv_heads, check_layout, check_name, check_place, check_sizes, one_mask
from .extras import (
    CONV_INITS,
    GATES,
    Temperature,
    ValueConv,
    check_temperature,
    conv_kernel,
    gate_name,
    rotary_base,
    rotate,
)
from .fold import folded_attention, folds
from .streams import LayerStream, forward_packed

LAYER_NORM = partial(nn.LayerNorm, eps=1e-6)


class MultiheadAttention(nn.Module):
    """Projections to query, key and value, a mechanism of the zoo between them, and an output projection.

        y = proj(gate(x) * norm(mechanism(t R q_norm(W_q x), R k_norm(W_k z), W_v z) + conv(W_v z))),  z = context or x

    Names in the state dict are timm's: qkv, q_norm, k_norm, proj; then, each only where it is asked for, norm,
    v_conv, gate, temperature, and mix for a mechanism with parameters.
    Cost: 4 L C^2 for the projections (5 with a gate; 2 (1 + Hk / H) with fewer key heads), plus the mechanism's own.

    Args:
        dim: width C of the tokens; must be a multiple of num_heads.
        attention: name of a mechanism, see `cumulant.zoo.names()`; options may stand behind it, "cumulant3+full".
        attention_options: the same options as a mapping, `{"full": True}`.
        num_kv_heads: key and value heads Hk, each of which serves num_heads / Hk query heads in a row (grouped queries;
            1 is multi-query attention); as many as query heads unless given. `qkv` then has (H + 2 Hk) D rows.
        head_dim: channels D of a head, dim / num_heads unless given.
        qk_norm: normalise queries and keys per head with `norm_layer` (LayerNorm unless given).
        scale_norm: normalise the mechanism's output before the last projection.
        attn_drop: dropout on the attention probabilities; an error for mechanisms that have none.
        grid_size: (rows, cols) or (frames, rows, cols) of the patch tokens to expect, and `prefix` the tokens that
            stand before them: for tables whose size depends on it, and for calls that name no grid.
        v_conv: depthwise convolution of the values on that grid, added to the mechanism's output; prefix tokens are
            left alone. True is 3 x 3, an odd k is k x k (within each frame of a clip), (k_t, k, k) is over time too.
            `v_conv_init="zero"` starts it at nothing.
        gate: multiply the output by sigmoid(W x + b) (True or "sigmoid"), or by silu of it ("silu").
        temperature: "head" learns a positive factor on the query of each head; "order", for cumulant2 and cumulant3,
            one for the second and one for the third term of each head. They are 1 at first.
        rotary: turn queries and keys by their place (R above): True, or the base of the angles (10,000).
    """

    mixer_names: tuple[str, ...] = ("mix",)  # attributes with what `build_mix` made
    first_place = 0  # of x in its sequence, for layers that know places; a stream moves it on
    rows_alone = True  # a row of `scores_of` is that of the mechanism, which may form it without the others
    stays: str | None = None  # why no other mechanism can take the place of this one's, for `convert`
    place: dict[str, Any]  # where its parts were made: device and dtype
    fold: str | bool = False  # see `nn.fold.folds`; for second order without norms and extras

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        attention: str = "softmax",
        attention_options: dict[str, Any] | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        grid_size: Grid | None = None,
        prefix: int = 0,
        v_conv: bool | int | Sequence[int] = False,
        v_conv_init: str = "default",
        gate: bool | str = False,
        temperature: str | None = None,
        rotary: bool | float = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim, num_heads, head_dim)
        check_layout(grid_size, prefix)
        check_place(device, dtype)
        check_choice("v_conv_init", v_conv_init, CONV_INITS)
        check_name(attention)
        given = attention_options or {}
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise TypeError(f"attention_options must be a mapping of names to values, got {attention_options!r}")
        name, own = parse(attention)
        self.mechanism = zoo.get(name)
        self.num_kv_heads = check_kv_heads(num_kv_heads, num_heads, self.mechanism)
        check_share("attn_drop", attn_drop)
        check_share("proj_drop", proj_drop)
        check_kinds(MultiheadAttention.__init__, locals())
        if norm_layer is not None and not callable(norm_layer):
            raise TypeError(f"norm_layer must make a norm of a width, such as nn.LayerNorm, got {norm_layer!r}")
        if attn_drop and not self.mechanism.dropout:
            raise ValueError(
                f"attn_drop={attn_drop}, but {name!r} forms no probabilities to drop; "
                "use attn_drop=0 with proj_drop or stochastic depth"
            )
        norm = LAYER_NORM if norm_layer is None else norm_layer
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.place = place
        self.dim, self.num_heads = dim, num_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.attn_drop, self.grid_size, self.prefix = attn_drop, grid_size, prefix
        self.rotary = rotary_base(rotary)
        self.attention_options = {**own, **(attention_options or {})}
        check_temperature(temperature, name, self.attention_options.get("around", "zero"))
        kernel, self.gate_activation = conv_kernel(v_conv), gate_name(gate)
        self.qkv = nn.Linear(dim, sum(self.widths), bias=qkv_bias, **place)
        self.q_norm = norm(self.head_dim, **place) if qk_norm else nn.Identity()
        self.k_norm = norm(self.head_dim, **place) if qk_norm else nn.Identity()
        self.mix = self.build_mix()
        by_order = temperature == "order" and name == "cumulant3"  # at order 2 the factor of the query is all
        self.temperature = Temperature(num_heads, 2 if by_order else 1, **place) if temperature else None
        inner = self.inner_dim
        self.v_conv = None if kernel is None else ValueConv(inner, kernel, v_conv_init, **place)
        self.gate = nn.Linear(dim, inner, **place) if self.gate_activation else None
        self.norm = norm(inner, **place) if scale_norm else nn.Identity()
        self.proj = nn.Linear(inner, dim, bias=proj_bias, **place)
        self.proj_drop = nn.Dropout(proj_drop)

    def build_mix(self) -> Mix:
        """The mechanism as this layer calls it: itself with its options, or a module with parameters."""
        return self.mix_of(self.num_heads)

    def mix_of(self, heads: int) -> Mix:
        """The mechanism for so many heads of this layer's width."""
        layout: dict[str, Any] = {"grid_size": self.grid_size, "prefix": self.prefix, **self.place}
        return self.mechanism.build(heads * self.head_dim, heads, **layout, **self.attention_options)

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Heads that query, key and value are projected to."""
        return self.num_heads, self.num_kv_heads, self.num_kv_heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of query, key and value: the rows of `qkv` that belong to each."""
        query, key, value = self.head_counts
        return query * self.head_dim, key * self.head_dim, value * self.head_dim

    @property
    def inner_dim(self) -> int:
        """Channels that the output projection reads."""
        return self.num_heads * self.head_dim

    @property
    def enable_gqa(self) -> bool:
        """Whether a key head serves several query heads."""
        return self.num_kv_heads != self.num_heads

    def mixers(self) -> tuple[Mix, ...]:
        """Every callable that `build_mix` made."""
        return tuple(getattr(self, name) for name in self.mixer_names)

    def reset_extras(self) -> None:
        """Initialise what is not a projection or norm of every layer: mechanism, convolution and temperatures.

        A model that initialises all its linear layers alike calls this afterwards.
        """
        for module in (*self.mixers(), self.v_conv, self.temperature):
            reset = getattr(module, "reset_parameters", None) if isinstance(module, nn.Module) else None
            if callable(reset):
                reset()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: Grid | None = None,
        prefix: int = 0,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """x (..., L, C), context (..., M, C), key_mask (..., M) -> (..., L, C).

        `grid` (rows, cols) or (frames, rows, cols) says how the tokens after the first `prefix` are laid out; without
        it, the layer's own `grid_size` and `prefix` hold. `attn_mask` is a key mask as timm and the layers of `heads`
        take it, see `as_key_mask`.
        """
        key_mask = one_mask(key_mask, attn_mask, x if context is None else context)
        folding = bool(self.fold) and context is None and self.rotary is None
        if folding:
            self._check_width("x", x)
        if folding and folds(self.fold, x, self.num_heads, self.num_kv_heads, is_causal=is_causal):
            return self.proj_drop(self.folded(x, key_mask))
        return self.attend(self.call(x, context, key_mask, is_causal, grid=grid, prefix=prefix), x, context)

    def attend(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The layer's output (..., L, C) for the call that it makes of x (..., L, C) and its context."""
        out = self.mix_tokens(call, x, context).transpose(-3, -2).flatten(-2)
        if self.v_conv is not None:
            out = out + self._convolved(self.v_conv, call, context)
        return self.finished(out, x)

    def finished(self, out: Tensor, x: Tensor) -> Tensor:
        """What the mechanism said, heads side by side, (..., L, C), normalised, gated and projected."""
        out = self.norm(out)
        if self.gate is not None and self.gate_activation is not None:
            out = out * GATES[self.gate_activation](self.gate(x))
        return self.proj_drop(self.proj(out))

    def folded(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The second-order layer up to its last dropout, by the covariance of its tokens."""
        self._check_width("x", x)
        if key_mask is not None:
            check_mask(key_mask, x, x.shape[:-2])
        W, out = self.qkv, self.proj
        return folded_attention(x, W.weight, W.bias, out.weight, out.bias, self.num_heads, key_mask)

    def call(
        self,
        x: Tensor,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: Grid | None = None,
        prefix: int = 0,
    ) -> Call:
        """What the mechanism is asked for these tokens; arguments are those of `forward`."""
        check_flag("is_causal", is_causal)
        check_count("prefix", prefix, 0)
        if grid is None:
            if prefix not in (0, self.prefix):
                raise ValueError(f"prefix={prefix} stands before the patches of a grid: pass grid=(rows, cols) with it")
            grid, prefix = self.grid_size, self.prefix
        dropout = self.attn_drop if self.training else 0.0
        there = key_mask if context is None else None
        query, key, value = self.project(x, context)
        if self.rotary is not None:
            query, key = (rotate(x, self.rotary, self.first_place + shards.place(x.shape[-2])[0]) for x in (query, key))
        grouped = self.enable_gqa
        return Call(query, key, value, key_mask, is_causal, None, grouped, there, grid, prefix, dropout_p=dropout)

    def asked(
        self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None, *args: Any,
        attn_mask: Tensor | None = None, **layout: Any,
    ) -> Call:  # fmt: skip
        """The call that `forward` makes of the same arguments."""
        return self.call(x, context, one_mask(key_mask, attn_mask, x if context is None else context), *args, **layout)

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Output (..., H, L, D) of the mechanism for the call of x (..., L, C) and its context."""
        return self.mix_in_mean(self.mix.run(call, x), call)

    def mix_in_mean(self, out: Tensor, call: Call, heads: slice = slice(None)) -> Tensor:
        """The mechanism's output for some heads with `temperature="order"`; as it is with any other."""
        return out if self.temperature is None else self.temperature.mean_in(out, call, self.normalization, heads)

    @property
    def normalization(self) -> str:
        """That of the cumulant mechanisms."""
        return self.attention_options.get("normalization", "mean")

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Query (..., H, L, D) of x, and key and value (..., Hk, M, D) of the context, or of x itself."""
        self._check_width("x", x)
        counts = self.head_counts
        if context is None:
            query, key, value = self._heads(self.qkv(x), counts)
        else:
            self._check_width("context", context)
            bias, cut = self.qkv.bias, (self.widths[0], sum(self.widths[1:]))
            own, other = (None, None) if bias is None else bias.split(cut)
            W_query, W_rest = self.qkv.weight.split(cut)
            (query,) = self._heads(F.linear(x, W_query, own), counts[:1])
            key, value = self._heads(F.linear(context, W_rest, other), counts[1:])
        # Under autocast a norm may answer in float32; all three must be of one dtype.
        query, key = self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype)
        return query if self.temperature is None else self.temperature.scale(query), key, value

    def scores(self, x: Tensor, context: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """The weights with which the mechanism of this layer mixes the values, (..., H, L, M). Cost: L M C.

        Arguments are those of `forward`. Temperatures are in them; a convolution of the values and a gate are not.
        """
        return self.scores_of(self.call(x, context, *args, **kwargs), x, context)

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """The same for the call of x (..., L, C) and its context; mechanisms that look at x need it."""
        return self.weights(self.mix, call, x)

    def weights(self, mix: Mix, call: Call, x: Tensor | None = None, heads: slice = slice(None)) -> Tensor:
        """Weights of some heads for their call, as `call` makes it."""
        A = mix.weigh(call, x)
        return A if self.temperature is None else self.temperature.mean_in(A, call, self.normalization, heads, weigh)

    def forward_packed(self, x: Tensor, cu_seq: Tensor, longest: int | None = None, is_causal: bool = False) -> Tensor:
        """Sequences end to end, x (T, C) -> (T, C); see `nn.streams`."""
        return forward_packed(self, x, cu_seq, longest, is_causal)

    def stream(self) -> LayerStream:
        """This layer token by token: `stream().step(x)` with x (B, n, C)."""
        return LayerStream(self)

    def extra_repr(self) -> str:
        grouped = f", num_kv_heads={self.num_kv_heads}" if self.enable_gqa else ""
        return f"{self.dim}, num_heads={self.num_heads}{grouped}, attention={self.mechanism.name!r}"

    def _heads(self, x: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """(..., L, sum of counts D) as tensors (..., count, L, D)."""
        split = x.unflatten(-1, (-1, self.head_dim)).split(counts, -2)
        return tuple(part.transpose(-3, -2) for part in split)

    def _convolved(self, v_conv: ValueConv, call: Call, context: Tensor | None) -> Tensor:
        """Convolution of the values (..., H, L, D) on the grid, (..., L, C); absent tokens count as 0."""
        shards.needs_all("v_conv, a convolution of the values,")
        grid, prefix = call.grid, call.prefix
        if context is not None or call.is_causal:
            raise ValueError("v_conv mixes neighbours on a grid: it needs context=None and is_causal=False")
        if grid is None:
            raise ValueError("v_conv needs to know the grid: pass grid=(rows, cols) here or grid_size to the layer")
        value = repeat_heads(without_absent(call.value, call.key_mask), self.num_heads)
        tokens = value.transpose(-3, -2).flatten(-2)
        if prefix + math.prod(grid) != tokens.shape[-2]:
            raise ValueError(f"grid={grid} with prefix={prefix} does not make {tokens.shape[-2]} tokens")
        return v_conv(tokens, grid, prefix)

    def _check_width(self, name: str, x: Tensor) -> None:
        check_dtype(name, x)
        if x.ndim < 2 or x.shape[-1] != self.dim:
            raise ValueError(f"{name} must have shape (..., tokens, {self.dim}), got {tuple(x.shape)}")
        check_beside(name, x, next(self.proj.parameters(), None))  # which may have been swapped for something else
