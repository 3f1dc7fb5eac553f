"""How masks and decay create position bias, exactly, for random maps of every operator, and in trained networks.

What is derived for random maps is in `rollouts` and docs/studies/position-bias.md.

Shape legend: N tokens, t layers, D width, B prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant import zoo
from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.rollouts import (
    absorbing_rate,
    decayed,
    last_row,
    mean_distance,
    mode,
    predicted_rate,
    random_maps,
    rotary,
    seen,
    uniform,
)
from cumulant.studies.statements import Measured, Statement, above, number
from cumulant.style import SOFT, colour, mark, new_figure, styled
from cumulant.train.optimise import descend

TRAINED = "trained"
KNOWN: dict[str, dict[Any, float]] = {  # mass of the first token (A3: of the prefix) in the last row, by layers
    "A1": {1: 0.0312, 2: 0.127, 3: 0.283, 4: 0.463, 6: 0.763, 8: 0.917, 12: 0.993, 16: 0.9995},
    "A2 4": {4: 0, 8: 0, 16: 0.060, 32: 0.994},
    "A2 8": {4: 0, 8: 0.210, 16: 0.974, 32: 1.0},
    "A2 16": {4: 0.174, 8: 0.808, 16: 0.9987, 32: 1.0},
    "A3": {1: 0.125, 2: 0.372, 4: 0.813, 8: 0.996},
    "A4": {4: 0.155, 8: 0.455, 16: 0.870, 32: 0.9975},
    "A5 0.1": {8: 0.013, 16: 0.44, 32: 0.998},
    "A6 2": {2: 0.093, 4: 0.353, 8: 0.842, 16: 0.998},
    "A6 8": {4: 0.083, 8: 0.339, 16: 0.855},
}
PLACES = {"first": 0, "middle": 4, "last": 7}  # of the eight pairs of a prompt
DECAYED = (0.25, 2.0)  # sizes of the logits at which decay is tried
GAPS = (("first", "middle"), ("first", "last"), ("middle", "last"))


@dataclass(frozen=True)
class Settings:
    """The recipe of the study."""

    attention: tuple[str, ...] = ("softmax", "linear", "cumulant2", "cumulant3", "cluster4+block=4")
    masks: tuple[str, ...] = ("none", "causal", "decay", "rotary")
    layers: tuple[int, ...] = (2, 4)
    sizes: tuple[float, ...] = (0.25, 1.0, 2.0, 4.0, 8.0)  # standard deviation of the logits of random maps
    draws: int = 2048
    steps: int = 1500
    classes: int = 128
    width: int = 32
    tests: int = 8000
    seeds: int = 3


# What is measured.


def exact_maps() -> dict[str, Tensor]:
    causal = uniform(seen(32))
    maps = {"A1": causal, "A3": uniform(seen(32, prefix=4)), "A4": (causal + torch.eye(32)) / 2}
    maps |= {f"A2 {window}": uniform(seen(32, window=window)) for window in (4, 8, 16)}
    return {**maps, "A5 0.1": decayed(128, 0.1), "A6 2": rotary(32, 2.0), "A6 8": rotary(32, 8.0)}


def exact(settings: Settings, seed: int) -> dict[str, Any]:
    """All numbers of part A, how far they are from the known ones, and the bound for random scores."""
    found: dict[str, Any] = {}
    for name, A in exact_maps().items():
        for layers in (1, 2, 3, 4, 6, 8, 12, 16, 32):
            row = last_row(A, layers)
            found[f"{name} {layers}"] = float(row[:4].sum() if name == "A3" else row[0])
            found[f"{name} {layers} mode"] = float(row.argmax())
        found[f"{name} deviation"] = max(abs(found[f"{name} {t}"] - known) for t, known in KNOWN[name].items())
    left = [1 - float(last_row(uniform(seen(32)), t)[0]) for t in (21, 22)]
    found["A1 ratio"] = left[1] / left[0]
    found["A1 eigenvalues"] = float(
        (torch.linalg.eigvals(uniform(seen(32))).real.sort().values.flip(0) - 1 / torch.arange(1, 33)).abs().max()
    )
    cases = [(-math.log(0.8), t) for t in (2, 4, 8, 16)] + [(m, t) for m in (0.5, 1.0) for t in (2, 4, 8, 16, 32)]
    rows = {case: 127 - int(last_row(decayed(128, case[0]), case[1]).argmax()) for case in cases}
    found["A5 modes"] = max(abs(rows[case] - mode(*case)) for case in cases)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(24, 16, 16, generator=generator, dtype=torch.float64) * 2 - 1
    A = scores.masked_fill(~seen(16), -math.inf).softmax(-1)
    least, P, over = float(A[:, seen(16)].min()), torch.eye(16, dtype=torch.float64), -math.inf
    for layers, one in enumerate(A, start=1):
        P = one @ P
        bound = (1 - torch.arange(16) * least) ** layers  # of what lies at token j or behind it
        over = max(over, float((P.flip(-1).cumsum(-1).flip(-1) - bound)[:, 1:].max()))
    return {**found, "bound": max(0.0, over)}


def operator(settings: Settings, name: str, seed: int) -> dict[str, Any]:
    generator, found = torch.Generator().manual_seed(seed), dict[str, Any]()
    for size in settings.sizes:
        A = random_maps(name, size, 12, settings.draws, generator)
        found[f"rate {size}"] = absorbing_rate(A)
        found[f"diagonal {size}"] = float(A.diagonal(dim1=-2, dim2=-1)[:, 1:].abs().log().mean(0).max().exp())
        spread = A.std(0).clamp(min=1e-12) / math.sqrt(settings.draws)
        found[f"mean map {size}"] = float(((A.mean(0) - uniform(seen(12))).abs() / spread)[1:][seen(12)[1:]].mean())
    for size in DECAYED:
        A = random_maps(name, size, 40, max(8, settings.draws // 16), generator, decay=0.8).mean(0)
        found[f"distance {size}"] = mean_distance(A, 4) / mean_distance(decayed(40, -math.log(0.8)), 4)
    return found


# Trained networks.


class Net(nn.Module):
    """t layers of one head without biases and residuals, the last token through three ReLU layers, 32 classes."""

    def __init__(self, width: int, layers: int, attention: str, mask: str) -> None:
        super().__init__()
        self.mask, self.mechanism = mask, zoo.get(attention)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.mlp = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(width, width), nn.ReLU())))
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        for qkv in self.qkv:
            x = self.mix(*(part[:, None] for part in qkv(x).chunk(3, -1)))[:, 0]
        return self.head(self.mlp(x[:, -1]))

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.mask == "decay":
            tokens = query.shape[-2]
            i, j = torch.arange(tokens, device=query.device)[:, None], torch.arange(tokens, device=query.device)
            bias = ((i - j) * math.log(0.8)).to(query.dtype).masked_fill(j > i, -math.inf)
            return F.scaled_dot_product_attention(query, key, value, bias)
        if self.mask == "rotary":
            query, key = rotated(query), rotated(key)
        scores = self.mechanism.scores  # at 17 tokens the map is cheaper than what scales
        assert scores is not None
        return scores(query, key, is_causal=self.mask != "none") @ value


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of (..., N, D), pairs of neighbouring channels."""
    tokens, width = x.shape[-2:]
    theta = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angle = torch.arange(tokens, device=x.device)[:, None] * theta
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


