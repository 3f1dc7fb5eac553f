"""Losses that a layer adds to its task, a router's balance say: kept by the layer, gathered from the model.

loss = F.cross_entropy(model(images), labels)
more = auxiliary_loss(model)
loss = loss if more is None else loss + more
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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
