"""Layers and heads to replace within a budget: the safest first, by a diagnosis, each beside those chosen before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TextIO

from torch import Tensor, nn

from ..inspect.batches import Batch, answers, relative_error
from ..inspect.watching import kept_plan
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import Choice
from .checks import find_sites
from .diagnosis import Diagnosis, LayerDiagnosis, diagnose
from .paying import SlowerError, Times
from .settings import CANDIDATES

PATIENCE = 3  # heads that may not fit before the search, by rising effect, ends


def select(
    model: nn.Module,
    batches: Sequence[Batch],
    asked: Choice,
    budget: float,
    heads: bool,
    output: Callable[[Any, Batch], Tensor] | None,
    found: Diagnosis | None = None,
    force: bool = False,
    progress: TextIO | None = None,
) -> tuple[dict[str, Choice], float]:
    """Layers, and with `heads` single heads, to replace within `budget`, and the error predicted for them.

    Safest first, by their effect alone, whole layers before single heads; each is kept in the plan if the output of all
    together, measured, stays within the budget. Mechanisms that are slower than softmax in a layer are no choice there
    unless `force`. Predicted: effects add like independent errors, by squares.
    Asked for cumulant2 or cumulant3, each layer takes the better of both, and of the points to expand around unless one
    is asked for.
    """
    around = asked.options.get("around")
    if found is None:
        free = asked.attention in CANDIDATES and not set(asked.options) - {"around"}
        names = tuple(name for name in CANDIDATES if _around(name) == (around or _around(name)))
        names = names if free else (asked.name,)
        found = diagnose(
            model, batches, attention=names, batches=len(batches), heads=heads, output=output, progress=progress
        )
    there = {name for name, _ in model.named_modules()}
    unknown = [layer.name for layer in found.layers if layer.name not in there]
    if unknown:
        raise ValueError(f"diagnosis is of another model: {type(model).__name__} has no layer {', '.join(unknown)}")
    if heads and not all(layer.head_effect for layer in found.layers):
        raise ValueError("heads=True needs a diagnosis of single heads: diagnose(model, data, heads=True)")
    wanted = answers(model, batches, output)
    kept = kept_plan(model, find_sites(model, batches[0]))
    plan: dict[str, Choice] = {}
    squares = 0.0

    def usable(layer: LayerDiagnosis) -> list[str]:
        names = [name for name in layer.effect if around is None or _around(name) == around]
        return [name for name in names if force or not layer.times(name).slower]

    def best(layer: LayerDiagnosis) -> str:
        return layer.best(usable(layer))

    def choice(layer: LayerDiagnosis, name: str, heads: tuple[int, ...] | None = None) -> Choice:
        made, others = layer.choice(name, heads), {k: v for k, v in asked.options.items() if k != "around"}
        return replace(made, options={**others, **made.options}) if made.attention == asked.attention else made

    def fits(trial: dict[str, Choice]) -> bool:
        with plans.applied(model, {**kept, **trial}):
            return relative_error(answers(model, batches, output), wanted) <= budget

    layers = [layer for layer in found.layers if usable(layer)]
    if not layers:
        times = [layer.times(min(layer.effect, key=layer.seconds.__getitem__)) for layer in found.layers]
        said = Times(sum(t.before for t in times), sum(t.after for t in times))
        tokens = max(layer.tokens for layer in found.layers)
        raise SlowerError(
            f"every layer is slower than softmax with each of {', '.join(found.layers[0].effect)} at {tokens:,} tokens "
            f"on {found.device}: attention {said}, the fastest of each. Nothing was replaced; force=True (--force) "
            "chooses by the change of the output alone"
        )
    for layer in sorted(layers, key=lambda layer: layer.effect[best(layer)]):
        made, effect = choice(layer, best(layer)), layer.effect[best(layer)]
        if effect <= budget and fits({**plan, layer.name: made}):
            plan[layer.name], squares = made, squares + effect**2
    if not heads:
        return plan, squares**0.5
    rest = [layer for layer in layers if layer.name not in plan]
    single = ((e, n, h) for n, layer in enumerate(rest) for h, e in enumerate(layer.head_effect[best(layer)]))
    misses = 0
    for effect, number, head in sorted(single):
        layer = rest[number]
        chosen = (*(plan[layer.name].heads or ()), head) if layer.name in plan else (head,)
        trial = {**plan, layer.name: choice(layer, best(layer), chosen)}
        if effect <= budget and fits(trial):
            plan, squares = trial, squares + effect**2
        else:
            misses += 1
            if misses == PATIENCE:
                break
    return plan, squares**0.5


def _around(name: str) -> str:
    """Where the mechanism of that name expands: "zero" or "mean"."""
    return "mean" if Choice.named(name).around_mean else "zero"
