"""Where a model has attention: our own layers, converted ones, and timm or transformers modules with fused softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..models import ViViT
from ..nn import MultiheadAttention
from ..nn.swapped import hf, inside, timm_layers
from ..nn.swapped.choice import SOFTMAX, Choice
from ..nn.swapped.plan import OURS, TIMM, TRANSFORMERS, implementation, is_linear, library_of
from .batches import check_model
from .prefixes import prefixes
from .tokens import expected_layout

QKV_NAMES = (
    *(("qkv",), ("Wqkv",), ("qkv_proj",), ("query_key_value",), ("c_attn",)),
    *(("q", "k", "v"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("query", "key", "value")),
)
OUTPUT_NAMES = ("proj", "o_proj", "out_proj", "dense", "c_proj", "out_lin", "Wo")
HEAD_NAMES = ("num_heads", "num_attention_heads", "n_heads")
OWN, CONVERTED, FUSED = "own", "converted", "fused"
# Arguments by which layers of transformers are given another sequence.
CONTEXTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "kv_states", "context_states")


@dataclass(frozen=True)
class Site:
    """An attention layer: its number and name in the model, its heads, and how its weights are had (`kind`).

    axes: along which it looks: "all" tokens; within frames, "space"; at one place, "time"; or "frames", over one token
    for each frame. Of layers that may be swapped, see `swappable_sites`: why this one has to stay softmax (`obstacle`;
    None: it has not), its attention dropout, its `pattern` ("self", "causal" or "cross"), and as `prefix` the class
    tokens and the like at the start, where the model says or shows it; `window`: it looks within windows of so many
    tokens a side.
    """

    number: int
    name: str
    module: Any
    heads: int
    kind: str
    axes: str = "all"
    obstacle: str | None = None
    dropout: float = 0.0
    pattern: str = "self"
    prefix: int = 0
    window: int = 0

    @property
    def attention(self) -> str:
        """Name of the mechanism."""
        if isinstance(self.module, MultiheadAttention):
            return self.module.mechanism.name
        return SOFTMAX if self.choice is None else self.choice.attention

    @property
    def choice(self) -> Choice | None:
        """What `cumulant.convert` put there, or None."""
        return getattr(self.module, "choice", None) or getattr(self.module, hf.TAG, None)

    @property
    def windows(self) -> str | None:
        """Within which windows it looks, in words; None where it looks beyond."""
        return f"it looks within windows of {self.window} x {self.window} tokens" if self.window else None

    def fitted(self, choice: Choice) -> Choice:
        """That choice as it is made in this layer, see `Choice.at`."""
        return choice.at(self.prefix, self.pattern == "causal")

    def refusal(self, choice: Choice) -> str | None:
        """Why this layer cannot take that choice, or None."""
        if self.obstacle is None and choice.heads is None and choice.told not in (0, self.heads):
            return f"options are listed for {choice.told} heads, and it has {self.heads}"
        if self.obstacle is not None or not choice.whole or self.pattern == "self":
            return self.obstacle
        if not choice.around_mean:
            return f"apart={choice.options['apart']} is for layers that see all of their own sequence"
        if self.pattern == "causal":
            return 'it is causal, and around="mean" has no causal form: the mean would know later queries'
        return (
            'it attends to another sequence, and its queries may come one at a time: around="mean" would give another '
            "answer each time"
        )


def find_sites(model: nn.Module) -> list[Site]:
    """Attention layers in the order of the model's modules, numbered from 0; an error where there are none."""
    check_model(model)
    video = [(name, module) for name, module in model.named_modules() if isinstance(module, ViViT)]
    sites: list[Site] = []
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is not None:
            sites.append(Site(len(sites), name, module, _heads(module), kind, _axes(name, video)))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that can be looked into: no "
            "cumulant.nn.MultiheadAttention, and no module with qkv (or q, k, v) projections and a number of heads"
        )
    return sites


