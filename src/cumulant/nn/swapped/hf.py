"""transformers: mechanisms as entries of its attention and mask registries, and one entry that differs by layer.

Shape legend: B batch, H query heads, Hk key heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import zoo
from ...call import Call
from ...optional import needed
from .choice import Choice, fitting, mix, observed, placed, weights
from .inside import TAG as TAG
from .inside import is_candidate, wants_weights
from .masks import DenseMaskError, dense, every_key, key_mask_function, linear_form, understood

MIXED = "cumulant_mixed"  # the implementation of a model whose layers differ
BASE = "transformers.modeling_utils"  # has the base of all models, which knows the registry for them
GRID = "_cumulant_grid"  # attribute of a Hiera's attention: rows and columns of what it was called with
CARRIED = "_cumulant_cache"  # attribute of keys that come from a MomentsCache
UNSUPPORTED = {
    "position_bias": "adds a position bias to the logits",
    "softcap": "caps its logits",
    "s_aux": "has attention sinks",
    "head_mask": "masks heads",
    "sinks": "has attention sinks",
    "cache": "uses a paged cache",
    "cu_seq_lens_q": "is given packed sequences",
    "cu_seqlens": "is given packed sequences",
    "indices": "attends to keys that an indexer selects for each query",
    "block_indices": "attends to blocks of keys that an indexer selects for each query",
}
INSTEAD = "cumulant.convert(model) replaces such modules where they are plain, and says why where they are not"


def register_transformers(*names: str) -> list[str]:
    """Make every fitting mechanism an `attn_implementation` of transformers, and return their names.

        cumulant.register_transformers("cumulant3+around=mean")
        model = AutoModel.from_pretrained(path, attn_implementation="cumulant3+around=mean")

    transformers knows an implementation by its whole name: one with options is registered when it is named here, those
    without always are. A class token is computed as all tokens are unless `+apart=1` keeps it at softmax: a layer is
    handed tensors and not the model, so nobody can tell that there is one; `cumulant.convert` finds out. Both
    registries are filled, so padding is honoured. `cumulant.convert` does more: it checks that the model really calls
    the mechanism, may differ by layer, and survives saving.
    """
    attention_interface, mask_interface = _registries()
    choices = {name: Choice.named(name) for name in (*fitting(), *names)}
    for name, choice in choices.items():
        attention_interface.register(name, _entry(choice))
        mask_interface.register(name, key_mask_function)
    attention_interface.register(MIXED, _entry(None))
    mask_interface.register(MIXED, key_mask_function)
    from .loading import watch  # which puts plans into models, and those need this

    watch()
    _ours.update(choices, (MIXED,))
    _guard()
    return list(choices)


_ours: set[str] = set()


def _guard() -> None:
    """Let transformers refuse our names for models that would take them and go on computing softmax."""
    from transformers import PreTrainedModel

    if getattr(PreTrainedModel, "_cumulant_guard", False):
        return
    kind: Any = PreTrainedModel
    correct, put = kind.get_correct_attn_implementation, kind.set_attn_implementation

    @wraps(correct)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        found = correct(self, *args, **kwargs)
        _check_asks(type(self), found)
        if found in _ours:
            _complete_tables(type(self), found)
        return found

    @wraps(put)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        _check_asks(type(self), attn_implementation, self)
        put(self, attn_implementation, *args, **kwargs)
        note_grids(self)

    kind.get_correct_attn_implementation = get_correct_attn_implementation
    kind.set_attn_implementation = set_attn_implementation
    kind._cumulant_guard = True


def _check_asks(kind: Any, name: Any, model: nn.Module | None = None) -> None:
    """An error for a class of models, or a model, under a name of ours whose attention never asks the registry."""
    if not isinstance(name, str) or name not in _ours:
        return
    if model is not None and kind.__module__.startswith("transformers."):  # what asks in its file may be no part of it
        asking = any(map(asks, model.modules())) or not any(map(is_candidate, model.modules()))
    else:
        home = sys.modules.get(kind.__module__)
        there: list[Any] = [x for x in vars(home or kind).values() if isinstance(x, type) and issubclass(x, nn.Module)]
        asking = kind._can_set_attn_implementation() or any(map(_class_asks, there))
    if asking:
        return
    raise ValueError(
        f"{kind.__name__} takes attn_implementation={name!r} but computes attention itself, and would go on with "
        f"softmax; {INSTEAD}"
    )


def _complete_tables(kind: Any, name: str) -> None:
    """Put an error under our name into the tables by which the files of some models (SAM, GIT) choose a class of
    attention while they are built: those classes never ask the registry, and the lookup would be a bare KeyError."""
    for home in {base.__module__ for base in kind.__mro__} & set(sys.modules):
        for table, classes in vars(sys.modules[home]).items():
            plain = classes.get("eager") if isinstance(classes, dict) else None
            if isinstance(plain, type) and issubclass(plain, nn.Module):
                classes.setdefault(name, partial(_refuse, name, f"{home}.{table}"))


def _refuse(name: str, table: str, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"attn_implementation={name!r} is for layers that ask transformers' registry, and those of {table} compute "
        f"attention themselves; load the model without that name: {INSTEAD}"
    )


@cache
def _class_asks(kind: Any) -> bool:
    bases = [base for base in kind.__mro__ if base.__module__ not in ("torch.nn.modules.module", BASE)]
    named = [f for base in bases for f in vars(base).values() if hasattr(f, "__code__")]
    return any("ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(f).__code__.co_names for f in named)


def asks(module: nn.Module) -> bool:
    """Whether the code of a module asks the attention registry; others compute attention themselves."""
    kind: Any = type(module)
    return _class_asks(kind)


def _registries() -> tuple[Any, Any]:
    with needed("this needs transformers", "transformers"):
        from transformers import AttentionInterface, AttentionMaskInterface
    return AttentionInterface, AttentionMaskInterface


def _entry(fixed: Choice | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An entry of the attention registry: one mechanism for every layer, where anything that it cannot honour is an
    error; or (None) what each layer is tagged with, where a layer without a tag is an error: it was never converted."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # Before there is a Call: a compiler that breaks its graph here (torch 2.11) rebuilds named tuples wrongly.
        weighed, watched = wants_weights(rest), observed()
        choice = getattr(module, TAG, None) if fixed is None else fixed
        attention_mask = linear_form(attention_mask)
        reason = None
        noting = fixed is None and _discovery is not None
        stays = choice is None or choice.attention == "softmax"
        if (stays or noting) and not hasattr(key, CARRIED):  # what has a cache of ours is answered by it
            reason = obstacle(module, query, key, attention_mask, is_causal, rest)
        if noting and _discovery is not None and not torch.compiler.is_compiling():
            causal = _causal(module, is_causal, attention_mask)
            pattern = "causal" if causal else "self" if query.shape[2] == key.shape[2] else "cross"
            _discovery.append(Found(module, query.shape[1], reason, pattern))
        elif choice is None:
            raise RuntimeError(
                f"{type(module).__name__} runs under {MIXED!r} but carries no choice of mechanism; a converted model "
                "is loaded with cumulant.convert.load(folder), and a model that was not converted needs a config "
                "object of its own"
            )
        if choice is None or (choice.attention == "softmax" and reason is not None):
            shared: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **rest}
            return _softmax(module, query, key, value, attention_mask, shared, weighed)
        # A layer that stays softmax goes through our own, so that observers see it; the answer is the same.
        call = Call(query, key, value, scale=scaling, dropout_p=dropout)
        return _converted(module, choice, call, attention_mask, is_causal, rest, weighed, watched)

    return attend


class Found(NamedTuple):
    """A layer that asked the registry: its heads, why it cannot be converted, and "self", "causal" or "cross".

    Cross attention over as many keys as there are queries is told by what its module is called with, see `sites`.
    """

    module: nn.Module
    heads: int
    obstacle: str | None
    pattern: str


_discovery: list[Found] | None = None


@contextmanager
def discovering() -> Iterator[list[Found]]:
    """Within this, layers under the mixed implementation are noted."""
    global _discovery
    _discovery = []
    try:
        yield _discovery
    finally:
        _discovery = None


def obstacle(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None, rest: dict[str, Any]
) -> str | None:
    """Why this layer must stay softmax, or None."""
    reason = _unsupported(module, rest)
    if reason is not None:
        return reason
    try:
        understood(mask, _causal(module, is_causal, mask), query.shape[2], key.shape[2])
    except DenseMaskError:
        kind = "a position bias, a window or packed sequences"
        return f"{type(module).__name__} has a mask that differs from head to head or from query to query ({kind})"
    return None


def _unsupported(module: nn.Module, rest: dict[str, Any]) -> str | None:
    """What a layer is called with that moments cannot honour, or None."""
    found = (f"{why} ({name})" for name, why in UNSUPPORTED.items() if rest.get(name) is not None)
    first = next(found, None)
    return None if first is None else f"{type(module).__name__} {first}"


def _softmax(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rest: dict[str, Any],
    weighed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A layer that stays as it was: by "sdpa", or, for what that does not know and where weights are wanted, by the
    model's own eager function."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None and every_key(mask) and queries == keys and not _selects(rest):
        mask, rest = None, {**rest, "is_causal": True}
    rest["is_causal"] = _causal(module, rest["is_causal"], mask)
    seen = _selected(module, query, dense(mask, queries, keys), keys, rest)
    own = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    more = any(rest.get(name) is not None for name in ("softcap", "s_aux", "sinks", "head_mask"))
    if own is not None and (more or weighed):
        if seen is None and queries > 1 and rest["is_causal"]:
            seen = dense(torch.ones(1, 1, keys, dtype=torch.bool, device=query.device), queries, keys)
        if seen is not None and seen.dtype == torch.bool:
            absent = torch.finfo(query.dtype).min
            seen = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, absent)
        return own(module, query, key, value, seen, **rest)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, seen, **rest)


def _selects(rest: dict[str, Any]) -> bool:
    return rest.get("indices") is not None or rest.get("block_indices") is not None


def _selected(module: Any, query: Tensor, mask: Tensor | None, keys: int, rest: dict[str, Any]) -> Tensor | None:
    """The mask with no keys but those that an indexer selects for each query. Models put them into it beforehand for
    "eager" and "sdpa", and hand them to any other implementation."""
    blocks, places = rest.get("block_indices"), rest.get("indices")
    if blocks is not None:
        asked = rest.get("position_ids")
        return module.indexer.build_block_mask(blocks, mask, keys, query.dtype, query.device, asked)
    if places is None:
        return mask
    chosen = torch.zeros(*places.shape[:-1], keys, dtype=torch.bool, device=query.device)
    chosen = chosen.scatter(-1, places.long(), True).unsqueeze(1)
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _converted(
    module: nn.Module,
    choice: Choice,
    call: Call,
    mask: Tensor | None,
    is_causal: bool | None,
    rest: dict[str, Any],
    weighed: bool,
    watched: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output (B, Lq, H, E) as transformers wants it, and the weights (B, H, Lq, Lk) where `weighed` asks for them.

    What the layer masks is not yet in the call. `watched`: somebody wants to see each call.
    """
    query, key, value = call[:3]
    state = getattr(key, CARRIED, None)
    taken = {} if state is None else {name: rest[name] for name in state.honours if rest.get(name) is not None}
    reason = _unsupported(module, {name: x for name, x in rest.items() if name not in taken})
    if reason is not None:
        way = "keep softmax in this layer: cumulant.convert(model, layers=...)"
        way = way if state is None else "generate with the default cache"
        raise ValueError(f"{reason}, which {choice.attention!r} cannot honour; {way}")
    if state is not None:
        if weighed:
            raise ValueError(
                "output_attentions=True needs every key, which a MomentsCache does not keep; generate "
                "with the default cache to see weights"
            )
        new = None if mask is None else _new_tokens(mask, key.shape[2])
        return state.attend(query, key, value, new, choice, call.scale, **taken).transpose(1, 2).contiguous(), None
    queries, keys = query.shape[2], key.shape[2]
    causal = _causal(module, is_causal, mask)
    pattern = understood(mask, causal, queries, keys)
    if queries == 1 < keys and causal:
        # The last row of causal attention is plain attention over all keys only where their order does not matter.
        static = isinstance(pattern.offset, Tensor)
        last = pattern.offset if static else keys - 1
        pattern = pattern._replace(is_causal=not zoo.get(choice.attention).order_free, offset=last)
    if pattern.key_mask is not None and pattern.key_mask.shape[-1] != keys:
        raise ValueError(f"the mask is for {pattern.key_mask.shape[-1]} keys, but {type(module).__name__} has {keys}")
    asking = pattern.key_mask if queries == keys else None  # self-attention: what is absent asks nothing
    grid = _grid(module, queries) if queries == keys and not pattern.is_causal else None
    call = call._replace(key_mask=pattern.key_mask, is_causal=pattern.is_causal, query_mask=asking, grid=grid)
    whole = choice.heads is None and not watched and not weighed
    call, rows = placed(choice, call, pattern.offset, whole)
    out = mix(module, choice, call)[:, :, rows]
    A = weights(choice, call)[:, :, rows] if weighed else None
    return out.transpose(1, 2).contiguous(), A


