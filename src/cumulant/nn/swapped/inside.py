"""Modules that compute softmax attention themselves, with another mechanism in the place of that softmax.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width.

While such a module runs, torch's functions are watched. q k^T becomes `Logits`: no numbers, but query and key, that can
be scaled, masked and made probabilities; these times the values are what the mechanism computes, and nothing of size
Lq Lk is formed. F.scaled_dot_product_attention is the same in one call, nn.MultiheadAttention is computed from its
weights. Whatever else is done to logits, a position bias say, is a reason to leave the module as it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

from ... import zoo
from ...call import Call
from .choice import KEPT, SOFTMAX, Choice, Undo, mix, placed, weights
from .logits import Logits, Weighted, found, in_place, is_part, numbers, product, step
from .masks import DenseMaskError, Pattern, merged

TAG = "_cumulant_choice"  # attribute of a module: its choice
CALLED = ("Attention", "Attn", "MHSA", "GPSA")  # what modules are named that may compute attention
GATES = ("SplitAttn", "SelectiveKernelAttn")  # and what weighs branches of channels, not tokens (ResNeSt, SKNet)
FORWARD = "forward"  # of the module's own dictionary, before that of its class


class Seen(NamedTuple):
    """One attention in a module that computes it itself; `obstacle` says why the module has to stay as it is."""

    module: nn.Module
    heads: int
    obstacle: str | None
    pattern: str  # "self", "causal" or "cross"


class Inside:
    """The forward pass of a module under watch. An object, so that a copy or a pickle of the module has its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @_disable_dynamo  # torch.compiler.disable would import the compiler here, and not when it is needed
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, run = self.module, type(self.module).forward
        before = getattr(_here, "watch", None)
        _here.watch = watch = _Watch(module)
        try:
            if isinstance(module, nn.MultiheadAttention):
                return multihead(module, *args, **kwargs)
            with watch:
                said = run(module, *args, **kwargs)
        finally:
            _here.watch = before
        return _without_logits(said, module, wants_weights(kwargs))


def put(module: nn.Module, choice: Choice) -> None:
    """Let the module compute that choice in the place of its softmax."""
    setattr(module, TAG, choice)
    module.__dict__[FORWARD] = Inside(module)


def take_out(module: nn.Module) -> None:
    """Let the module compute what its class says."""
    if is_watched(module):
        del module.__dict__[FORWARD]


def is_candidate(module: nn.Module) -> bool:
    """Whether a module may compute attention itself: nn.MultiheadAttention, or one that is called so."""
    name = type(module).__name__
    return isinstance(module, nn.MultiheadAttention) or (name not in GATES and any(word in name for word in CALLED))


def is_watched(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get(FORWARD), Inside)


def slow_path(model: nn.Module, modules: Iterable[nn.Module]) -> Undo:
    """Encoder layers of torch around these modules call them; their fast path computes softmax without. Returns what
    takes that back."""
    watched, undo = set(modules), Undo()
    for module in model.modules():
        around = [m for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer) and m.self_attn in watched]
        for kind, name in (
            (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),
            (nn.TransformerEncoder, "use_nested_tensor"),
        ):
            if around and isinstance(module, kind):  # what the fast path asks for; nested tensors are a part of it
                undo.keep(module, name)
                setattr(module, name, 0)
    return undo


_here = threading.local()
_seen: list[Seen] | None = None


@contextmanager
def discovering(model: nn.Module, modules: list[nn.Module]) -> Iterator[list[Seen]]:
    """Within this, what these modules of a model compute is noted, and computed as they do."""
    global _seen
    _seen, undo = [], slow_path(model, modules)
    for module in modules:
        undo.keep(module, TAG)
        undo.append(partial(take_out, module))
        put(module, KEPT)
    try:
        yield _seen
    finally:
        _seen = None
        undo()


def note(module: nn.Module, heads: int, obstacle: str | None, pattern: str = "self") -> None:
    if _seen is not None:
        _seen.append(Seen(module, heads, obstacle, pattern))