def swappable_sites(model: nn.Module, run: Callable[[], Any]) -> list[Site]:
    """Attention layers that another mechanism may enter, in the order in which they run; `run()` is a forward pass.

    Nothing is changed. Layers of transformers are those that really ask its attention registry; elsewhere, and where
    they do not, modules that are seen to compute softmax attention between projections.
    """
    library = library_of(model)
    if library == TRANSFORMERS:
        asking = _asking(model, run)
        others = _inside(model, run, [site.module for site in asking])
        both = [*asking, *others]
        before = prefixes(model, run, [site.name for site in both if site.pattern == "self" and site.obstacle is None])
        both = [replace(site, prefix=before.get(site.name, 0)) for site in both]
        return _in_order(model, both) if asking and others else _numbered(both)
    sites: list[Site] = []
    for name, module in model.named_modules():
        if library == OURS and isinstance(module, MultiheadAttention):
            fitted = "it is a mechanism with parameters of its own" if module.mechanism.module is not None else None
            reason = module.stays or fitted
            known: dict[str, Any] = {"dropout": module.attn_drop, "prefix": module.prefix}
            sites.append(Site(len(sites), name, module, module.num_heads, OWN, obstacle=reason, **known))
        elif library == TIMM and timm_layers.is_attention(module):
            reason = timm_layers.obstacle(module)
            kind = FUSED
            if isinstance(module, timm_layers.ConvertedAttention):
                kind, module = CONVERTED, module.original()
            elif reason is None and not timm_layers.is_known(module):
                continue
            one_query = timm_layers.class_name(module) in timm_layers.CLASS_TOKEN
            known = {
                "dropout": getattr(getattr(module, "attn_drop", None), "p", 0.0),
                "prefix": 0 if one_query else int(getattr(model, "num_prefix_tokens", 0)),
                "obstacle": reason,
            }
            sites.append(Site(len(sites), name, module, int(getattr(module, "num_heads", 0)), kind, **known))
    if library == OURS:
        with _noted((site.module for site in sites), _is_causal) as causal, torch.no_grad():
            run()
        return [replace(site, pattern="causal") if site.module in causal else site for site in sites]
    sites += _inside(model, run, [model.get_submodule(site.name) for site in sites])
    return _in_order(model, sites)


def _in_order(model: nn.Module, sites: list[Site]) -> list[Site]:
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return _numbered(sorted(sites, key=lambda site: order[site.name]))


def _numbered(sites: list[Site]) -> list[Site]:
    return [replace(site, number=number) for number, site in enumerate(sites)]


def _inside(model: nn.Module, run: Callable[[], Any], others: list[nn.Module]) -> list[Site]:
    """Modules, but for these others and what is in them, that compute attention themselves, in the order in which they
    run."""
    taken = {part for module in others for part in module.modules()}
    may = [(name, m) for name, m in model.named_modules() if inside.is_candidate(m) and m not in taken]
    names = {m: name for name, m in may if not any(part in taken or hf.asks(part) for part in m.modules())}
    if not names:
        return []
    with inside.discovering(model, list(names)) as seen, torch.no_grad():
        run()
    sites: dict[str, Site] = {}
    for module, heads, obstacle, pattern in seen:
        name = names[module]
        if name not in sites or (obstacle is not None and sites[name].obstacle is None):
            known: dict[str, Any] = {"obstacle": obstacle, "dropout": _dropout_of(module), "pattern": pattern}
            sites[name] = Site(0, name, module, heads, FUSED, **known)
    return list(sites.values())


def _asking(model: nn.Module, run: Callable[[], Any]) -> list[Site]:
    hf.register_transformers()
    found: list[hf.Found] = []
    try:
        attention = [module for module in model.modules() if "Attention" in type(module).__name__]
        crosses = _noted(attention, _crosses)
        with implementation(model, hf.MIXED), hf.discovering() as found, crosses as crossing, torch.no_grad():
            run()
    except Exception as error:
        # A model that computes attention itself may stumble over a mask that our registry made. Where the same batch
        # passes without it, the model is one that never asks.
        if found:
            raise RuntimeError(
                f"{type(model).__name__} does not run once its attention is asked for by name, so it cannot be "
                f"converted: {type(error).__name__}: {error}"
            ) from error
        with torch.no_grad():
            run()
        return []
    names = {module: name for name, module in model.named_modules()}
    sites: dict[str, Site] = {}
    for module, heads, obstacle, pattern in found:
        name = names[module]
        if pattern == "self" and module in crossing:
            pattern = "cross"
        if name not in sites or (obstacle is not None and sites[name].obstacle is None):
            number = sites[name].number if name in sites else len(sites)
            known: dict[str, Any] = {"obstacle": obstacle, "dropout": _dropout_of(module), "pattern": pattern}
            sites[name] = Site(number, name, module, heads, FUSED, **known)
        elif pattern != "self":
            sites[name] = replace(sites[name], pattern=pattern)
    return [replace(site, window=_window_of(model, site.name)) for site in sites.values()]


