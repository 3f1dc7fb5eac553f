"""How another mechanism gets into the layers of a model, and out again, for transformers, timm and our own models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ..attention import MultiheadAttention
from ..registry import number_layers
from . import hf, inside, layers, own, timm_layers
from .choice import KEPT, SOFTMAX, Choice, Undo

TRANSFORMERS, TIMM, OURS, TORCH = "transformers", "timm", "cumulant", "torch"
OWN_CONFIGS = "_cumulant_own_configs"  # attribute of a model whose configs are its alone
PLAN = "_cumulant_plan"  # attribute of a converted model: choices by layer, as `Choice`


def library_of(model: nn.Module) -> str:
    """Which kind of model this is; "torch" for one of modules of torch, or of somebody's own."""
    modules = list(model.modules())
    if any(type(m).__module__.startswith("transformers.") and hasattr(m, "config") for m in modules):
        return TRANSFORMERS
    if any(isinstance(m, MultiheadAttention) for m in modules):
        return OURS
    if any(timm_layers.is_attention(m) for m in modules):
        return TIMM
    if any(inside.is_candidate(m) for m in modules):
        return TORCH
    made = getattr(model, "config", None)  # of `create_model`
    name = made.get("name") if isinstance(made, dict) else None
    anew = f"; create_model({name!r}, attention=...) makes one with another that takes these weights" if name else ""
    raise ValueError(
        f"{type(model).__name__} has no attention that can be converted: no model of transformers, no attention of "
        f"timm, torch or this library, and no module with Attention in its name{anew}"
    )


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Another attention implementation for a while; an error where the model does not take it."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    set_implementation(model, name)
    try:
        yield
    finally:
        for config, old in before:
            config._attn_implementation_internal = old


