"""What a converted layer computes: one mechanism for all heads, or for some of them with softmax for the others.

Shape legend: B batch, H query heads, Hk key heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import zoo
from ...around import check_around
from ...call import Call
from ...grammar import parse, suggest, write
from ...tensors import repeat_heads
from ...zoo.cluster import by_head
from ...zoo.registry import Mechanism
from ..fold import unfolded
from ..registry import get_layer

SOFTMAX = "softmax"
NOTHING = (("around", "zero"), ("apart", 0))  # options that change nothing
SINKS = 4  # first tokens that clusters of a causal layer keep exact


@dataclass(frozen=True)
class Choice:
    """The mechanism of a layer, its options, and the heads that take it (None: all; the others stay softmax).

    `name` writes mechanism and options as one word, "cumulant3+around=mean", and `named` reads it. `layer`: a layer of
    `cumulant.nn.layers()`, with its options behind its name, that takes the place of the whole layer.
    """

    attention: str = "cumulant3"
    heads: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    layer: str | None = None

    def __post_init__(self) -> None:
        if self.layer is None:
            check_fits(self.attention)
        elif self.heads is not None:
            raise ValueError(f"heads={list(self.heads)} stay with a mechanism; layer={self.layer!r} is of all heads")
        else:
            get_layer(self.layer)
        zoo.get(self.attention).check_options(self.options)
        if "around" in self.options:
            check_around(self.options["around"], is_causal=False)
        if self.heads is not None:
            wrong = [head for head in self.heads if isinstance(head, bool) or not isinstance(head, int)]
            if wrong:
                raise ValueError(f"heads must be numbers, got {wrong}")
            object.__setattr__(self, "heads", tuple(sorted(set(self.heads))))
        if self.heads is not None and self.told not in (0, len(self.heads)):
            raise ValueError(f"options are listed for {self.told} heads, and heads={list(self.heads)} take them")

    @property
    def order(self) -> int | None:
        """Order of a cumulant mechanism, None for another."""
        return int(self.attention[-1]) if self.attention.startswith("cumulant") else None

    @property
    def told(self) -> int:
        """How many heads the options are listed for, one value each; 0 where all heads have the same."""
        return len(by_head(self.options)) if self.attention.startswith("cluster") else 0

    @property
    def name(self) -> str:
        """Mechanism and options in one word."""
        return write(self.attention, self.options)

    @classmethod
    def named(cls, name: str, options: Mapping[str, Any] | None = None, layer: str | None = None) -> Choice:
        """The choice that "cumulant3+around=mean" stands for, with further options."""
        attention, own = parse(name)
        return cls(attention, None, {**own, **(options or {})}, layer)

    @property
    def for_all_heads(self) -> Choice:
        return replace(self, heads=None)

    @property
    def around_mean(self) -> bool:
        """Whether the expansion is around the mean query, which all queries of a sequence make together."""
        return self.options.get("around") == "mean"

    @property
    def whole(self) -> bool:
        """Whether a row's answer depends on where it stands among the queries, all of which have to be there."""
        return self.around_mean or bool(self.options.get("apart"))

    @property
    def foldable(self) -> bool:
        """Whether the covariance of the tokens is all that it needs of a layer without norms and extras."""
        return self.attention == "cumulant2" and self.heads is None and not self.options

    @property
    def drops(self) -> bool:
        """Whether some head still forms probabilities that attention dropout acts on."""
        return self.heads is not None or zoo.get(self.attention).dropout

    def at(self, prefix: int, causal: bool = False) -> Choice:
        """The same in a layer with `prefix` tokens of another kind at the start: cumulant mechanisms set these apart,
        unless `apart` says otherwise; in a `causal` one clusters keep the first tokens exact, where much of the
        attention of language models goes, unless `sinks` says otherwise. What is said by nothing (around 0, none apart)
        is not said, so that what knows no options, folding say, serves.
        """
        options = dict(self.options)
        if self.order is not None and prefix:
            options.setdefault("apart", prefix)
        if causal and self.attention.startswith("cluster"):
            options.setdefault("sinks", SINKS)
        if not self.around_mean:
            options = {key: value for key, value in options.items() if (key, value) not in NOTHING}
        return replace(self, options=options)

    def to_json(self) -> dict[str, Any]:
        heads = None if self.heads is None else list(self.heads)
        made = {"attention": self.attention, "heads": heads, "options": dict(self.options)}
        return made if self.layer is None else {**made, "layer": self.layer}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Choice:
        heads = values.get("heads")
        made = cls.named(values["attention"], values.get("options"), values.get("layer"))
        return made if heads is None else replace(made, heads=tuple(heads))

    def __str__(self) -> str:
        extra = "".join(f", {name}={value}" for name, value in self.options.items())
        over = "" if self.layer is None else f"layer {self.layer} over "
        return f"{over}{self.attention}{extra}" + ("" if self.heads is None else f" in heads {list(self.heads)}")


def fits(mechanism: Mechanism) -> bool:
    """Whether it can take the place of softmax in a trained layer: no parameters or inputs of its own, any mask.

    One that would like to know the grid of the tokens is told where the model knows it, and does without elsewhere.
    """
    free = mechanism.module is None and not mechanism.wants_input
    return (
        free
        and mechanism.independent_rows
        and mechanism.length_option is None
        and all(getattr(mechanism, c) for c in ("noncausal", "causal", "cross", "causal_cross", "key_mask"))
    )


