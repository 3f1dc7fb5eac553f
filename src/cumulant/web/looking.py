"""The only door from the explorer to `cumulant.explain`: what it asks for, in the shapes that the page needs.

Shape legend: N layers, H heads, L tokens (prefix first, then patches row by row), K classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import explain
from ..explain.flow import logits_of
from ..nn.attention import MultiheadAttention

Pair = tuple[int, int]  # layer, head


def facts(model: nn.Module) -> dict[str, Any]:
    """layers, heads, prefix, grid, attention, classes of a model."""
    return explain.model_info(model)


@contextlib.contextmanager
def without(model: nn.Module, off: Sequence[Pair]) -> Iterator[None]:
    """The model with these heads switched off: their output is 0."""
    if not off:
        yield
        return
    with explain.head_off(model, list(off)):
        yield


@torch.no_grad()
def rows(model: nn.Module, images: Tensor, off: Sequence[Pair], query: int | None) -> Tensor:
    """Signed weights (N, H, 1, L) of one query of one image, or (N, H, L, L) of all when `query` is None."""
    queries: Any = "all" if query is None else [query]
    with without(model, off), explain.capture(model, images, queries=queries) as captured:
        pass
    return torch.stack([captured.maps(layer)[0].float().cpu() for layer in captured.layers])


@torch.no_grad()
def probabilities(model: nn.Module, images: Tensor, off: Sequence[Pair] = ()) -> Tensor:
    """Class probabilities (K,) of one image."""
    with without(model, off):
        return logits_of(model(images))[0].double().softmax(-1).cpu()


@torch.no_grad()
def summary(model: nn.Module, images: Tensor, off: Sequence[Pair]) -> dict[str, Tensor]:
    """Every number that `explain.summary` has, (N, H) each."""
    with without(model, off), explain.capture(model, images, queries="all") as captured:
        return explain.summary(captured)


@torch.no_grad()
def rollout(model: nn.Module, images: Tensor, off: Sequence[Pair]) -> Tensor:
    """How much of each input token reaches each output token, (L, L): the exact linear flow, with signs."""
    with without(model, off), explain.capture(model, images, queries="all") as captured:
        return explain.rollout(captured, sign="signed")[0].cpu()


def relevance(model: nn.Module, images: Tensor, off: Sequence[Pair]) -> Tensor:
    """Relevance of each token for the predicted class, seen from each token, (L, L)."""
    with without(model, off):
        return explain.relevance(model, images)[0].cpu()


def can_lens(model: nn.Module) -> bool:
    """Whether queries and keys of every layer can be had: plain layers of this library."""
    layers = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
    return bool(layers) and all(type(layer) is MultiheadAttention for layer in layers)


@torch.no_grad()
def projected(model: Any, images: Tensor, off: Sequence[Pair], layer: int) -> tuple[Tensor, Tensor]:
    """Query and key (H, L, D) of one layer for one image."""
    found: list[Tensor] = []
    attention = model.blocks[layer].attn
    hook = attention.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    try:
        with without(model, off):
            model(images)
    finally:
        hook.remove()
    query, key, _ = attention.project(found[0])
    return query[0].float(), key[0].float()


def divergence(p: Tensor, q: Tensor) -> float:
    """Jensen-Shannon divergence of two distributions (K,), between 0 and log 2."""
    middle = (p + q) / 2
    return max(0.0, float((torch.special.entr(middle) - (torch.special.entr(p) + torch.special.entr(q)) / 2).sum()))
