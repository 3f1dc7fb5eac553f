"""Our own `MultiheadAttention` with another mechanism inside, taken out again at will.

Shape legend: ... leading dimensions, L tokens, M context tokens, C width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ... import zoo
from ...call import Call
from ...zoo.mixing import Mixer
from .. import CumulantAttention, MultiheadAttention
from .choice import Choice, mix, weights


class HeadMix(Mixer):
    """What a `MultiheadAttention` calls between its projections after conversion. No parameters."""

    def __init__(self, choice: Choice, owner: nn.Module) -> None:
        super().__init__()
        self.choice = choice
        self.__dict__["owner"] = owner  # not a submodule: it holds this one

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        return mix(self.__dict__["owner"], self.choice, call)

    def weigh(self, call: Call, x: Tensor | None = None) -> Tensor:
        return weights(self.choice, call)

    def extra_repr(self) -> str:
        return str(self.choice)


def swap(name: str, module: nn.Module, choice: Choice) -> Callable[[], None]:
    """Put the choice into a layer; returns what takes it out again."""
    assert isinstance(module, MultiheadAttention)
    several = len(module.mixer_names) > 1
    if several and choice.heads is not None:
        raise ValueError(f"{name}: heads of {type(module).__name__} differ already; choose whole layers")
    if isinstance(module, CumulantAttention):
        raise ValueError(f"{name} is a CumulantAttention; convert a model made with cumulant.create_model")
    mechanism = zoo.get(choice.attention)
    mixers = module.mixer_names
    before = {key: getattr(module, key) for key in ("mechanism", "attention_options", "attn_drop", "fold", *mixers)}
    after: dict[str, Any] = {
        "mechanism": mechanism,
        "attention_options": dict(choice.options),
        "attn_drop": module.attn_drop,
        "fold": "auto" if choice.foldable and not several and not module.attn_drop and _plain(module) else False,
        **{key: HeadMix(choice, module) for key in mixers},
    }
    _put(module, after)
    return partial(_put, module, before)


def _put(module: nn.Module, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if key in module._modules and not isinstance(value, nn.Module):
            del module._modules[key]
        setattr(module, key, value)


def _plain(module: MultiheadAttention) -> bool:
    norms = all(isinstance(norm, nn.Identity) for norm in (module.q_norm, module.k_norm, module.norm))
    return norms and module.v_conv is module.gate is module.temperature is None
