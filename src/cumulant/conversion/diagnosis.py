"""`diagnose`: which layers and heads of a model may lose softmax, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from ..call import Call
from ..cluster.dial import check_target
from ..inspect.batches import Batch, answers, call, check_model, check_numbers, evaluating, relative_error, some
from ..inspect.examples import example_for
from ..inspect.sites import Site
from ..inspect.watching import kept_plan, softmax_sites, watching_softmax
from ..kinds import kinds_checked
from ..nn import AxialAttention
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import SOFTMAX, Choice
from ..train.progress import bar_of
from .checks import check_runs, compared_by, find_sites, unreached
from .dial import ModelDial, choose_layers
from .paying import WHOLE, Times, device_of, seconds_of
from .settings import CANDIDATES
from .statistics import ORDERS, HeadSums, head_sums

NEAR, ROUNDING = 0.02, 1e-6  # a dearer mechanism has to lower the effect by more than this share of it, and this


@dataclass
class LayerDiagnosis:
    """One attention layer. Lists are by head; mappings by order, or by mechanism for effects on the output."""

    name: str
    heads: int
    tokens: int  # keys of a sequence
    width: int  # of a head
    spread: list[float]  # standard deviation of the logits over the keys
    largest: list[float]  # |logit - mean| at its largest
    error: dict[int, list[float]]  # ||order n - softmax|| / ||softmax|| of the layer's own output
    mean_error: dict[int, list[float]]  # the same around the mean query; empty where the layer is causal
    left_out: dict[int, list[float]]  # what order n leaves out to fourth order, over ||softmax||
    negative: dict[int, list[float]]  # share of weight that is negative
    effect: dict[str, float]  # relative change of the model's output if this layer alone is replaced
    head_effect: dict[str, list[float]] = field(default_factory=dict)  # the same for single heads
    prefix: int = 0  # class tokens and the like at the start
    causal: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # of the layer, by mechanism, on the data and this device

    def times(self, name: str) -> Times:
        """Seconds of this layer as it is, and with that mechanism in all heads."""
        return Times(self.seconds[SOFTMAX], self.seconds[name])

    def best(self, names: Iterable[str] | None = None) -> str:
        """The mechanism (of `names`) with the smallest effect; of those that are within 2 % of it, the cheapest."""
        able = list(self.effect) if names is None else [name for name in names if name in self.effect]
        limit = (1 + NEAR) * min(self.effect[name] for name in able) + ROUNDING
        return min((name for name in able if self.effect[name] <= limit), key=self.cost)

    def choice(self, name: str, heads: tuple[int, ...] | None = None) -> Choice:
        """What `convert` puts into this layer under that name."""
        return replace(Choice.named(name).at(self.prefix, self.causal), heads=heads)

    def cost(self, name: str, tokens: int | None = None) -> float:
        """Multiply-adds of a sequence in this layer: 2 L^2 D a head for softmax, 2 (n - 1) L D^2 for order n.

        Around the mean query, each mean costs a softmax of one query more, 2 L D. Other mechanisms count as order 2.
        """
        L, D, choice = self.tokens if tokens is None else tokens, self.width, self.choice(name)
        if choice.attention == SOFTMAX:
            return 2.0 * L * L * D * self.heads
        order = 2 if choice.order is None else max(2, choice.order)
        means = (1 + (choice.options.get("apart", 0) > 0)) if choice.around_mean else 0
        return 2.0 * L * D * ((order - 1) * D + means) * self.heads

    def even(self, name: str) -> int:
        """Tokens from which on that mechanism multiplies less than softmax."""
        return int(self.cost(name, 1) / self.cost(SOFTMAX, 1)) + 1


@dataclass
class Diagnosis:
    """What `diagnose` found, layers in the order in which they run."""

    model: str
    layers: list[LayerDiagnosis]
    kept: dict[str, str]  # layers that cannot be replaced, and why
    linear: int  # multiply-adds of a token in all linear layers
    dial: ModelDial | None = None  # clusters and heads of each layer, where an error target was given
    measured_on: str = "data"  # "noise" if none was given
    seconds: float = 0.0  # of a forward pass over the batches
    device: str = "cpu"

    def ranked(self) -> list[LayerDiagnosis]:
        """Layers by their effect on the output, the safest first."""
        return sorted(self.layers, key=lambda layer: layer.effect[layer.best()])

    def best(self, count: int) -> dict[str, Choice]:
        """The `count` safest layers with the mechanism that suits each: `convert(model, layers=diagnosis.best(3))`."""
        return {layer.name: layer.choice(layer.best()) for layer in self.ranked()[:count]}

    def best_heads(self, count: int) -> dict[str, Choice]:
        """The `count` safest heads of the model, after `diagnose(..., heads=True)`; their layers keep the others."""
        if not all(layer.head_effect for layer in self.layers):
            raise ValueError("best_heads needs a diagnosis of single heads: diagnose(model, data, heads=True)")
        ranked = sorted(
            (effect, layer.name, head)
            for layer in self.layers
            for head, effect in enumerate(layer.head_effect[layer.best()])
        )
        chosen: dict[str, tuple[int, ...]] = {}
        for _, name, head in ranked[:count]:
            chosen[name] = (*chosen.get(name, ()), head)
        by_name = {layer.name: layer for layer in self.layers}
        return {
            name: by_name[name].choice(by_name[name].best(), None if len(heads) == by_name[name].heads else heads)
            for name, heads in chosen.items()
        }

    def speedup(self, tokens: int, layers: Iterable[str] | None = None) -> float:
        """Multiply-adds of a forward pass before, over those after replacing `layers` (all), at so many tokens.

        A count, not a measurement, see `LayerDiagnosis.cost`.
        """
        chosen = {layer.name for layer in self.layers} if layers is None else set(layers)
        before = after = float(self.linear * tokens)
        for layer in self.layers:
            softmax = layer.cost(SOFTMAX, tokens)
            before += softmax
            after += layer.cost(layer.best(), tokens) if layer.name in chosen else softmax
        return before / after

    def table(self) -> str:
        """Layers ranked, the safest first, as text."""
        width = max([len(layer.name) for layer in self.layers] + [5])
        names = list(dict.fromkeys(name for layer in self.layers for name in layer.effect))
        head = f"{'layer':{width}}  {'spread':>6}  " + "  ".join(f"err{n:d}" for n in ORDERS)
        head += "  " + "  ".join(f"mean{n}" for n in ORDERS) + "  " + "  ".join(f"rest{n}" for n in ORDERS[1:])
        head += "  neg3  " + "  ".join(f"{n:>10}" for n in names)
        if self.dial is not None:
            head += f"  {'dial':>5}  {'cost':>4}  clusters and heads, error at most {self.dial.target:g}"
        rows = [head]
        for layer in self.ranked():
            mean = {n: _mean(layer.error[n]) for n in ORDERS}
            left = {n: _mean(layer.left_out[n]) for n in ORDERS}
            cells = f"{layer.name:{width}}  {_mean(layer.spread):6.2f}  "
            cells += "  ".join(f"{_short(mean[n])}" for n in ORDERS) + "  "
            tilted = [_short(_mean(layer.mean_error[n])) if layer.mean_error else "-" for n in ORDERS]
            cells += "  ".join(f"{cell:>5}" for cell in tilted) + "  "
            cells += "  ".join(f"{_short(left[n]):>5}" for n in ORDERS[1:])
            cells += f"  {_mean(layer.negative[3]):4.0%}  "
            shown = [f"{layer.effect[n]:.2%}" if n in layer.effect else "-" for n in names]
            cells += "  ".join(f"{cell:>{max(10, len(n))}}" for cell, n in zip(shown, names, strict=True))
            rows.append(cells + self._dialled(layer.name))
        rows += [f"{name:{width}}  stays softmax: {reason}" for name, reason in self.kept.items()]
        if self.measured_on == "noise":
            rows.append("measured on noise, for want of data: a trained model may answer it quite otherwise")
        return "\n".join(rows)

    def _dialled(self, name: str) -> str:
        """The dial's cells of a layer: its error, its share of softmax's multiply-adds, mechanism and heads."""
        if self.dial is None:
            return ""
        found = self.dial.layers.get(name)
        if found is None:
            return f"  {'-':>5}  {'-':>4}  softmax, {self.dial.kept[name]}"
        return f"  {found.error:5.3f}  {found.cost:4.0%}  {found.what}"

    def proposal(self, budget: float = 0.05) -> str:
        """Which layers to replace so that the output is expected to change by no more than `budget`, and nothing is
        slower than it was; with the time that was measured."""
        fitting, squares = list[LayerDiagnosis](), 0.0
        for layer in self.ranked():
            effect = layer.effect[layer.best()]
            if (squares + effect**2) ** 0.5 > budget:
                break
            squares += effect**2
            fitting.append(layer)
        if not fitting:
            return f"no layer can be replaced within a relative change of {budget:.0%}; keep softmax"
        tokens = max(layer.tokens for layer in self.layers)
        chosen = [layer for layer in fitting if not layer.times(layer.best()).slower]
        if not chosen:
            even = max(layer.even(layer.best()) for layer in fitting)
            counted = f"; by multiply-adds it can pay from {even:,} tokens on" if even > tokens else ""
            return (
                f"keep softmax: {len(fitting)} of {len(self.layers)} layers fit a relative change of {budget:.0%}, but "
                f"none is faster at {tokens:,} tokens on {self.device}: {self._expected(fitting)}{counted}"
            )
        error = sum(layer.effect[layer.best()] ** 2 for layer in chosen) ** 0.5
        names = [layer.name for layer in chosen]
        gains = {L: self.speedup(L, names) for L in sorted({tokens, 4 * tokens, 16 * tokens})}
        counted = ", ".join(f"{gain:.3g} x fewer at {L:,} tokens" for L, gain in gains.items() if gain >= 1.005)
        which = ", ".join(f"{layer.name} ({layer.best()})" for layer in chosen)
        slower = len(fitting) - len(chosen)
        return (
            f"replace {len(chosen)} of {len(self.layers)} layers: {which}\n"
            f"expected relative change of the output {error:.1%}; {self._expected(chosen)} on {self.device}"
            + (f"\nmultiply-adds, counted: {counted}" if counted else "")
            + (f"\n{slower} more would fit the change and are slower" if slower else "")
        )

    def _expected(self, chosen: Sequence[LayerDiagnosis]) -> str:
        """The forward pass before, and after by what was measured layer by layer."""
        saved = sum(layer.times(layer.best()).before - layer.times(layer.best()).after for layer in chosen)
        return f"forward pass {Times(self.seconds, max(0.0, self.seconds - saved))}, measured layer by layer"

    def to_json(self) -> dict[str, Any]:
        layers = [vars(layer) for layer in self.layers]
        chosen = {} if self.dial is None else {"dial": self.dial.to_json()}
        known = {"model": self.model, "measured_on": self.measured_on, "linear": self.linear}
        known |= {"seconds": self.seconds, "device": self.device}
        return {**known, "kept": self.kept, "layers": layers, **chosen}

    def figure(self, path: str | Path) -> Path:
        """Heat map of layers and heads: logit spread and the error of orders 2 and 3. Needs matplotlib."""
        from .figure import heat_map

        return heat_map(self, Path(path))


@kinds_checked
def diagnose(
    model: nn.Module,
    data: Iterable[Batch] | Batch | None = None,
    *,
    attention: Sequence[str] = CANDIDATES,
    batches: int = 2,
    queries: int = 64,
    heads: bool = False,
    dial: float | None = None,
    seed: int = 0,
    output: Callable[[Any, Batch], Tensor] | None = None,
    progress: TextIO | None = None,
) -> Diagnosis:
    """Measure, layer by layer and head by head, what replacing softmax would do. The model is left as it is.

    Cost: one forward pass for the statistics (`queries` rows of each layer), one for each layer and mechanism, and with
    `heads` one for each head and mechanism.

    Args:
        data: batches as the model will see them; noise, made from its config, if there are none.
        attention: mechanisms whose effect on the output is measured; "+around=mean" is left out where a layer is causal
            or attends to another sequence.
        queries: sampled in each layer and batch.
        heads: also measure the effect of replacing single heads.
        dial: also choose, for this error of each layer's own output, clusters and the heads that take them, see
            `cumulant.conversion.choose_layers`; `convert(model, layers=diagnosis.dial.plan)` applies the choice.
    """
    check_model(model)
    if dial is not None:
        check_target(dial, "dial")
    if isinstance(attention, str) or not attention:
        raise ValueError(f"attention must be a list of one mechanism or more, got {attention!r}")
    if SOFTMAX in attention:
        raise ValueError("attention names what could replace softmax, got 'softmax' itself")
    if queries < 1:
        raise ValueError(f"queries must be 1 or more, got {queries}")
    asked = {name: Choice.named(name) for name in attention}
    used = some(example_for(model) if data is None else data, batches, model)
    with evaluating(model):
        check_runs(model, used[0])
        found = find_sites(model, used[0])
        able = softmax_sites(found)
        if not able:
            raise ValueError(f"{type(model).__name__} has no softmax layer left to diagnose")
        able = [site for site in able if any(site.refusal(choice) is None for choice in asked.values())]
        if not able:
            reasons = dict.fromkeys(str(site.refusal(choice)) for site in found for choice in asked.values())
            raise ValueError(f"no attention layer can take {', '.join(attention)}: {'; '.join(reasons)}")
        output, compared = compared_by(model, found, used[0], output)
        if compared is None:
            raise ValueError(f"{unreached(model)}, so that replacing them shows nowhere; pass output=function")
        wanted = answers(model, used, output)
        check_numbers(model, wanted)
        kept = kept_plan(model, found)
        prefixes = {site.name: site.prefix for site in able}
        sums, shapes = _record(model, used, found, prefixes, queries, seed)

        def effect(plan: dict[str, Choice]) -> float:
            with plans.applied(model, {**kept, **plan}):
                return relative_error(answers(model, used, output), wanted)

        layers = []
        for site in bar_of("diagnose", len(able), "layer", progress, iterable=able, leave=False):
            layer = _layer(site, sums[site.name], shapes[site.name])
            names = [name for name, choice in asked.items() if site.refusal(choice) is None]
            layer.effect = {name: effect({site.name: layer.choice(name)}) for name in names}
            if heads:
                layer.head_effect = {
                    name: [effect({site.name: layer.choice(name, (h,))}) for h in range(site.heads)] for name in names
                }
            layers.append(layer)
        seconds = _seconds(model, used, layers, kept)
    linear = sum(_linear(module) for module in model.modules())
    why = {s.name: next(filter(None, map(s.refusal, asked.values())), "not softmax") for s in found if s not in able}
    chosen = None if dial is None else choose_layers(model, used, target=dial, batches=len(used), samples=queries)
    measured = "noise" if data is None else "data"
    return Diagnosis(type(model).__name__, layers, why, linear, chosen, measured, seconds, str(device_of(model)))


def _seconds(
    model: nn.Module, batches: Sequence[Batch], layers: Sequence[LayerDiagnosis], kept: dict[str, Choice]
) -> float:
    """Seconds of a forward pass; those of each layer are noted there, for a mechanism in all layers at once."""
    whole = seconds_of(model, batches)[WHOLE]
    before = seconds_of(model, batches, [layer.name for layer in layers])
    for layer in layers:
        layer.seconds[SOFTMAX] = before[layer.name]
    for name in dict.fromkeys(name for layer in layers for name in layer.effect):
        plan = {layer.name: layer.choice(name) for layer in layers if name in layer.effect}
        with plans.applied(model, {**kept, **plan}):
            after = seconds_of(model, batches, plan)
        for layer in layers:
            if layer.name in after:
                layer.seconds[name] = after[layer.name]
    return whole


def _linear(module: nn.Module) -> int:
    """Weights of a linear layer; 0 for other modules."""
    weight = getattr(module, "weight", None)
    return weight.numel() if plans.is_linear(module) and isinstance(weight, Tensor) else 0


def _record(
    model: nn.Module, batches: Sequence[Batch], found: Sequence[Site], prefixes: dict[str, int], queries: int, seed: int
) -> tuple[dict[str, HeadSums], dict[str, tuple[int, int]]]:
    """Statistics over the batches of the layers that `prefixes` names, and their number of keys and width of a head."""
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, HeadSums] = {}
    shapes: dict[str, tuple[int, int]] = {}

    halves = {site.name for site in found if isinstance(site.module, AxialAttention)}  # heads over time, then space
    passed: dict[str, HeadSums] = {}

    def record(name: str, made: Call) -> None:
        if name not in prefixes:
            return
        new = head_sums(made, queries, generator, prefixes[name])
        if name in passed:
            new = passed[name].beside(new) if name in halves else passed[name].add(new)
        passed[name] = new
        shapes[name] = made.key.shape[-2], made.query.shape[-1]

    with watching_softmax(model, found, record), torch.no_grad():
        for batch in batches:
            passed.clear()
            call(model, batch)
            for name, new in passed.items():
                sums[name] = sums[name].add(new) if name in sums else new
    return sums, shapes


def _layer(site: Site, sums: HeadSums, shape: tuple[int, int]) -> LayerDiagnosis:
    return LayerDiagnosis(
        name=site.name,
        heads=site.heads,
        tokens=shape[0],
        width=shape[1],
        spread=sums.spread(),
        largest=sums.largest.tolist(),
        error={n: sums.relative(sums.error[n]) for n in ORDERS},
        mean_error={n: sums.relative(error) for n, error in sums.mean_error.items()},
        left_out={n: sums.relative(sums.left_out[n]) for n in ORDERS},
        negative={n: (sums.negative[n] / sums.queries).tolist() for n in ORDERS},
        effect={},
        prefix=site.prefix,
        causal=site.pattern == "causal",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _short(value: float) -> str:
    return f"{value:4.0%}" if value < 9.995 else f"{value:4.0f}" + "x"
