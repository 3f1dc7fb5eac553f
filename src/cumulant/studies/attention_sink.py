"""Attention sinks: who has them, what removes them, and what becomes of them without a denominator.

The same small transformer is trained on digits somewhere on a canvas; the empty patches around them carry nothing.
Received attention of key k is the mean over queries of its weight; signed weights count by |a| / sum |a|.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cumulant import zoo
from cumulant.explain.flow import unsigned
from cumulant.explain.metrics import received
from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.mixers import SIDE, Mixer, Settings, SmallTransformer, accuracy, examination, fit
from cumulant.studies.statements import Measured, Quantity, Statement, above, number
from cumulant.style import SEQUENTIAL, colour, mark, new_figure

EPS = 0.3  # received attention above which a key is a sink
TIMES = 10  # or so many times the mean
HIGH = 2.0  # norm of a patch's output over the median of its image
MITIGATIONS: Mapping[str, dict[str, Any]] = {
    "softmax": {},
    **{f"softmax, {count} registers": {"registers": count} for count in (1, 4, 8)},
    "off-by-one": {"kind": "off-by-one"},
    "learned sink": {"kind": "learned sink"},
    "sigmoid": {"kind": "sigmoid"},
    "softmax, gated": {"gate": True},
}
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)  # of the logits, for the capacity


def plan(settings: Settings) -> list[str]:
    orders = [name for name in settings.attention if name.startswith("cumulant")]
    more = [f"{name}, {what}" for name in orders for what in ("phantom", "gated")]
    return [*MITIGATIONS, *settings.attention, *more, *(f"{name}, capacity" for name in ("softmax", *orders))]


def build(settings: Settings, configuration: str, seed: int) -> SmallTransformer:
    torch.manual_seed(seed)
    name, _, what = configuration.partition(", ")
    given = MITIGATIONS.get(configuration, {"kind": name, "gate": what == "gated", "phantom": int(what == "phantom")})
    own = {"kind": "softmax", **given}
    registers = own.pop("registers", 0)
    mixers = [Mixer(dim=settings.width, heads=settings.heads, **own) for _ in range(settings.depth)]
    return SmallTransformer(mixers, SIDE, settings.patch, settings.width, registers=registers)


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    name, _, what = configuration.partition(", ")
    if what == "capacity":
        return capacity(name, seed)
    model = build(settings, configuration, seed)
    start = time.process_time()
    fit(model, settings.steps, settings.batch, settings.lr, seed, device)
    spent = 1e3 * (time.process_time() - start) / settings.steps  # of the processor: what runs beside it does not count
    return {"accuracy": accuracy(model, device), "parameters": sum(x.numel() for x in model.parameters()),
            "ms a step": spent, **looked_at(model, device, SIDE // settings.patch)}  # fmt: skip


@torch.no_grad()
def looked_at(model: SmallTransformer, device: str, grid: int, images: int = 128) -> dict[str, Any]:
    """Sinks among patches, class token and registers, tokens of large norm, values of sinks, and where they look."""
    shown = examination()[0][:images].to(device)
    tokens = model.layers(shown)
    patches = slice(1, 1 + grid * grid)
    ink = shown.unfold(2, model.patch, model.patch).unfold(3, model.patch, model.patch).amax((-2, -1)).flatten(1) > 0
    each: dict[str, list[float]] = {}
    heat = torch.zeros(grid * grid, device=device)

    def add(**values: Tensor) -> None:
        for key, value in values.items():
            each.setdefault(key.replace("_", " "), []).append(float(value.float().mean()))

    for mixer, x in zip(model.mixers, tokens, strict=False):
        weights = mixer.weights(x)
        got = received(weights)  # (B, H, T)
        on_patches = got[..., patches]
        top, place = on_patches.max(-1)
        value = mixer.split(x)[2][..., patches, :].norm(dim=-1)
        ratio = value.gather(-1, place[..., None]).squeeze(-1) / value.median(-1).values.clamp(min=1e-9)
        add(patch_sinks=top > EPS, first_sinks=got[..., 0] > EPS, relative=top > TIMES * got.mean(-1),
            top_share=top, largest_received=weights.mean(-2)[..., patches].amax(-1),
            on_registers=got[..., patches.stop :].sum(-1), value_of_the_top=ratio,
            top_is_empty=~ink.gather(1, place.flatten(1)).view_as(place))  # fmt: skip
        heat += on_patches.mean((0, 1)) / len(model.mixers)
    norms = tokens[-1][:, patches].norm(dim=-1)
    add(high_norm=norms > HIGH * norms.median(-1, keepdim=True).values)
    pointing = unsigned(model.mixers[-1].weights(tokens[-2]), "absolute")[:, :, 0, patches]
    add(pointing=(pointing * ink[:, None]).sum(-1) / pointing.sum(-1).clamp(min=1e-30))
    add(ink=ink)
    return {key: statistics.mean(values) for key, values in each.items()} | {"heat": heat.tolist()}


def capacity(name: str, seed: int, tokens: int = 64, width: int = 16) -> dict[str, Any]:
    """The largest weight of a key without training, mean over queries, as the logits are scaled."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 1, tokens, width, generator=generator, dtype=torch.float64) for _ in range(2))
    scores = zoo.get(name).scores
    assert scores is not None
    return {f"t={t:g}": float(scores(t * query / 16, key).amax(-1).mean()) for t in SCALES}


