"""What the attention layers of a model are asked to compute, seen while it runs; nothing is changed by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..call import Call
from ..models import ViViT
from ..nn.swapped.choice import KEPT, Choice, observing
from ..nn.swapped.plan import TRANSFORMERS, applied, library_of
from .seen import Seen, seen_converted, seen_fused, seen_in
from .sites import FUSED, OWN, Site
from .tokens import TokenLayout, layout_of


def softmax_sites(found: Sequence[Site]) -> list[Site]:
    """Those that compute softmax now and can be replaced."""
    return [site for site in found if site.obstacle is None and _is_softmax(site.module)]


def kept_plan(model: nn.Module, found: Sequence[Site]) -> dict[str, Choice]:
    """Layers of transformers that stay softmax are tagged so; elsewhere they are left alone."""
    if library_of(model) != TRANSFORMERS:
        return {}
    return {site.name: KEPT for site in found}


@contextmanager
def own_softmax(model: nn.Module, found: Sequence[Site]) -> Iterator[None]:
    """For a while our own softmax in every layer that is softmax and can be replaced: the answers are the same."""
    plan = {**kept_plan(model, found), **{site.name: KEPT for site in softmax_sites(found)}}
    with applied(model, plan):
        yield


@contextmanager
def watching_softmax(model: nn.Module, found: Sequence[Site], seen: Callable[[str, Call], None]) -> Iterator[None]:
    """Within this, `seen(name, call)` is told of every call of a softmax layer, with its grid where it has one."""
    with own_softmax(model, found):
        names = {id(model.get_submodule(site.name)): site.name for site in softmax_sites(found)}

        def tell(module: nn.Module, made: Call) -> None:
            if id(module) in names:
                seen(names[id(module)], made)

        with observing(tell):
            yield


def _is_softmax(module: nn.Module) -> bool:
    mechanism = getattr(module, "mechanism", None)
    return mechanism is None or mechanism.name == "softmax"


@contextmanager
def watching(model: nn.Module, sites: list[Site], see: Callable[[Site, Seen, TokenLayout], None]) -> Iterator[None]:
    """Within this, `see(site, call, layout)` is told of every call of these layers, before its result is used.

    Our own layers tell by their input; fused softmax by the arguments it is called with; converted layers by what
    they report to `nn.swapped`.
    """
    thread, active = threading.get_ident(), list[Site]()
    by_module = {site.module: site for site in sites}
    clip = TokenLayout(0, ())  # the one on its way, for layers that see only a part of it

    def here() -> bool:
        return threading.get_ident() == thread

    def tell(site: Site, seen: Seen) -> None:
        layout = layout_of(seen.queries, model)
        if site.axes != "all":
            layout = clip
        elif seen.call.grid is not None:
            layout = TokenLayout(seen.call.prefix, tuple(seen.call.grid))
        see(site, seen, layout)

    def own(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if here():
            tell(by_module[module], seen_in(module, *args, **kwargs))

    def reported(module: nn.Module, call: Call) -> None:
        site = by_module.get(module)
        if here() and site is not None and site.choice is not None:
            tell(site, seen_converted(site.choice, call))

    def begin(module: Any, _: Any) -> None:
        if here():
            active.append(by_module[module])

    def end(module: Any, *_: Any) -> None:
        if here() and active and active[-1].module is module:
            active.pop()

    def fused(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if here() and active:
            tell(active[-1], seen_fused(*arguments, **options))

    def note(module: Any, args: tuple[Any, ...]) -> None:
        nonlocal clip
        clip = TokenLayout(module.num_prefix_tokens, tuple(module.patch_embed.grid(*args[0].shape[2:])))

    with ExitStack() as stack:
        for site in sites:
            if site.kind == OWN:
                stack.callback(site.module.register_forward_pre_hook(own, with_kwargs=True).remove)
            elif site.choice is None:
                stack.callback(site.module.register_forward_pre_hook(begin).remove)
                stack.callback(site.module.register_forward_hook(end, always_call=True).remove)
        for module in model.modules():
            if isinstance(module, ViViT):
                stack.callback(module.register_forward_pre_hook(note).remove)
        if any(site.kind == FUSED and site.choice is None for site in sites):
            stack.enter_context(_Fused(fused))
        if any(site.choice is not None for site in sites):
            stack.enter_context(observing(reported))
        yield


class _Fused(TorchFunctionMode):
    """Tells of every fused softmax before it runs."""

    def __init__(self, told: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self.told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.told(args, kwargs)
        return func(*args, **kwargs)
