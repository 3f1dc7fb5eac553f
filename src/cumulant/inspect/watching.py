"""What the attention layers of a model are asked to compute, seen while it runs; nothing is changed by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..call import Call
from ..models import ViViT
from ..nn.swapped.choice import KEPT, Choice, observing
from ..nn.swapped.plan import TRANSFORMERS, applied, library_of
from .seen import ConvertedCall, FusedCall, OwnCall
from .sites import CONVERTED, FUSED, OWN, Site
from .tokens import TokenLayout, layout_of

Seen = OwnCall | FusedCall | ConvertedCall


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
    thread, active, clips = threading.get_ident(), [], _ClipGrids()
    by_module = {site.module: site for site in sites}

    def here() -> bool:
        return threading.get_ident() == thread

    def own(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if here():
            call = OwnCall(module, *args, **kwargs)
            site = by_module[module]
            see(site, call, clips.layout(site, call) or layout_of(call.queries, model))

    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if here():
            active.append(by_module[module])

    def end(module: Any, *_: Any) -> None:
        if here() and active and active[-1].module is module:
            active.pop()

    def fused(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if here() and active and active[-1].kind == FUSED and active[-1].choice is None:
            call = FusedCall(*arguments, **options)
            see(active[-1], call, layout_of(call.queries, model))

    def reported(module: nn.Module, report: Any) -> None:
        site = by_module.get(module)
        if site is not None and here() and site.kind == FUSED:
            call = ConvertedCall(site.choice, report)
            see(site, call, layout_of(call.queries, model))

    def aside(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The layer may run folded, where nobody is told of query and key; so it runs once more, beside the pass.
        if not here():
            return
        reports: list[Any] = []
        keep_random = torch.random.fork_rng() if module.training else nullcontext()
        with torch.no_grad(), keep_random, observing(lambda m, report: reports.append(report) if m is module else None):
            module.forward(*args, **kwargs)
        call = ConvertedCall(module.choice, reports[-1])
        see(by_module[module], call, layout_of(call.queries, model))

    with ExitStack() as stack:
        for site in sites:
            before = {OWN: own, CONVERTED: aside, FUSED: begin}[site.kind]
            stack.callback(site.module.register_forward_pre_hook(before, with_kwargs=True).remove)
            if site.kind == FUSED:
                stack.callback(site.module.register_forward_hook(end, always_call=True).remove)
        for module in model.modules():
            if isinstance(module, ViViT):
                stack.callback(module.register_forward_pre_hook(clips.note).remove)
        if any(site.kind == FUSED for site in sites):
            stack.enter_context(_Fused(fused))
        if any(site.kind == FUSED and site.choice is not None for site in sites):
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


class _ClipGrids:
    """The grid of the clip that is on its way, for layers that see only a part of it."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.prefix = 0

    def note(self, module: Any, args: tuple[Any, ...]) -> None:
        self.grid, self.prefix = module.patch_embed.grid(*args[0].shape[2:]), module.num_prefix_tokens

    def layout(self, site: Site, call: OwnCall) -> TokenLayout | None:
        if site.axes != "all":
            return TokenLayout(self.prefix, tuple(self.grid))
        return None if call.grid is None else TokenLayout(call.prefix, tuple(call.grid))
