"""The dial of cluster attention beside every sub-quadratic mechanism: error and multiply-adds on the same tokens.

Shape legend: B sequences, H heads, L tokens, D, E widths, R queries on which errors are taken.

The error is ||out - softmax|| / ||softmax - mean of the values||, its mean over layers; the cost is the multiply-adds
of a head over those of softmax. Those of a mechanism are counted while its plain form runs; those of cluster attention
are what the method needs (`cumulant.cluster.multiply_adds`, the search for clusters included), since its plain form
multiplies more than that. Every dial setting is one for all heads and layers: nothing is fitted to the tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import zoo
from cumulant.bench.variants import Variant, parse
from cumulant.bench.work import work_of
from cumulant.call import Call
from cumulant.cluster import Choice, KMeans, cluster_attention, multiply_adds, softmax_multiply_adds
from cumulant.cluster.dial import measure

# Settings of the mechanisms that have a dial of their own, besides their defaults.
MORE = (
    "agent+agents=4", "agent+agents=16", "agent+agents=144", "combiner+variant=axial", "hierarchical+levels=1",
    "hierarchical+branching=16", "cumulant3+full", "flow+clamp=10", "lla+iterations=4",
)  # fmt: skip
SAME = 1.1  # costs up to so many times as large count as the same, see `verdicts`
FAR = 10.0  # times the cost of softmax: what is dearer is in the table, not in the figure


@dataclass(frozen=True)
class Point:
    """Multiply-adds as a share of softmax's and error of one method, means over layers."""

    label: str
    kind: str  # "mechanism" or "dial"
    cost: float
    error: float


def settings(tokens: int) -> list[Choice]:
    """Uniform settings of the dial for sequences of so many tokens: blocks in a row, and k-means."""
    found = []
    for count in (1, 2, 4, 8, 16, 32, 64, 128):
        for clusters in (count, KMeans(count, 3, 4)):
            if 2 * count > tokens or (count == 1 and clusters != 1):
                continue
            nears = [near for near in (0, 1, 2, 4, 8) if near < count] if count > 1 else [0]
            for near in nears:
                kinds = (0, "pooled", 8, None) if count > 1 else (0, None)  # one cluster is its own pool
                found += [Choice(clusters, near, r) for r in kinds if r != 8 or count > 8]
    return found


def name_of(choice: Choice) -> str:
    kind = f"{choice.clusters.count} k-means" if isinstance(choice.clusters, KMeans) else f"{choice.clusters} blocks"
    answer = {None: "", 0: ", means", "pooled": ", pooled"}.get(choice.response, f", {choice.response} respond")
    return f"{kind}, {choice.near} near{answer}"


