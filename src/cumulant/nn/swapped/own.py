"""Our own `MultiheadAttention` with another mechanism inside, taken out again at will.

Shape legend: ... leading dimensions, L tokens, M context tokens, C width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ... import zoo
from .. import AxialAttention, CumulantAttention, MultiheadAttention
from ..fold import folded_attention, pays
from .choice import Choice, mix, observed, weights


class HeadMix(nn.Module):
    """What a `MultiheadAttention` calls between its projections after conversion. No parameters."""

    def __init__(self, choice: Choice, owner: nn.Module) -> None:
        super().__init__()
        self.choice = choice
        self.__dict__["owner"] = owner  # not a submodule: it holds this one

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **shared: Any) -> Tensor:
        return mix(self.__dict__["owner"], self.choice, query, key, value, **shared)

    def scores(self, query: Tensor, key: Tensor, **shared: Any) -> Tensor:
        return weights(self.choice, query, key, **shared)

    def extra_repr(self) -> str:
        return str(self.choice)


class FoldingAttention(MultiheadAttention):
    """A converted second-order layer, computed from the token covariance where that is expected to be faster."""

    fold = True

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Tensor:
        """x (..., L, C), context (..., M, C), key_mask (..., M) -> (..., L, C)."""
        plain = self.fold and context is None and not is_causal and x.ndim == 3 and not observed()
        if plain and pays(x.shape[1], self.dim, self.num_heads, x.device.type):
            y = folded_attention(
                x, self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias, self.num_heads,
                self.head_dim**-0.5, key_mask,
            )  # fmt: skip
            return self.proj_drop(y)
        return super().forward(x, context, key_mask, is_causal, grid, prefix)


def swap(name: str, module: nn.Module, choice: Choice) -> Callable[[], None]:
    """Put the choice into a layer; returns what takes it out again."""
    assert isinstance(module, MultiheadAttention)
    axial = isinstance(module, AxialAttention)
    if axial and choice.heads is not None:
        raise ValueError(f"{name}: heads of AxialAttention differ already; choose whole layers")
    if isinstance(module, CumulantAttention):
        raise ValueError(f"{name} is a CumulantAttention; convert a model made with cumulant.create_model")
    mechanism = zoo.get(choice.attention)
    mixers = ["mix", "mix_space"] if axial else ["mix"]
    before = {key: getattr(module, key) for key in ("mechanism", "attention_options", "attn_drop", *mixers)}
    after: dict[str, Any] = {
        "mechanism": mechanism,
        "attention_options": dict(choice.options),
        "attn_drop": module.attn_drop if choice.drops else 0.0,
        **{key: HeadMix(choice, module) for key in mixers},
    }
    kind = type(module)
    _put(module, after, FoldingAttention if kind is MultiheadAttention and _foldable(module, choice) else kind)
    return partial(_put, module, before, kind)


def _put(module: nn.Module, values: dict[str, Any], kind: type[MultiheadAttention]) -> None:
    for key, value in values.items():
        if key in module._modules and not isinstance(value, nn.Module):
            del module._modules[key]
        setattr(module, key, value)
    module.__class__ = kind


def _foldable(module: MultiheadAttention, choice: Choice) -> bool:
    norms = all(isinstance(norm, nn.Identity) for norm in (module.q_norm, module.k_norm, module.norm))
    extras = any(part is not None for part in (module.v_conv, module.gate, module.temperature))
    return choice.attention == "cumulant2" and choice.heads is None and not choice.options and norms and not extras
