"""Class tokens and registers of models that do not say how many there are, found by moving them.

Shape legend: B batch, L tokens, C width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .batches import same_draws

# Parameters that models of transformers, and timm's inside of them, put before their patches.
TOKENS = re.compile(
    r"(^|\.)((cls|class|distillation|dist|cls_register|reg)_token|class_embedding|cls_emb|register_tokens)$"
)


def prefixes(model: nn.Module, run: Callable[[], Any], names: Sequence[str]) -> dict[str, int]:
    """How many tokens at the start of each named layer's input are class tokens and the like; layers without are left
    out. `run()` is a forward pass: one is made, and one more for each module that has such parameters.

    Nothing is guessed from names alone: in the first layer that a change of the parameters reaches, as many tokens as
    they make have to move, the first ones and no others. Further layers of that kind over as many tokens have the same.
    """
    owners: dict[str, list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if TOKENS.search(name):
            owners.setdefault(name.rpartition(".")[0], []).append(p)
    if not owners or not names:
        return {}
    found: dict[str, int] = {}
    before = _inputs(model, run, names)
    for tokens in owners.values():
        with _moved(tokens):
            after = _inputs(model, run, names)
        known: dict[tuple[str, int], int] = {}
        for name, x in before.items():
            y = after.get(name)
            if y is None or y.shape != x.shape or x.ndim != 3:
                continue
            moved, kind = (x != y).any(-1).any(0), (re.sub(r"\d+", "N", name), x.shape[1])
            count = sum(p.numel() for p in tokens) // x.shape[-1]
            if count == int(moved.sum()) and bool(moved[:count].all()):
                known[kind] = count
            if bool(moved.any()) and kind in known:
                found[name] = known[kind]
    return found


def _inputs(model: nn.Module, run: Callable[[], Any], names: Sequence[str]) -> Mapping[str, Tensor]:
    """What each layer is given first, of one of the batch, (1, L, C), in the order in which they run."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
            if x is not None and name not in seen:
                seen[name] = x[:1].detach().clone()

        return hook

    hooks = [model.get_submodule(n).register_forward_pre_hook(note(n), with_kwargs=True) for n in names]
    try:
        with torch.no_grad(), same_draws(model):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@contextmanager
def _moved(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this, the parameters are others. What a norm would take out again, a constant say, is not added."""
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.add_(torch.linspace(-1, 1, p.numel(), device=p.device).to(p.dtype).reshape(p.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, was in zip(parameters, kept, strict=True):
                p.copy_(was)
