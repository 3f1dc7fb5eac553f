"""Which heads matter, how far they look and what they do, for a ViT under every operator: four views from `explain`.

Importance is measured on one half of the test images and the pruning curves on the other. Definitions are ours, in the
spirit of the study (docs/explain.md).

Shape legend: N images, H heads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from cumulant import explain, zoo
from cumulant.data import open_source
from cumulant.explain import patterns as kinds
from cumulant.explain.figures import importance_map, pruning_figure
from cumulant.inspect import labelled_items, open_model
from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.statements import Measured, Statement, above, difference, number, quotient
from cumulant.style import DIVERGING, FIRST, INK, RULE, SOFT, colour, new_figure, styled
from cumulant.train import read_recipe, train

MAPPED = 128  # images whose maps are kept
SHOWN = 40  # pictures of the overview
DISTANCES = ("distance", "distance_positive", "distance_signed")
ORDERS = ("important first", "random", "least important first")
MEASURES = ("probability", "js", "loss", "accuracy", "feature")
NEAREST_FIRST = ("softmax", "cumulant3", "cumulant2", "linear")  # the order of mean distances that is claimed


@dataclass(frozen=True)
class Settings:
    """The recipe of the study: digits of 8 x 8 pixels enlarged to `image_size`, patches of 2 x 2."""

    attention: tuple[str, ...] = (*NEAREST_FIRST, "cluster4")
    epochs: int = 10
    image_size: int = 12
    images: int = 450
    steps: int = 400  # of the autoencoder of maps
    seeds: int = 3


def trained(settings: Settings, attention: str, seed: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A ViT on the digits, and test images with their labels."""
    recipe = read_recipe("digits")
    options = {**recipe.model_options, "patch_size": 2}
    recipe = replace(recipe, attention=attention, seed=seed, image_size=settings.image_size, model_options=options)
    with TemporaryDirectory() as folder:
        train(recipe.lasting(settings.epochs), folder, device=device)
        opened = open_model(folder, device)
        images, labels, _ = labelled_items(opened, "digits", settings.images)
    return opened.model.float(), images.to(device), labels.to(device)


