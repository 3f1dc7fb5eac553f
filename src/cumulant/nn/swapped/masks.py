"""Masks between transformers and attention of linear cost: which keys are there, and whether rows see only the past.

Shape legend: B batch, H heads, Lq queries, Lk keys.

The models of transformers hand a layer one tensor. Ours says in its shape what it means, so that nothing quadratic is
formed for the two patterns that need none, and nothing is guessed:

    None             every key; causal if the layer says so and there is more than one query
    (B, 1, Lk)       bool: these keys, and query i sees those up to its own place, the last query the last key. All
                     keys are one True that is expanded: causal whatever the layer says of itself
    (B, 2, Lk)       bool, for a static cache: these keys, and those that stand before the first query; keys beyond the
                     last query are not there yet. Query i sees those up to its own place
    (B, 1, 1, Lk)    bool, or a bias b of the logits that is the same for all queries: weights exp(b)
    (B, ., Lq, Lk)   differs from query to query: only layers that stay softmax can take it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

ABSENT = -1e3  # a bias below this means that a key is not there
# Models in which something else than an attention that asks the registry reads the mask: text layers of GIT and the
# encoders of BigBird-Pegasus and Informer have a softmax of their own, routers of NLLB-MoE look for padding in it,
# decoders of T5Gemma 2 and DeepSeek-V4 join it with another, Doge and indexers that select keys index it. They get the
# mask that eager attention has.
SOFTMAX_OF_THEIR_OWN = ("BigBirdPegasusConfig", "GitConfig", "InformerConfig")
INDEXED = ("AXK2Config", "DeepseekV32Config", "DogeConfig", "GlmMoeDsaConfig", "HYV4Config", "MistralLarge4TextConfig")
READERS = (*SOFTMAX_OF_THEIR_OWN, *INDEXED, "DeepseekV4Config", "NllbMoeConfig", "T5Gemma2DecoderConfig")
LINEAR = "_cumulant_linear"  # attribute of such a mask: the same in the terms above


def compiling() -> bool:
    return torch.compiler.is_compiling()


class Pattern(NamedTuple):
    """A mask in our terms: weights or bools (B, Lk) or None, and whether rows are causal, query i at offset + i."""

    key_mask: Tensor | None
    is_causal: bool
    offset: int | Tensor  # place of the first query among the keys; a tensor () for a static cache


class DenseMaskError(ValueError):
    """A mask that differs from query to query."""


def key_mask_function(**asked: Any) -> Tensor | None:
    """An entry of `AttentionMaskInterface`. Linear in the lengths for plain causal and bidirectional masks.

    Packed sequences, windows shorter than the keys and masks with overlays come out dense, as for "sdpa".
    """
    made = _linear_mask(**asked)
    if type(asked.get("config")).__name__ not in READERS:
        return made
    from transformers.masking_utils import eager_mask

    shown: Any = eager_mask(**asked)
    if shown is not None:
        setattr(shown, LINEAR, made)
    return shown


def linear_form(mask: Tensor | None) -> Tensor | None:
    """The mask in the terms above, of one that others read too."""
    return getattr(mask, LINEAR, mask)


def _linear_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> Tensor | None:
    # torch 2.11 cannot trace an import of the package itself, whose module loads its parts when they are asked for
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    if attention_mask is not None and attention_mask.ndim == 3:  # `generate` made it beforehand, for a static cache
        return attention_mask

    # Keys that a cache has let go before ours: a window then still reaches back over those that are left, whereas a
    # chunk may begin among them.
    last = q_offset + q_length - 1
    whole = kv_offset == 0 or (mask_function is not None and _reaches(mask_function, batch_size, last, kv_offset, rest))
    within = local_size is not None and kv_length <= local_size and whole
    causal = mask_function in (None, causal_mask_function) or within
    both_ways = mask_function is bidirectional_mask_function
    simple = (causal and allow_is_causal_skip) or (both_ways and allow_is_bidirectional_skip)
    if causal and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_length + kv_offset):
        if mask_function in (None, causal_mask_function) and kv_offset == 0:
            return _static(batch_size, q_length, kv_length, q_offset, attention_mask, rest.get("device"))
        simple = False
    if not simple:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=cast(int, q_offset),  # or a tensor, whatever its annotation says
            kv_offset=kv_offset,
            mask_function=mask_function or causal_mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **rest,
        )
    present = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if present is not None:
        present = present[:, kv_offset : kv_offset + kv_length].bool()
        if not compiling() and bool(present.all()):
            present = None
    if both_ways:
        return None if present is None else present[:, None, None, :]
    if present is None:
        return torch.ones((), dtype=torch.bool, device=rest.get("device")).expand(batch_size, 1, kv_length)
    return present[:, None, :].clone(memory_format=torch.contiguous_format)


def every_key(mask: Tensor) -> bool:
    """Whether a causal mask is one True for all keys, told without reading a number."""
    return mask.ndim == 3 and not any(mask.stride())


def _static(
    batch_size: int, queries: int, keys: int, offset: int | Tensor, attention_mask: Tensor | None, device: Any
) -> Tensor:
    """(B, 2, Lk) for keys of a static cache, which are there from the start; no number is read, so that it compiles."""
    places = torch.arange(keys, device=device)
    there = (places < offset + queries).expand(batch_size, keys)
    if attention_mask is not None:
        given = attention_mask.bool()[:, :keys]
        there = there & torch.nn.functional.pad(given, (0, keys - given.shape[1]))
    return torch.stack((there, (places < offset).expand(batch_size, keys)), 1)


def _reaches(
    mask_function: Callable[..., Any], batch_size: int, last: int | Tensor, first: int, rest: dict[str, Any]
) -> bool:
    """Whether in every sequence the last query sees the first key that is kept."""
    if compiling() or isinstance(last, Tensor):
        return False
    texts = torch.arange(batch_size, device=rest.get("device"))
    seen = mask_function(texts, texts.new_zeros(()), texts.new_tensor(last), texts.new_tensor(first))
    return bool(seen.all())


def understood(mask: Tensor | None, is_causal: bool, queries: int, keys: int) -> Pattern:
    """What a mask means for attention of linear cost; `DenseMaskError` for one that differs from query to query."""
    if mask is None:
        return Pattern(None, is_causal and queries > 1, 0)
    if mask.ndim == 3 and mask.dtype == torch.bool:
        static = mask.shape[1] == 2
        return Pattern(
            None if every_key(mask) else mask[:, 0], queries > 1, mask[0, 1].sum() if static else keys - queries
        )
    one_row = mask.ndim == 4 and mask.shape[1] == 1 and (mask.shape[2] == 1 or mask.stride(2) == 0)
    if not one_row:
        hint = "; pass attention_mask, or compiling takes the sequences for packed" if compiling() else ""
        raise DenseMaskError(
            f"attention_mask of shape {tuple(mask.shape)} and dtype {mask.dtype} differs from head to head or from "
            f"query to query (a position bias, a window, packed sequences ...). Moments are taken once "
            f"for all queries and cannot honour it; accepted: (batch, 1, 1, {keys}), or a plain causal mask. Keep "
            f"softmax in such layers: cumulant.convert(model, layers=...){hint}"
        )
    row = mask[:, 0, 0]
    if row.dtype != torch.bool:
        row = row.clamp(min=torch.finfo(row.dtype).min)
        row = (row - row.amax(-1, keepdim=True)).exp()
    return Pattern(row, False, 0)


def merged(masks: Sequence[Tensor], queries: int, keys: int) -> Pattern:
    """What several masks (., ., Lq or 1, Lk), bools or biases of the logits, mean together.

    Of one that differs from query to query the numbers are read: it may be causal, with keys that are absent, and
    nothing else. Cost then: Lq Lk, as for making it.
    """
    present: Tensor | None = None
    causal = False
    for mask in masks:
        found = _alike(mask, queries, keys)
        causal = causal or found.is_causal
        new = found.key_mask
        if present is None or new is None:
            present = new if present is None else present
        elif present.dtype == new.dtype == torch.bool:
            present = present & new
        else:
            present = present * new
    if causal and present is not None and present.dtype != torch.bool:
        # exp(b) relative to the largest of all keys would be 0 for whole rows that see only early ones.
        raise DenseMaskError("a bias of the keys in a causal layer, as ALiBi has it, which grows with the length")
    return Pattern(present, causal and queries > 1, keys - queries if causal else 0)


def _alike(mask: Tensor, queries: int, keys: int) -> Pattern:
    if mask.shape[1] != 1:
        return understood(mask, False, queries, keys)  # which refuses what differs from head to head
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((allowed | (mask < ABSENT)).all()):
        return understood(mask, False, queries, keys)
    if mask.shape[-2] == 1 or mask.stride(-2) == 0:
        return Pattern(None if bool(allowed.all()) else allowed[:, 0, 0], False, 0)
    seen, there = allowed[:, 0], allowed[:, 0, -1]
    same = there[:, None].expand_as(seen)
    places = torch.arange(keys, device=mask.device)
    lower = same & (places <= places[:queries, None] + (keys - queries))
    alike = seen.all(-1, keepdim=True) | ~seen.any(-1, keepdim=True)  # how makers fill a row without any key
    for expected, causal in ((same, False), (lower, True)):
        if bool(((seen == expected) | (alike & ~expected.any(-1, keepdim=True))).all()):
            return Pattern(None if bool(there.all()) else there, causal, keys - queries if causal else 0)
    return understood(mask, False, queries, keys)


def dense(mask: Tensor | None, queries: int, keys: int) -> Tensor | None:
    """The same mask as F.scaled_dot_product_attention takes it, for a layer that stays softmax."""
    if mask is None or mask.ndim != 3:
        return mask
    at = torch.arange(queries, device=mask.device)[:, None] + understood(mask, True, queries, keys).offset
    seen = torch.arange(keys, device=mask.device) <= at
    return mask[:, None, :1] & seen
