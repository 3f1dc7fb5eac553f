"""A causal layer token by token: its mechanisms replaced by ones that remember what came before.

Shape legend: B batch, H heads, n new tokens, M tokens so far, C width, D head width.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..call import Call
from ..zoo.mixing import Bound, Mix

if TYPE_CHECKING:
    from .attention import MultiheadAttention


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

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        """The rows of the next tokens x (B, n, C)."""
        self.layer.first_place = self.tokens
        call = self.layer.call(x, is_causal=True)
        out = self.layer.attend(call, x)
        self.tokens += x.shape[-2]
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
