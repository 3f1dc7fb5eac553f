"""A cache of constant size for generation with a converted causal model: moments in place of all keys and values.

Shape legend: B batch, Hk key heads, H query heads, L tokens added at once, D key width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ..attention import attention
from ..moments import Moments
from .choice import Choice
from .hf import CARRIED, MIXED, TAG


class MomentsLayer(CacheLayerMixin):
    """The moments of all tokens so far, (B, Hk) of them: 4 D E bytes a head at order 2, 8 at order 3, at any length."""

    is_sliding = False

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.state: Moments | None = None
        self.tokens = 0
        self._unread = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands the new tokens on; `attend`, which knows the mask, takes them in. The keys carry this layer along."""
        if self._unread:
            raise RuntimeError(
                "the model did not hand the cached keys to a cumulant mechanism unchanged, so a MomentsCache cannot "
                "be used with it; generate with the default cache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key_states = key_states.view_as(key_states)
        setattr(key_states, CARRIED, self)
        self._unread = True
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, choice: Choice, scale: float | None
    ) -> Tensor:
        """Causal attention of the new tokens, query (B, H, L, D), over all so far and themselves: (B, H, L, E).

        Cost: L D E. A prompt after other tokens is taken token by token.
        """
        if choice.order is None or choice.heads is not None or choice != self.choice:
            raise ValueError(f"this cache was made for {self.choice}, but the layer computes {choice}")
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"a MomentsCache is for self-attention, got {query.shape[2]} queries and {key.shape[2]} new keys; an "
                "encoder-decoder takes EncoderDecoderCache(MomentsCache(model), DynamicCache()) of transformers"
            )
        self._unread = False
        order, full = choice.order, bool(choice.options.get("full", False))
        if self.state is None:
            self.state = self._of(key, value, mask, order, full)
            self.tokens += key.shape[2]
            gqa = query.shape[1] != key.shape[1]
            return attention(
                query,
                key,
                value,
                order=order,
                full=full,
                key_mask=mask,
                is_causal=query.shape[2] > 1,
                scale=scale,
                enable_gqa=gqa,
            )
        rows = []
        for at in range(key.shape[2]):
            here = slice(at, at + 1)
            new = self._of(key[:, :, here], value[:, :, here], None if mask is None else mask[:, here], order, full)
            self.state = self.state.merge(new)
            grouped = query[:, :, here].unflatten(1, (key.shape[1], -1)).flatten(2, 3)
            row = self.state.apply(grouped, scale)
            rows.append(row.reshape(query.shape[0], query.shape[1], 1, value.shape[-1]))
        self.tokens += key.shape[2]
        return torch.cat(rows, 2)

    @staticmethod
    def _of(key: Tensor, value: Tensor, mask: Tensor | None, order: int, full: bool) -> Moments:
        weights = None if mask is None else mask[:, None, :]
        return Moments.of(key, value, order=order, full=full, key_mask=weights)

    def numel(self) -> int:
        """Numbers held."""
        return 0 if self.state is None else sum(x.numel() for x in self.state if x is not None)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.tokens, self._unread = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a MomentsCache cannot forget tokens: they are in the sums; use the default cache")

    def offload(self) -> None:
        self._each(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._each(lambda x: x.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices, ...])

    def _each(self, change: Any) -> None:
        if self.state is not None:
            self.state = Moments._make(None if x is None else change(x) for x in self.state)


class MomentsCache(Cache):
    """A cache for `model.generate(..., past_key_values=MomentsCache(model))` whose size does not grow.

    Layers that stay softmax keep their keys and values, as in the default cache.
    """

    def __init__(self, model: nn.Module) -> None:
        config = _config(model)
        count, implementation = config.num_hidden_layers, config._attn_implementation
        if implementation == MIXED:
            modules: list[Any] = [m for m in model.modules() if hasattr(m, TAG) and _is_self(m)]
            by_index = {module.layer_idx: getattr(module, TAG) for module in modules}
            choices = [by_index.get(index) for index in range(count)]
        else:
            choices = [Choice(implementation) if implementation.startswith("cumulant") else None] * count
        if not any(_constant(choice) for choice in choices):
            raise ValueError(f"no layer of {type(model).__name__} is causal cumulant attention: {implementation!r}")
        super().__init__(
            layers=[MomentsLayer(c) if c is not None and _constant(c) else DynamicLayer() for c in choices]
        )

    def numel(self) -> int:
        """Numbers held by all layers together."""
        held = 0
        layers: list[Any] = list(self.layers)
        for layer in layers:
            if isinstance(layer, MomentsLayer):
                held += layer.numel()
            elif layer.is_initialized:
                held += layer.keys.numel() + layer.values.numel()
        return held


def _config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _constant(choice: Choice | None) -> bool:
    """Whether the state of this layer has a constant size: every head, in the mean form that moments give."""
    if choice is None or choice.order is None or choice.heads is not None or choice.around_mean:
        return False
    return choice.options.get("normalization", "mean") == "mean"


def _is_self(module: nn.Module) -> bool:
    return getattr(module, "layer_idx", None) is not None and bool(getattr(module, "is_causal", False))
