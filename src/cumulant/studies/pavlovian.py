"""Attention as an associative memory: how many pairs a head holds, by which criterion, for every operator.

A memory stores S = sum_i v_i k_i^T (keys: conditional stimuli, values: unconditional ones) and answers S q. An operator
of polynomial degree p in the query stores the moments of the keys up to degree p: its capacity is the number of
independent features of the keys among them, `features`; docs/studies/pavlovian.md derives it.

Shape legend: T trials, n pairs, d key width, e value width, H heads, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.memories import MOST, capacity, delta, features, hebb, mse, signs, slope, tail, unit, vote
from cumulant.studies.statements import Measured, Quantity, Statement, difference, number, quotient
from cumulant.style import INK, SOFT, colour, mark, new_figure, styled

RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0)  # n / d of experiment 1
ERRORS = {0.1: 0.0007, 0.185: 0.0092, 0.3: 0.0332, 0.5: 0.0778, 1.0: 0.1582}  # n / d of experiment 2, with its theory
ITEMS = (16, 32, 48, 64)
KNOWN = {"Hebb": (0.233, 0.484, 0.725, 1.004), "delta, one pass": (0.137, 0.289, 0.446, 0.596)}
VOTES = {  # (p, H) -> probability that a chain of 6, 12 and 24 layers succeeds
    (0.1, 1): (0.531, 0.282, 0.080),
    (0.1, 3): (0.843, 0.711, 0.506),
    (0.1, 5): (0.950, 0.902, 0.814),
    (0.2, 1): (0.262, 0.069, 0.005),
    (0.2, 5): (0.699, 0.489, 0.239),
}
MAPS: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "relu": F.relu, "elu+1": lambda x: F.elu(x) + 1}


@dataclass(frozen=True)
class Settings:
    """The recipe of the study."""

    attention: tuple[str, ...] = ("linear", "cumulant2", "cumulant3", "cumulant3+full", "cluster16", "softmax")
    widths: tuple[int, ...] = (32, 64, 256)
    holding: tuple[int, ...] = (8, 16, 32)  # key widths at which operators are filled
    trials: int = 8
    layers: int = 6
    budget: int = 60  # H d of the chains of memories, which hold three times as many symbols
    seeds: int = 5


# The experiments: each takes the settings and a generator, and gives numbers by name.


def fidelity(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """MSE = (n-1)/d_k, and how n - 1 at MSE = 1/2 grows with d_k."""
    found: dict[str, Any] = {}
    reached = []
    for width in settings.widths:
        errors = {}
        for ratio in RATIOS:
            n = max(2, round(ratio * width))
            key, value = (unit(settings.trials * 256 // width, n, e, generator=generator) for e in (width, 64))
            errors[n] = found[f"{width} {ratio}"] = mse(hebb(key, value), value)
            found[f"law {width} {ratio}"] = errors[n] / ((n - 1) / width)
        (n, low), (more, high) = list(errors.items())[2:4]  # around 1/2, between which it is a line
        reached.append(n - 1 + (0.5 - low) / (high - low) * (more - n))
    return {**found, "exponent": slope(settings.widths, reached)}


def bits(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """Errors of single bits at d_k = 256, beside Q(sqrt(d_k / (n-1)))."""
    found = {}
    for ratio in ERRORS:
        n = round(ratio * 256)
        key, value = (
            unit(settings.trials, n, 256, generator=generator),
            signs(settings.trials, n, 64, generator=generator),
        )
        found[f"error {ratio}"] = (hebb(key, value).sign() != value).double().mean().item()
        found[f"theory {ratio}"] = tail(math.sqrt(256 / (n - 1)))
    return found


def faultless(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """Pairs of which 99 % come back with all their d_k bits right."""
    widths, found = (16, 32, 64, 128, 256), {}
    for width in widths:
        before, n = 1.0, 2
        while True:
            trials = settings.trials * 25
            key, value = unit(trials, n, width, generator=generator), signs(trials, n, width, generator=generator)
            right = (hebb(key, value).sign() == value).all(-1).double().mean().item()
            if right < 0.99:
                break
            before, n = right, n + 1
        found[f"pairs {width}"] = n - 1 + (before - 0.99) / max(before - right, 1e-9)
    return {**found, "exponent": slope(widths, [found[f"pairs {width}"] for width in widths])}


def guaranteed(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """Pairs for which no values can flip a sign: (n-1) max |k_i . k_j| < 1."""
    widths, found = (16, 64, 256, 1024), {}
    for width in widths:
        key = unit(settings.trials * 4, 32, width, generator=generator)
        overlap = (key @ key.mT).abs() * (1 - torch.eye(32, dtype=key.dtype))
        worst = torch.stack([overlap[:, :n, :n].amax((-1, -2)) * (n - 1) for n in range(2, 33)])  # (31, T), rising in n
        found[f"pairs {width}"] = (1 + (worst < 1).sum(0)).double().mean().item()
    return {**found, "exponent": slope(widths, [found[f"pairs {width}"] for width in widths])}


def rules(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """Hebb, the delta rule, forgetting and softmax on the same pairs, d_k = 64."""
    found = {}
    for n in ITEMS:
        key, value = (unit(settings.trials * 4, n, 64, generator=generator) for _ in range(2))
        found[f"Hebb {n}"] = mse(hebb(key, value), value)
        found[f"delta, one pass {n}"] = mse(delta(key, value), value)
        if n == ITEMS[0]:
            found["delta, 50 passes 16"] = mse(delta(key, value, 50), value)
    age = 0.9 ** torch.arange(ITEMS[-1], dtype=torch.float64).flip(0)  # S <- 0.9 S + v k^T: the last item has 1
    old = (hebb(key, age[:, None] * value) - value).square().sum(-1).mean(0)
    found["forgetting, last 8"], found["forgetting, first 8"] = old[-8:].mean().item(), old[:8].mean().item()
    n = 1024
    key, value = (unit(1, n, 64, generator=generator) for _ in range(2))
    found["softmax 1024"] = mse((4 * math.log(n) * key @ key.mT).softmax(-1) @ value, value)
    return found


def chains(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """Symbols handed on by `layers` memories: one wide head against several narrow ones that vote, H d fixed; and
    several wide ones. Layer l maps code j to code j of the next layer; what a head answers is the nearest code."""
    found: dict[str, Any] = {}
    n, trials = 3 * settings.budget, settings.trials
    for heads, width in (
        (1, settings.budget),
        (3, settings.budget // 3),
        (5, settings.budget // 5),
        (3, settings.budget),
    ):
        said = torch.arange(n).expand(trials, n)  # the symbol that each of n chains holds
        wrong = torch.zeros(0, dtype=torch.float64)
        for _ in range(settings.layers):
            code, after = (unit(trials, heads, n, width, generator=generator) for _ in range(2))
            asked = code.gather(2, said[:, None, :, None].expand(trials, heads, n, width))
            nearest = ((asked @ (code.mT @ after)) @ after.mT).argmax(-1)  # (T, H, n)
            wrong = torch.cat([wrong, (nearest != said[:, None]).double().mean().view(1)])
            said = nearest.mode(1).values
        p = wrong.mean().item()
        name = f"{heads} heads of {width}"
        found[f"fails, {name}"] = p
        found[f"arrives, {name}"] = (said == torch.arange(n)).double().mean().item()
        found[f"formula, {name}"] = (1 - vote(p, heads)) ** settings.layers
    return found


def positive(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """Keys through a feature map, as they are and centred over the items, d_k = 64: MSE of Hebb's memory."""
    found = {}
    for n, (name, phi), shifted, centred in product((16, 32, 64, 128), MAPS.items(), (False, True), (False, True)):
        key = phi(torch.randn(settings.trials * 4, n, 64, generator=generator, dtype=torch.float64))
        value = torch.randn(settings.trials * 4, n, 64, generator=generator, dtype=torch.float64) + shifted
        if centred:
            key = key - key.mean(1, keepdim=True)
        key, value = F.normalize(key, dim=-1), F.normalize(value, dim=-1)
        words = name + ", centred" * centred + ", values shifted" * shifted
        found[f"{words} {n}"] = mse(hebb(key, value), value)
    return found


