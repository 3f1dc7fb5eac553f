"""What the softmax layers of a model compute, seen from outside while it runs; nothing is changed by it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ..nn import MultiheadAttention
from . import sites
from .choice import KEPT, Call, Choice, observing
from .sites import Site

Seen = Callable[[str, Call], None]  # the layer's name in the model, and what it was asked to compute


def softmax_sites(found: Sequence[Site]) -> list[Site]:
    """Those that compute softmax now and can be replaced."""
    return [site for site in found if site.obstacle is None and _is_softmax(site.module)]


def kept_plan(model: nn.Module, found: Sequence[Site]) -> dict[str, Choice]:
    """Layers of transformers that stay softmax are tagged so; elsewhere they are left alone."""
    if sites.library_of(model) != sites.TRANSFORMERS:
        return {}
    return {site.name: KEPT for site in found}


@contextmanager
def own_softmax(model: nn.Module, found: Sequence[Site]) -> Iterator[None]:
    """For a while our own softmax in every layer that is softmax and can be replaced: the answers are the same."""
    plan = {**kept_plan(model, found), **{site.name: KEPT for site in softmax_sites(found)}}
    with sites.applied(model, plan):
        yield


@contextmanager
def watching(model: nn.Module, found: Sequence[Site], seen: Seen) -> Iterator[None]:
    """Within this, `seen(name, call)` is told of every call of a softmax layer, with its grid where it has one."""
    with own_softmax(model, found), ExitStack() as hooks:
        names = {id(model.get_submodule(site.name)): site.name for site in softmax_sites(found)}
        grids: dict[int, tuple[tuple[int, ...] | None, int]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            own = getattr(module, "grid_size", None), getattr(module, "prefix", 0)
            grid, prefix = (given["grid"], given.get("prefix", 0)) if given.get("grid") is not None else own
            grids[id(module)] = None if grid is None else tuple(grid), prefix

        def tell(module: nn.Module, made: Call) -> None:
            if id(module) in names:
                grid, prefix = grids.get(id(module), (None, 0))
                seen(names[id(module)], replace(made, grid=grid, prefix=prefix))

        for site in softmax_sites(found):
            if isinstance(site.module, MultiheadAttention):  # others do not tell their mechanism of a grid
                handle = site.module.register_forward_pre_hook(note, with_kwargs=True)
                hooks.callback(handle.remove)
        with observing(tell):
            yield


def _is_softmax(module: nn.Module) -> bool:
    mechanism = getattr(module, "mechanism", None)
    return mechanism is None or mechanism.name == "softmax"
