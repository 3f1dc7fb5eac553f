"""A cache for generation with a converted causal model: moments in place of all keys and values.

Shape legend: B batch, Hk key heads, H query heads, L tokens added at once, D key width, E value width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from .. import zoo
from ..call import Call
from ..cluster import ClusterStream, MergedStream
from ..moments import Moments
from ..nn.swapped.choice import KEPT, SOFTMAX, Choice
from ..nn.swapped.hf import CARRIED, MIXED, TAG, register_transformers
from ..tensors import fold_groups

STREAMED = {"block", "recent", "sinks", "closure", "variance", "response"}  # options of clusters that a stream knows


class StateLayer(CacheLayerMixin):
    """A layer whose mechanism takes the new tokens into a state of its own; the keys carry this layer to it."""

    is_sliding = False
    honours: tuple[str, ...] = ()  # what a layer may hand to `attend` beyond tensors, mask and scale

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.tokens = 0
        self._unread = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands the new tokens on; `attend`, which knows the mask, takes them in."""
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
        self._check(query, key, choice)
        if self.tokens == 0:
            self._take(key, value, mask, scale)
            mechanism, grouped = zoo.get(self.choice.attention), query.shape[1] != key.shape[1]
            causal = query.shape[2] > 1 or not mechanism.order_free
            call = Call(query, key, value, mask, causal, scale, enable_gqa=grouped)
            out = mechanism.run(call, **self.choice.options)
        else:
            rows = []
            for at in range(key.shape[2]):
                here = slice(at, at + 1)
                self._take(key[:, :, here], value[:, :, here], None if mask is None else mask[:, here], scale)
                rows.append(self._read(query[:, :, here], scale))
            out = torch.cat(rows, 2)
        self.tokens += key.shape[2]
        return out

    def _check(self, query: Tensor, key: Tensor, choice: Choice) -> None:
        """That the keys came here as they are, to the mechanism that this was made for."""
        if choice != self.choice:
            raise ValueError(f"this cache was made for {self.choice}, but the layer computes {choice}")
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"a MomentsCache is for self-attention, got {query.shape[2]} queries and {key.shape[2]} new keys; an "
                "encoder-decoder takes EncoderDecoderCache(MomentsCache(model), DynamicCache()) of transformers"
            )
        if not self._unread:
            raise RuntimeError(
                "a layer reads keys that another one has taken in already, as in models whose layers share keys; "
                "generate with the default cache"
            )
        self._unread = False

    def _take(self, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> None:
        """Takes further tokens of every sequence in."""
        raise NotImplementedError

    def _read(self, query: Tensor, scale: float | None) -> Tensor:
        """Answers one query of every sequence from all tokens so far."""
        raise NotImplementedError

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Puts change(x) in the place of every tensor x of the state."""
        raise NotImplementedError

    def numel(self) -> int:
        """Numbers held."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.tokens, self._unread = 0, False

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


class MomentsLayer(StateLayer):
    """The moments of all tokens so far, (B, Hk) of them: 4 D E bytes a head at order 2, 8 at order 3, at any length."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.state: Moments | None = None
        assert choice.order is not None
        self.form: dict[str, Any] = {"order": choice.order, "full": bool(choice.options.get("full", False))}

    def _take(self, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> None:
        new = Moments.of(key, value, key_mask=None if mask is None else mask[:, None, :], **self.form)
        self.state = new if self.state is None else self.state.merge(new)

    def _read(self, query: Tensor, scale: float | None) -> Tensor:
        assert self.state is not None
        heads, width = self.state.key_mean.shape[1], self.state.value_mean.shape[-1]
        return self.state.apply(fold_groups(query, heads), scale).reshape(*query.shape[:3], width)

    def numel(self) -> int:
        return 0 if self.state is None else sum(x.numel() for x in self.state if x is not None)

    def reset(self) -> None:
        super().reset()
        self.state = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = Moments._make(None if x is None else change(x) for x in self.state)


class StreamLayer(StateLayer):
    """Recent tokens and moments of ever larger blocks behind them: grows with the logarithm of the length."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.stream: ClusterStream | None = None

    def _take(self, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> None:
        if mask is not None and not bool((mask != 0).all()):
            raise ValueError(
                "the blocks of a cluster layer in a MomentsCache are those of unpadded texts; generate with texts of "
                "one length, or with the default cache"
            )
        if self.stream is None:
            made = zoo.get(self.choice.attention).stream
            assert made is not None
            self.stream = made(scale=scale, **self.choice.options)
        self.stream.append(key, value)

    def _read(self, query: Tensor, scale: float | None) -> Tensor:
        assert self.stream is not None
        return self.stream.apply(query)

    def numel(self) -> int:
        held = None if self.stream is None else self.stream.state
        return sum(x.numel() for x in held or ())

    def reset(self) -> None:
        super().reset()
        self.stream = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.stream is not None:
            self.stream.each(change)


class MergedLayer(StateLayer):
    """Softmax over a fixed number of places, see `MergedStream`."""

    honours = ("softcap",)

    def __init__(self, **options: Any) -> None:
        super().__init__(KEPT)
        self.options, self.stream = options, MergedStream(**options)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        choice: Choice,
        scale: float | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of the new tokens, query (B, H, L, D), over what is kept and themselves: (B, H, L, E)."""
        self._check(query, key, choice)
        self.stream.scale, self.stream.softcap = scale, softcap
        self.tokens += key.shape[2]
        return self.stream.step(query, key, value, mask)

    def numel(self) -> int:
        return sum(x.numel() for x in self.stream.state or ())

    def reset(self) -> None:
        super().reset()
        self.stream = MergedStream(**self.options)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.stream.each(change)


class MergedCache(Cache):
    """A cache for `model.generate(..., past_key_values=MergedCache(model, 1024))` of at most so many tokens a layer.

    The model is a causal one as it came, nothing trained or converted: from here on its softmax is computed by
    `attn_implementation="softmax"`, which answers as before under other caches. Layers that see a window of the text
    keep it as transformers' own cache does; `tokens` is for those that see all of it. Options are those of
    `MergedStream`.
    """

    def __init__(self, model: nn.Module, tokens: int | Sequence[int] = 1024, **options: Any) -> None:
        config = _config(model)
        layers = _own_layers(config)
        growing = [at for at, layer in enumerate(layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding]
        _check_known(self, model, [layers[at] for at in growing])
        sizes = [tokens] * len(growing) if isinstance(tokens, int) else list(tokens)
        if len(sizes) != len(growing):
            which = f"{len(growing)} layers" + (" that see all of the text" if len(growing) < len(layers) else "")
            raise ValueError(f"tokens must be one number, or one for each of {which}, got {len(sizes)}")
        if growing:
            _answer_by_softmax(model, config)
        else:
            warnings.warn(
                f"every layer of {type(model).__name__} sees a window of the text or less, and its cache is of that "
                "size: nothing is merged",
                stacklevel=2,
            )
        for at, size in zip(growing, sizes, strict=True):
            layers[at] = MergedLayer(tokens=size, **options)
        super().__init__(layers=layers)

    def numel(self) -> int:
        """Numbers held by all layers together."""
        return _numbers(self)


class MomentsCache(Cache):
    """A cache for `model.generate(..., past_key_values=MomentsCache(model))` whose size does not grow, or with the
    logarithm of the length where layers are clusters.

    Layers in which some heads stay softmax keep their keys and values, as in the default cache, and recurrent layers
    their states.
    """

    def __init__(self, model: nn.Module) -> None:
        config = _config(model)
        count, implementation = config.num_hidden_layers, config._attn_implementation
        if implementation == MIXED:
            modules: list[Any] = [m for m in model.modules() if hasattr(m, TAG) and _is_self(m)]
            by_index = {module.layer_idx: getattr(module, TAG) for module in modules}
            choices = [by_index.get(index) for index in range(count)]
        else:
            ours = implementation.startswith(("cumulant", "cluster"))
            choices = [Choice.named(implementation) if ours else None] * count
        own = _own_layers(config)
        layers = [_layer(choice, kept) for choice, kept in zip(choices, own, strict=False)]
        states = [kept for layer, kept in zip(layers, own, strict=False) if isinstance(layer, StateLayer)]
        if not states:
            raise ValueError(f"no layer of {type(model).__name__} is causal cumulant attention: {implementation!r}")
        _check_known(self, model, states)
        super().__init__(layers=layers)

    def numel(self) -> int:
        """Numbers held by all layers together."""
        return _numbers(self)


def _numbers(cache: Cache) -> int:
    layers: list[Any] = list(cache.layers)
    return sum(x.numel() for layer in layers for x in ([layer] if isinstance(layer, StateLayer) else _held(layer)))


def _held(layer: Any) -> Iterator[Tensor]:
    """The tensors of a layer of transformers: keys and values of attention, states of a recurrence."""
    for part in (getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")):
        yield from (x for x in (part.values() if isinstance(part, dict) else (part,)) if isinstance(x, Tensor))


def _config(model: Any) -> Any:
    if not hasattr(model, "config"):
        raise TypeError(f"model must be a language model of transformers, got {type(model).__name__}")
    return model.config.get_text_config(decoder=True)


def _answer_by_softmax(model: Any, config: Any) -> None:
    """Lets the softmax of a model be computed by ours, which a `MergedLayer` can answer."""
    now = config._attn_implementation
    if now == SOFTMAX:
        return
    if now == MIXED or now.startswith(("cumulant", "cluster")):
        raise ValueError(
            f"{type(model).__name__} is converted ({now!r}) and a MergedCache is for softmax: take "
            "MomentsCache(model), or cumulant.convert.restore(model) first"
        )
    register_transformers(SOFTMAX)
    model.set_attn_implementation(SOFTMAX)


def _own_layers(config: Any) -> list[Any]:
    """What transformers keeps of each layer: keys, those of a window, states of a recurrence, or nothing."""
    return list(DynamicCache(config=config).layers) or [DynamicLayer() for _ in range(config.num_hidden_layers)]


def _check_known(cache: Cache, model: nn.Module, replaced: Sequence[Any]) -> None:
    """An error where what takes the place of these layers keeps less than they do."""
    unknown = {type(layer).__name__ for layer in replaced} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if unknown:
        raise ValueError(
            f"a {type(cache).__name__} knows no {', '.join(sorted(unknown))}, which {type(model).__name__} keeps; "
            "generate with the default cache"
        )


def _layer(choice: Choice | None, own: Any) -> Any:
    """What keeps the past of a layer: a state where all heads have one, in the mean form that moments give, else what
    transformers keeps (`own`), but all keys where that has a window, since the layers have one mask between them."""
    if not isinstance(own, DynamicLayer):
        return own
    kept = DynamicLayer() if own.is_sliding else own
    if choice is None or choice.heads is not None or choice.whole:
        return kept
    if choice.order is not None:
        return MomentsLayer(choice) if choice.options.get("normalization", "mean") == "mean" else kept
    if choice.attention.startswith("cluster") and set(choice.options) <= STREAMED:
        return StreamLayer(choice)
    return kept


def _is_self(module: nn.Module) -> bool:
    return getattr(module, "layer_idx", None) is not None and bool(getattr(module, "is_causal", False))
