"""A causal layer token by token, its mechanisms replaced by ones that remember what came before; and sequences end to
end through a layer: on a GPU as they are, where its mechanism takes them so, else padded once and masked.

Shape legend: B batch, H heads, n new tokens, M tokens so far, C width, D head width; T tokens of N sequences in a row.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..call import Call, check_dtype, offsets
from ..zoo.mixing import Bound, Mix
from ..zoo.ragged import places
from ..zoo.registry import own_options

if TYPE_CHECKING:
    from .attention import MultiheadAttention

DEVICES, DTYPES = ("cuda",), (torch.bfloat16, torch.float16)


class LayerStream:
    """`step(x)` takes the next tokens (B, n, C) of a sequence and gives their rows of causal attention, (B, n, C).

    A mechanism that streams keeps its state of constant size; softmax, and every other whose last causal row is that of
    all keys so far, keeps keys and values. No gradients.
    """

    def __init__(self, layer: MultiheadAttention) -> None:
        layer.mechanism.require("causal")
        self.layer = copy.copy(layer)  # the same parameters, its own mechanisms
        self.layer._modules = dict(layer._modules)
        self.mixes = [_remembering(layer, mix) for mix in layer.mixers()]
        for name, mix in zip(layer.mixer_names, self.mixes, strict=True):
            self.layer._modules.pop(name, None)
            self.layer.__dict__[name] = mix
        self.tokens = 0
        self.lead: torch.Size | None = None  # of the tokens so far

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """The rows of the next tokens x (B, n, C)."""
        lead = check_next(x, self.lead)
        self.layer.first_place = self.tokens
        call = self.layer.call(x, is_causal=True)
        out = self.layer.attend(call, x)
        self.tokens, self.lead = self.tokens + x.shape[-2], lead
        return out

    def numel(self) -> int:
        """Numbers that are held."""
        return sum(mix.numel() for mix in self.mixes)


def _remembering(layer: MultiheadAttention, mix: Mix) -> Sums | KeysValues:
    mechanism = layer.mechanism
    if not isinstance(mix, Bound):
        raise ValueError(f"{mechanism.name!r} has parameters of its own in a layer and does not stream")
    if mechanism.stream is not None:
        return Sums(mix, mechanism.stream(**mix.options))
    if not (mechanism.cross and mechanism.independent_rows and mechanism.order_free and mechanism.noncausal):
        mechanism.require("streaming")
    return KeysValues(mix)


class Recomputed:
    """For any causal layer: keeps its input and computes all rows again. Cost: that of the layer, for every token."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.past: Tensor | None = None

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """The rows of the next tokens x (B, n, C)."""
        check_next(x, None if self.past is None else self.past.shape[:-2])
        if self.past is not None and (x.dtype, x.shape[-1]) != (self.past.dtype, self.past.shape[-1]):
            before = f"{self.past.dtype} and {self.past.shape[-1]} wide"
            raise ValueError(f"x must be as the tokens before it, {before}, got {x.dtype}, {x.shape[-1]} wide")
        past = x if self.past is None else torch.cat((self.past, x), -2)
        out: Tensor = self.layer(past, is_causal=True)
        self.past = past  # once it was taken: a step that fails leaves no token behind
        return out[..., -x.shape[-2] :, :]

    def numel(self) -> int:
        """Numbers that are held."""
        return 0 if self.past is None else self.past.numel()


def check_next(x: Tensor, lead: torch.Size | None) -> torch.Size:
    """The leading dimensions of tokens x (..., n, C); raises where they are not those of the tokens before."""
    check_dtype("x", x)
    if x.ndim < 3 or lead not in (None, x.shape[:-2]):
        before = "..." if lead is None else ", ".join(map(str, lead))
        raise ValueError(f"x must have shape ({before}, tokens, width), as the tokens before it, got {tuple(x.shape)}")
    return x.shape[:-2]


def stream_of(layer: Any, claimed: bool) -> LayerStream | Recomputed:
    """What keeps the past of a causal layer: its stream, if its kind claims one and its mechanism has it with these
    options, or all its inputs."""
    return layer.stream() if claimed and streams(layer) else Recomputed(layer)