@dataclass(frozen=True)
class Prompts:
    """Eight (item, label) pairs of two classes, four of each, and an item of one of them: 17 tokens (B, 17, D)."""

    labels: Tensor  # (32, D), a vector for each label
    means: Tensor  # (K, D), and the label of each class
    of_class: Tensor

    @classmethod
    def drawn(cls, classes: int, width: int, generator: torch.Generator, labels: Tensor | None = None) -> Prompts:
        """Entries have standard deviation 1/D, as in the released script."""
        vectors = torch.randn(32, width, generator=generator) / width if labels is None else labels
        means = torch.randn(classes, width, generator=generator) / width
        return cls(vectors, means, torch.randint(0, 32, (classes,), generator=generator))

    def __call__(
        self, count: int, generator: torch.Generator, answer: int | None = None, decoy: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens, and the label of the query, which is of the class of pair `answer`; the very item of that pair also
        stands at `decoy`, with the label of what was there."""
        K, width = self.means.shape
        first = torch.randint(0, K, (count,), generator=generator)
        second = (first + torch.randint(1, K, (count,), generator=generator)) % K
        turn = torch.rand(count, 8, generator=generator).argsort(-1) % 2
        classes = torch.where(turn == 0, first[:, None], second[:, None])  # (B, 8)
        place = torch.randint(0, 8, (count,), generator=generator) if answer is None else torch.full((count,), answer)
        asked = classes.gather(1, place[:, None])[:, 0]
        noise = torch.randn(count, 9, width, generator=generator) / width
        items = (self.means[torch.cat([classes, asked[:, None]], 1)] + 0.75 * noise) / math.sqrt(1 + 0.75**2)
        if answer is not None and decoy is not None:
            items[:, decoy] = items[:, answer]
        pairs = torch.stack([items[:, :8], self.labels[self.of_class[classes]]], 2).flatten(1, 2)
        return torch.cat([pairs, items[:, 8:]], 1), self.of_class[asked]


def trained(settings: Settings, attention: str, mask: str, layers: int, seed: int, device: str) -> dict[str, Any]:
    """Accuracy, and the preference gap acc(answer at a, decoy at b) - acc(answer at b, decoy at a) of each pair."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    data = Prompts.drawn(settings.classes, settings.width, generator)
    net = Net(settings.width, layers, attention, mask).to(device)
    optimiser = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-6, fused=True)
    batches = ((part.to(device) for part in data(128, generator)) for _ in range(settings.steps))
    descend(optimiser, (F.cross_entropy(net(tokens), label) for tokens, label in batches), 1.0)
    new = Prompts.drawn(8 * settings.tests, settings.width, generator, data.labels)  # classes that were never seen

    @torch.no_grad()
    def accuracy(prompts: Prompts, answer: int | None = None, decoy: int | None = None) -> float:
        tokens, label = prompts(settings.tests, generator, answer, decoy)
        return (net(tokens.to(device)).argmax(-1) == label.to(device)).double().mean().item()

    found = {"accuracy": accuracy(data), "accuracy, new classes": accuracy(new)}
    for a, b in GAPS:
        found[f"gap {a} {b}"] = accuracy(new, PLACES[a], PLACES[b]) - accuracy(new, PLACES[b], PLACES[a])
    return found


