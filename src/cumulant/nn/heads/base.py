"""What the layers of this room share: their signature, the losses that they add to a task, and what they say to a bad
request.

Shape legend: ... leading dimensions, L tokens, M context tokens, C width, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import shards, zoo
from ...call import Call, Grid
from ...grammar import parse
from ...kinds import kinds_checked
from ...zoo.registry import Mechanism
from ..arguments import as_key_mask
from ..attention import MultiheadAttention


class KeepsLosses:
    """Mixin of layers with losses: `keep_loss` in a training forward, `losses()` afterwards.

    What is kept belongs to the graph of the last forward, so it is left out of copies and pickles.
    """

    training: bool

    def keep_loss(self, name: str, loss: Tensor) -> None:
        """Keep a loss, its weight included, of the forward that is running; nothing where the layer does not train."""
        if self.training:
            self.__dict__.setdefault("_kept_losses", {})[name] = loss

    def losses(self) -> dict[str, Tensor]:
        """Losses of the last forward in training mode by name, weights included; empty in evaluation."""
        return dict(self.__dict__.get("_kept_losses", {})) if self.training else {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_kept_losses"}


@kinds_checked
def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """What the layers of a model add to its loss: each named loss as the mean over the layers that have it, summed.

    None where no layer has any.
    """
    found: dict[str, list[Tensor]] = {}
    for module in model.modules():
        if isinstance(module, KeepsLosses):
            for name, loss in module.losses().items():
                found.setdefault(name, []).append(loss)
    means = [torch.stack(losses).mean() for losses in found.values()]
    return torch.stack(means).sum() if means else None


class HeadsLayer(KeepsLosses, MultiheadAttention):
    """`MultiheadAttention` in the signature of this room; a layer changes its projections, its mixing, or both.

    A subclass is `@registered`, and overrides `project`, `mix_tokens` and `scores_of` as far as its formula differs.
    Arguments that it does not explain are those of `MultiheadAttention`.
    """

    layer_name: str  # in the registry
    splits = False  # whether it may hold one worker's part of a sequence: where a mechanism alone looks at other tokens

    def forward(  # type: ignore[override]  # a mask as in timm before the context
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, context: Tensor | None = None,
        **layout: Any,
    ) -> Tensor:  # fmt: skip
        """x (..., L, C), context (..., M, C) -> (..., L, C).

        attn_mask marks keys: (..., M) bool or weights, or (..., 1, 1, M) bool; see `as_key_mask`.
        """
        self.check_whole()
        return self.attend(self.asked(x, attn_mask, is_causal, context, **layout), x, context)

    def asked(  # type: ignore[override]
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        context: Tensor | None = None,
        grid: Grid | None = None,
        prefix: int = 0,
    ) -> Call:
        """The call that `forward` makes of the same arguments."""
        mask = as_key_mask(attn_mask, x if context is None else context)
        return self.call(x, context, mask, is_causal, grid=grid, prefix=prefix)

    def check_whole(self) -> None:
        """Raises where workers hold the other tokens of a sequence that this layer must see."""
        if not self.splits:
            shards.needs_all(f"layer {self.layer_name!r}", "take layer 'multihead', 'sqa' or 'gda', which are")

    def check_ungrouped(self) -> None:
        """Raises where query heads share key heads."""
        if self.enable_gqa:
            raise ValueError(
                f"layer {self.layer_name!r} has a key head for each head, got num_kv_heads={self.num_kv_heads}"
            )

    def scores(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The weights with which this layer mixes the values, (..., H, L, M); arguments are those of `forward`."""
        call = self.asked(x, *args, **kwargs)
        return self.scores_of(call, x, kwargs.get("context"))


def need(layer: str, mechanism: Mechanism, capability: str, why: str, remedy: str) -> None:
    """Raises unless the mechanism has what a layer needs, naming both and the nearest that works."""
    if not getattr(mechanism, capability):
        near = zoo.nearest(mechanism, capability)
        hint = f"; nearest mechanism that has it: {near!r}" if near else ""
        raise ValueError(
            f"layer {layer!r} {why} and needs {capability.replace('_', ' ')}, which {mechanism.name!r} does not "
            f"have{hint}; or {remedy}"
        )


def refuse(layer: str, mechanism: Mechanism, why: str) -> None:
    """Raises for a mechanism that a layer cannot be over, naming both and the nearest that works."""
    near = "linear" if mechanism.name.startswith("cumulant") else "cumulant3"
    raise ValueError(
        f"layer {layer!r} cannot be over {mechanism.name!r}: {why}; nearest mechanism that works: {near!r}"
    )


def flattened(call: Call) -> Call:
    """The call, checked, with all leading dimensions as one and a mask for each batch."""
    call = call.checked()
    query, key, value, mask = call.in_one_batch()
    return call._replace(query=query, key=key, value=value, key_mask=mask, query_mask=None)


def crossed(layer: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a layer whose mechanism meets keys of other places than its queries: parts of a module that need
    one grid for both (convolutions, tables of positions) are left out unless options ask for them."""
    name, own = parse(layer.get("attention", "softmax"))
    without = {key: x for key, x in zoo.get(name).pattern_options.get("cross", {}).items() if key not in own}
    return {**layer, "attention_options": {**without, **(layer.get("attention_options") or {})}} if without else layer
