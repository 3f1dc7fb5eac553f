"""The registry of attention mechanisms: one fixed signature, so that layers know nothing of mechanisms.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D query and key width, E value width.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Arguments that every mechanism takes; whatever else its function takes by keyword is an option of its own.
SHARED_ARGUMENTS = frozenset({"query", "key", "value", "key_mask", "is_causal", "scale", "enable_gqa"})


@dataclass(frozen=True)
class Mechanism:
    """A published attention mechanism: what it computes, what it costs, what it can do.

    Calling it maps query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) to (..., H, Lq, E), as
    `F.scaled_dot_product_attention` does. `scale=None` is the mechanism's own default.
    `scores(query, key, ...)` gives its weights, (..., H, Lq, Lk), or is None where there are none.
    """

    name: str
    summary: str
    paper: str
    year: int
    cost: str  # multiply-adds of one head, in L, D and E
    function: Callable[..., Tensor]
    scores: Callable[..., Tensor] | None = None
    causal: bool = False
    cross: bool = False
    key_mask: bool = False
    grouped_queries: bool = False
    subquadratic: bool = False
    streaming: bool = False  # a state of constant size can be carried from token to token
    ragged: bool = False  # packed sequences of different lengths without padding
    dropout: bool = False  # takes `dropout_p`, which acts on its probabilities

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword options that belong to this mechanism alone."""
        return _own_options(self.function)

    def options_of_scores(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those of the given options that change the weights and not only the way they are computed."""
        return {} if self.scores is None else {k: v for k, v in options.items() if k in _own_options(self.scores)}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Tensor:
        if key_mask is not None and not self.key_mask:
            raise ValueError(f"key_mask was given, but {self.name!r} takes no key mask; pass key_mask=None")
        if is_causal and not self.causal:
            raise ValueError(f"is_causal=True, but {self.name!r} has no causal form; pass is_causal=False")
        if enable_gqa and not self.grouped_queries:
            raise ValueError(f"enable_gqa=True, but {self.name!r} has no grouped queries; repeat the key heads")
        return self.function(
            query, key, value, key_mask=key_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, **options
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A registered mechanism is stored by name: its function may be a closure, which cannot be pickled.
        if _MECHANISMS.get(self.name) is self:
            return get, (self.name,)
        return super().__reduce_ex__(protocol)

    def build(self, dim: int, num_heads: int, **options: Any) -> Callable[..., Tensor]:
        """The callable a layer of width `dim` with `num_heads` heads holds; options are checked here, once.

        A mechanism with parameters of its own returns an `nn.Module` with the same call signature instead.
        """
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            accepted = ", ".join(self.options) or "none"
            raise ValueError(f"unknown option {unknown[0]!r} of mechanism {self.name!r}; accepted: {accepted}")
        return functools.partial(self, **options) if options else self


_MECHANISMS: dict[str, Mechanism] = {}


def register(mechanism: Mechanism) -> Mechanism:
    """Add a mechanism under its name, which must be new, and return it."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"mechanism must be a Mechanism, got {type(mechanism).__name__}")
    if mechanism.name in _MECHANISMS:
        raise ValueError(f"a mechanism named {mechanism.name!r} is registered already; choose another name")
    _MECHANISMS[mechanism.name] = mechanism
    return mechanism


def names() -> list[str]:
    """Names of all registered mechanisms, in the order in which they were registered."""
    return list(_MECHANISMS)


def get(name: str) -> Mechanism:
    """The mechanism of that name, e.g. `get("cumulant3")`."""
    if name not in _MECHANISMS:
        raise ValueError(f"unknown attention mechanism {name!r}; {suggest(name, names())}")
    return _MECHANISMS[name]


def _own_options(function: Callable[..., Tensor]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in SHARED_ARGUMENTS)


def suggest(name: object, known: list[str]) -> str:
    """The part of an error message that names what would have been accepted, the nearest first."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"