def runs(settings: Settings) -> dict[str, tuple[str, str, int]]:
    """The trained networks by name: softmax under every mask, the other operators under the causal one; deeper than the
    shallowest only where depth is claimed to matter."""
    asked = [("softmax", mask) for mask in settings.masks]
    asked += [(name, "causal") for name in settings.attention if name != "softmax"]
    return {
        f"{TRAINED} {name}, {mask}, {t} layers": (name, mask, t)
        for (name, mask), t in product(asked, settings.layers)
        if t == settings.layers[0] or (name == "softmax" and mask in ("causal", "decay"))
    }


def plan(settings: Settings) -> list[str]:
    return ["exact", *settings.attention, *runs(settings)]


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    if configuration == "exact":
        return exact(settings, seed)
    if configuration.startswith(TRAINED):
        return trained(settings, *runs(settings)[configuration], seed, device)
    return operator(settings, configuration, seed)


def statements(settings: Settings) -> list[Statement]:
    exact: dict[str, Any] = {"exact": True}
    derived: dict[str, Any] = {"source": "derived"}
    said = [
        Statement(f"{name}: known masses, largest deviation", number("exact", f"{name} deviation"), most=6e-4, **exact)
        for name in KNOWN
    ]
    said += [
        Statement("uniform: eigenvalues 1, ..., 1/N, deviation", number("exact", "A1 eigenvalues"), most=1e-6, **exact),
        Statement("uniform: what is not at token 1, per layer", number("exact", "A1 ratio"), 0.4995, 0.501, **exact),
        Statement("decay: mode - (t-1)/(e^m - 1), largest", number("exact", "A5 modes"), most=1.5, **exact),
        Statement("random scores: mass from token j on above (1-(j-1)eps)^t", number("exact", "bound"), most=1e-12),
    ]
    for name in settings.attention:
        for size in settings.sizes:
            rate = predicted_rate(name, size)
            if rate is not None and 0.05 < rate:
                text = f"{name}, logits {size:g}: rate per layer, exp(E log |A_22|)"
                said.append(Statement(text, number(name, f"rate {size}"), 0.9 * rate, 1.1 * rate, "derived"))
        text = f"{name}: mean map of random inputs less uniform, in standard errors"
        said.append(Statement(text, number(name, "mean map 1.0"), most=1.2, **derived))
        text = f"{name}, decay 0.8, logits {{:g}}: mean distance over that without content"
        small, large = DECAYED
        said.append(Statement(text.format(small), number(name, f"distance {small}"), 0.95, 1.05, "derived"))
        if name == "cumulant2":  # its mean map does not depend on the logits
            said.append(Statement(text.format(large), number(name, f"distance {large}"), 0.9, 1.1, "derived"))
        elif name in ("softmax", "cumulant3"):  # the weight of heavy keys is bounded
            said.append(Statement(text.format(large), number(name, f"distance {large}"), 1.0, **derived))
    for name in settings.attention:
        if name.startswith(("cumulant2", "cumulant3")):
            rate_of = number(name, f"rate {settings.sizes[-1]}")
            text = f"{name}, logits {settings.sizes[-1]:g}: token 1 no longer absorbs, rate"
            said.append(Statement(text, rate_of, least=1.0, **derived))
    for configuration, (name, mask, _) in runs(settings).items():
        if mask == "causal":
            text = f"{configuration}: the first is preferred to the last by"
            source = "published" if name == "softmax" else "new"
            said.append(Statement(text, number(configuration, "gap first last"), least=0.0, source=source))
    shallow, deep = (f"{TRAINED} softmax, {{}}, {t} layers" for t in (settings.layers[0], settings.layers[-1]))
    for mask in ("causal", "decay"):
        text = f"softmax, {mask}: the preference for the first grows with depth"
        said.append(above(deep.format(mask), shallow.format(mask), "gap first last", text))
    none, decay = (number(shallow.format(mask), "gap first last") for mask in ("none", "decay"))
    return [
        *said,
        Statement("trained softmax without a mask: the first over the last", none, -0.03, 0.03),
        Statement("trained softmax, decay 0.8, shallow: the first over the last", decay, most=0.0),
    ]


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    def rated(name: str, size: float) -> str:
        rate = predicted_rate(name, size)
        return mean_of(seeds, name, f"rate {size}") + (f" ({rate:.3f})" if rate else "")

    layers, trained = (1, 2, 4, 8, 16, 32), {name.removeprefix(f"{TRAINED} "): name for name in runs(settings)}
    told = {"accuracy": "accuracy", "new classes": "accuracy, new classes"}
    told |= {f"{a} over {b}": f"gap {a} {b}" for a, b in GAPS}
    return [
        Table.grid("Mass of the first token (A3: of the prefix) in the last row", "map", [*KNOWN],
                   {f"t = {t}": t for t in layers}, lambda name, t: mean_of(seeds[:1], "exact", f"{name} {t}", 4)),
        Table.grid("Random maps: rate per layer at which content reaches the first token (derived)", "operator",
                   settings.attention, {f"logits {size:g}": size for size in settings.sizes}, rated),
        Table.grid("Decay 0.8, 4 layers: mean distance over that of a map without content", "operator",
                   settings.attention, {f"logits {size:g}": size for size in DECAYED},
                   lambda name, size: mean_of(seeds, name, f"distance {size}", 2)),
        Table.grid("Trained: preference gaps between places", "network", trained, told, partial(mean_of, seeds)),
    ]  # fmt: skip