def fitting() -> list[str]:
    """Names of the mechanisms that can be put into a trained model, without softmax itself."""
    return [name for name in zoo.names() if name != SOFTMAX and fits(zoo.get(name))]


def check_fits(attention: str) -> None:
    if attention != SOFTMAX and not fits(zoo.get(attention)):
        raise ValueError(
            f"attention={attention!r} cannot replace softmax in a trained layer: it brings parameters or inputs of its "
            f"own, or lacks a pattern that layers need; {suggest(attention, fitting())}"
        )


KEPT = Choice(SOFTMAX)


_observers: list[Callable[[nn.Module, Call], None]] = []


@contextmanager
def observing(observer: Callable[[nn.Module, Call], None]) -> Iterator[None]:
    """Within this, `observer(module, call)` is told of every converted layer that runs."""
    _observers.append(observer)
    try:
        with unfolded():  # query and key are there to be seen
            yield
    finally:
        _observers.remove(observer)


def observed() -> bool:
    """Whether somebody wants to see each call; never while compiling."""
    return bool(_observers) and not torch.compiler.is_compiling()


def mix(module: nn.Module, choice: Choice, call: Call) -> Tensor:
    """Attention of a converted layer, (B, H, Lq, E). Cost: that of the mechanism, plus softmax for heads that keep it.

    Dropout acts on the probabilities of softmax heads; the other mechanisms form none and lose whole keys.
    """
    if observed():
        for observer in tuple(_observers):
            observer(module, call)
    return _by_heads(choice, call, _all_heads)


def _by_heads(choice: Choice, call: Call, run: Callable[[Choice, Call], Tensor]) -> Tensor:
    """What `run` makes of the heads that take the choice, and of those that stay softmax, in their order."""
    if choice.heads is None:
        return run(choice, call)
    kinds = [head in choice.heads for head in range(call.query.shape[-3])]
    return call.by_heads(kinds, lambda taken, own: run(choice.for_all_heads if taken else KEPT, own))


def placed(choice: Choice, call: Call, offset: int | Tensor, whole: bool = False) -> tuple[Call, Tensor | slice]:
    """The call whose causal rows stand where they belong, the first at `offset` among the keys; which rows are ours.

    Causal rows are aligned at the first key, so rows of no account are put before or around ours, but for mechanisms
    that know an offset, where the `whole` of the layer is theirs.
    """
    query = call.query
    if not call.is_causal:
        return call, slice(None)
    if isinstance(offset, Tensor):  # of a static cache: nothing may depend on its value
        rows = offset + torch.arange(query.shape[-2], device=query.device)
        among = query.new_zeros(*query.shape[:-2], call.key.shape[-2], query.shape[-1])
        return call._replace(query=among.index_copy(-2, rows, query), query_mask=None), rows
    if not offset:
        return call, slice(None)
    if whole and zoo.get(choice.attention).offset:
        return call._replace(offset=offset), slice(None)
    before = query.new_zeros(*query.shape[:-2], offset, query.shape[-1])
    return call._replace(query=torch.cat((before, query), -2)), slice(offset, None)


def weights(choice: Choice, call: Call) -> Tensor:
    """The weights with which `mix` takes the values, (B, H, Lq, Lk); signed for cumulant mechanisms. Cost: Lq Lk D."""
    call = call._replace(key=repeat_heads(call.key, call.query.shape[-3]), enable_gqa=False)
    call = call._replace(value=call.key)
    return _by_heads(choice, call, lambda which, own: zoo.get(which.attention).weigh(own, **which.options))


def without_some_keys(call: Call) -> Call:
    """Attention dropout of a mechanism that forms no probabilities: keys leave a sequence with that probability, for
    all queries and heads at once. The others need no factor: what mechanisms take is a mean over the keys."""
    stay = torch.rand(*call.key.shape[:-3], call.key.shape[-2], device=call.key.device) >= call.dropout_p
    mask = call.key_mask
    if mask is not None:
        stay = mask & stay if mask.dtype == torch.bool else mask * stay
    return call._replace(key_mask=stay, dropout_p=0.0)


def _all_heads(choice: Choice, call: Call) -> Tensor:
    mechanism = zoo.get(choice.attention)
    if not mechanism.dropout and call.dropout_p:
        call = without_some_keys(call)
    if call.query.shape[-3] != call.key.shape[-3]:
        if mechanism.grouped_queries:
            call = call._replace(enable_gqa=True)
        else:
            key, value = (repeat_heads(x, call.query.shape[-3]) for x in (call.key, call.value))
            call = call._replace(key=key, value=value, enable_gqa=False)
    return mechanism.run(call, **choice.options)


class Undo(list[Callable[[], Any]]):
    """Steps that take back what was done, the last first. They hold the model's parts as arguments, so that in a copy
    or a pickle of the model they take the copy back."""

    def __call__(self) -> None:
        while self:
            self.pop()()

    def keep(self, thing: Any, name: str) -> None:
        """An attribute will be as it is now, or not there as it is not now."""
        there = hasattr(thing, name)
        self.append(partial(setattr, thing, name, getattr(thing, name)) if there else partial(_without, thing, name))


def _without(thing: Any, name: str) -> None:
    if hasattr(thing, name):
        delattr(thing, name)