def findings(
    model: nn.Module, images: Tensor, labels: Tensor, *, orders: int = 3, prunings: int | None = None, steps: int = 400
) -> dict[str, Any]:
    """What is asked of one model: importance under five measures, distances, patterns, pruning, signed maps."""
    answers = torch.cat([explain.importance.answers(model, part).logits for part in images.split(256)])
    with explain.capture(model, images[:MAPPED]) as captured:
        pass
    half = len(images) // 2
    measures = explain.head_importance(model, images[:half], labels[:half])
    names, correlation = explain.rank_correlations(measures)
    others = images[half:], labels[half:]
    curves = explain.pruning_curves(model, *others, measures["loss"], seeds=range(orders), steps=prunings)
    maps, owner = explain.flat_maps(captured)
    some = owner[:, 0] < MAPPED // 2
    maps, owner = maps[some].cpu(), owner[some]
    found = explain.find_patterns(maps, owner, clusters=6, code=8, steps=steps)
    loss = measures["loss"].cpu()
    best = explain.ranked(loss)[0]
    summary = {name: value.cpu() for name, value in explain.summary(captured).items()}
    spread = summary["distance"].std(1)
    return {
        "right": float((answers.argmax(-1) == labels).double().mean()),
        "predicted": answers.argmax(-1).tolist(),
        "labels": labels.tolist(),
        **{f"mean {name}": float(value.nanmean()) for name, value in summary.items()},
        "spread, first half": float(spread[: len(spread) // 2].mean()),
        "spread, second half": float(spread[len(spread) // 2 :].mean()),
        "summary": {name: value.tolist() for name, value in summary.items()},
        "profile": profiles(captured),
        "uniform": explain.uniform_distance(captured.tokens.grid),
        "sinks": explain.sink_rate(captured),
        "importance": {name: value.tolist() for name, value in measures.items()},
        "correlation": {
            f"{names[j]}, {names[i]}": float(correlation[i, j]) for i in range(len(names)) for j in range(i)
        },
        **{f"area, {name}": statistics.fmean(curve.area for curve in several) for name, several in curves.items()},
        "curves": {
            name: [[list(curve.removed), list(curve.accuracy)] for curve in several] for name, several in curves.items()
        },
        "partial": explain.partial_importance(model, best, images[:half], labels[:half]),
        "best": list(best),
        "kinds": [kinds.describe(centre) for centre in found.centres],
        "centres": [[[round(x, 3) for x in row] for row in centre] for centre in found.centres.tolist()],
        "share": [float((found.labels == k).float().mean()) for k in range(len(found.centres))],
        "worth": [
            float(loss[owner[found.labels == k, 1], owner[found.labels == k, 2]].mean())
            for k in range(len(found.centres))
        ],
        "code error": found.error,
        "pca error": found.pca_error,
        "content-agnostic": float((found.entropies() < 0.5).float().mean()),
    }


def profiles(captured: explain.Captured) -> list[list[list[float]]]:
    """R(k) times the number of tokens, by layer, head and hop k, mean over images: 1 is what a uniform map has."""
    of_layers = [explain.ring_profile(captured.maps(layer), captured.tokens) for layer in captured.layers]
    return [(one.per_neighbour.mean(0) * captured.tokens.count).tolist() for one in of_layers]


def planted(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Maps (5 count, 16, 16) of 4 x 4 patches of five kinds, a tenth of their entries disturbed, with their kinds."""
    place = torch.arange(16)
    row, column = place // 4, place % 4
    near = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs())
    plain = [near == 0, row[:, None] == row, column[:, None] == column, torch.zeros(16, 16), torch.ones(16, 16)]
    maps = []
    for kind, one in enumerate(plain):
        many = one.float().expand(count, 16, 16).clone()
        if kind == 3:  # stripes: the same few keys for all queries
            many[:, :, (3, 10)] = 1.0
        maps.append(
            many
            + (torch.rand(count, 16, 16, generator=generator) < 0.1) * torch.rand(count, 16, 16, generator=generator)
        )
    return torch.cat(maps), torch.arange(5).repeat_interleave(count)


def checks(seed: int, count: int = 200) -> dict[str, Any]:
    """What needs no trained weights: known maps through the measures, planted kinds through the clusters."""
    generator = torch.Generator().manual_seed(seed)
    layout = explain.TokenLayout(0, (6, 6))
    hop = explain.patch_distances((6, 6))
    eye, flat = torch.eye(36)[None, None], torch.full((1, 1, 36, 36), 1 / 36)
    ring = (hop == 2).float()
    ring = (ring / ring.sum(-1, keepdim=True))[None, None]
    random = torch.rand(1, 1, 36, 36, generator=generator).softmax(-1)
    turned = (
        random.unflatten(-1, (6, 6)).unflatten(-3, (6, 6)).rot90(1, (2, 3)).rot90(1, (4, 5)).flatten(4).flatten(2, 3)
    )
    per = [explain.ring_profile(one, layout).per_neighbour for one in (random, turned)]
    p, q = torch.rand(2, 64, 10, generator=generator, dtype=torch.float64).softmax(-1)
    js = explain.jensen_shannon(p, q)
    query, key, value = (torch.randn(2, 2, 36, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    rows, outputs = 0.0, 0.0
    for name in ("cumulant2", "cumulant3", "cumulant3+full"):
        mechanism = zoo.get(name)
        assert mechanism.scores is not None
        A = mechanism.scores(query, key)
        rows = max(rows, float((A.sum(-1) - 1).abs().max()))
        outputs = max(outputs, float((A @ value - mechanism(query, key, value)).abs().max()))
    maps, truth = planted(count, generator)
    found = explain.find_patterns(kinds.resized(maps), clusters=5, code=8, method="pca", seed=seed)
    mass = explain.ring_profile(ring, layout).mass[0, 0]
    return {
        "identity": float(explain.mean_distance(eye, layout).abs().max()),
        "uniform": float((explain.mean_distance(flat, layout) - explain.uniform_distance((6, 6))).abs().max()),
        "ring": float(1 - mass[2] / mass.sum()),
        "turned": float((per[0] - per[1]).abs().max()),
        "js symmetric": float((js - explain.jensen_shannon(q, p)).abs().max()),
        "js largest": float(js.max()) / math.log(2),
        "rows": rows,
        "outputs": outputs,
        "planted": kinds.adjusted_rand(truth, found.labels),
    }


def plan(settings: Settings) -> list[str]:
    return ["checks", *settings.attention]


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    if configuration == "checks":
        return checks(seed)
    return findings(*trained(settings, configuration, seed, device), steps=settings.steps)


CHECKS = {  # of `checks`: text, least, most
    "identity": ("identity map: mean distance", -1e-9, 1e-6),
    "uniform": ("uniform map: distance from the grid's reference", -1e-9, 1e-4),
    "ring": ("uniform over hop 2: mass elsewhere", -1e-6, 1e-6),
    "turned": ("a turn of the grid changes profiles by", -1e-6, 1e-6),
    "js symmetric": ("Jensen-Shannon is symmetric, deviation", -1e-12, 1e-12),
    "js largest": ("Jensen-Shannon over log 2, largest", 0.0, 1.0),
    "rows": ("cumulant rows sum to 1, deviation", -1e-9, 1e-6),
    "outputs": ("cumulant rows give the operator's output, deviation", -1e-9, 1e-5),
    "planted": ("planted kinds of maps are found, adjusted Rand index", 0.9, 1.01),
}


def statements(settings: Settings) -> list[Statement]:
    said = [Statement(text, number("checks", key), least, most, "known") for key, (text, least, most) in CHECKS.items()]
    for name in settings.attention:
        for low, high in pairwise(ORDERS):
            less = difference(number(name, f"area, {high}"), number(name, f"area, {low}"))
            said.append(Statement(f"{name}: removing {low} leaves a smaller area than {high}", less, least=0.0))
        early = difference(number(name, "spread, first half"), number(name, "spread, second half"))
        said.append(Statement(f"{name}: distances spread more over the heads of early layers", early, least=0.0))
        lost = quotient(number(name, "code error"), number(name, "pca error"))
        said.append(Statement(f"{name}: what the autoencoder loses over what PCA loses", lost, most=1.0))
    for key in DISTANCES:
        for near, far in pairwise(name for name in NEAREST_FIRST if name in settings.attention):
            said.append(above(far, near, f"mean {key}", f"{near} looks nearer than {far} ({key})"))
    return said


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    there = [name for name in settings.attention if any(name in one for one in seeds)]
    columns = {
        "accuracy": "right",
        **{key.replace("_", ", "): f"mean {key}" for key in DISTANCES},
        **{key.replace("_", " "): f"mean {key}" for key in ("tokens_used", "negative_mass")},
        "largest × n": "mean largest",
        **{key.replace("_", " "): f"mean {key}" for key in ("class_share", "self_share")},
    }
    areas = {f"area, {order}": f"area, {order}" for order in ORDERS}
    areas |= {"spread, early layers": "spread, first half", "late layers": "spread, second half"}
    lost = {"autoencoder loses": "code error", "PCA loses": "pca error", "heads in one cluster": "content-agnostic"}
    flat = [{name: one[name]["correlation"] for name in there if name in one} for one in seeds]
    pairs = list(next(iter(flat[0].values()), {})) if flat else []
    clusters = [[name, kinds_of(seeds[0][name])] for name in there if name in seeds[0]]
    return [
        Table.grid("Strength: means over heads, images and patches", "operator", there, columns,
                   partial(mean_of, seeds)),
        Table.grid("Pruning, depth and patterns", "operator", there, areas | lost,
                   lambda name, key: mean_of(seeds, name, key, 2 if key in lost.values() else 3)),
        Table.grid("Rank correlation between measures of importance", "measures", pairs, there,
                   lambda pair, name: mean_of(flat, name, pair, 2)),
        Table("Kinds of maps of seed 0: share (mean importance by loss)", ["operator", "clusters"], clusters),
    ]  # fmt: skip


def kinds_of(one: Mapping[str, Any]) -> str:
    """The clusters of a model in words, the largest first."""
    order = sorted(range(len(one["kinds"])), key=lambda k: -one["share"][k])
    return "; ".join(f"{one['kinds'][k]} {100 * one['share'][k]:.0f} % ({one['worth'][k]:.3f})" for k in order)


@styled
def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """The four views of the first seed: images, importance, strength, patterns."""
    there = [name for name in settings.attention if name in seeds[0]]
    if not there:
        return {}
    first = {name: seeds[0][name] for name in there}
    name = "cumulant3" if "cumulant3" in first else there[0]
    importance = {key: torch.tensor(first[name]["importance"][key]) for key in MEASURES}
    curves = {
        order: [
            explain.PruningCurve((), tuple(removed), tuple(right)) for removed, right in first[name]["curves"][order]
        ]
        for order in ORDERS
    }
    return {
        "Image overview": overview(settings, first),
        f"Head importance of {name}": importance_map(importance),
        "Parts of the most important head": partial_figure(first),
        f"Pruning of {name}": pruning_figure(curves, chance=0.1),
        "Attention strength": strength_figure(first),
        "Attention patterns": pattern_figure(first),
    }


def overview(settings: Settings, first: Measured) -> Any:
    """Test images by class, those that most operators get wrong first; the colour of a frame says how many do."""
    source = open_source("digits")
    labels = next(iter(first.values()))["labels"]
    chosen = torch.linspace(0, len(source.test) - 1, len(labels)).long()
    wrong = [sum(one["predicted"][i] != label for one in first.values()) for i, label in enumerate(labels)]
    columns = SHOWN // 10
    figure, axes = new_figure(columns, 10, (8.6, 0.95 * columns + 0.3))
    for kind in range(10):
        mine = sorted((i for i, label in enumerate(labels) if label == kind), key=lambda i: -wrong[i])[:columns]
        for place, i in zip(axes[:, kind], mine, strict=False):
            place.imshow(source.test.decode(int(chosen[i]), 8)[0].numpy(), cmap="gray", interpolation="nearest")
            said = sorted({one["predicted"][i] for one in first.values()} - {kind})
            place.set_title(f"said {', '.join(map(str, said))}"[:16] if said else "", fontsize=7, color=FIRST, pad=2)
            place.spines[:].set(visible=True, color=FIRST if wrong[i] else RULE, linewidth=0.5 + 0.6 * wrong[i])
    for place in axes.flatten():
        place.set(xticks=[], yticks=[])
    figure.suptitle(
        f"wrong in 0 to {len(first)} of the models (width of the frame), and what they said", fontsize=9, color=INK
    )
    return figure


def partial_figure(first: Measured) -> Any:
    """Loss without one block of the map of each model's most important head."""
    figure, axes = new_figure(1, len(first), (2.0 * len(first) + 1.4, 2.8), sharey=True)
    for i, (place, (name, one)) in enumerate(zip(axes[0], first.items(), strict=True)):
        blocks = list(one["partial"])
        place.barh(range(len(blocks)), [one["partial"][b]["loss"] for b in blocks], color=colour(name, i), height=0.65)
        layer, head = one["best"]
        place.set_title(f"{name}\nlayer {layer + 1}, head {head + 1}", fontsize=8)
        place.axvline(0, color=SOFT, linewidth=0.8)
        place.set_yticks(range(len(blocks)), blocks, fontsize=7)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("loss added when this block of the map is left out", fontsize=9)
    return figure


def strength_figure(first: Measured) -> Any:
    """Mean distance of every head by layer, and weight per neighbour by distance, against a uniform map."""
    figure, axes = new_figure(2, len(first), (1.9 * len(first) + 0.6, 4.4), sharey="row")
    for i, (name, one) in enumerate(first.items()):
        top, below = axes[0, i], axes[1, i]
        distance, ink = torch.tensor(one["summary"]["distance"]), colour(name, i)
        layers = range(1, len(distance) + 1)
        top.plot(layers, distance.numpy(), "o", color=ink, markersize=3.5, alpha=0.7)
        top.plot(layers, distance.mean(1).numpy(), color=ink, linewidth=1.3)
        top.axhline(one["uniform"], color=SOFT, linewidth=0.9, linestyle="--")
        top.set(title=name, xlabel="layer")
        for layer in one["profile"]:
            for line in layer:
                below.plot(range(len(line)), line, color=ink, linewidth=0.8, alpha=0.45)
        below.axhline(1, color=SOFT, linewidth=0.9, linestyle="--")
        below.set(xlabel="hops")
    axes[0, 0].set_ylabel("mean distance (hops)")
    axes[1, 0].set_ylabel("weight / uniform")
    return figure


def pattern_figure(first: Measured) -> Any:
    """Mean map of every cluster of each model, by share, with its kind and mean importance."""
    columns = max(len(one["kinds"]) for one in first.values())
    figure, axes = new_figure(len(first), columns, (1.25 * columns + 0.8, 1.65 * len(first)))
    for i, (name, one) in enumerate(first.items()):
        order = sorted(range(len(one["kinds"])), key=lambda k: -one["share"][k])
        for place, k in zip(axes[i], order, strict=False):
            centre = torch.tensor(one["centres"][k])
            end = float(centre.abs().max()) or 1.0
            place.imshow(centre.numpy(), cmap=DIVERGING, vmin=-end, vmax=end, interpolation="nearest")
            place.set_title(f"{one['kinds'][k]}, {100 * one['share'][k]:.0f} %", fontsize=7)
            place.set_xlabel(f"importance {one['worth'][k]:.3f}", fontsize=6.5, color=SOFT)
            place.spines[:].set_visible(False)
        axes[i, 0].set_ylabel(name, fontsize=8)
    for place in axes.flatten():
        place.set(xticks=[], yticks=[])
        place.set_visible(place.has_data())
    return figure


STUDY = Study.of(
    __name__,
    name="visual-analytics",
    claim="pruning shows which heads matter; heads differ in how far they look and in what kind of map they make",
    paper="Li et al., How Does Attention Work in Vision Transformers? A Visual Analytics Attempt, TVCG 2023",
    settings={"small": Settings(), "paper": Settings(epochs=20, seeds=5)},
    needs=("noncausal", "weights"),
    views={
        "images": ("Image overview",),
        "importance": ("Head importance", "Parts of", "Pruning of"),
        "strength": ("Attention strength",),
        "patterns": ("Attention patterns",),
    },
    seconds={"two cores": 240},
)