def streams(layer: Any) -> bool:
    """Whether the mechanism of a layer, with its options, can be taken token by token."""
    mechanism, mixes = layer.mechanism, layer.mixers()
    if not all(isinstance(mix, Bound) for mix in mixes):
        return False
    if mechanism.stream is not None:
        known = set(own_options(mechanism.stream))
        # Temperatures per order mix in a mean of the values, which no stream keeps.
        mixes_means = layer.temperature is not None and layer.temperature.third is not None
        return all(set(mix.options) <= known for mix in mixes) and not mixes_means
    return mechanism.cross and mechanism.independent_rows and mechanism.order_free and mechanism.noncausal


class Sums:
    """A stream of the zoo as what a layer calls between its projections."""

    def __init__(self, mix: Bound, stream: Any) -> None:
        self.mix, self.stream, self.begun = mix, stream, False

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        prompt, self.begun = not self.begun and call.key.shape[-2] > 1 and hasattr(self.stream, "append"), True
        if prompt:  # all rows at once
            self.stream.append(call.key, call.value)
            return self.mix.run(call)
        query, key, value = (part.split(1, -2) for part in call[:3])
        rows = [self.stream.step(*token) for token in zip(query, key, value, strict=True)]
        return torch.cat(rows, -2)

    def numel(self) -> int:
        from torch.utils._pytree import tree_leaves

        return sum(part.numel() for part in tree_leaves(self.stream.state) if isinstance(part, Tensor))


class KeysValues:
    """Keys and values so far. Cost of a token: M D."""

    def __init__(self, mix: Bound) -> None:
        self.mix = mix
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        past = 0 if self.key is None else self.key.shape[-2]
        self.key = call.key if self.key is None else torch.cat((self.key, call.key), -2)
        self.value = call.value if self.value is None else torch.cat((self.value, call.value), -2)
        if not past:
            return self.mix.run(call)
        rows = []
        for t in range(call.query.shape[-2]):
            seen = slice(0, past + t + 1)
            one = call._replace(query=call.query[..., t : t + 1, :], key=self.key[..., seen, :])
            rows.append(self.mix.run(one._replace(value=self.value[..., seen, :], is_causal=False)))
        return torch.cat(rows, -2)

    def numel(self) -> int:
        return sum(0 if part is None else part.numel() for part in (self.key, self.value))


def forward_packed(
    layer: nn.Module, x: Tensor, cu_seq: Tensor, longest: int | None = None, is_causal: bool = False
) -> Tensor:
    """x (T, C) -> (T, C), sequence i being x[cu_seq[i] : cu_seq[i + 1]]; equal to a loop over them.

    Cost: that of N sequences of the longest length; of their own where `takes_packs`.
    """
    check_dtype("x", x)
    if x.ndim != 2:
        raise ValueError(f"x must be packed as (tokens, width), got {tuple(x.shape)}")
    place, mask = places(offsets("cu_seq", cu_seq, x.shape[0], longest, "longest"), x.device)
    if place.numel() == 0:
        return x.new_zeros(x.shape)
    # Padding repeats some token of the pack: it is masked, so that it does not matter which.
    out: Tensor = layer(x[place], attn_mask=mask, is_causal=is_causal)
    return out[mask]


def takes_packs(layer: Any, x: Tensor) -> bool:
    """Whether a layer's mechanism takes these tokens end to end: in 16 bits on a GPU, and with nothing of the layer
    between its projections."""
    half = x.dtype in DTYPES or torch.is_autocast_enabled(x.device.type)
    free = layer.v_conv is None and layer.temperature is None and layer.rotary is None and not layer.enable_gqa
    return (
        x.device.type in DEVICES
        and half
        and free
        and isinstance(layer.mix, Bound)
        and layer.mechanism.packed is not None
        and not layer.mechanism.wants_grid
        and not (layer.training and layer.attn_drop)
    )


def attend_packed(layer: Any, x: Tensor, cu_seq: Tensor, longest: int) -> Tensor:
    """x (T, C) -> (T, C) of a layer that `takes_packs`: its projections around the packed mechanism. `longest` bounds
    the length of a sequence; nothing waits for the device."""
    query, key, value = (part.transpose(0, 1) for part in layer.project(x))
    options = layer.attention_options
    out = layer.mechanism.packed(query, key, value, cu_seq, cu_seq, longest, longest, **options)
    return layer.finished(out.flatten(1), x)
