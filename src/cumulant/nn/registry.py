"""Attention layers by name: `create_layer("moh+top=4", 384, 6, attention="cumulant3")`.

A layer maps tokens x (..., L, C) to tokens, `layer(x, attn_mask=None, is_causal=False, context=None, grid=None,
prefix=0)`, all but x by keyword; which mechanism works between its projections is the name it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from ..call import check_count
from ..grammar import Registry, parse
from ..kinds import check_kinds
from ..zoo.registry import can
from .arguments import check_name
from .attention import MultiheadAttention
from .axial import AxialAttention

Kind = TypeVar("Kind", bound=Callable[..., nn.Module])
# What models tell every layer; all other arguments of its class are options that a user may write behind its name.
SHARED = frozenset({"self", "dim", "num_heads", "attention", "attention_options", "qkv_bias", "qk_norm", "scale_norm",
                    "proj_bias", "attn_drop", "proj_drop", "norm_layer", "grid_size", "prefix", "v_conv", "v_conv_init",
                    "gate", "temperature", "num_kv_heads", "head_dim", "rotary", "device", "dtype"})  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """`build(dim, num_heads, *, attention, **options)` makes the module. The rest is what it claims; the conformance
    suite and `cumulant list layers` find out by running it (`nn/probes.py`)."""

    name: str
    summary: str
    build: Callable[..., nn.Module]
    paper: str = ""
    year: int = 0
    arxiv: str = ""
    cost: str = ""  # multiply-adds of one layer, besides the projections, in L, D and H

    causal: bool = False  # `is_causal=True`: rows that no later token changes
    cross: bool = False  # `context=`: keys and values of another sequence
    key_mask: bool = False  # `attn_mask=`: padding, which acts on nobody
    ragged: bool = False  # `forward_packed(x, cu_seq)`: sequences end to end
    streaming: bool = False  # `stream().step(x)`: token by token, equal to the causal layer
    equivariant: bool = False  # permuting the tokens permutes the output
    losses: bool = False  # `losses()`: auxiliary losses in training
    weights: bool = False  # `scores(x)`: the weights can be shown
    needs_grid: bool = False  # runs only where tokens lie on a `grid`
    # Mechanisms of the zoo that it does not run over, with the reason.
    not_over: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """What may stand behind its name, as in "moh+top=4"."""
        parameters = inspect.signature(self.build).parameters.values()
        return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in SHARED)


CLAIMS = ("causal", "cross", "key_mask", "ragged", "streaming", "equivariant", "losses", "weights")
_LAYERS: Registry[Layer] = Registry("attention layer")


def register_layer(layer: Layer) -> Layer:
    """Add a layer under its name, which must be new, and return it."""
    return _LAYERS.add(layer.name, layer)


def registered(name: str, summary: str, **claims: Any) -> Callable[[Kind], Kind]:
    """Decorator for the class of a layer: it is registered, with what else a `Layer` says, and knows its name."""

    def add(build: Kind) -> Kind:
        register_layer(Layer(name, summary, build, **claims))
        build.layer_name = name  # type: ignore[attr-defined]
        return build

    return add


def layers() -> list[str]:
    """Names of all registered layers."""
    return list(_LAYERS)


def get_layer(name: str) -> Layer:
    """The layer of that name; options behind it are passed over."""
    if not isinstance(name, str):
        raise TypeError(f"layer must be the name of an attention layer, got {name!r}")
    return _LAYERS.named(parse(name)[0])


def create_layer(name: str, dim: int, num_heads: int, *, attention: str = "softmax", **options: Any) -> nn.Module:
    """A freshly initialised layer of width `dim`; `options` are those of its class, or stand behind its name."""
    layer, own = get_layer(name), parse(name)[1]
    check_count("dim", dim)
    check_count("num_heads", num_heads)
    check_name(attention)
    unknown = [option for option in own if option not in layer.options]
    if unknown:
        accepted = ", ".join(layer.options) or "none"
        raise ValueError(f"unknown option {unknown[0]!r} of layer {layer.name!r}; accepted: {accepted}")
    given = {**options, **own}
    for form in (layer.build, MultiheadAttention):
        check_kinds(form, given)
    return layer.build(dim, num_heads, attention=attention, **given)


def number_layers(model: nn.Module) -> None:
    """Tell layers that want to know it (`set_number`) which one of the model they are, from 1."""
    wanting: list[Any] = [module for module in model.modules() if hasattr(module, "set_number")]
    for number, layer in enumerate(wanting, 1):
        layer.set_number(number)


_PLAIN: dict[str, Any] = {"paper": "Attention Is All You Need (Vaswani et al.)", "year": 2017, "arxiv": "1706.03762"}
register_layer(
    Layer(
        "multihead", "projections, a mechanism between them, an output projection", MultiheadAttention, **_PLAIN,
        cost="that of the mechanism", **can("causal cross key_mask ragged streaming equivariant weights"),
    )
)  # fmt: skip
register_layer(
    Layer(
        "axial", "half of the heads along time, the other half within a frame", AxialAttention,
        paper="ViViT, model 4 (Arnab et al.)", year=2021, arxiv="2103.15691",
        cost="that of the mechanism over time and over a frame", **can("key_mask weights needs_grid"),
    )
)  # fmt: skip