def statements(settings: Settings) -> list[Statement]:
    def less(low: str, high: str, key: str, source: str) -> Statement:
        words = f"{key}: {high} above {low}"
        return above(high, low, key, words, source=source, control="softmax")

    def slope(name: str) -> Quantity:
        """Of log (largest weight - 1 / n) against log t at small logits."""
        return lambda of: math.log((of[name]["t=1"] - 1 / 64) / (of[name]["t=0.5"] - 1 / 64), 2)

    def passes(of: Measured) -> float:
        """The first scale at which the second order passes 1; twice the last where it does not."""
        return next((t for t in SCALES if of["cumulant2, capacity"][f"t={t:g}"] > 1), 2 * SCALES[-1])

    found = [
        less("softmax, 4 registers", "softmax", "top share", "published"),
        less("off-by-one", "softmax, 4 registers", "top share", "published"),
        less("softmax, gated", "off-by-one", "top share", "published"),
        less("sigmoid", "off-by-one", "top share", "published"),
        less("softmax, 4 registers", "softmax", "high norm", "published"),
        less("cumulant2", "softmax", "top share", "new"),
        less("cumulant3", "softmax", "top share", "new"),
        less("cumulant2", "cumulant3", "top share", "new"),
        less("cluster4", "softmax", "top share", "new"),
        less("linear", "softmax", "top share", "new"),
        Statement("softmax: share of heads with a patch above 0.3", number("softmax", "patch sinks"), least=0.01),
    ]
    found += [
        Statement(
            f"{name}: share of heads with a patch above 0.3", number(name, "patch sinks"), most=0.01, source="new"
        )
        for name in settings.attention
    ]
    found += [
        Statement(f"{name}: value norm of the top patch over the median", number(name, "value of the top"), most=0.8)
        for name in ("softmax", "cumulant2", "cumulant3")
    ]
    found += [
        Statement("capacity: slope of order 2 at small logits", slope("cumulant2, capacity"), 0.9, 1.1, "derived"),
        Statement("capacity, t = 8: softmax above order 3", capacities("softmax", "cumulant3", 8), 0, source="known"),
        Statement("capacity, t = 8: order 3 above order 2", capacities("cumulant3", "cumulant2", 8), 0, source="known"),
        Statement("capacity: order 2 passes 1 at t", passes, 8.0, source="known"),
        above("softmax", "off-by-one", "accuracy", "accuracy: softmax above off-by-one", control="softmax"),
        above("cumulant2, gated", "cumulant2", "accuracy", "accuracy: a gate helps cumulant2", source="new",
              control="softmax"),
        above("cumulant2", "softmax", "pointing", "pointing: cumulant2 above softmax", source="new", control="softmax"),
    ]  # fmt: skip
    return found


def capacities(first: str, second: str, t: float) -> Quantity:
    return lambda of: of[f"{first}, capacity"][f"t={t:g}"] - of[f"{second}, capacity"][f"t={t:g}"]


KEYS = ("accuracy", "patch sinks", "first sinks", "relative", "top share", "largest received", "on registers",
        "top is empty", "value of the top", "high norm", "pointing")  # fmt: skip


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    able = [name for name in plan(settings) if name.endswith("capacity")]
    trained = [name for name in plan(settings) if name not in able]
    columns = {**dict.fromkeys(KEYS, 3), "ms a step": 1, "parameters": 0}  # digits of each
    return [
        Table.grid("Sinks after training, mean over layers and heads", "", [*trained, "softmax, again"],
                   {key: key for key in columns}, lambda name, key: mean_of(seeds, name, key, columns[key])),
        Table.grid("Largest weight of one key without training, logits times t", "", able,
                   [f"t={t:g}" for t in SCALES], partial(mean_of, seeds)),
    ]  # fmt: skip


def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """Where attention goes: received attention over the canvas, one map a mechanism."""
    names = [
        name for name in ("softmax", "softmax, 4 registers", "softmax, gated", *settings.attention) if name in seeds[0]
    ]
    figure, axes = new_figure(1, len(names), (1.5 * len(names), 1.9))
    side = SIDE // settings.patch
    for axis, name in zip(axes[0], names, strict=True):
        heat = torch.tensor([one[name]["heat"] for one in seeds if name in one]).mean(0).view(side, side) * side * side
        axis.imshow(heat, cmap=SEQUENTIAL, vmin=0.5, vmax=1.75)
        axis.set_title(f"{name}\n{heat.min():.2f} to {heat.max():.2f}", fontsize=7)
        axis.set_axis_off()
    found = {"Received attention over the canvas (1: as much as every patch)": figure}
    able = [name for name in plan(settings) if name.endswith("capacity") and name in seeds[0]]
    figure, axes = new_figure(1, 1, (5.5, 3.2))
    for name in able:
        values = [statistics.mean(one[name][f"t={t:g}"] for one in seeds if name in one) for t in SCALES]
        label = name.removesuffix(", capacity")
        axes[0, 0].plot(SCALES, values, color=colour(label), marker=mark(label), ms=4, label=label)
    axes[0, 0].set(xscale="log", yscale="log", xlabel="scale t of the logits", ylabel="largest weight of a key")
    axes[0, 0].axhline(1, color="#d9d9d9", lw=1)
    axes[0, 0].legend()
    return found | {"How much weight one key can have": figure}


STUDY = Study.of(
    __name__,
    name="attention-sink",
    claim="Softmax heads that have nothing to say put their weight on a token that says nothing; registers, an extra "
    "logit and gates take that away, and attention without a denominator has no need of it.",
    paper="Su et al., Attention Sink in Transformers: A Survey, 2026, and the works it covers",
    settings={"small": Settings(), "paper": Settings(width=64, depth=8, steps=4000, batch=64, seeds=5)},
    needs=("weights",),
    seconds={"two cores": 510, "an H200": 64},
    control="softmax",
)
