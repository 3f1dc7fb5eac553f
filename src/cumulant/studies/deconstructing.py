"""Which design principle of attention is needed: parts are exchanged one by one, in all layers or in every second one.

Digits on a canvas are classified from a class token, so that without mixing nothing is seen. Hybrid: the variant in
layers 1, 3, ..., softmax in the others. Skip: the trained hybrid with the variant's outputs taken away.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.explain.flow import unsigned
from cumulant.studies import mixers
from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.mixers import SIDE, Mixer, SmallTransformer, accuracy, digits, examination, fit, placed
from cumulant.studies.statements import Measured, Quantity, Statement, above, number
from cumulant.style import FIRST, LAST, SOFT, new_figure

STANDARD = "softmax"
VARIANTS: Mapping[str, tuple[str, str]] = {  # name -> kind of mixer, what queries and keys are made of
    "MLP": ("mlp", "own"),
    "Mean": ("cumulant1", "own"),
    "Approximate": ("approximate", "own"),
    "Non-approximate": ("alone", "own"),
    "RndEmbQK": ("softmax", "last"),
    "FixedSeqQK": ("softmax", "last"),
    "StaticEmbQK": ("softmax", "embedded"),
}
PUBLISHED = ("softmax", "Approximate", "FixedSeqQK", "StaticEmbQK", "RndEmbQK", "MLP", "Non-approximate")
OURS = ("softmax", "cumulant3", "cumulant2", "linear", "Mean", "MLP")
INDICATORS = ("entropy", "concentration", "head diversity", "sink", "focus 0", "focus 1", "focus 2", "focus 3")


@dataclass(frozen=True)
class Settings(mixers.Settings):
    """The recipe of the study."""

    swept: tuple[str, ...] = ("cumulant3",)  # mechanisms with other shares of softmax layers


def plan(settings: Settings) -> list[str]:
    names = [*VARIANTS, *settings.attention]
    found = [STANDARD, *(f"{name}, {layout}" for layout in ("uniform", "hybrid") for name in names)]
    shares = [count for count in range(1, settings.depth) if 2 * count != settings.depth]
    return found + [
        f"{name}, {100 * count // settings.depth} % softmax"
        for name in settings.swept
        if name in settings.attention
        for count in shares
    ]


def layout(settings: Settings, configuration: str) -> tuple[str, list[bool]]:
    """The variant, and which layers have it."""
    name, _, what = configuration.partition(", ")
    depth = settings.depth
    if name == STANDARD:
        return name, [False] * depth
    if what == "uniform":
        return name, [True] * depth
    if what == "hybrid":
        return name, [i % 2 == 0 for i in range(depth)]
    standard = int(what.split()[0]) * depth // 100  # the last ones
    return name, [i < depth - standard for i in range(depth)]


def build(settings: Settings, configuration: str, seed: int) -> SmallTransformer:
    """The model; all variants have as many parameters."""
    torch.manual_seed(seed)
    name, own = layout(settings, configuration)
    kind, source = VARIANTS.get(name, (name, "own"))
    size = settings.width, settings.heads
    mixers = [Mixer(kind, *size, source=source) if variant else Mixer(STANDARD, *size) for variant in own]
    fixed = None
    if name == "RndEmbQK":
        fixed = torch.randn(1 + (SIDE // settings.patch) ** 2, settings.width)
    elif name == "FixedSeqQK":
        fixed = placed(digits()[0][:1], torch.Generator().manual_seed(0))[0][0]
    return SmallTransformer(mixers, SIDE, settings.patch, settings.width, fixed=fixed)


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    model = build(settings, configuration, seed)
    fit(model, settings.steps, settings.batch, settings.lr, seed, device)
    found: dict[str, Any] = {
        "accuracy": accuracy(model, device),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        **layers_seen(model, device),
    }
    _, own = layout(settings, configuration)
    if any(own) and not all(own):
        for mixer, variant in zip(model.mixers, own, strict=True):
            mixer.bypassed = variant
        found["skip"] = accuracy(model, device)
    return found


@torch.no_grad()
def layers_seen(model: SmallTransformer, device: str) -> dict[str, Any]:
    """The indicators of every layer that has a map, mean over heads and 64 images, and the largest logit of any."""
    shown = examination()[0][:64].to(device)
    found: dict[str, Any] = {name: [] for name in INDICATORS}
    largest = 0.0
    for mixer, tokens in zip(model.mixers, model.layers(shown), strict=False):
        if mixer.kind == "mlp":
            for name in INDICATORS:
                found[name].append(None)
            continue
        for name, value in indicators(mixer.weights(tokens)[: len(shown)]).items():
            found[name].append(float(value.mean()))
        query, key, _ = mixer.split(tokens)
        largest = max(largest, float((query @ key.mT).abs().max()) * query.shape[-1] ** -0.5)
    return {**found, "largest logit": largest}


def indicators(weights: Tensor) -> dict[str, Tensor]:
    """Of maps (B, H, T, T): per item and head, head diversity per item. Signed rows count by |a| / sum |a|.

    The entropy is the sum over rows (n log n for uniform ones), concentration the Frobenius norm.
    """
    weights = unsigned(weights, "absolute")
    count = weights.shape[-1]
    lower = torch.ones(count, count, dtype=torch.bool, device=weights.device).tril()
    found = {
        "entropy": torch.special.entr(weights).sum((-2, -1)),
        "concentration": weights.square().sum((-2, -1)).sqrt(),
        "head diversity": weights.std(1, correction=0)[:, lower].mean(-1),
        "sink": weights[..., 0].mean(-1),
    }
    focus = {f"focus {n}": weights.diagonal(-n, -2, -1).mean(-1) for n in range(4)}
    return found | focus


def statements(settings: Settings) -> list[Statement]:
    def full(name: str) -> str:
        return name if name == STANDARD else f"{name}, uniform"

    def ordered(names: Sequence[str], source: str) -> list[Statement]:
        return [
            above(full(a), full(b), "accuracy", f"uniform: {a} above {b}", source=source, control=STANDARD)
            for a, b in itertools.pairwise(names)
        ]

    found = [*ordered(PUBLISHED, "published"), *ordered(OURS, "new")]
    names = [*VARIANTS, *settings.attention]
    for name in names:
        uniform, hybrid = f"{name}, uniform", f"{name}, hybrid"
        found.append(above(hybrid, uniform, "accuracy", f"{name}: hybrid above uniform", control=STANDARD))
        found.append(Statement(f"{name}: skip at chance (0.1)", number(hybrid, "skip"), most=0.2))
    found += [
        Statement(f"{name}: share of the gap to softmax that the hybrid closes", closes(name), 0.5, source="new")
        for name in ("MLP", "Mean", "linear", "cumulant2")
    ]
    counts = [full(name) for name in [STANDARD, *names]]

    def spread(of: Measured) -> float:
        every = [of[name]["parameters"] for name in counts]
        return max(every) / min(every) - 1

    found.append(Statement("parameters: largest over smallest, less 1", spread, most=0.01, source="known", exact=True))
    return found


def closes(name: str) -> Quantity:
    def share(of: Measured) -> float:
        uniform, hybrid = (of[f"{name}, {what}"]["accuracy"] for what in ("uniform", "hybrid"))
        return (hybrid - uniform) / max(of[STANDARD]["accuracy"] - uniform, 1e-6)

    return share


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    names = [*VARIANTS, *settings.attention]
    rows = [[STANDARD, mean_of(seeds, STANDARD, "accuracy"), mean_of(seeds, STANDARD, "accuracy"), "-",
             mean_of(seeds, STANDARD, "largest logit", 1), "-", mean_of(seeds, STANDARD, "parameters", 0)],
            [f"{STANDARD}, again", mean_of(seeds, f"{STANDARD}, again", "accuracy"), *["-"] * 5]]  # fmt: skip
    for name in names:
        uniform, hybrid = f"{name}, uniform", f"{name}, hybrid"
        rows.append([name, mean_of(seeds, uniform, "accuracy"), mean_of(seeds, hybrid, "accuracy"),
                     mean_of(seeds, hybrid, "skip"), mean_of(seeds, uniform, "largest logit", 1),
                     mean_of(seeds, hybrid, "largest logit", 1), mean_of(seeds, uniform, "parameters", 0)])  # fmt: skip
    head = ["variant", "uniform", "hybrid", "skip", "largest logit, uniform", "hybrid", "parameters"]
    swept = []
    for name in settings.swept:
        each = [f"{name}, uniform"]
        for count in range(1, settings.depth):
            share = 100 * count // settings.depth
            each.append(f"{name}, hybrid" if 2 * count == settings.depth else f"{name}, {share} % softmax")
        swept.append([name, *(mean_of(seeds, one, "accuracy") for one in [*each, STANDARD])])
    shares = [f"{100 * count // settings.depth} %" for count in range(settings.depth + 1)]
    found = [Table("Test accuracy", head, rows), Table("Accuracy by share of softmax layers", ["", *shares], swept)]
    return [*found, Table("Indicators of uniform models, mean over layers", ["", *INDICATORS], indicated(seeds, names))]


def indicated(seeds: Sequence[Measured], names: Sequence[str]) -> list[list[str]]:
    """A row of indicators for every uniform model that has maps."""
    rows = []
    for name in [STANDARD, *(f"{name}, uniform" for name in names if name != "MLP")]:
        there = [one[name] for one in seeds if name in one]
        if there:
            cells = [statistics.mean(statistics.mean(one[key]) for one in there) for key in INDICATORS]
            rows.append([name, *(f"{cell:.3f}" for cell in cells)])
    return rows


def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """Accuracy of every variant: uniform, hybrid and skip."""
    names = [name for name in [*VARIANTS, *settings.attention] if f"{name}, uniform" in seeds[0]]
    figure, axes = new_figure(1, 1, (7, 0.32 * len(names) + 1.2))
    axis = axes[0, 0]
    kinds = ((", uniform", "accuracy", FIRST, "o", "uniform"), (", hybrid", "accuracy", LAST, "s", "hybrid"),
             (", hybrid", "skip", SOFT, "x", "hybrid, variant skipped"))  # fmt: skip
    for behind, key, colour, mark, label in kinds:
        for i, name in enumerate(names):
            values = [100 * one[name + behind][key] for one in seeds if name + behind in one]
            axis.scatter(
                values, [i] * len(values), color=colour, marker=mark, s=22, alpha=0.75, label="" if i else label
            )
    axis.axvline(100 * statistics.mean(one[STANDARD]["accuracy"] for one in seeds), color=SOFT, lw=1)
    axis.axvline(10, color=SOFT, lw=1, ls=":")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("test accuracy, % (a point a seed; lines: softmax in all layers, chance)")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return {"Accuracy by variant and layout": figure}


STUDY = Study.of(
    __name__,
    name="deconstructing",
    claim="Token mixing cannot be given up, the form of the weights and their dependence on the input can in every "
    "second layer; layers that were weak by themselves carry something, for without them accuracy falls to chance.",
    paper="Xue et al., Deconstructing Attention, 2025, carried over to images",
    settings={
        "small": Settings(),
        "paper": Settings(width=64, depth=8, steps=4000, batch=64, swept=("cumulant2", "cumulant3"), seeds=5),
    },
    needs=("weights",),
    seconds={"two cores": 415, "an H200": 85},
    control=STANDARD,
)