@torch.no_grad()
def dial_points(layers: Sequence[Call], every: int, choices: Sequence[Choice] | None = None) -> list[Point]:
    """The choices, or every setting there is, on every `every`-th query of each layer.

    Settings are also blocks that ask once, and blocks of the patch grid where the layers have one. Cost: R L D a layer
    and setting, and its k-means.
    """
    everything = choices is None
    choices = settings(layers[0].key.shape[-2]) if choices is None else choices
    found = [measure(x.query[..., every // 2 :: every, :], x.query, x.key, x.value, choices) for x in layers]
    points = [
        Point(name_of(choice), "dial", _mean(f[i].cost for f in found), _mean(f[i].error for f in found))
        for i, choice in enumerate(choices)
    ]
    if everything:
        points += shared_points(layers, every)
        points += grid_points(layers) if _patches(layers) is not None else []
    return points


def _patches(layers: Sequence[Call]) -> tuple[int, ...] | None:
    """Rows and columns of the patches of an image, None for other tokens."""
    grid = layers[0].grid
    return grid if grid is not None and len(grid) == 2 else None


def shared_points(layers: Sequence[Call], every: int) -> list[Point]:
    """Blocks whose queries ask once, with their mean: of the sequence, or of the patches with prefix tokens exact."""
    L = layers[0].key.shape[-2]
    grid = _patches(layers)
    prefix = layers[0].prefix if grid is not None else 0
    points = []
    for side in (1, 2, 4, 8):
        count = side * side
        if grid is not None and (grid[0] % side or grid[1] % side or 2 * count > L):
            continue
        shape: Any = count if grid is None else (side, side)
        form: dict[str, Any] = {"clusters": shape, "near": count, "queries": "mean", "grid": grid, "prefix": prefix}
        errors = []
        for x in layers:
            out = cluster_attention(x.query, x.key, x.value, **form)[..., every // 2 :: every, :]
            asked = x.query[..., every // 2 :: every, :]
            errors.append(_distance(out, F.scaled_dot_product_attention(asked, x.key, x.value), x.value))
        # Each block and each prefix token is one query of softmax.
        points.append(Point(f"{count} mean queries, exact", "dial", (count + prefix) / L, _mean(errors)))
    return points


def grid_points(layers: Sequence[Call]) -> list[Point]:
    """Blocks of an image's patches, prefix tokens exact, with near blocks and with or without covariances."""
    grid, prefix, (L, D), E = layers[0].grid, layers[0].prefix, layers[0].key.shape[-2:], layers[0].value.shape[-1]
    assert grid is not None
    points = []
    shapes = [(a, b) for a in (1, 2, 4, 8) for b in (a, 2 * a) if grid[0] % a == 0 and grid[1] % b == 0]
    for shape in shapes:
        count, size = shape[0] * shape[1], grid[0] * grid[1] // (shape[0] * shape[1])
        for near, response in itertools.product((0, 1, 2, 4), (0, "pooled", None)):
            if near >= count or 2 * count > L:
                continue
            form: dict[str, Any] = {"clusters": shape, "near": near, "response": response, "rank": "error"}
            errors = []
            for x in layers:
                out = cluster_attention(x.query, x.key, x.value, grid=grid, prefix=prefix, **form)
                errors.append(_distance(out, F.scaled_dot_product_attention(x.query, x.key, x.value), x.value))
            work = multiply_adds(L, D, E, count, near_tokens=near * size + prefix, response=response)
            answer = "" if response is None else ", means" if response == 0 else ", pooled"
            name = f"{shape[0]} x {shape[1]} blocks, {near} near{answer}"
            points.append(Point(name, "dial", work / softmax_multiply_adds(L, D, E), _mean(errors)))
    return points


@torch.no_grad()
def mechanism_points(layers: Sequence[Call], every: int, texts: Sequence[str] = ()) -> list[Point]:
    """Every sub-quadratic mechanism of the registry that is not ours by clusters, and the settings in MORE."""
    labels = texts or [n for n in zoo.names() if zoo.get(n).subquadratic and not n.startswith("cluster")]
    more = [] if texts else [m for m in MORE if zoo.get(m.split("+")[0]).subquadratic]
    points = []
    for variant in map(parse, [*labels, *more]):
        errors = [_error(variant, layer, every) for layer in layers]
        if all(error == error for error in errors):
            points.append(Point(variant.label, "mechanism", _mean(map(_cost(variant), layers)), _mean(errors)))
    return points


def _error(variant: Variant, layer: Call, every: int) -> float:
    """NaN where the options do not fit the tokens."""
    asked = layer.query[..., every // 2 :: every, :]
    try:
        out = variant.plain().run(layer)[..., every // 2 :: every, :]
    except ValueError:
        return float("nan")
    return _distance(out, F.scaled_dot_product_attention(asked, layer.key, layer.value), layer.value)


def _distance(out: Tensor, exact: Tensor, value: Tensor) -> float:
    away = exact.double() - value.double().mean(-2, keepdim=True)
    return ((out.double() - exact.double()).norm() / away.norm()).item()


def _cost(variant: Variant) -> Any:
    def share(layer: Call) -> float:
        query, key, value = (x[:1, :1] for x in layer[:3])
        one = layer._replace(query=query, key=key, value=value, key_mask=None, query_mask=None)
        return work_of(variant, one).multiply_adds / softmax_multiply_adds(*key.shape[-2:], value.shape[-1])

    return share


def verdicts(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each mechanism the best dial setting at the same cost or less, and whether that is at least as close.

    Costs up to SAME times as large are the same: denominators and masses that a mechanism sums up without a product of
    matrices are not counted for it, those of the dial are.
    """
    rows = []
    for point in points:
        if point.kind != "mechanism":
            continue
        affordable = [d for d in points if d.kind == "dial" and d.cost <= SAME * point.cost]
        best = min(affordable, key=lambda d: d.error, default=None)
        rows.append({
            "mechanism": point.label, "cost": point.cost, "error": point.error,
            "dial": None if best is None else best.label, "dial_cost": None if best is None else best.cost,
            "dial_error": None if best is None else best.error,
            "better_than_dial": point.error < 1 if best is None else point.error < best.error,
        })  # fmt: skip
    return rows


def compare(layers: Sequence[Call], every: int) -> dict[str, Any]:
    """Points and verdicts of one model's layers, as they go into a results file."""
    points = [*mechanism_points(layers, every), *dial_points(layers, every)]
    tokens, dim = layers[0].key.shape[-2:]
    return {
        "layers": len(layers), "heads": layers[0].key.shape[-3], "tokens": tokens, "dim": dim, "every": every,
        "points": [asdict(point) for point in points], "verdicts": verdicts(points),
    }  # fmt: skip


def figure(results: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each model: mechanisms as named crosses, the settings of the dial as dots, its front as a line."""
    from cumulant.style import new_figure, save

    fig, axes = new_figure(len(results), 1, (9, 5.4 * len(results)))
    named = []
    for axis, (title, result) in zip(axes[:, 0], results.items(), strict=True):
        dial = sorted((p["cost"], p["error"]) for p in result["points"] if p["kind"] == "dial" and p["error"] < 3)
        front: list[tuple[float, float]] = []
        for cost, error in dial:
            if not front or error < front[-1][1]:
                front.append((cost, error))
        axis.plot(*zip(*dial, strict=True), ".", ms=3, color="#9ecae1", label="its other settings")
        axis.step(*zip(*front, strict=True), where="post", color="#08519c", label="cluster attention, best setting")
        mechanisms = [p for p in result["points"] if p["kind"] == "mechanism" and p["error"] < 3 and p["cost"] < FAR]
        axis.plot([p["cost"] for p in mechanisms], [p["error"] for p in mechanisms], "x", ms=6, color="#cb181d")
        named.append((axis, [(p["cost"], p["error"], p["label"]) for p in mechanisms]))
        axis.plot([1], [0.02], "D", ms=6, color="k")
        axis.annotate("softmax (error 0)", (1, 0.02), (-8, 0), textcoords="offset points", fontsize=8, ha="right")
        axis.set(xscale="log", yscale="log", ylim=(0.018, 3.2))
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("multiply-adds, share of softmax's")
        axis.set_ylabel("error against softmax (1: the mean of the values)")
        axis.legend(fontsize=8, frameon=False, loc="lower left")
    fig.canvas.draw()  # places are known after the layout
    for axis, points in named:
        _label(axis, points)
    save(fig, path, ("svg",))


def _label(axis: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, each at the nearest free place around it, with a line where that is not beside it."""
    width, height = 4.8, 9.0  # of a letter and of a line, in points
    scale = 72 / axis.figure.dpi
    places = [tuple(axis.transData.transform((x, y)) * scale) for x, y, _ in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    left, bottom, right, top = (edge * scale for edge in axis.bbox.extents)
    angles = (0.4, 2.7, -0.4, -2.7, 1.2, -1.2, 1.9, -1.9)
    ways = [(r * math.cos(angle), r * math.sin(angle)) for r in range(8, 90, 6) for angle in angles]
    for (x, y), (cost, error, text) in sorted(zip(places, points, strict=True)):
        for dx, dy in ways:
            start = x + dx if dx > 0 else x + dx - width * len(text)
            box = (start, y + dy - height / 2, start + width * len(text), y + dy + height / 2)
            inside = left < box[0] and box[2] < right and bottom < box[1] and box[3] < top
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in taken):
                break
        taken.append(box)
        line = {"arrowstyle": "-", "lw": 0.5, "color": "0.6"} if math.hypot(dx, dy) > 10 else None
        axis.annotate(
            text, (cost, error), (dx, dy), textcoords="offset points", fontsize=7, va="center",
            ha="left" if dx > 0 else "right", arrowprops=line,
        )  # fmt: skip


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)
