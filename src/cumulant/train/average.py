"""The exponential moving average of the weights, kept beside the model and put in its place for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .processes import local


class Average:
    """a <- d a + (1 - d) w after every step, with d = min(decay, (1 + step) / (10 + step)).

    The lower decay of the first steps forgets the random initial weights. Cost: one pass over the weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = [local(p) for p in model.parameters()]
        self.average = [w.detach().clone() for w in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after that many steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, self.weights, 1 - decay)

    @torch.no_grad()
    def take(self) -> None:
        """Start again from the weights as they are."""
        torch._foreach_copy_(self.average, self.weights)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is held the model has the averaged weights; afterwards its own again, bit for bit."""
        with torch.no_grad():
            own = [w.clone() for w in self.weights]
            torch._foreach_copy_(self.weights, self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, own)
