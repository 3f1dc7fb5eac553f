"""The dial for a model: clusters and near field of each layer, and the heads that may have them, in words of `convert`.

Shape legend: B batch, H heads, Lq queries, Lk keys, D, E widths, R sampled queries, N candidates.

A layer takes one mechanism in some of its heads, the others stay softmax. For each candidate those heads are taken
whose errors are smallest, as many as the target allows. Of candidates with as many clusters, each head may also take
its own: the cheapest for the target together. All these are timed, and the fastest wins; of two that take the same
time, to the digits of a clock, the one of fewer multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from .. import zoo
from ..call import Call
from ..cluster.attention import cluster_attention
from ..cluster.cost import softmax_multiply_adds
from ..cluster.dial import cheapest, check_counts, check_target
from ..cluster.tree import Tree
from ..grammar import parse, write
from ..inspect.batches import call, evaluating, some
from ..inspect.examples import example_for
from ..inspect.sites import Site, unwindowed
from ..inspect.watching import kept_plan, softmax_sites, watching_softmax
from ..kinds import kinds_checked
from ..nn.swapped.choice import SOFTMAX, Choice
from ..nn.swapped.plan import applied
from ..tensors import repeat_heads
from ..train.progress import bar_of
from ..zoo.cluster import joined
from .candidates import CAUSAL_NAMES, NAMES, arguments_of, work_of
from .checks import find_sites
from .paying import NOISE, Times, recorded, seconds_of

# Of softmax's multiply-adds: what takes more is no gain, as blocks of two tokens, which take three quarters.
WORTH = 2 / 3
LOOKED_AT = 512  # queries that a tree sees, at least, where only a sample of them is compared
AXIAL = "its heads look along different axes, for which the dial is not set"


@dataclass(frozen=True)
class LayerDial:
    """Of one layer: the mechanism, the heads that take it (none: all stay softmax) of how many, its error and cost.

    The error is that of all heads together, the cost a share of softmax's multiply-adds at `tokens` keys, the most that
    were seen. `tried` candidates spare a head a third of these or more, and were measured. `seconds` are those of the
    layer before and after, on the data and this device; with `slower` they are why it stays softmax.
    """

    attention: str
    heads: tuple[int, ...]
    of: int
    error: float
    cost: float
    tokens: int
    tried: int
    seconds: tuple[float, float] | None = None
    slower: str | None = None

    @property
    def what(self) -> str:
        """Mechanism and heads in words; for a layer that stays softmax, why it does."""
        if self.heads:
            measured = "" if self.seconds is None else f"; {Times(*self.seconds)}"
            return self.attention + ("" if len(self.heads) == self.of else f" in heads {list(self.heads)}") + measured
        if self.slower:
            return f"softmax, {self.slower}"
        if self.tried:
            return f"softmax, no head meets the target with clusters at {self.tokens:,} tokens"
        return f"softmax, cheapest at {self.tokens:,} tokens (no clusters spare a third of the work)"

    def to_json(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else list(self.seconds)
        return {**asdict(self), "heads": list(self.heads), "seconds": seconds}

    def timed(self, times: Times, force: bool) -> LayerDial:
        """The same with what a clock says: softmax where that is slower, unless `force`."""
        measured = replace(self, seconds=(times.before, times.after))
        if force or not times.slower:
            return measured
        return measured.without(f"{self.attention} is slower here at {self.tokens:,} tokens: {times}")

    def without(self, why: str) -> LayerDial:
        """The same layer as softmax, for a reason that a clock gave."""
        return replace(self, attention=SOFTMAX, heads=(), error=0.0, cost=1.0, slower=why)


@dataclass(frozen=True)
class ModelDial:
    """What `choose_layers` found, by layer in the order in which they run; `kept` are layers not looked at, and why."""

    layers: dict[str, LayerDial]
    target: float
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> dict[int | str, Any]:
        """For `convert(model, layers=dial.plan)`: the layers in which something changes."""
        heads = {name: None if len(x.heads) == x.of else list(x.heads) for name, x in self.layers.items()}
        return {name: {"attention": x.attention, "heads": heads[name]} for name, x in self.layers.items() if x.heads}

    @property
    def reasons(self) -> dict[str, str]:
        """Layers that stay softmax, and why."""
        stay = {name: x.what.removeprefix("softmax, ") for name, x in self.layers.items() if not x.heads}
        return {**stay, **self.kept}

    def without(self, why: str) -> ModelDial:
        """The same with no layer replaced."""
        return replace(self, layers={name: x.without(why) if x.heads else x for name, x in self.layers.items()})

    def to_json(self) -> dict[str, Any]:
        layers = {name: x.to_json() for name, x in self.layers.items()}
        return {"target": self.target, "layers": layers, "kept": dict(self.kept)}

    def __str__(self) -> str:
        width = max([5, *map(len, self.layers), *map(len, self.kept)])
        rows = [f"{'layer':{width}}  {'error':>6}  {'cost':>5}  mechanism and heads, error at most {self.target:g}"]
        rows += [f"{name:{width}}  {x.error:6.3f}  {x.cost:5.0%}  {x.what}" for name, x in self.layers.items()]
        rows += [f"{name:{width}}  {'-':>6}  {'-':>5}  softmax, {reason}" for name, reason in self.kept.items()]
        return "\n".join(rows)


@kinds_checked
@torch.no_grad()
def choose_layers(
    model: nn.Module,
    data: Any = None,
    *,
    target: float = 0.15,
    candidates: Sequence[str] = (*NAMES, *CAUSAL_NAMES),
    batches: int = 2,
    samples: int = 64,
    force: bool = False,
    progress: TextIO | None = None,
) -> ModelDial:
    """For every softmax layer of a model that `convert` knows, the fastest candidate with an error within `target`.

    Errors are ||out - softmax|| / ||softmax - <v>|| of the layer's own heads on `samples` queries of each of the first
    `batches` of data (noise where there are none), with masks and grids as the model has them. Costs are those at the
    lengths of the data, and a candidate has to spare a head a third of softmax's multiply-adds; over few tokens none
    does, and none is measured. Candidates with `block`, `recent` or `sinks` are for causal layers (where all have 4
    sinks unless they say otherwise), those with a near field or a pooled response for others. Axial layers, and windows
    beside layers that see all (Hiera), are not looked at, which the result says. Candidates within the target are timed
    on this device: the fastest is taken, and a layer that is slower with each of them stays softmax unless `force`. The
    model is left as it is. Cost: a forward pass to see lengths, one in which every candidate that is cheap enough
    answers the sampled queries of every layer, all queries where it is causal, one to note what these layers are called
    with, and the layers alone to take the time of every candidate within the target. `progress`: where a bar is shown
    meanwhile.
    """

    check_target(target)
    asked = _choices(candidates, batches, samples)
    used = some(example_for(model) if data is None else data, batches, model)
    with evaluating(model):
        found = find_sites(model, used[0])
        kept = {site.name: site.obstacle or site.windows or "it is not softmax now" for site in found}
        able = {site.name: site for site in unwindowed(softmax_sites(found))}
        sums: dict[str, _Sums] = {}

        def look(name: str, made: Call) -> None:
            if name not in able:
                return
            if made.query.shape[-3] != able[name].heads:
                kept[name] = AXIAL
                sums.pop(name, None)
            elif kept[name] != AXIAL:
                sums.setdefault(name, _Sums()).count(made, asked)

        def measure(name: str, made: Call) -> None:
            if name in sums and sums[name].cheaper:
                sums[name].add(made, asked, samples, bar.update)

        for name in able:
            kept[name] = "it did not run"
        with watching_softmax(model, found, look):
            for batch in used:
                call(model, batch)
        answers = len(used) * sum(len(layer.cheaper) for layer in sums.values())
        if answers:
            bar = bar_of("dial, errors", answers, "answer", progress, leave=False)
            with bar, watching_softmax(model, found, measure):
                for batch in used:
                    call(model, batch)
        layers = {name: sums[name].softmax for name in kept if name in sums}
        options = {name: sums[name].within(target, asked) for name in layers}
        layers |= _fastest(model, used, found, options, force, progress)
    return ModelDial(layers, float(target), {name: why for name, why in kept.items() if name not in layers})


def _fastest(
    model: nn.Module,
    used: Sequence[Any],
    found: Sequence[Site],
    options: Mapping[str, Sequence[LayerDial]],
    force: bool,
    progress: TextIO | None,
) -> dict[str, LayerDial]:
    """Of each layer's options, the cheapest first, the fastest on this device: fewer multiply-adds are not always less
    time. A dearer one has to be clearly faster. Layers without options are left out."""
    waiting = {name: list(several) for name, several in options.items() if several}
    if not waiting:
        return {}
    able, softmax = {site.name: site for site in found}, kept_plan(model, found)

    def plan() -> dict[str, Any]:
        return {name: able[name].fitted(_choice(several[0])) for name, several in waiting.items()}

    before = seconds_of(model, used, waiting, recorded(model, used, waiting))
    with applied(model, {**softmax, **plan()}):  # masks of transformers are other ones once layers are replaced
        calls = recorded(model, used, waiting)
    best: dict[str, LayerDial] = {}
    fastest: dict[str, float] = {}
    with bar_of("dial, times", sum(map(len, waiting.values())), "choice", progress, leave=False) as bar:
        while waiting:
            with applied(model, {**softmax, **plan()}):
                after = seconds_of(model, used, waiting, calls, {**({} if force else before), **fastest})
            for name, (tried, *others) in waiting.items():
                if name not in best or NOISE * after[name] < fastest[name]:
                    best[name], fastest[name] = tried, after[name]
                left = [other for other in others if not _only_nearer(other, tried)]
                bar.update(1 + len(others) - len(left))
                waiting[name] = left
            waiting = {name: several for name, several in waiting.items() if several}
    return {name: x.timed(Times(before[name], fastest[name]), force) for name, x in best.items()}


def _only_nearer(other: LayerDial, tried: LayerDial) -> bool:
    """Whether it is the same with more near clusters, and for no more heads: then it is not faster. (Beside none at all
    it may be: near clusters bring tiles and a pooled response, see `cluster.auto`.)"""
    (mechanism, own), (known, options) = parse(other.attention), parse(tried.attention)
    near = [x.pop("near", 0) for x in (own, options)]
    more = all(isinstance(n, int) for n in near) and near[0] >= near[1] > 0
    return more and (mechanism, own) == (known, options) and len(other.heads) <= len(tried.heads)


def _choice(found: LayerDial) -> Choice:
    return replace(Choice.named(found.attention), heads=None if len(found.heads) == found.of else found.heads)


def _choices(candidates: Sequence[str], batches: int, samples: int) -> dict[str, Choice]:
    """The candidates by name; an error for one that is not about clusters, and for numbers that are none."""
    check_counts(samples=samples, batches=batches)
    if isinstance(candidates, str) or not isinstance(candidates, Iterable) or not candidates:
        raise ValueError(f"candidates must be names of cluster mechanisms, at least one, got {candidates!r}")
    asked = {name: Choice.named(name) for name in candidates}
    for name, choice in asked.items():
        if not choice.attention.startswith("cluster"):
            raise ValueError(f"candidates must be cluster mechanisms, with options as in {NAMES[-1]!r}, got {name!r}")
        if choice.told:
            raise ValueError(f"candidates must be for all heads, the dial gives each head its own, got {name!r}")
    return asked


class _Sums:
    """Of a layer over its calls: multiply-adds of softmax and of each candidate, squared errors (H,) and size (H,)."""

    def __init__(self) -> None:
        self.heads = self.tokens = 0
        self.causal = False
        self.softmax_work = 0.0
        self.work: dict[str, float] = {}
        self.error: dict[str, Tensor] = {}
        self.size: Tensor | float = 0.0

    @property
    def cheaper(self) -> list[str]:
        """Candidates that are cheap enough to be worth it, over all calls together."""
        return [name for name, work in self.work.items() if work <= WORTH * self.softmax_work]

    def count(self, made: Call, asked: Mapping[str, Choice]) -> None:
        *lead, self.heads, Lq, D = made.query.shape
        Lk, E = made.value.shape[-2:]
        sequences = float(torch.Size(lead).numel())
        self.tokens, self.causal = max(self.tokens, Lk), made.is_causal
        softmax = softmax_multiply_adds(Lq, D, E, True) if made.is_causal else Lq * Lk * (D + E)
        self.softmax_work += sequences * softmax
        for name, choice in asked.items():
            work = work_of(choice.at(0, made.is_causal), made)
            self.work[name] = self.work.get(name, 0.0) + sequences * work

    def add(self, made: Call, asked: Mapping[str, Choice], samples: int, done: Callable[[], Any]) -> None:
        query, key, value, mask = made.in_one_batch()
        key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
        at = places(query.shape[2], samples).to(query.device)
        asking = query[:, :, at]
        shared: dict[str, Any] = {"key_mask": mask, "scale": made.scale}
        exact = _softmax(query, key, value, at, made.is_causal, shared).double()
        there = torch.ones(len(key), 1, asking.shape[2], 1, dtype=torch.bool, device=exact.device)
        if mask is not None and query.shape[2] == key.shape[2]:  # padding asks nothing
            there = (mask != 0)[:, None, at, None]
        mean = _mean(value, mask, made.is_causal)
        mean = mean[:, :, at] if made.is_causal else mean
        self.size = self.size + _squares(exact - mean, there)
        wide = torch.cat((at, places(query.shape[2], LOOKED_AT).to(at))).unique()
        for name in self.cheaper:
            options = arguments_of(asked[name].at(0, made.is_causal), made)
            if made.is_causal or options.get("near") == "neighbours" or options["near_rows"] != 1:  # its place counts
                out = cluster_attention(query, key, value, **options, **shared)[:, :, at]
            elif isinstance(options["clusters"], Tree):  # which is made for the queries that it sees
                out = cluster_attention(query[:, :, wide], key, value, **options, **shared)
                out = out[:, :, torch.searchsorted(wide, at)]
            else:
                out = cluster_attention(asking, key, value, **options, **shared)
            done()
            self.error[name] = self.error.get(name, 0.0) + _squares(out.double() - exact, there)

    @property
    def softmax(self) -> LayerDial:
        """The layer as it is."""
        return LayerDial("softmax", (), self.heads, 0.0, 1.0, self.tokens, len(self.error))

    def within(self, target: float, asked: Mapping[str, Choice]) -> list[LayerDial]:
        """Each candidate with which heads meet the target, in as many heads as do, the cheapest first; then heads with
        candidates of their own, of as many clusters and levels."""
        size, found = float(torch.as_tensor(self.size).sum()), []
        alike: dict[Any, list[str]] = {}
        for name, error in self.error.items():
            taken = int((error.sort().values.cumsum(0) <= target**2 * size).sum())
            if taken:
                found.append(self._taken(dict.fromkeys(error.argsort()[:taken].tolist(), name), asked))
            if error.isfinite().all():
                choice = asked[name]
                alike.setdefault((choice.attention, choice.options.get("leaves", 1)), []).append(name)
        for names in alike.values():
            own = self._by_head(names, target**2 * size)
            if len(set(own.values())) > 1:
                found.append(self._taken(own, asked))
        return sorted(found, key=lambda x: x.cost)

    def _by_head(self, names: list[str], allowed: float) -> dict[int, str]:
        """The candidate of each head that takes one, so that all together are cheapest with errors up to `allowed`."""
        measured = [self.error[name].cpu() for name in names]
        error = torch.stack([*measured, torch.zeros_like(measured[0])])  # the last is softmax
        cost = error.new_tensor([*(self.work[name] / self.softmax_work for name in names), 1.0])
        which = cheapest(error, cost[:, None].expand(-1, self.heads), error.new_tensor(allowed))
        return {head: names[c] for head, c in enumerate(which.tolist()) if c < len(names)}

    def _taken(self, own: Mapping[int, str], asked: Mapping[str, Choice]) -> LayerDial:
        """Heads with a candidate each, the others softmax."""
        heads, size = sorted(own), float(torch.as_tensor(self.size).sum())
        options = [asked[own[head]].at(0, self.causal).options for head in heads]
        several = len(set(own.values())) > 1
        name = write(asked[own[heads[0]]].attention, joined(options)) if several else own[heads[0]]
        error = sum(float(self.error[own[head]][head]) for head in heads)
        saved = sum(1 - self.work[own[head]] / self.softmax_work for head in heads) / self.heads
        relative = (error / max(size, 1e-300)) ** 0.5
        return replace(self.softmax, attention=name, heads=tuple(heads), error=relative, cost=1 - saved)


def places(length: int, samples: int) -> Tensor:
    """About so many places of a sequence, one in each of its equal parts. Where in its part moves on by the golden
    ratio: a causal query at the start of a block has fewer exact tokens than one at its end, and all must have a say.
    """
    step = max(1, length // samples)
    number = torch.arange(length // step)
    return number * step + (number * 0.6180339887 % 1 * step).long()


def _softmax(query: Tensor, key: Tensor, value: Tensor, at: Tensor, is_causal: bool, shared: dict[str, Any]) -> Tensor:
    """What softmax answers the queries `at` these places."""
    if not is_causal:
        return cluster_attention(query[:, :, at], key, value, clusters=1, near=1, backend="reference", **shared)
    return zoo.get("softmax")(query, key, value, is_causal=True, **shared)[:, :, at]


def _mean(value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Mean (B, H, 1, E) of the values (B, H, Lk, E) that are there, in float64; mask (B, Lk), bool or weights. Causal:
    over each token and those before it, (B, H, Lk, E), 0 where none of them is there."""
    value = value.double()
    weights = value.new_ones(1, 1, value.shape[-2], 1) if mask is None else mask.double()[:, None, :, None]
    parts = weights * value.masked_fill(weights == 0, 0), weights
    total, count = (x.cumsum(-2) if is_causal else x.sum(-2, keepdim=True) for x in parts)
    return total / count.clamp(min=1e-300)


def _squares(difference: Tensor, there: Tensor) -> Tensor:
    """Squared sizes (H,) of (B, H, R, E) where something asks."""
    return torch.where(there, difference, 0).square().sum((0, 2, 3))