EXPERIMENTS: Mapping[str, Callable[[Settings, torch.Generator], dict[str, Any]]] = {
    "fidelity": fidelity,
    "bits": bits,
    "faultless": faultless,
    "guaranteed": guaranteed,
    "rules": rules,
    "chains": chains,
    "feature maps": positive,
}


def plan(settings: Settings) -> list[str]:
    return [*EXPERIMENTS, *settings.attention]


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    if configuration in EXPERIMENTS:
        return EXPERIMENTS[configuration](settings, generator)
    found: dict[str, Any] = {}
    for width in settings.holding:
        one = capacity(configuration, width, settings.trials, generator)
        found |= {f"{key} {width}": value for key, value in one.items()}
    found["exponent"] = slope(settings.holding, [found[f"capacity {width}"] for width in settings.holding])
    return found


def statements(settings: Settings) -> list[Statement]:
    def chain(what: str, heads: int, width: int) -> Quantity:
        return number("chains", f"{what}, {heads} heads of {width}")

    said = []
    for width, share in product(settings.widths, (0.5, 1.0, 2.0)):
        if width >= 64:
            text = f"MSE over (n-1)/d_k at d_k = {width}, n = {share} d_k"
            said.append(Statement(text, number("fidelity", f"law {width} {share}"), 0.95, 1.05, "derived"))
    said.append(Statement("pairs at a fixed MSE grow like d_k, exponent", number("fidelity", "exponent"), 0.97, 1.03))
    for share in (0.3, 0.5, 1.0):
        over = quotient(number("bits", f"error {share}"), number("bits", f"theory {share}"))
        said.append(Statement(f"bit errors at n = {share} d_k over Q(sqrt(d_k/(n-1)))", over, 0.9, 1.1, "derived"))
    for rule, known in KNOWN.items():
        text, lowest, highest = f"{rule}, 32 pairs at d_k = 64: MSE", 0.94 * known[1], 1.06 * known[1]
        said.append(Statement(text, number("rules", f"{rule} 32"), lowest, highest, "known"))
    older = difference(number("rules", "forgetting, first 8"), number("rules", "forgetting, last 8"))
    wide, most = settings.budget, settings.budget // 5
    split = difference(chain("arrives", 1, wide), chain("arrives", 5, most))
    voted = difference(chain("arrives", 3, wide), chain("arrives", 1, wide))
    alone = difference(chain("arrives", 1, wide), chain("formula", 1, wide))
    coherent = quotient(number("feature maps", "relu 64"), number("feature maps", "relu, centred 64"))
    said += [
        Statement("pairs without a wrong bit, exponent in d_k", number("faultless", "exponent"), 0.6, 1.0, "known"),
        Statement("pairs safe whatever the values, exponent in d_k", number("guaranteed", "exponent"), most=0.55),
        Statement("delta rule, many passes, n < d_k: MSE", number("rules", "delta, 50 passes 16"), most=1e-3),
        Statement("forgetting: the oldest pairs fare worse than the newest", older, least=0.0),
        Statement("softmax recalls 16 d_k pairs at b = 4 log n: MSE", number("rules", "softmax 1024"), most=0.01),
        Statement("one wide head beats five narrow ones of the same total width", split, least=0.0, source="known"),
        Statement("three heads that vote beat one of the same width each", voted, least=0.0),
        Statement("a chain of single heads succeeds with (1-p)^L", alone, -0.03, 0.03, "derived"),
        Statement("relu keys: MSE over that of centred ones, 64 pairs", coherent, least=5.0, source="known"),
        Statement("centred relu keys, 64 pairs: MSE", number("feature maps", "relu, centred 64"), 0.95, 1.08, "known"),
    ]
    for name, width in product(settings.attention, settings.holding):
        if (held := features(name, width)) is not None:
            text = f"{name} at d_k = {width}: capacity, its {held:.0f} features"
            said.append(Statement(text, number(name, f"capacity {width}"), 0.93 * held, 1.07 * held, "derived"))
    largest = max(settings.holding)
    more = quotient(number("softmax", f"capacity {largest}"), number("cumulant3+full", f"capacity {largest}"))
    text = f"best logit scale of the full third cumulant over d_k + 2, d_k = {largest}"
    return [
        *said,
        Statement(f"softmax holds more than the full third cumulant at d_k = {largest}, by", more, 1.0, source="new"),
        Statement(text, number("cumulant3+full", f"sharpness {largest}"), 0.7, 1.2, "derived"),
    ]


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    def mean(configuration: str, digits: int = 3) -> Callable[[Any, Any], str]:
        return lambda row, column: mean_of(seeds, configuration, f"{row} {column}", digits)

    def held(width: int, by: str) -> str:
        return by.format(width / 2 / math.log(width)) if "{" in by else mean_of(seeds, by, f"pairs {width}", 1)

    def capacity_of(name: str, key: str) -> str:
        if key == "exponent" or key.startswith("sharpness"):
            return mean_of(seeds, name, key, 2)
        law = features(name, int(key.split()[1]))
        return mean_of(seeds, name, key, 1) + ("" if law is None else f" ({law:.0f})")

    chain = next((one["chains"] for one in seeds if "chains" in one), {})
    names = [key.removeprefix("fails, ") for key in chain if key.startswith("fails")]
    told = {"one head fails": "fails", "arrives": "arrives", "binary majority": "formula"}
    maps = [n + c + s for n in MAPS for c in ("", ", centred") for s in ("", ", values shifted")]
    criteria = {"99 % without a wrong bit": "faultless", "d_k / (2 ln d_k)": "{:.1f}",
                "safe whatever the values": "guaranteed"}  # fmt: skip
    widest = f"sharpness {settings.holding[-1]}"
    asked = {f"d_k = {w}": f"capacity {w}" for w in settings.holding}
    asked |= {"exponent": "exponent", "best scale / (d_k + 2)": widest}
    votes = [[str(p), str(h), *(f"{(1 - vote(p, h)) ** layers:.3f}" for layers in (6, 12, 24))] for p, h in VOTES]
    pairs = {f"{n} pairs": n for n in ITEMS}
    more = {f"{n} pairs": n for n in (16, 32, 64, 128)}
    return [
        Table.grid("Average fidelity: MSE of S k_i", "d_k", settings.widths, {f"n = {r} d_k": r for r in RATIOS},
                   mean("fidelity")),
        Table.grid("Bit errors at d_k = 256", "n / d_k", [*ERRORS], {"measured": "error", "theory": "theory"},
                   lambda r, key: mean_of(seeds if key == "error" else seeds[:1], "bits", f"{key} {r}", 4)),
        Table.grid("Pairs held", "d_k", (16, 32, 64, 128, 256, 1024), criteria, held),
        Table.grid("Learning rules, d_k = 64: MSE", "rule", (*KNOWN, "delta, 50 passes"), pairs, mean("rules")),
        Table("Chain succeeds, majority of H heads that fail with p", ["p", "H", "6 layers", "12", "24"], votes),
        Table.grid(f"Real memories in a chain of {settings.layers}", "heads", names, told,
                   lambda n, key: mean_of(seeds, "chains", f"{key}, {n}")),
        Table.grid("Keys through a feature map, d_k = 64: MSE", "keys", maps, more, mean("feature maps", 2)),
        Table.grid("Capacity of operators: pairs at SNR 1 and the best scale (derived)", "operator",
                   settings.attention, asked, capacity_of),
    ]  # fmt: skip