def unwindowed(sites: Iterable[Site]) -> list[Site]:
    """Those that look beyond windows, which are short already; all where each looks within windows."""
    sites = list(sites)
    return [site for site in sites if not site.window] or sites


def _window_of(model: nn.Module, name: str) -> int:
    """Side of the windows that the block around a layer cuts its picture into; 0 where it sees all of it (Hiera)."""
    parent = model.get_submodule(name.rpartition(".")[0])
    size = getattr(parent, "window_size", 0)
    return size if isinstance(size, int) and hasattr(parent, "query_stride") else 0


@contextmanager
def _noted(modules: Iterable[nn.Module], so: Callable[..., bool]) -> Iterator[set[nn.Module]]:
    """Within this, those of the modules are noted for which so(module, args, kwargs) is true of a call."""
    found: set[nn.Module] = set()

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if so(module, args, kwargs):
            found.add(module)

    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _is_causal(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer of ours is called with is_causal=True."""
    return bool(kwargs.get("is_causal"))


def _crosses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention module is called with another sequence to attend to."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    return any(given.get(name) is not None for name in CONTEXTS)


def _dropout_of(module: nn.Module) -> float:
    """Attention dropout of a transformers layer, under the names that its models give it."""
    for name in ("attention_dropout", "dropout_prob", "attn_dropout", "dropout"):
        value = getattr(module, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, float | int):
            return float(value)
    return 0.0


def model_info(model: nn.Module) -> dict[str, Any]:
    """What there is to look at: layers, heads (of each layer: the greatest number), prefix, grid, attention, classes.

    `grid` is what the model was made for; None where only a forward pass can tell. `attention` is the name of the
    mechanism, or "mixed". `classes` is None for a model without a classifier.
    """
    sites = find_sites(model)
    layout = expected_layout(model)
    names = {site.attention for site in sites}
    return {
        "layers": len(sites),
        "heads": max(site.heads for site in sites),
        "prefix": layout.prefix if layout else 0,
        "grid": layout.grid if layout else None,
        "attention": names.pop() if len(names) == 1 else "mixed",
        "classes": _classes(model),
        "names": [site.name for site in sites],
        "axes": [site.axes for site in sites],
    }


def output_projection(model: nn.Module, site: Site) -> nn.Module:
    """The linear layer that the heads' outputs enter side by side."""
    parents = [site.name]
    if "." in site.name:
        parents.append(site.name.rsplit(".", 1)[0] + ".output")
    for parent in parents:
        for child in OUTPUT_NAMES:
            try:
                found = model.get_submodule(f"{parent}.{child}" if parent else child)
            except AttributeError:
                continue
            if is_linear(found):
                return found
    raise ValueError(f"layer {site.number} ({site.name}) has no output projection named {', '.join(OUTPUT_NAMES)}")


def numbered(name: str, wanted: list[int] | None, count: int) -> list[int]:
    """The numbers asked for, or all; negative ones count from the end."""
    if wanted is None:
        return list(range(count))
    if isinstance(wanted, int):
        raise ValueError(f"{name} must be a list of numbers or None, got {wanted}")
    for number in wanted:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ValueError(f"{name} must be numbers from 0 to {count - 1}, got {number!r}")
    return [number % count for number in wanted]


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, MultiheadAttention):
        return OWN
    if isinstance(module, timm_layers.ConvertedAttention):
        return CONVERTED
    children = dict(module.named_children())
    projects = any(all(is_linear(children.get(part)) for part in parts) for parts in QKV_NAMES)
    return FUSED if projects and _heads(module) else None


def _heads(module: nn.Module) -> int:
    """Number of heads, which many decoders of transformers leave to their config; 0 where neither says."""
    for owner in (module, getattr(module, "config", None)):
        for key in HEAD_NAMES:
            if isinstance(getattr(owner, key, None), int):
                return int(getattr(owner, key))
    return 0


def _axes(name: str, video: list[tuple[str, ViViT]]) -> str:
    for root, model in video:
        if name.startswith(f"{root}." if root else ""):
            inner = name[len(root) + 1 if root else 0 :]
            if inner.startswith("temporal_blocks"):
                return "frames"
            if model.variant == 3:
                return "time" if inner.endswith("temporal_attn") else "space"
            if model.per_frame:
                return "space"
    return "all"


def _classes(model: nn.Module) -> int | None:
    count = getattr(model, "num_classes", None)
    if count is None and "Classification" in type(model).__name__:
        count = getattr(getattr(model, "config", None), "num_labels", None)
    return int(count) if isinstance(count, int) and count > 0 else None