def _configs(model: nn.Module) -> list[Any]:
    """Every config object in the model, once; parts of it may have their own."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            for key in config.sub_configs:
                sub = getattr(config, key, None)
                if sub is not None and hasattr(sub, "_attn_implementation_internal"):
                    found[id(sub)] = sub
    return list(found.values())


def _own_configs(model: nn.Module) -> None:
    """Give the model configs that no other model has: what is put into this one must not reach, say, its teacher."""
    if model.__dict__.get(OWN_CONFIGS):
        return
    shared = {id(config) for config in _configs(model)}
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in shared:
                module.__dict__[name] = copy.deepcopy(value, memo)
    model.__dict__[OWN_CONFIGS] = True


def set_implementation(model: nn.Module, name: str) -> None:
    """As `model.set_attn_implementation(name)`, for every config in the model."""
    for config in _configs(model):
        config._attn_implementation_internal = name


def apply(model: nn.Module, plan: Mapping[str, Choice]) -> Undo:
    """Put the mechanisms of `plan` (by layer name) into the model; returns what takes them out again.

    Layers that the plan does not name stay softmax.
    """
    library = library_of(model)
    whole = [name for name, choice in plan.items() if choice.layer is not None]
    if whole:
        return _apply_layers(model, plan, whole)
    how = {TRANSFORMERS: _apply_transformers, TIMM: _apply_timm, OURS: _apply_own, TORCH: _apply_inside}
    return how[library](model, plan)


def _apply_layers(model: nn.Module, plan: Mapping[str, Choice], whole: list[str]) -> Undo:
    """Whole layers that take the place of others, and mechanisms in the rest of the plan."""
    rest = {name: choice for name, choice in plan.items() if name not in whole}
    undo = apply(model, rest) if rest else Undo()
    try:
        for name in whole:
            layers.put_in(model, name, plan[name])
            undo.append(partial(layers.take_out, model, name))
    except BaseException:
        undo()
        raise
    number_layers(model)
    return undo


def remember(model: nn.Module, plan: Mapping[str, Choice], undo: Callable[[], None], whole: bool = False) -> None:
    """Note in the model what was replaced, where saving looks for it, and how to take it back.

    `whole` says that no layer stays softmax: then one name is enough for from_pretrained.
    """
    setattr(model, PLAN, dict(plan))
    model.__dict__["_cumulant_undo"] = undo
    first = next(iter(plan.values()), None)  # the choice of all heads of all layers, where they do not differ
    one = first if whole and first and first.heads is None and all(x == first for x in plan.values()) else None
    if library_of(model) == TRANSFORMERS:
        # Read by from_pretrained: without `register_transformers` it fails there, and never falls back to softmax.
        named = one is not None and not one.options and one.attention != SOFTMAX
        for prefix, config in _stated(model):
            within = {name.removeprefix(prefix): choice for name, choice in plan.items() if name.startswith(prefix)}
            if within:
                config.cumulant = {"layers": {name: choice.to_json() for name, choice in within.items()}}
                config.attn_implementation = one.attention if one is not None and named else hf.MIXED
    elif isinstance(getattr(model, "config", None), dict):
        # `cumulant.train.save` writes the config: it must make this model, or none.
        stated: Any = model.config
        model.__dict__["_cumulant_config"] = stated
        made = None if one is None else {"attention": one.attention, "attention_options": dict(one.options)}
        if made is not None and one is not None and one.layer is not None:
            made["layer"] = one.layer
        model.__dict__["config"] = None if made is None else {**stated, **made}


def put_back(model: nn.Module, stored: Mapping[str, dict[str, Any]], whole: bool) -> None:
    """Make a model that was just loaded the converted one whose choices by layer were `stored`; `whole` as above."""
    plan = {name: Choice.from_json(values) for name, values in stored.items()}
    missing = sorted(set(plan) - {name for name, _ in model.named_modules()})
    if missing:
        raise ValueError(f"the plan replaces layers that {type(model).__name__} does not have: {', '.join(missing)}")
    kept = dict.fromkeys(attention_layers(model), KEPT) if library_of(model) == TRANSFORMERS else {}
    remember(model, plan, apply(model, {**kept, **plan}), whole)


def attention_layers(model: nn.Module) -> list[str]:
    """Modules of a transformers model that ask the registry for attention."""
    return [name for name, module in model.named_modules() if hf.asks(module)]


def config_of(model: nn.Module) -> Any:
    """The config of a model of transformers; None for a module that holds such a model, and for other models."""
    config = getattr(model, "config", None)
    return config if hasattr(config, "_attn_implementation_internal") else None


def _stated(model: nn.Module) -> list[tuple[str, Any]]:
    """Configs that are saved with the models of transformers in a model, and what the names of their layers begin with:
    the model itself, or the outermost of those that a SentenceTransformer or a module of somebody's own holds."""
    if library_of(model) != TRANSFORMERS:
        return []
    from transformers import PreTrainedModel

    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        inner = any(prefix.startswith(outer) for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inner:
            found.append((prefix, module.config))
    return found


def is_linear(module: nn.Module | None) -> bool:
    """Whether it is a linear layer; those of GPT-2 are of a class of their own in transformers."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def count_own(model: nn.Module) -> int:
    """Attention layers of a model of ours."""
    return sum(isinstance(module, MultiheadAttention) for module in model.modules())


def original_config(model: nn.Module) -> Any:
    """The arguments that made a model of ours before it was converted."""
    return model.__dict__.get("_cumulant_config", getattr(model, "config", None))


def forget(model: nn.Module) -> None:
    """Take back what `remember` noted."""
    if not is_converted(model) or "_cumulant_undo" not in model.__dict__:
        raise ValueError(f"this {type(model).__name__} was not converted in this session")
    model.__dict__.pop("_cumulant_undo")()
    delattr(model, PLAN)
    if "_cumulant_config" in model.__dict__:
        model.__dict__["config"] = model.__dict__.pop("_cumulant_config")
    for _, config in _stated(model):
        for name in ("cumulant", "attn_implementation"):
            if name in config.__dict__:
                delattr(config, name)


def is_converted(model: nn.Module) -> bool:
    return hasattr(model, PLAN)


def converted_parts(model: nn.Module) -> list[str]:
    """Names of the parts that were converted by themselves, or with a model around this one."""

    def taken(part: nn.Module) -> bool:
        return is_converted(part) or getattr(part, hf.TAG, KEPT).attention != SOFTMAX

    return [name for name, part in model.named_modules() if taken(part)]


def plan_of(model: nn.Module) -> dict[str, Choice]:
    """The choices by layer of a converted model; an error for one that is not."""
    if not is_converted(model):
        raise ValueError(f"this {type(model).__name__} is not converted; call cumulant.convert(model) first")
    return getattr(model, PLAN)


@contextmanager
def applied(model: nn.Module, plan: Mapping[str, Choice]) -> Iterator[None]:
    """`apply` for a while."""
    undo = apply(model, plan)
    try:
        yield
    finally:
        undo()


def _apply_transformers(model: nn.Module, plan: Mapping[str, Choice]) -> Undo:
    hf.register_transformers()
    hf.note_grids(model)
    _own_configs(model)
    undo = Undo()
    for config in _configs(model):
        undo.keep(config, "_attn_implementation_internal")
    asking = {name: choice for name, choice in plan.items() if hf.asks(model.get_submodule(name))}
    for name, module in model.named_modules():
        undo.keep(module, hf.TAG)
        if name in asking:
            setattr(module, hf.TAG, plan[name])
        elif hasattr(module, hf.TAG):
            setattr(module, hf.TAG, KEPT)
    undo += _apply_inside(model, {name: choice for name, choice in plan.items() if name not in asking})
    if asking:  # else every layer computes attention itself, with masks as they are
        set_implementation(model, hf.MIXED)
    return undo


def _apply_inside(model: nn.Module, plan: Mapping[str, Choice]) -> Undo:
    """Modules that compute attention themselves."""
    undo, layers = Undo(), [model.get_submodule(name) for name in plan]
    for module, choice in zip(layers, plan.values(), strict=True):
        undo.keep(module, inside.TAG)
        if not inside.is_watched(module):
            undo.append(partial(inside.take_out, module))
        inside.put(module, choice)
    undo += inside.slow_path(model, layers)
    return undo


def _apply_timm(model: nn.Module, plan: Mapping[str, Choice]) -> Undo:
    plain = {name: choice for name, choice in plan.items() if timm_layers.is_known(model.get_submodule(name))}
    undo = _apply_inside(model, {name: choice for name, choice in plan.items() if name not in plain})
    for name, choice in plain.items():
        old = model.get_submodule(name)
        undo.append(partial(_undo_timm, model, name, old))
        source = old.original() if isinstance(old, timm_layers.ConvertedAttention) else old
        model.set_submodule(name, timm_layers.converted(source, choice))
    return undo


def _undo_timm(model: nn.Module, name: str, before: nn.Module) -> None:
    replaced = model.get_submodule(name)
    if isinstance(replaced, timm_layers.ConvertedAttention):
        replaced.hand_back()
    model.set_submodule(name, before)


def _apply_own(model: nn.Module, plan: Mapping[str, Choice]) -> Undo:
    undo = Undo()
    try:
        for name, choice in plan.items():
            undo.append(own.swap(name, model.get_submodule(name), choice))
    except BaseException:
        undo()
        raise
    return undo