@styled
def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """Capacity against d_k, with the derived laws as lines."""
    figure, axes = new_figure(1, 1, (5.4, 3.6))
    place = axes[0, 0]
    lines = [
        2 ** (x / 8)
        for x in range(int(8 * math.log2(min(settings.holding))), int(8 * math.log2(max(settings.holding))) + 1)
    ]
    for i, name in enumerate(settings.attention):
        points = [[one[name][f"capacity {w}"] for one in seeds if name in one] for w in settings.holding]
        if not all(points):
            continue
        beyond = any(one[name][f"beyond {w}"] for one in seeds if name in one for w in settings.holding)
        ink = "#6a4fd0" if "full" in name else colour(name, i)
        place.plot(
            settings.holding,
            [mean(p) for p in points],
            mark(name),
            color=ink,
            markersize=6,
            label=name + (f" ({MOST} and more)" if beyond else ""),
        )
        if features(name, 8) is not None:
            place.plot(lines, [features(name, w) for w in lines], color=ink, linewidth=1.2)
    place.set_xscale("log", base=2)
    place.set_yscale("log")
    place.set_xticks(settings.holding, [str(w) for w in settings.holding])
    place.set(xlabel="key width d_k", ylabel="pairs held at SNR 1")
    place.annotate(
        "lines: number of stored features", (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=8, color=SOFT
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, labelcolor=INK)
    return {"Capacity of operators": figure}


STUDY = Study.of(
    __name__,
    name="pavlovian",
    claim="a head stores O(d_k) pairs on average and O(sqrt(d_k)) without any error",
    paper="Qiao, Understanding Transformers through the Lens of Pavlovian Conditioning, 2025 (arXiv 2508.08289)",
    settings={"small": Settings(), "paper": Settings(holding=(8, 16, 32, 64), seeds=10, trials=16)},
    seconds={"two cores": 41, "an H200": 16},
)
