"""What one attention layer and a ReLU network approximate: with and without positions and attention, by operator.

Tokens are 8 numbers; targets are maps of all of them. What an operator without a denominator needs in place of the
published construction is derived in docs/studies/universal-approximation.md: `routed` and `projected` are those proofs
as programs.

Shape legend: B sequences, n tokens, D width, H heads, M anchors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant import zoo
from cumulant.attention import attention
from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.memories import slope
from cumulant.studies.statements import Measured, Quantity, Statement, number, quotient
from cumulant.style import colour, new_figure, styled
from cumulant.train.optimise import descend

TOKENS = 8
TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(-1, keepdim=True).expand_as(x),
    "prod": lambda x: 2 * x * x.mean(-1, keepdim=True),
    "reverse": lambda x: x.flip(-1),
    "sort": lambda x: x.sort(-1).values,
}
SIZES = {"small": (8, 1, 16), "medium": (16, 2, 64), "large": (32, 4, 256)}  # D, H, width of the ReLU network
HEADS = {"wide": (64, 4, 256), "many heads": (64, 8, 256)}  # as many channels a head as tokens, or more
KNOWN = {  # normalised mean squared error, seed 0, 3,000 steps
    "max": (0.019, 0.0014, 0.0006, 0.0001, 0.927),
    "prod": (0.0063, 0.0004, 0.0001, 0.0000, 0.894),
    "reverse": (0.0001, 0.0000, 0.0000, 0.854, 1.000),
    "sort": (0.042, 0.038, 0.028, 0.873, 0.203),
}
VARIANTS = ("small", "medium", "large", "no positions", "no attention")
ANCHORS = {8: 0.171, 16: 0.065, 32: 0.029, 64: 0.0135, 128: 0.0065}  # and the known sup errors, b = M^2
DEGREES = (1, 2, 4, 6, 8, 10)


@dataclass(frozen=True)
class Settings:
    """The recipe of the study."""

    attention: tuple[str, ...] = ("softmax", "linear", "cumulant2", "cumulant3", "cluster4")
    steps: int = 1000
    batch: int = 256
    tests: int = 4096
    clip: float = 1.0  # norm of gradients where operators are compared; the networks of KNOWN are not clipped
    seeds: int = 3


class Net(nn.Module):
    """Linear(1, D) and learned places, attention with a residual, a ReLU network to 1; no norms."""

    def __init__(
        self, size: tuple[int, int, int], attention: str | None, *, places: bool = True, layers: int = 1
    ) -> None:
        super().__init__()
        width, self.heads, hidden = size
        self.mechanism = None if attention is None else zoo.get(attention)
        self.embed = nn.Linear(1, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width)) if places else None
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.proj = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        ends = [width] * (layers - 1) + [1]
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, e)) for e in ends)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        h = h if self.places is None else h + self.places
        for qkv, proj, mlp in zip(self.qkv, self.proj, self.mlp, strict=True):
            if self.mechanism is not None:
                parts = (part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in qkv(h).chunk(3, -1))
                h = h + proj(self.mechanism(*parts).transpose(-2, -3).flatten(-2))
            out = mlp(h)
            h = h + out if out.shape[-1] > 1 else out
        return h[..., 0]


def numbers(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, TOKENS, generator=generator) * 2 - 1


def fitted(
    net: nn.Module, target: Callable[[Tensor], Tensor], settings: Settings, seed: int, device: str, clip: float | None
) -> dict[str, float]:
    """Trains on fresh sequences, and gives the normalised mean squared error and the largest one on new sequences."""
    generator, net = torch.Generator().manual_seed(seed + 1), net.to(device)
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.steps)
    batches = (numbers(settings.batch, generator).to(device) for _ in range(settings.steps))
    descend(optimiser, (F.mse_loss(net(x), target(x)) for x in batches), clip, rates)
    x = numbers(settings.tests, generator).to(device)
    with torch.no_grad():
        error = net(x) - target(x)
    return {"error": float(error.square().mean() / target(x).var()), "largest": float(error.abs().max())}


class Moments(nn.Module):
    """A ReLU network of a token and the first `order` moments of all: what cumulants of that order depend on where keys
    and values are affine in tokens without a place."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order
        self.mlp = nn.Sequential(
            nn.Linear(1 + order, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        moments = [x.mean(-1), *(centred.pow(p).mean(-1) for p in range(2, self.order + 1))]
        return self.mlp(torch.stack([x, *(m[:, None].expand_as(x) for m in moments)], -1))[..., 0]


# Constructions: weights that are written down, not trained.


def anchored(anchors: int, sharpness: float, attention: str = "softmax") -> float:
    """Sup error on [-1, 1] of sin(3x) from anchors c_m: keys (2 b c_m, -b c_m^2), values sin(3 c_m), queries (x, 1).

    Under softmax the score is -b (x - c_m)^2 less its part in x alone. Under order p + 1 the answer is a polynomial of
    degree p in x, whatever the keys, so that its error has a floor; the best gain of the query is taken for it."""
    centre = torch.linspace(-1, 1, anchors, dtype=torch.float64)
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    query = torch.stack([x, torch.ones_like(x)], -1)[None, None]
    key = torch.stack([2 * centre, -centre.square()], -1)[None, None]
    value = (3 * centre).sin()[None, None, :, None]
    scales = [sharpness] if attention == "softmax" else [0.05 * 1.2**i for i in range(40)]
    answers = (zoo.get(attention)(query, key, value, scale=scale)[0, 0, :, 0] for scale in scales)
    return min(float((answer - (3 * x).sin()).abs().max()) for answer in answers)


def projected(degree: int, anchors: int = 64) -> float:
    """Sup error of sin(3x) from second-order cumulant attention over anchors whose keys are the Legendre polynomials of
    degree 1 to `degree`, orthonormal over the anchors: cov(key, value) is then the least-squares fit."""
    centre, x = (torch.linspace(-1, 1, count, dtype=torch.float64) for count in (anchors, 2001))
    powers = torch.stack([centre**p for p in range(degree + 1)], -1)
    basis, triangle = torch.linalg.qr(powers)
    at_x = torch.stack([x**p for p in range(degree + 1)], -1) @ torch.linalg.inv(triangle)
    key, query = (math.sqrt(anchors) * features[:, 1:][None, None] for features in (basis, at_x))
    value = (3 * centre).sin()[None, None, :, None]
    out = attention(query, key, value, order=2, scale=1.0)[0, 0, :, 0]
    return float((out - (3 * x).sin()).abs().max())


def routed(x: Tensor, order: int = 2) -> Tensor:
    """The tokens x (B, n) at every position, (B, n, n), by n heads of cumulant attention: keys are the unit vectors of
    the places, head m asks with that of place m.

    Order 2 gives x_mean + (s/n)(x_m - x_mean), which is x_m at s = n; the third cumulant adds s^2 (n - 2)/(2 n^2) to
    the factor s/n, so that it is 1 for another s."""
    n = x.shape[-1]
    bend = 0.0 if order == 2 else (n - 2) / (2 * n * n)  # bend s^2 + s/n = 1
    scale = float(n) if bend == 0 else (math.sqrt(1 / n**2 + 4 * bend) - 1 / n) / (2 * bend)
    places = torch.eye(n, dtype=x.dtype).expand(x.shape[0], 1, n, n)  # a head's queries are the same at all positions
    heads = [
        attention(places[..., [m], :].expand(-1, -1, n, -1), places, x[:, None, :, None], order=order, scale=scale)
        for m in range(n)
    ]
    return torch.cat([head[:, 0] for head in heads], -1)


def constructed() -> dict[str, Any]:
    found: dict[str, Any] = {f"softmax {m}": anchored(m, m**2) for m in ANCHORS}
    found |= {f"softmax half {m}": anchored(m, m**2 / 2) for m in ANCHORS}
    found["exponent"] = slope(list(ANCHORS), [found[f"softmax {m}"] for m in ANCHORS])
    for name in ("cumulant2", "cumulant3+full"):
        found |= {f"{name} {m}": anchored(m, 0.0, name) for m in (8, 32, 128)}
    found |= {f"projected {degree}": projected(degree) for degree in DEGREES}
    x = numbers(16, torch.Generator().manual_seed(0)).double()
    found |= {f"routed {order}": float((routed(x, order) - x[:, None]).abs().max()) for order in (2, 3)}
    return found


def runs(settings: Settings) -> dict[str, tuple[str, Callable[[], nn.Module], float | None]]:
    """What is trained: by name a target, a network and the norm at which gradients are clipped."""
    found: dict[str, tuple[str, Callable[[], nn.Module], float | None]] = {}

    def add(target: str, words: str, make: Callable[[], nn.Module], clip: float | None = None) -> None:
        found[f"{target}, {words}"] = target, make, clip

    large = SIZES["large"]
    for target in TARGETS:
        for name, size in SIZES.items():
            add(target, name, partial(Net, size, "softmax"))
        add(target, "no positions", partial(Net, large, "softmax", places=False))
        add(target, "no attention", partial(Net, large, None))
    add("sort", "two layers", partial(Net, large, "softmax", layers=2))
    for name in settings.attention:
        for target in ("max", "prod", "reverse"):
            add(target, name, partial(Net, large, name), settings.clip)
        if name.startswith("cumulant"):
            for words, size in HEADS.items():
                add("max", f"{name}, {words}", partial(Net, size, name), settings.clip)
            add("max", f"{name}, no positions", partial(Net, large, name, places=False), settings.clip)
    for order in (2, 3):
        add("max", f"{order} moments", partial(Moments, order), settings.clip)
    return found


def plan(settings: Settings) -> list[str]:
    return ["construction", *runs(settings)]


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    if configuration == "construction":
        return constructed()
    target, make, clip = runs(settings)[configuration]
    torch.manual_seed(seed)
    return fitted(make(), TARGETS[target], settings, seed, device, clip)


def statements(settings: Settings) -> list[Statement]:
    def ratio(first: str, second: str, key: str = "error") -> Quantity:
        return quotient(number(first, key), number(second, key))

    def built(key: str) -> Quantity:
        return number("construction", key)

    floor = quotient(built("cumulant2 128"), built("cumulant2 8"))
    exact: dict[str, Any] = {"exact": True}
    derived: dict[str, Any] = {"source": "derived", "exact": True}
    said = [
        Statement(f"{m} anchors: sup error", built(f"softmax {m}"), 0.97 * known, 1.03 * known, "known", **exact)
        for m, known in ANCHORS.items()
    ]
    said.append(Statement("sup error falls like 1/M or faster, exponent", built("exponent"), most=-0.9, **exact))
    for target in ("max", "prod", "reverse"):
        fall = ratio(f"{target}, small", f"{target}, large", "largest")
        said.append(Statement(f"{target}: sup error falls from small to large, by", fall, least=2.0))
    said += [
        Statement("reverse without positions: the floor 6/7", number("reverse, no positions", "error"), 0.84, 0.87),
        Statement("sort without positions has a floor", number("sort, no positions", "error"), least=0.8),
        Statement("max without attention has a floor", number("max, no attention", "error"), least=0.85),
        Statement("reverse without attention has a floor", number("reverse, no attention", "error"), least=0.98),
        Statement("sort: a second layer divides the error by", ratio("sort, large", "sort, two layers"), 3.0),
        Statement("order 2 asked by (x, 1): error of 128 anchors over that of 8", floor, 0.8, 1.2, **derived),
        Statement("order 2, Legendre keys to degree 10: sup error", built("projected 10"), most=1e-3, **derived),
    ]
    for order in (2, 3):
        text = f"order {order}: n heads route all n tokens, largest error"
        said.append(Statement(text, built(f"routed {order}"), most=1e-9, **derived))
    for name in settings.attention:
        if name.startswith("cumulant"):
            more = ratio(f"max, {name}, wide", f"max, {name}, many heads")
            said.append(
                Statement(f"{name}, max: 8 heads instead of 4 divide the error by", more, 2.0, source="derived")
            )
            moments = ratio(f"max, {name}, no positions", f"max, {name[8]} moments")
            text = f"{name}, max without positions: error over that of a network of its moments"
            said.append(Statement(text, moments, 0.8, 1.5, "derived"))
        if name != "softmax":
            source = "known" if name in ("linear", "cumulant2") else "new"
            over = ratio(f"max, {name}", "max, softmax")
            said.append(Statement(f"max tells {name} from softmax: error over softmax's", over, 1.0, source=source))
    return said


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    def cell(name: str, key: str = "") -> str:
        return f"{mean_of(seeds, name, 'error', 4)}; {mean_of(seeds, name, 'largest', 2)}"

    def built(name: str, key: Any, digits: int = 4) -> str:
        return mean_of(seeds[:1], "construction", f"{name} {key}", digits)

    cumulants = [name for name in settings.attention if name.startswith("cumulant")]
    more = {f"{name}, {word}": f"max, {name}, {word}"
            for name in cumulants for word in ("many heads", "wide", "no positions")}  # fmt: skip
    more |= {f"network of {order} moments": f"max, {order} moments" for order in (2, 3)}
    anchored = {f"{name}, M anchors": name for name in ("softmax", "cumulant2", "cumulant3+full")}
    return [
        Table.grid("Normalised MSE; sup error", "target", [*TARGETS], (*VARIANTS, "two layers"),
                   lambda target, variant: cell(f"{target}, {variant}")),
        Table.grid("By operator, large, with positions, gradients clipped", "operator", settings.attention,
                   ("max", "prod", "reverse"),
                   lambda name, target: cell(f"{target}, {name}")),
        Table.grid("max: what it takes without a denominator", "network", more, ["error; sup"], cell),
        Table.grid("Sup error of sin(3x), nothing trained", "construction", anchored, {f"M = {m}": m for m in ANCHORS},
                   built),
        Table.grid("Order 2 over Legendre keys", "degree", DEGREES, ["sup error"],
                   lambda degree, _: built("projected", degree, 6)),
    ]  # fmt: skip


@styled
def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """The constructions against their size, and the error of max by operator and heads."""
    figure, axes = new_figure(1, 2, (8.6, 3.2), width_ratios=[1, 1.2])
    place, other = axes[0]
    built = seeds[0]["construction"]
    place.loglog(
        list(ANCHORS),
        [built[f"softmax {m}"] for m in ANCHORS],
        "o-",
        color=colour("softmax"),
        label="softmax, M anchors",
    )
    for name in ("cumulant2", "cumulant3+full"):
        place.loglog(
            [8, 32, 128],
            [built[f"{name} {m}"] for m in (8, 32, 128)],
            "s--",
            color="#6a4fd0" if "full" in name else colour(name),
            label=f"{name}, M anchors",
        )
    place.loglog(
        DEGREES,
        [built[f"projected {d}"] for d in DEGREES],
        "D-",
        color=colour("cumulant2"),
        label="cumulant2, M Legendre keys",
    )
    place.set(xlabel="M", ylabel="sup error of sin(3x)", title="constructions")
    place.legend(fontsize=7, loc="lower right")
    place.set_xlim(right=3000)
    bars = [(n, f"max, {n}") for n in settings.attention]
    bars += [
        (f"{n}, {w}", f"max, {n}, {w}")
        for n in settings.attention
        if n.startswith("cumulant")
        for w in ("wide", "many heads", "no positions")
    ]
    there = [(label, [one[key]["error"] for one in seeds if key in one]) for label, key in bars]
    there = [(label, found) for label, found in there if found]
    for y, (label, found) in enumerate(there):
        other.barh(y, mean(found), color=colour(label, y), height=0.65)
        other.plot(found, [y] * len(found), ".", color="#222222", markersize=3)
    other.set_yticks(range(len(there)), [label for label, _ in there], fontsize=8)
    other.invert_yaxis()
    other.set_xscale("log")
    other.set(xlabel="normalised MSE", title="max of 8 numbers")
    return {"Universal approximation": figure}


STUDY = Study.of(
    __name__,
    name="universal-approximation",
    claim="one attention layer and a ReLU network approximate any continuous map of sequences",
    paper="Gumaan, Universal Approximation Theorem for a Single-Layer Transformer, 2025 (arXiv 2507.10581)",
    settings={"small": Settings(), "paper": Settings(steps=3000, seeds=5)},
    needs=("noncausal",),
    seconds={"two cores": 851},
)