class _Watch(TorchFunctionMode):
    """Sees what one module calls, but not what modules within it call that are watched themselves."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_here, "watch", None) is not self:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            call, mask = Call.fused(*args, **kwargs)
            query, masks = call.query * call.softmax_scale, [] if mask is None else [mask]
            return attend(self.module, query, call.key, call.value, masks, call.is_causal, call.dropout_p)
        made = product(func, args, kwargs)
        if made is not None:
            return made
        logits = found(args) or found(kwargs)
        if logits is not None:
            return self._step(func, args, kwargs, logits)
        if _is_softmax(func) and isinstance(args[0], Tensor) and args[0].ndim >= 3:
            self._refuse(args[0])
        return func(*args, **kwargs)

    def _step(self, func: Any, args: Any, kwargs: Any, logits: Logits) -> Any:
        out, kwargs = kwargs.get("out"), {name: x for name, x in kwargs.items() if name != "out"}
        said, order = step(func, args, kwargs), None
        if isinstance(said, tuple) and not isinstance(said, Weighted):  # an einsum, with the order of its result
            said, order = said
        if isinstance(said, Weighted):
            parts = said.logits
            made = attend(self.module, parts.query, parts.key, said.value, parts.masks, dropout=parts.dropout)
            made = made if order is None else made.permute(order)
            return made if out is None else out.copy_(made)
        if said is NotImplemented:
            if logits.is_weights or _is_softmax(func):
                self._refuse(logits)
            if is_part(func) and isinstance(args[0], Logits):
                args[0].fixed = args[0].actual()
            said = func(*numbers(args), **numbers(kwargs))
        written = args[0] if in_place(func) else out
        if isinstance(written, Logits):
            return written.become(said)
        return said if out is None else out.copy_(numbers(said))

    def _refuse(self, logits: Any) -> None:
        why = f"{type(self.module).__name__} does more to its logits than to scale and mask them"
        if getattr(self.module, TAG).attention != SOFTMAX:
            raise ValueError(f"{why}; keep softmax in this layer: cumulant.convert(model, layers=...)")
        note(self.module, logits.shape[-3], why)


def _is_softmax(func: Any) -> bool:
    return getattr(func, "__name__", "") == "softmax"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: list[Tensor],
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the module's choice, (..., Lq, E); the query is scaled. Masks are bool, or biases of the logits."""
    choice: Choice = getattr(module, TAG)
    heads = query.shape[-3] if query.ndim > 3 else 1
    try:
        call, pattern = _called(query, key, value, masks, is_causal)
    except DenseMaskError as error:
        if choice.attention != SOFTMAX:
            raise
        why = str(error).partition(". ")[0]
        note(module, heads, f"{type(module).__name__} has logits that moments cannot honour: {why}")
        logits = Logits(query, key, [*masks, *([_lower(query, key)] if is_causal else [])])
        return F.dropout(logits.weighed().actual(), dropout, dropout > 0) @ value
    sort = "causal" if pattern.is_causal else "self" if query.shape[-2] == key.shape[-2] else "cross"
    note(module, heads, _linear_already(module, query, key), sort)
    if pattern.is_causal and not zoo.get(choice.attention).order_free and choice != KEPT:
        raise ValueError(
            f"{type(module).__name__} is causal and computes attention itself: {choice} cannot follow it there"
        )
    call, rows = placed(choice, call._replace(dropout_p=dropout), pattern.offset)
    return mix(module, choice, call)[:, :, rows].reshape(*query.shape[:-1], value.shape[-1])


def _linear_already(module: nn.Module, query: Tensor, key: Tensor) -> str | None:
    """Why attention that is softmax need not be replaced, or None."""
    name, (Lq, D) = type(module).__name__, query.shape[-2:]
    if Lq == 1 < key.shape[-2]:
        return f"{name} asks one query, whose cost is linear already"
    width = next((part.in_features for part in module.children() if isinstance(part, nn.Linear)), 0)
    heads = getattr(module, "num_heads", 0) or 0
    if isinstance(heads, int) and heads * Lq == width != heads * D:
        return f"{name} attends over channels, whose cost is linear in the tokens already"
    return None


