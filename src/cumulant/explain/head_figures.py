"""Figures about heads: distance profiles, importance, pruning, patterns, and how far measures agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..style import DIVERGING, FIRST, INK, LAST, RULE, SEQUENTIAL, SOFT, colour, new_figure, styled
from .capture import Captured
from .importance import PruningCurve
from .metrics import ring_profile, summary, uniform_distance
from .patterns import Patterns, describe

CURVE_STYLES = {
    "important first": (FIRST, "-", "o"),
    "random": (SOFT, "--", None),
    "least important first": (LAST, "-", "s"),
}


@styled
def distance_profiles(captured: Captured, *, title: str = "") -> Any:
    """Weight per neighbour against distance, in units of the uniform weight: a panel for each layer, a line a head.

    The dashed line at 1 is the uniform map; negative values are subtracted rings. Lines are dark for early heads.
    """
    plt_map = _colours(max(captured.maps(layer).shape[1] for layer in captured.layers))
    columns = min(6, len(captured.layers))
    rows = -(-len(captured.layers) // columns)
    figure, axes = new_figure(rows, columns, (1.75 * columns + 0.5, 1.75 * rows + 0.5), sharex=True, sharey=True)
    for place, layer in zip(axes.flatten(), captured.layers, strict=False):
        profile = ring_profile(captured.maps(layer), captured.tokens, captured.queries)
        relative = (profile.per_neighbour.mean(0) / profile.uniform).cpu().numpy()
        for head, line in enumerate(relative):
            place.plot(range(len(line)), line, color=plt_map[head], linewidth=1.2, marker="o", markersize=2.2)
        place.axhline(1, color=SOFT, linewidth=0.9, linestyle="--")
        place.axhline(0, color=RULE, linewidth=0.8)
        place.set_title(f"layer {layer + 1}", color=INK)
    for place in axes.flatten()[len(captured.layers) :]:
        place.axis("off")
    figure.supxlabel("distance (hops between patches)", fontsize=9, color=INK)
    figure.supylabel("weight / uniform weight", fontsize=9, color=INK)
    if title:
        figure.suptitle(title, fontsize=9, color=SOFT)
    return figure


@styled
def distance_by_layer(captured: Mapping[str, Captured], *, sign: str = "distance") -> Any:
    """Mean attention distance of every head against depth, one panel for each model, with the uniform reference."""
    figure, axes = new_figure(1, len(captured), (2.1 * len(captured) + 0.5, 2.3), sharey=True)
    for number, (place, (name, one)) in enumerate(zip(axes[0], captured.items(), strict=True)):
        distance = summary(one)[sign].cpu().numpy()
        layers = range(1, len(distance) + 1)
        for head in distance.T:
            place.plot(layers, head, "o", color=colour(name, number), markersize=3.5, alpha=0.7)
        place.plot(layers, distance.mean(1), color=colour(name, number), linewidth=1.3)
        reference = uniform_distance(one.tokens.grid)
        place.axhline(reference, color=SOFT, linewidth=0.9, linestyle="--")
        place.set_title(name, color=INK)
        if number == 0:
            place.annotate("uniform", (layers[0], reference), (0, 3), textcoords="offset points", fontsize=7,
                           color=SOFT)  # fmt: skip
    figure.supxlabel("layer", fontsize=9, color=INK)
    axes[0, 0].set_ylabel("mean attention distance (hops)")
    return figure


@styled
def importance_map(importance: Mapping[str, Tensor]) -> Any:
    """Heads (columns) of every layer (rows) by each measure; the number in a cell is its rank, 1 the most important."""
    layers, heads = next(iter(importance.values())).shape
    width = max(1.7, 0.32 * heads + 0.9)
    figure, axes = new_figure(1, len(importance), (width * len(importance) + 0.3, 0.3 * layers + 1.1), sharey=True)
    for place, (name, values) in zip(axes[0], importance.items(), strict=True):
        values = values.detach().float().cpu()
        signed = bool((values < -1e-9).any())
        end = float(values.nan_to_num(0).abs().max()) or 1.0
        shades = (
            {"cmap": DIVERGING, "vmin": -end, "vmax": end} if signed else {"cmap": SEQUENTIAL, "vmin": 0, "vmax": end}
        )
        shown = place.imshow(values.numpy(), aspect="auto", interpolation="nearest", **shades)
        order = values.flatten().nan_to_num(-1e30).argsort(descending=True).argsort().reshape(values.shape) + 1
        for i in range(layers):
            for h in range(heads):
                if bool(values[i, h].isnan()):  # a layer with fewer heads than others
                    continue
                share = float(values[i, h]) / end
                dark = abs(share) > 0.6 if signed else share < 0.55
                place.text(h, i, int(order[i, h]), ha="center", va="center", fontsize=6, color="white" if dark else INK)
        place.set_title(name, color=INK)
        place.set(xticks=range(heads), xticklabels=range(1, heads + 1))
        place.set(yticks=range(layers), yticklabels=range(1, layers + 1))
        place.tick_params(length=0, labelsize=7)
        place.spines[:].set_visible(False)
        found = figure.colorbar(shown, ax=place, location="bottom", shrink=0.85, aspect=18, pad=0.03)
        found.outline.set_visible(False)
        found.ax.tick_params(labelsize=6, length=2, colors=SOFT)
        found.ax.locator_params(nbins=3)
    axes[0, 0].set_ylabel("layer")
    figure.supxlabel("head", fontsize=9, color=INK)
    return figure


@styled
def pruning_figure(
    curves: Mapping[str, Sequence[PruningCurve]], *, chance: float | None = None, title: str = ""
) -> Any:
    """Accuracy against the number of heads removed; random orders as a band with their mean."""
    figure, axes = new_figure(1, 1, (4.8, 3.0))
    place = axes[0, 0]
    top = 100 * max(max(curve.accuracy) for several in curves.values() for curve in several) or 1.0
    for number, (name, several) in enumerate(curves.items()):
        ink, line, mark = CURVE_STYLES.get(name, (colour(name, number), "-", None))
        removed = several[0].removed
        accuracy = 100 * torch.tensor([curve.accuracy for curve in several]).numpy()
        area = sum(curve.area for curve in several) / len(several)
        if len(several) > 1:
            place.fill_between(removed, accuracy.min(0), accuracy.max(0), color=ink, alpha=0.15, linewidth=0)
        place.plot(removed, accuracy.mean(0), color=ink, linestyle=line, marker=mark, markersize=3.2, linewidth=1.4,
                   label=f"{name} (area {area:.2f})")  # fmt: skip
    if chance is not None:
        place.axhline(100 * chance, color=RULE, linewidth=1)
        place.annotate("chance", (0, 100 * chance), (2, 2), textcoords="offset points", fontsize=7, color=SOFT)
    place.set(xlabel="heads removed", ylabel="accuracy (%)", ylim=(0, 1.08 * top))
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, columnspacing=1.2, handlelength=1.8)
    if title:
        place.set_title(title, color=INK)
    return figure


@styled
def pattern_figure(patterns: Patterns, importance: Tensor | None = None) -> Any:
    """Mean map of each cluster with its name, share of all maps and mean importance, and the plane of the codes."""
    clusters = len(patterns.centres)
    figure, axes = new_figure(1, clusters + 1, (1.5 * clusters + 3.0, 2.3), width_ratios=[1] * clusters + [1.7])
    inks = _colours(clusters)
    for k, place in enumerate(axes[0, :clusters]):
        centre = patterns.centres[k]
        end = float(centre.abs().max()) or 1.0
        place.imshow(centre.numpy(), cmap=DIVERGING, vmin=-end, vmax=end, interpolation="nearest")
        place.set(xticks=[], yticks=[])
        mine = patterns.labels == k
        place.set_title(f"{k + 1}: {describe(centre)}", color=inks[k])
        note = f"{100 * float(mine.float().mean()):.0f} % of maps"
        if importance is not None:
            mean = importance[patterns.owner[mine, 1], patterns.owner[mine, 2]].nanmean()
            note += f"\nimportance {float(mean):.3f}"
        place.set_xlabel(note, fontsize=7.5, color=SOFT)
        place.spines[:].set(visible=True, color=inks[k], linewidth=1.2)
    plane = axes[0, -1]
    for k in range(clusters):
        points = patterns.plane[patterns.labels == k].numpy()
        plane.plot(points[:, 0], points[:, 1], ".", color=inks[k], markersize=2.5, alpha=0.6)
    plane.set(xticks=[], yticks=[], xlabel="codes of the maps, in the plane")
    return figure


@styled
def correlation_figure(names: Sequence[str], matrix: Tensor) -> Any:
    """Spearman correlations between measures, as numbers on colours."""
    figure, axes = new_figure(1, 1, (0.55 * len(names) + 1.6, 0.5 * len(names) + 1.0))
    place = axes[0, 0]
    place.imshow(matrix.numpy(), cmap=DIVERGING, vmin=-1, vmax=1)
    for i in range(len(names)):
        for j in range(len(names)):
            value = float(matrix[i, j])
            place.text(j, i, f"{value:.2f}".replace("-", "−"), ha="center", va="center", fontsize=7,
                       color="white" if abs(value) > 0.6 else INK)  # fmt: skip
    place.set(xticks=range(len(names)), yticks=range(len(names)), xticklabels=names, yticklabels=names)
    place.tick_params(length=0, labelsize=8)
    for label in place.get_xticklabels():
        label.set(rotation=35, ha="right")
    place.spines[:].set_visible(False)
    return figure


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](0.05 + 0.72 * i / max(1, count - 1)) for i in range(count)]