@styled
def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """Rate against the size of the logits with its law, and which place each trained network prefers."""
    figure, axes = new_figure(1, 2, (8.6, 3.4))
    place, other = axes[0]
    fine = [settings.sizes[0] * (settings.sizes[-1] / settings.sizes[0]) ** (i / 40) for i in range(41)]
    for i, name in enumerate(settings.attention):
        ink = colour(name, i)
        points = [[one[name][f"rate {size}"] for one in seeds if name in one] for size in settings.sizes]
        if all(points):
            place.plot(settings.sizes, [mean(p) for p in points], mark(name), color=ink, label=name, markersize=5)
        if name in ("softmax", "cumulant2"):
            place.plot(fine, [predicted_rate(name, size) for size in fine], color=ink, linewidth=1.1)
    place.axhline(1, color=SOFT, linewidth=0.8, linestyle="--")
    place.annotate(
        "above: no longer absorbed", (settings.sizes[0], 1), (0, 3), textcoords="offset points", fontsize=7, color=SOFT
    )
    place.set_xscale("log", base=2)
    place.set_yscale("log", base=2)
    place.set(xlabel="standard deviation of the logits", ylabel="rate per layer", title="random maps; lines: the law")
    trained = runs(settings)
    for row, (configuration, (name, mask, _)) in enumerate(trained.items()):
        values = [one[configuration]["gap first last"] for one in seeds if configuration in one]
        if values:
            ink = colour(name, row)
            other.barh(row, mean(values), color=ink, alpha=0.75 if mask == "causal" else 0.35)
            other.plot(values, [row] * len(values), ".", color="black", markersize=3)
    other.axvline(0, color=SOFT, linewidth=0.8)
    labels = [f"{name}, {mask}, {layers} layers" for name, mask, layers in trained.values()]
    other.set_yticks(range(len(labels)), labels, fontsize=7)
    other.invert_yaxis()
    other.set(xlabel="the first preferred to the last by (accuracy)", title="trained; dots: seeds")
    place.legend(fontsize=7)
    return {"Position bias": figure}


STUDY = Study.of(
    __name__,
    name="position-bias",
    claim="causal masks move context to the first token with depth, exponentially; decay and depth trade off",
    paper="Wu et al., On the Emergence of Position Bias in Transformers, ICML 2025 (arXiv 2502.01951)",
    settings={"small": Settings(), "paper": Settings(layers=(2, 4, 6), seeds=5, steps=10000, tests=16000, draws=16384)},
    needs=("causal", "weights"),
    seconds={"two cores": 380, "an H200": 94},
)