def _called(query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor], is_causal: bool) -> tuple[Call, Pattern]:
    """The call (N, H, L, D) of attention over any number of leading dimensions, and what its masks mean."""
    Lq, Lk, lead = query.shape[-2], key.shape[-2], query.shape[:-2]
    if is_causal and (Lq != Lk or masks):
        masks = [*masks, _lower(query, key)]  # rows aligned at the first key, which `merged` has to find out
    parts = [x.expand(*lead, *x.shape[-2:]) if x.shape[-3] == 1 else x for x in (query, key, value)]
    q, k, v = (x.unsqueeze(1) if x.ndim == 3 else x.flatten(0, -4) for x in parts)
    pattern = merged([_four(mask, query.ndim) for mask in masks], Lq, Lk)
    if is_causal and not masks:
        pattern = Pattern(None, Lq > 1, 0)
    there = None if pattern.key_mask is None else pattern.key_mask.expand(len(q), Lk)
    asking = there if Lq == Lk else None  # self-attention: what is absent asks nothing
    return Call(q, k, v, there, pattern.is_causal, 1.0, query_mask=asking), pattern


def _four(mask: Tensor, ndim: int) -> Tensor:
    """A mask of logits with so many dimensions as one of four, (., ., Lq or 1, Lk)."""
    mask = mask[None] if mask.ndim == 1 else mask
    if ndim == 3 and mask.ndim == 3:
        return mask.unsqueeze(1)
    if mask.ndim > 4:
        if mask.shape[:-2].numel() != 1:
            raise DenseMaskError(f"a mask of shape {tuple(mask.shape)} differs from window to window")
        mask = mask.flatten(0, -4)
    return mask[(None,) * (4 - mask.ndim)]


def _lower(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention.forward`, with the module's choice between its projections; weights are signed."""
    single = query.ndim == 2
    tokens = [x.unsqueeze(0) if single else x if module.batch_first else x.transpose(0, 1) for x in (query, key, value)]
    H = module.num_heads
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn has keys of its own; keep softmax there"
        )
    own: Any = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    W = module.in_proj_weight.chunk(3) if module._qkv_same_embed_dim else own
    b: Any = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, c).unflatten(-1, (H, -1)).transpose(1, 2) for x, w, c in zip(tokens, W, b, strict=True))
    masks = []
    if key_padding_mask is not None:
        padding = key_padding_mask.unsqueeze(0) if single else key_padding_mask
        masks.append(_allowed(padding)[:, None, None, :])
    if attn_mask is not None and not (is_causal and attn_mask.shape[-2] == attn_mask.shape[-1]):
        seen = _allowed(attn_mask)
        masks.append(seen if seen.ndim == 2 else seen.unflatten(0, (-1, H)))
    elif attn_mask is None and is_causal:
        raise ValueError("is_causal=True is a hint about attn_mask, which nn.MultiheadAttention needs; got none")
    scaled = q * q.shape[-1] ** -0.5
    dropped = module.dropout if module.training else 0.0
    out = attend(module, scaled, k, v, masks, is_causal, dropped).transpose(1, 2).flatten(2)
    out = module.out_proj(out)
    A = None
    if need_weights:
        A = _weights(getattr(module, TAG), scaled, k, masks, is_causal)
        A = A.mean(1) if average_attn_weights else A
        A = A.squeeze(0) if single else A
    out = out.squeeze(0) if single else out if module.batch_first else out.transpose(0, 1)
    return out, A


def _allowed(mask: Tensor) -> Tensor:
    """A mask of torch's attention module, in which True means absent, as fused attention has it."""
    return ~mask if mask.dtype == torch.bool else mask


def _weights(choice: Choice, query: Tensor, key: Tensor, masks: list[Tensor], is_causal: bool) -> Tensor:
    """Weights (N, H, Lq, Lk) with which the values were taken."""
    try:
        call, pattern = _called(query, key, key, masks, is_causal)
    except DenseMaskError:
        logits = Logits(query, key, [*masks, *([_lower(query, key)] if is_causal else [])])
        return logits.weighed().actual()
    call, rows = placed(choice, call, pattern.offset)
    return weights(choice, call)[:, :, rows]


def wants_weights(rest: Any) -> bool:
    """Whether the caller asked for attention weights, by argument or through transformers' output collector."""
    if rest.get("output_attentions"):
        return True
    if "transformers" not in sys.modules:
        return False
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    collected = _active_collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def _without_logits(said: Any, module: nn.Module, wanted: bool) -> Any:
    """What a module returns: its probabilities are the mechanism's weights where they are asked for, or else None."""
    if isinstance(said, Logits):
        if not said.is_weights:
            return said.actual()
        return _weights(getattr(module, TAG), said.query, said.key, said.masks, False) if wanted else None
    if type(said) in (tuple, list):
        return type(said)(_without_logits(x, module, wanted) for x in said)
    return said