def note_grids(model: nn.Module) -> None:
    """Lets the attention layers of a Hiera, which see rows and columns, remember them for `_grid`."""
    for module in model.modules():
        if hasattr(module, "query_stride") and asks(module) and not hasattr(module, GRID):
            setattr(module, GRID, None)
            module.register_forward_pre_hook(_note_grid, with_kwargs=True)


def _note_grid(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    x = given[0] if given else named.get("hidden_states")
    setattr(module, GRID, tuple(x.shape[1:3]) if isinstance(x, Tensor) and x.ndim == 4 else None)


def _grid(module: nn.Module, tokens: int) -> tuple[int, int] | None:
    """Rows and columns of the tokens of a Hiera, a picture's or a window's; None elsewhere."""
    grid = getattr(module, GRID, None)
    return grid if grid is not None and grid[0] * grid[1] == tokens else None


def _causal(module: nn.Module, is_causal: bool | None, mask: Tensor | None) -> bool:
    """Whether queries see only the past: what the mask says, and else what the call, the layer and its config do.
    Causal masks of ours always arrive, so that a layer which says nothing sees every key, as eager attention does."""
    if mask is not None:
        return mask.ndim == 3
    if is_causal is not None:
        return bool(is_causal)
    stated = getattr(getattr(module, "config", None), "is_causal", None)
    return bool(getattr(module, "is_causal", False)) and stated is not False


def _new_tokens(mask: Tensor, count: int) -> Tensor | None:
    """The part (B, count) of a causal mask that belongs to the tokens just added to a cache."""
    if mask.ndim != 3:
        raise DenseMaskError(f"a MomentsCache is for plain causal layers, got a mask of shape {tuple(mask.shape)}")
    return None if every_key(mask) else mask[:, 0, -count:]
