"""The registry of attention mechanisms: one fixed signature, so that layers know nothing of mechanisms.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D query and key width, E value width, T packed
tokens, C = H D the width of a layer.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import shards
from ..call import Call, check_flag, check_share
from ..grammar import Registry, parse, write
from ..kinds import check_kinds
from ..tracing import constant, without_autocast
from .grid import resolve_grid
from .mixing import Bound, Mix
from .options import CHECKS, Check
from .ragged import padded

# What a layer, not its user, tells the constructor of a mechanism with parameters.
LAYER = {"grid_size": None, "prefix": 0, "device": None, "dtype": None}
MODULE_ARGUMENTS = frozenset({"dim", "num_heads", *LAYER})
CALL = frozenset({"call", *Call._fields})
Kind = TypeVar("Kind", bound=Callable[..., Any])
CAPABILITIES = (
    "noncausal", "causal", "cross", "causal_cross", "independent_rows", "key_mask", "grouped_queries", "weights",
    "subquadratic", "streaming", "ragged",
)  # fmt: skip


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
    # function(call, **options) -> (..., H, Lq, E). The call is prepared (`Call.prepared`) and autocast is off, unless
    # `raw` says that the function sees to both itself.
    function: Callable[..., Tensor]
    # row_weights(call, **options) -> (..., H, Lq, Lk), called alike; None where there are no weights to show.
    row_weights: Callable[..., Tensor] | None = None
    # module(dim, num_heads, *, grid_size, prefix, device, dtype, **options) makes the `Mixer` of one with parameters.
    module: Callable[..., nn.Module] | None = None
    # stream(**options) makes an object with step(query, key, value): one token (..., H, 1, D) in, its row out.
    stream: Callable[..., Any] | None = None
    # packed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, is_causal, scale, **options) for (T, H, D); where
    # there is none and `ragged` is claimed, sequences are padded and masked.
    packed: Callable[..., Tensor] | None = None
    arxiv: str = ""

    noncausal: bool = True
    causal: bool = False
    cross: bool = False  # queries and keys of different lengths
    causal_cross: bool = False  # is_causal with different lengths: row i sees the keys up to index i
    offset: bool = False  # with is_causal, row i sees the keys up to index `offset` + i
    independent_rows: bool = True  # a row depends on its own query only, not on the other queries
    key_mask: bool = False
    grouped_queries: bool = False
    subquadratic: bool = False
    streaming: bool = False  # a state of constant size can be carried from token to token
    ragged: bool = False  # packed sequences of different lengths without padding
    mergeable: bool = False  # what it knows of keys and values merges: a sequence may be split over workers
    dropout: bool = False  # `dropout_p` acts on its probabilities

    # Behaviour that follows from the formula; the conformance suite checks both what is and what is not claimed.
    order_free: bool = True  # permuting keys and values together changes nothing
    key_shift: bool = False  # adding one vector to all keys changes nothing
    value_shift: bool = True  # adding one vector to all values adds it to the output: the weights sum to 1

    raw: bool = False  # checks its call and minds precision itself
    wants_grid: bool = False  # reads `grid` and `prefix` of a call
    wants_input: bool = False  # its module takes `x=`, the tokens (..., Lq, C) that the queries were projected from
    wants_query_mask: bool = False  # reads `query_mask`: queries that must not act on other rows
    # Causal rows depend on a longest length; with this option at a fixed number, a prefix gives the same rows.
    length_option: str | None = None
    # What an option may be, by its name; a mechanism for which a name of these means something else gives its own.
    checks: Mapping[str, Check] = field(default_factory=lambda: CHECKS)
    # Options under which the module has a pattern that its published form lacks, e.g. {"causal": {"use_lepe": False}}.
    pattern_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stream is not None:
            object.__setattr__(self, "stream", _checking(self.stream, self.check_values))

    @property
    def weights(self) -> bool:
        """Whether there are weights to show, see `scores`."""
        return self.row_weights is not None

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
        return self.function_options if self.module is None else own_options(self.module, MODULE_ARGUMENTS)

    @property
    def function_options(self) -> tuple[str, ...]:
        """Those that a direct call takes."""
        return own_options(self.function)

    @property
    def scores(self) -> Callable[..., Tensor] | None:
        """scores(query, key, **arguments) gives the weights, (..., H, Lq, Lk); None where there are none to show."""
        return None if self.row_weights is None else self._scores

    @property
    def varlen(self) -> Callable[..., Tensor] | None:
        """varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **arguments) for packed (T, H, D), or None."""
        if not self.ragged:
            return None
        return functools.partial(padded, self) if self.packed is None else self.packed

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        """Arguments are the fields of `Call` (key_mask, is_causal, scale, ...) and the mechanism's own options."""
        call, options = Call.split(query, key, value, arguments)
        self.check_values(options)
        return self.run(call, **options)

    def run(self, call: Call, **options: Any) -> Tensor:
        """The output for a call, (..., H, Lq, E)."""
        self.check(call)
        if shards.answerer() is not None:
            self.require("mergeable", "a sequence split over workers (context_parallel)")
            shards.answerer().agree(self.name, call)
        return self._prepared(self.function, call, options)

    def weigh(self, call: Call, **options: Any) -> Tensor:
        """The weights of a call, (..., H, Lq, Lk); options that only say how the output is computed are passed over."""
        if self.row_weights is None:
            raise ValueError(f"{self.name!r} has no weights to show")
        self.check(call)
        passed_over = {*self.function_options} - {*own_options(self.row_weights)}
        chosen = {name: value for name, value in options.items() if name not in passed_over}
        return self._prepared(self.row_weights, call, chosen)

    def _scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        call, options = Call.split(query, key, key, arguments)
        self.check_values(options)
        return self.weigh(call, **options)

    def _prepared(self, function: Callable[..., Tensor], call: Call, options: Mapping[str, Any]) -> Tensor:
        if self.raw:
            return function(call, **options)
        call = call.prepared()
        with without_autocast(call.query.device.type):
            return function(call, **options).to(call.query.dtype)

    def check(self, call: Call) -> None:
        """Raises for a use of attention that this mechanism does not have, naming the nearest one that has it."""
        check_flag("is_causal", call.is_causal)
        check_flag("enable_gqa", call.enable_gqa)
        call.check_prefix()
        if call.key_mask is not None and not self.key_mask:
            self._refuse("key_mask", "key_mask was given", "takes no key mask; pass key_mask=None")
        if call.is_causal and not self.causal:
            self._refuse("causal", "is_causal=True", "has no causal form; pass is_causal=False")
        if not call.is_causal and not self.noncausal:
            self._refuse("noncausal", "is_causal=False", "has only a causal form; pass is_causal=True")
        if call.enable_gqa and not self.grouped_queries:
            self._refuse("grouped_queries", "enable_gqa=True", "has no grouped queries; repeat the key heads")
        if call.dropout_p:
            check_share("dropout_p", call.dropout_p)
        if call.dropout_p and not self.dropout:
            self._refuse("dropout", f"dropout_p={call.dropout_p}", "forms no probabilities to drop; pass dropout_p=0")
        if call.offset and not self.offset:
            self._refuse("offset", f"offset={call.offset}", "has no offset; pass all queries from the first key on")
        query, key = call.query, call.key
        if not all(isinstance(x, Tensor) and not x.is_nested and x.ndim > 1 for x in (query, key)):
            return  # what is wrong with them is said where tensors are checked
        laid = self.wants_grid and (call.grid is not None or call.prefix)
        if (
            laid and query.shape[-2] == key.shape[-2] and shards.answerer() is None
        ):  # else the grid is that of all parts
            resolve_grid(query.shape[-2], call.grid, call.prefix)
        if query.shape[-2] != key.shape[-2]:
            lengths = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
            if not self.cross:
                self._refuse("cross", lengths, "has no cross attention; their numbers must agree")
            if call.is_causal and not self.causal_cross:
                self._refuse("causal_cross", f"is_causal=True with {lengths}", "has causal rows for equal numbers only")

    def require(self, capability: str, received: str | None = None) -> None:
        """Raises unless the mechanism has `capability`, one of CAPABILITIES; the error names the nearest that has.

        `received` is what asked for it, with its value.
        """
        if not getattr(self, capability):
            words = capability.replace("_", " ")
            asked = received or f"{words} was asked for"
            self._refuse(capability, asked, "does not have it" if received is None else f"does not have {words}")

    def _refuse(self, capability: str, received: str, verdict: str) -> None:
        near = nearest(self, capability)
        hint = f"; nearest mechanism that can: {near!r}" if near else ""
        raise ValueError(f"{received}, but {self.name!r} {verdict}{hint}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A registered mechanism is stored by name: its function may be a closure, which cannot be pickled.
        if _find(self.name.partition("+")[0]) is not None and get(self.name) is self:
            return get, (self.name,)
        return super().__reduce_ex__(protocol)

    def build(self, dim: int, num_heads: int, **arguments: Any) -> Mix:
        """What a layer of width `dim` with `num_heads` heads holds; options are checked here, once.

        Besides them the arguments are those of LAYER: `grid_size` and `prefix` tell a mechanism with parameters, an
        `nn.Module`, the patch grid to expect and how many tokens stand before the patches.
        """
        options = {name: given for name, given in arguments.items() if name not in LAYER}
        self.check_options(options)
        if self.module is None:
            return Bound(self, options)
        built: Any = self.module(dim, num_heads, **{**LAYER, **arguments})
        return built

    def with_options(self, options: Mapping[str, Any]) -> Mechanism:
        """The same with other defaults, of a call or of a layer, under a name that says so: "cumulant3+full"."""
        self.check_options({key: value for key, value in options.items() if key not in self.function_options})
        self.check_values(options)

        def bound(function: Callable[..., Any] | None, shared: frozenset[str] = CALL) -> Any:
            if function is None:
                return None
            known = own_options(function, shared)
            return functools.partial(function, **{key: value for key, value in options.items() if key in known})

        packed = None if self.packed is None else functools.partial(self.packed, **options)
        return replace(
            self,
            name=write(self.name, options),
            function=bound(self.function),
            row_weights=bound(self.row_weights),
            module=bound(self.module, MODULE_ARGUMENTS),
            stream=bound(self.stream),
            packed=packed,
        )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises for an option that a layer with this mechanism does not take, naming those that it does."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            near = difflib.get_close_matches(unknown[0], self.options, n=1)
            accepted = ", ".join(self.options) or "none"
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown option {unknown[0]!r} of mechanism {self.name!r}; accepted: {accepted}{hint}")
        self.check_values(options)

    def check_values(self, options: Mapping[str, Any]) -> None:
        """Raises for values that options of those names cannot have."""
        for name, given in options.items():
            check = self.checks.get(name)
            if check is not None:
                check(name, given)
        if torch.compiler.is_compiling():  # signatures cannot be traced
            return
        others = {name: x for name, x in options.items() if name not in {*CHECKS, *self.checks}}
        for form in (self.module, self.function):
            if form is not None:
                check_kinds(form, others)


def _checking(make: Callable[..., Any], check: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    """`make` of options that are checked first."""

    @functools.wraps(make, updated=())
    def checked(**options: Any) -> Any:
        check(options)
        return make(**options)

    return checked


def options_of(form: Callable[..., Any], without: Iterable[str] = ()) -> Callable[[Kind], Kind]:
    """Decorator for a function or class with `**rest`: among its options are those of `form` that have a default, but
    for some."""

    def say(made: Kind) -> Kind:
        # Of a class its own constructor is told: what is said of a class itself its subclasses inherit.
        asked: Any = made.__init__ if "__init__" in vars(made) else made
        own = {p.name: p for p in inspect.signature(asked).parameters.values() if p.kind is not p.VAR_KEYWORD}
        more = {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(form).parameters.values()}
        more = {name: p for name, p in more.items() if name not in {*own, *without} and p.default is not p.empty}
        asked.__signature__ = inspect.Signature([*own.values(), *more.values()])
        return made

    return say


def can(words: str) -> dict[str, Any]:
    """Fields of a `Mechanism` that are True, by name: `Mechanism(..., **can("causal cross key_mask"))`."""
    return dict.fromkeys(words.split(), True)


_MECHANISMS: Registry[Mechanism] = Registry("attention mechanism")
_FAMILIES: dict[str, Callable[[int], Mechanism]] = {}
_NUMBERED = SimpleNamespace()  # by name; of a dict torch.compile would know what was in it at its first look


def register(mechanism: Mechanism | None = None, /, **fields: Any) -> Mechanism:
    """Add a mechanism, or one of these fields, under its name, which must be new, and return it."""
    mechanism = Mechanism(**fields) if mechanism is None else mechanism
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"mechanism must be a Mechanism, got {type(mechanism).__name__}")
    return _MECHANISMS.add(mechanism.name, mechanism)


def family(stem: str, make: Callable[[int], Mechanism]) -> None:
    """Let `get` make `stem` with any number behind it, "cluster256" say, also where that name is not registered."""
    _FAMILIES[stem] = make


def names() -> list[str]:
    """Names of all registered mechanisms, in the order in which they were registered."""
    return list(_MECHANISMS)


def get(name: str) -> Mechanism:
    """The mechanism of that name, e.g. `get("cumulant3")`, or with options, `get("cumulant3+around=mean")`.

    Behind "cluster" may be any number of clusters; `names()` lists three.
    """
    if isinstance(name, str) and name in _MECHANISMS:
        return _MECHANISMS[name]
    known, options = parse(name)
    found = _find(known) or _MECHANISMS.named(known)
    return _with_options(name) if options else found


def _find(name: str) -> Mechanism | None:
    return _MECHANISMS.get(name) or (getattr(_NUMBERED, name) if _numbered(name) else None)


@constant  # torch.compile cannot trace how a mechanism is made
def _numbered(name: str) -> bool:
    """Whether it is one of a family that is not registered, made once."""
    found = re.fullmatch(r"(.*?)([1-9][0-9]{0,8})", name)
    if found and found[1] in _FAMILIES and not hasattr(_NUMBERED, name):
        setattr(_NUMBERED, name, _FAMILIES[found[1]](int(found[2])))
    return hasattr(_NUMBERED, name)


@functools.lru_cache(256)
def _with_options(name: str) -> Mechanism:
    known, options = parse(name)
    return get(known).with_options(options)


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


def own_options(function: Callable[..., Any], shared: frozenset[str] = CALL) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in shared)
