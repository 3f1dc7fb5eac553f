"""What a converted layer computes: one mechanism for all heads, or for some of them with softmax for the others.

Shape legend: B batch, H query heads, Hk key heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import zoo
from ...zoo.grammar import parse, suggest, write
from ...zoo.registry import Mechanism
from ...zoo.tilted import check_around

SOFTMAX = "softmax"


@dataclass(frozen=True)
class Choice:
    """The mechanism of a layer, its options, and the heads that take it (None: all; the others stay softmax).

    `name` writes mechanism and options as one word, "cumulant3+around=mean", and `named` reads it.
    """

    attention: str = "cumulant3"
    heads: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fits(self.attention)
        zoo.get(self.attention).check_options(self.options)
        if "around" in self.options:
            check_around(self.options["around"], is_causal=False)
        if self.heads is not None:
            wrong = [head for head in self.heads if isinstance(head, bool) or not isinstance(head, int)]
            if wrong:
                raise ValueError(f"heads must be numbers, got {wrong}")
            object.__setattr__(self, "heads", tuple(sorted(set(self.heads))))

    @property
    def order(self) -> int | None:
        """Order of a cumulant mechanism, None for another."""
        return int(self.attention[-1]) if self.attention.startswith("cumulant") else None

    @property
    def name(self) -> str:
        """Mechanism and options in one word."""
        return write(self.attention, self.options)

    @classmethod
    def named(cls, name: str, options: Mapping[str, Any] | None = None) -> Choice:
        """The choice that "cumulant3+around=mean" stands for, with further options."""
        attention, own = parse(name)
        return cls(attention, None, {**own, **(options or {})})

    @property
    def around_mean(self) -> bool:
        """Whether the expansion is around the mean query, which all queries of a sequence make together."""
        return self.options.get("around") == "mean"

    @property
    def drops(self) -> bool:
        """Whether some head still forms probabilities that attention dropout acts on."""
        return self.heads is not None or zoo.get(self.attention).dropout

    def at(self, prefix: int) -> Choice:
        """The same in a layer with `prefix` tokens of another kind at the start: these have a mean query of their own,
        unless `apart` says otherwise. Around 0 is said by nothing, so that what knows no options, folding say, serves.
        """
        if not self.around_mean:
            return replace(self, options={key: value for key, value in self.options.items() if key != "around"})
        if "apart" in self.options or not prefix:
            return self
        return replace(self, options={**self.options, "apart": prefix})

    def to_json(self) -> dict[str, Any]:
        heads = None if self.heads is None else list(self.heads)
        return {"attention": self.attention, "heads": heads, "options": dict(self.options)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Choice:
        heads = values.get("heads")
        made = cls.named(values["attention"], values.get("options"))
        return made if heads is None else replace(made, heads=tuple(heads))

    def __str__(self) -> str:
        extra = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.attention}{extra}" + ("" if self.heads is None else f" in heads {list(self.heads)}")


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


@dataclass(frozen=True)
class Call:
    """What one attention layer was asked to compute: query (B, H, Lq, D), key (B, Hk, Lk, D), value (B, Hk, Lk, E).

    `grid` is how the tokens after the first `prefix` are laid out, where the layer says so, see `watching`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    is_causal: bool
    scale: float | None
    grid: tuple[int, ...] | None = None
    prefix: int = 0


_observers: list[Callable[[nn.Module, Call], None]] = []


@contextmanager
def observing(observer: Callable[[nn.Module, Call], None]) -> Iterator[None]:
    """Within this, `observer(module, call)` is told of every converted layer that runs."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def observed() -> bool:
    """Whether somebody wants to see each call; never while compiling."""
    return bool(_observers) and not torch.compiler.is_compiling()


def mix(
    module: nn.Module,
    choice: Choice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    query_mask: Tensor | None = None,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    offset: int = 0,
) -> Tensor:
    """Attention of a converted layer, (B, H, Lq, E). Cost: that of the mechanism, plus softmax for heads that keep it.

    `dropout_p` acts on softmax heads only: the other mechanisms form no probabilities. For those that want to know,
    `query_mask` (B, Lq) says which queries are there, and `grid` how the tokens after the first `prefix` are laid out.
    `offset` is the place of the first query among the keys, for a mechanism that takes it, in all heads.
    """
    if observed():
        for observer in tuple(_observers):
            observer(module, Call(query, key, value, key_mask, is_causal, scale))
    shared: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}
    told = _told(choice, query_mask, grid, prefix)
    if offset:
        told["offset"] = offset
    if choice.heads is None:
        return _all_heads(choice, query, key, value, dropout_p, {**shared, **told})
    groups = query.shape[-3] // key.shape[-3]
    device = query.device
    chosen = torch.tensor(choice.heads, dtype=torch.long, device=device)
    others = torch.tensor([h for h in range(query.shape[-3]) if h not in choice.heads], dtype=torch.long, device=device)

    def part(which: Choice, heads: Tensor, told: dict[str, Any]) -> Tensor:
        k, v = (x.index_select(-3, heads // groups) for x in (key, value))
        return _all_heads(which, query.index_select(-3, heads), k, v, dropout_p, {**shared, **told})

    out = torch.cat((part(Choice(choice.attention, None, choice.options), chosen, told), part(KEPT, others, {})), -3)
    return out.index_select(-3, torch.cat((chosen, others)).argsort())


def weights(
    choice: Choice,
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_mask: Tensor | None = None,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
) -> Tensor:
    """The weights with which `mix` takes the values, (B, H, Lq, Lk); signed for cumulant mechanisms. Cost: Lq Lk D."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    shared: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}

    def of(which: Choice) -> Tensor:
        mechanism = zoo.get(which.attention)
        assert mechanism.scores is not None
        told = _told(which, query_mask, grid, prefix)
        return mechanism.scores(query, key, **shared, **told, **mechanism.options_of_scores(which.options))

    A = of(Choice(choice.attention, None, choice.options))
    if choice.heads is None:
        return A
    chosen = torch.zeros(query.shape[-3], dtype=torch.bool, device=query.device)
    chosen[list(choice.heads)] = True
    return torch.where(chosen[:, None, None], A, of(KEPT))


def _told(choice: Choice, query_mask: Tensor | None, grid: tuple[int, ...] | None, prefix: int) -> dict[str, Any]:
    """What the mechanism of this choice wants to know at a call."""
    mechanism = zoo.get(choice.attention)
    told: dict[str, Any] = {"query_mask": query_mask} if mechanism.wants_query_mask else {}
    return told | {"grid": grid, "prefix": prefix} if grid is not None and mechanism.wants_grid else told


def _all_heads(
    choice: Choice, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, shared: dict[str, Any]
) -> Tensor:
    mechanism = zoo.get(choice.attention)
    options = dict(choice.options)
    if mechanism.dropout and dropout_p:
        options["dropout_p"] = dropout_p
    if query.shape[-3] != key.shape[-3]:
        if mechanism.grouped_queries:
            shared = {**shared, "enable_gqa": True}
        else:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    return mechanism(query, key, value, **shared, **options)
