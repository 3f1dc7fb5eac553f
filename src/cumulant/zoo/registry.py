"""The registry of attention mechanisms: one fixed signature, so that layers know nothing of mechanisms.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D query and key width, E value width, T packed
tokens, C = H D the width of a layer.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .grammar import suggest

# Arguments that every mechanism takes; whatever else its function takes by keyword is an option of its own.
SHARED_ARGUMENTS = frozenset(
    {"query", "key", "value", "key_mask", "is_causal", "scale", "enable_gqa", "query_mask", "grid", "prefix"}
)
# What a layer, not its user, tells the constructor of a mechanism with parameters.
MODULE_ARGUMENTS = frozenset({"dim", "num_heads", "grid_size", "prefix", "device", "dtype"})

CAPABILITIES = (
    "noncausal",
    "causal",
    "cross",
    "causal_cross",
    "independent_rows",
    "key_mask",
    "grouped_queries",
    "weights",
    "subquadratic",
    "streaming",
    "ragged",
)


@dataclass(frozen=True)
class Mechanism:
    """A published attention mechanism: what it computes, what it costs, what it can do.

    Calling it maps query (..., H, Lq, D), key (..., H, Lk, D), value (..., H, Lk, E) to (..., H, Lq, E), as
    `F.scaled_dot_product_attention` does. `scale=None` is the mechanism's own default. This is the operator alone;
    parts with parameters (convolutions, gates, tables) are in the module that `build` gives to a layer.
    """

    name: str
    summary: str
    paper: str
    year: int
    cost: str  # multiply-adds of one head, in L, D and E
    function: Callable[..., Tensor]
    # scores(query, key, ...) gives the weights, (..., H, Lq, Lk); None where there are none to show.
    scores: Callable[..., Tensor] | None = None
    # module(dim, num_heads, *, grid_size, prefix, device, dtype, **options) makes the nn.Module of a mechanism with
    # parameters; it is called like the function.
    module: Callable[..., nn.Module] | None = None
    # stream(**options) makes an object with step(query, key, value): one token (..., H, 1, D) in, its row out.
    stream: Callable[..., Any] | None = None
    # varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, is_causal, scale, **options), packed (T, H, D).
    varlen: Callable[..., Tensor] | None = None
    arxiv: str = ""

    noncausal: bool = True
    causal: bool = False
    cross: bool = False  # queries and keys of different lengths
    causal_cross: bool = False  # is_causal with different lengths: row i sees the keys up to index i
    offset: bool = False  # takes `offset` with is_causal: row i sees the keys up to index offset + i
    independent_rows: bool = True  # a row depends on its own query only, not on the other queries
    key_mask: bool = False
    grouped_queries: bool = False
    subquadratic: bool = False
    streaming: bool = False  # a state of constant size can be carried from token to token
    ragged: bool = False  # packed sequences of different lengths without padding
    dropout: bool = False  # takes `dropout_p`, which acts on its probabilities

    # Behaviour that follows from the formula; the conformance suite checks both what is and what is not claimed.
    order_free: bool = True  # permuting keys and values together changes nothing
    key_shift: bool = False  # adding one vector to all keys changes nothing
    value_shift: bool = True  # adding one vector to all values adds it to the output: the weights sum to 1

    wants_grid: bool = False  # takes `grid=(rows, cols)` or (frames, rows, cols) and `prefix=` at each call
    wants_input: bool = False  # its module takes `x=`, the tokens (..., Lq, C) that the queries were projected from
    wants_query_mask: bool = False  # takes `query_mask` (..., Lq): queries that must not act on other rows
    # Causal rows depend on a longest length; with this option at a fixed number, a prefix gives the same rows.
    length_option: str | None = None
    # Options under which the module has a pattern that its published form lacks, e.g. {"causal": {"use_lepe": False}}.
    pattern_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def weights(self) -> bool:
        """Whether there are weights to show, see `scores`."""
        return self.scores is not None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The uses of attention it serves: "noncausal self", "causal self", "noncausal cross", "causal cross".

        In causal cross attention row i may see queries 1..i and every key of the other sequence: rows that do not
        look at other queries have it for free.
        """
        has = {
            "noncausal self": self.noncausal,
            "causal self": self.causal,
            "noncausal cross": self.cross and self.noncausal,
            "causal cross": self.cross and self.noncausal and self.independent_rows,
        }
        return tuple(name for name, served in has.items() if served)

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword options that belong to this mechanism alone, as a layer takes them."""
        return self.function_options if self.module is None else _own_options(self.module, MODULE_ARGUMENTS)

    @property
    def function_options(self) -> tuple[str, ...]:
        """Those that a direct call takes."""
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
        self.check(query, key, key_mask=key_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        return self.function(
            query, key, value, key_mask=key_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, **options
        )

    def check(
        self,
        query: Tensor,
        key: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> None:
        """Raises for a use of attention that this mechanism does not have, naming the nearest one that has it."""
        if key_mask is not None and not self.key_mask:
            self._refuse("key_mask", "key_mask was given", "takes no key mask; pass key_mask=None")
        if is_causal and not self.causal:
            self._refuse("causal", "is_causal=True", "has no causal form; pass is_causal=False")
        if not is_causal and not self.noncausal:
            self._refuse("noncausal", "is_causal=False", "has only a causal form; pass is_causal=True")
        if enable_gqa and not self.grouped_queries:
            self._refuse("grouped_queries", "enable_gqa=True", "has no grouped queries; repeat the key heads")
        if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.ndim < 2 or key.ndim < 2:
            return  # the function says what is wrong with them
        if query.shape[-2] != key.shape[-2]:
            lengths = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
            if not self.cross:
                self._refuse("cross", lengths, "has no cross attention; their numbers must agree")
            if is_causal and not self.causal_cross:
                self._refuse("causal_cross", f"is_causal=True with {lengths}", "has causal rows for equal numbers only")

    def require(self, capability: str) -> None:
        """Raises unless the mechanism has `capability`, one of CAPABILITIES; the error names the nearest that has."""
        if not getattr(self, capability):
            self._refuse(capability, f"{capability.replace('_', ' ')} was asked for", "does not have it")

    def _refuse(self, capability: str, received: str, verdict: str) -> None:
        near = nearest(self, capability)
        hint = f"; nearest mechanism that can: {near!r}" if near else ""
        raise ValueError(f"{received}, but {self.name!r} {verdict}{hint}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A registered mechanism is stored by name: its function may be a closure, which cannot be pickled.
        if _MECHANISMS.get(self.name) is self:
            return get, (self.name,)
        return super().__reduce_ex__(protocol)

    def build(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: tuple[int, ...] | None = None,
        prefix: int = 0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> Callable[..., Tensor]:
        """The callable a layer of width `dim` with `num_heads` heads holds; options are checked here, once.

        A mechanism with parameters of its own returns an `nn.Module` with the same call signature instead.
        `grid_size` and `prefix` tell it the patch grid to expect and how many tokens stand before the patches.
        """
        self.check_options(options)
        if self.module is not None:
            place = {"device": device, "dtype": dtype}
            return self.module(dim, num_heads, grid_size=grid_size, prefix=prefix, **place, **options)
        return functools.partial(self, **options) if options else self

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises for an option that a layer with this mechanism does not take, naming those that it does."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            near = difflib.get_close_matches(unknown[0], self.options, n=1)
            accepted = ", ".join(self.options) or "none"
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown option {unknown[0]!r} of mechanism {self.name!r}; accepted: {accepted}{hint}")


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
        first = re.split("[+:,]", str(name))[0]
        if first in _MECHANISMS:
            raise ValueError(
                f"unknown attention mechanism {name!r}; {first!r} is one: give its options apart (attention_options), "
                "and further mechanisms as words of their own"
            )
        raise ValueError(f"unknown attention mechanism {name!r}; {suggest(name, names())}")
    return _MECHANISMS[name]


def nearest(mechanism: Mechanism, capability: str) -> str | None:
    """The registered mechanism with `capability` that keeps most of what `mechanism` has, best of the same kind."""
    others = [m for m in _MECHANISMS.values() if getattr(m, capability) and m.name != mechanism.name]
    if not others:
        return None

    def kept(other: Mechanism) -> tuple[int, int]:
        kind = ("wants_grid", "wants_input")
        return (
            sum(getattr(other, c) for c in CAPABILITIES if getattr(mechanism, c)),
            sum(getattr(other, w) == getattr(mechanism, w) for w in kind),
        )

    return max(others, key=kept).name


def _own_options(function: Callable[..., Any], shared: frozenset[str] = SHARED_ARGUMENTS) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in shared)
