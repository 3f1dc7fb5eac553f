"""How a network attends: arguments that all networks share, and one mechanism for all of its blocks or one for each,
`attention=["agent"] * 4 + ["softmax"] * 8`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import zoo
from ..call import check_count, check_share
from ..grammar import parse, read_blocks, suggest
from ..nn import create_layer
from .parts import checked_extras


@dataclass(frozen=True)
class Attending:
    """What decides the attention of a network, whatever its shape.

    Args:
        attention: name of a mechanism, see `cumulant.zoo.names()`; options may stand behind it, "cumulant3+full".
            Or one for each block: a list of names, or a text, "4xagent,8xsoftmax".
        attention_options: options of that mechanism; of several, each takes those that it has.
        layer: name of an attention layer, see `cumulant.nn.layers()`; "multihead" unless given.
        in_chans: channels of the images.
        drop_path: stochastic depth of the last block; it grows linearly from 0 at the first.
        init_std: of the initial linear weights, tokens and positions. DeiT's 0.02 is made for widths of hundreds;
            a model of width 64 starts learning much sooner from about 64**-0.5.
    """

    attention: str | Sequence[str] = "softmax"
    attention_options: dict[str, Any] | None = None
    layer: str | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    in_chans: int = 3
    drop_path: float = 0.0
    init_std: float | None = 0.02

    def __post_init__(self) -> None:
        check_count("in_chans", self.in_chans)

    @property
    def place(self) -> dict[str, Any]:
        """Where weights are made."""
        return {"device": self.device, "dtype": self.dtype}

    def each(self, count: int, what: str = "blocks") -> list[dict[str, Any]]:
        """For each of `count` blocks the arguments `attention` and `attention_options` of its layer."""
        return by_block(self.attention, self.attention_options, count, what)

    def made(self, dim: int, num_heads: int, mechanism: dict[str, Any], **more: Any) -> nn.Module:
        """The attention layer of a block, whose mechanism is one of `each`."""
        return create_layer(self.layer or "multihead", dim, num_heads, **mechanism, **self.place, **more)


@dataclass(frozen=True)
class Projecting(Attending):
    """And what its layers and blocks have around the mechanism.

    Args:
        attention_extras: further arguments of every layer: num_kv_heads, v_conv, v_conv_init, gate and temperature.
        drop_rate: dropout behind embeddings and projections and in MLPs; `attn_drop`: of probabilities.
    """

    attention_extras: dict[str, Any] | None = None
    qkv_bias: bool = True
    qk_norm: bool = False
    drop_rate: float = 0.0
    attn_drop: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("drop_rate", self.drop_rate)

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments of every layer but for the extras."""
        own = {"qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm, "attn_drop": self.attn_drop}
        return {**own, "proj_drop": self.drop_rate}

    @property
    def extras(self) -> dict[str, Any]:
        return checked_extras(self.attention_extras, self.layer)

    def made(self, dim: int, num_heads: int, mechanism: dict[str, Any], **more: Any) -> nn.Module:
        return super().made(dim, num_heads, mechanism, **{**self.shared, **self.extras, **more})


def by_block(
    attention: str | Sequence[str], options: dict[str, Any] | None, count: int, what: str = "blocks"
) -> list[dict[str, Any]]:
    """For each of `count` blocks the arguments `attention` and `attention_options` of its layer.

    `attention` is one name, or as many as there are blocks: a list, or one text, "4xagent,8xsoftmax". With several,
    each takes those of the options that it has; one that none has is an error.
    """
    names = read_blocks(attention)
    if len(names) == 1:
        names = names * count
    if len(names) != count:
        raise ValueError(
            f"attention must be one name, or one for each of the {count} {what}, got {len(names)} names in "
            f"{','.join(map(str, names))!r}; give several as words, without commas, where they are to be compared"
        )
    if len(set(names)) == 1:
        return [{"attention": name, "attention_options": options} for name in names]
    known = {name: zoo.get(parse(name)[0]).options for name in names}
    for option in options or {}:
        if not any(option in own for own in known.values()):
            every = list(dict.fromkeys(one for own in known.values() for one in own))
            raise ValueError(f"unknown option {option!r} of the mechanisms in {attention!r}; {suggest(option, every)}")
    return [
        {"attention": name, "attention_options": {key: x for key, x in (options or {}).items() if key in known[name]}}
        for name in names
    ]
