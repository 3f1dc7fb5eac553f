"""What one attention layer with frozen random scores learns: targets by degree, against an MLP, for every operator.

Features of head m: F_m = sum_i a(xt_0^T W_m xt_i) xt_i with xt = (x, 1) and frozen W_m; only a linear read-out of all
heads is fitted, by ridge regression, without an intercept: the prediction is sum_m v_m . F_m alone ("BRFA, centred" has
one: features and targets less their means). Points are uniform on the sphere of R^d: a query x_0, keys x_1..x_N.

Shape legend: B prompts, N keys, d width, M heads, n training prompts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cumulant import zoo
from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.statements import Measured, Statement, above, number, ratio
from cumulant.style import new_figure

TARGETS = (*(f"f1 p={p}" for p in (1, 2, 3)), *(f"f2 p={p}" for p in (1, 2, 3, 4)), "f3", "f4")
BASES = ("RFA", "BRFA", "RFMLP")
CENTRED = "BRFA, centred"  # what an intercept changes
TEST = 500
RIDGES = tuple(10.0**power for power in range(-6, 0))
SPREAD = 0.25  # standard deviation of the entries of W


@dataclass(frozen=True)
class Settings:
    """The recipe of the study."""

    width: int = 8
    keys: int = 8
    heads: int = 300
    samples: tuple[int, ...] = (256, 1024, 2048)
    wide: int = 16  # the second problem: as many keys
    wide_heads: int = 400
    wide_samples: tuple[int, ...] = (64, 256, 1024, 2048)
    sweep: tuple[int, ...] = (10, 30, 100, 300, 600)  # heads, for RFA on f1 p=2
    attention: tuple[str, ...] = ("softmax", "linear", "cumulant2", "cumulant3", "cumulant3+full", "cluster4")
    centred: bool = False  # an intercept for all: features and targets less their means
    seeds: int = 3


def prompts(count: int, keys: int, width: int, seed: int) -> Tensor:
    """(count, 1 + keys, width) on the unit sphere, the query first."""
    x = torch.randn(count, 1 + keys, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


def with_one(x: Tensor) -> Tensor:
    """xt = (x, 1)."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


def targets(x: Tensor) -> dict[str, Tensor]:
    """Averages over the keys of powers of beta.x_i (f1) and of <x_0, x_i> (f2), and mixtures; each is (B,)."""
    width = x.shape[-1]
    beta = torch.full((width,), width**-0.5, dtype=x.dtype)
    along, with_query = (width**0.5 * x[:, 1:] @ beta), width**0.5 * (x[:, 1:] @ x[:, 0, :, None]).squeeze(-1)
    found = {f"f1 p={p}": along**p for p in (1, 2, 3)} | {f"f2 p={p}": with_query**p for p in (1, 2, 3, 4)}
    found["f3"] = with_query**2 * along
    centred = x[:, 1:] - x[:, 1:].mean(1, keepdim=True)
    # What the second cumulant holds: the query's product with the covariance of the keys.
    found["f4"] = width * (centred @ x[:, 0, :, None]).squeeze(-1) * (centred @ beta)
    return {name: values.mean(1) for name, values in found.items()}


def features(name: str, x: Tensor, heads: int, seed: int) -> Tensor:
    """(B, M (d + 1)): of RFA, BRFA, RFMLP, or of a mechanism of the zoo with the same frozen W, scale 1."""
    generator = torch.Generator().manual_seed(7919 + seed)
    size = x.shape[-1] + 1
    if name == "RFMLP":
        flat = torch.cat([x.flatten(1), x.new_ones(len(x), 1)], 1)
        weights = torch.randn(flat.shape[1], heads * size, generator=generator, dtype=x.dtype) * x.shape[1] ** -0.5
        return (flat @ weights).relu()
    tokens = with_one(x)
    weights = SPREAD * torch.randn(heads, size, size, generator=generator, dtype=x.dtype)
    if name == "BRFA":
        weights = weights + torch.diag(torch.tensor([1.0] * (size - 1) + [0.0], dtype=x.dtype))
    query = torch.einsum("bd,mde->bme", tokens[:, 0], weights)
    keys = tokens[:, 1:]
    if name in BASES:
        scores = torch.einsum("bme,bne->bmn", query, keys).relu() / keys.shape[1]
        return torch.einsum("bmn,bne->bme", scores, keys).flatten(1)
    spread = keys[:, None].expand(-1, heads, -1, -1)
    return zoo.get(name)(query[:, :, None], spread, spread, scale=1.0).flatten(1)


def errors(
    inputs: Tensor, values: dict[str, Tensor], samples: Sequence[int], intercept: bool = False
) -> dict[str, float]:
    """Normalised test error of ridge regression by target and number of samples; the ridge is picked on held-out data.
    With an intercept features and targets are taken less their means in training.

    `inputs` (n + 2 TEST, P): training prompts first, then validation, then test. In the dual: one eigenproblem for
    each number of samples.
    """
    found: dict[str, float] = {}
    names = list(values)
    every = torch.stack([values[name] for name in names], 1)
    held, test = inputs[-2 * TEST : -TEST], inputs[-TEST:]
    for count in samples:
        train, y = inputs[:count], every[:count]
        centre, mean = train.mean(0) * intercept, y.mean(0) * intercept
        kernel = (train - centre) @ (train - centre).T
        roots, vectors = torch.linalg.eigh(kernel)
        turned = vectors.T @ (y - mean)
        across = [((part - centre) @ (train - centre).T) @ vectors for part in (held, test)]
        best: dict[str, tuple[float, float]] = {}
        for ridge in RIDGES:
            alpha = turned / (roots.clamp(min=0) + ridge * roots.mean())[:, None]
            tries = [part @ alpha + mean for part in across]
            for i, name in enumerate(names):
                missed = [
                    float((said[:, i] - truth[:, i]).square().mean() / truth[:, i].var())
                    for said, truth in zip(tries, (every[-2 * TEST : -TEST], every[-TEST:]), strict=True)
                ]
                best[name] = min(best.get(name, (float("inf"), 0.0)), (missed[0], missed[1]))
        found |= {f"{name} n={count}": best[name][1] for name in names}
    return found


def plan(settings: Settings) -> list[str]:
    return [*BASES, CENTRED, *settings.attention]


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    """Errors of both problems; of RFA also against the number of heads, and what a permutation of the keys changes."""
    found: dict[str, Any] = {}
    intercept = settings.centred or configuration == CENTRED
    configuration = configuration.removesuffix(", centred")

    def problem(
        width: int, keys: int, heads: int, samples: Sequence[int], only: Sequence[str] = ()
    ) -> dict[str, float]:
        x = prompts(max(samples) + 2 * TEST, keys, width, seed)
        values = {name: y for name, y in targets(x).items() if not only or name in only}
        own = features(configuration, x, heads, seed).to(device)
        return errors(own, {name: y.to(device) for name, y in values.items()}, samples, intercept)

    found |= problem(settings.width, settings.keys, settings.heads, settings.samples)
    if configuration in BASES:
        wide = problem(settings.wide, settings.wide, settings.wide_heads, settings.wide_samples, ("f1 p=1", "f2 p=1"))
        found |= {f"wide {key}": value for key, value in wide.items()}
    if configuration == "RFA":
        for heads in settings.sweep:
            one = problem(settings.width, settings.keys, heads, settings.samples[1:2], ("f1 p=2",))
            found[f"heads={heads}"] = next(iter(one.values()))
    x = prompts(64, settings.keys, settings.width, seed)
    shuffled = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
    before, after = (features(configuration, one, 20, seed) for one in (x, shuffled))
    found["permuted"] = float((before - after).norm() / before.norm())
    found["rank"] = span(configuration, seed)
    return found


def span(name: str, seed: int, width: int = 3, keys: int = 7) -> int:
    """How many independent functions all heads together can express: rank of very many heads' features on many
    prompts, at width 3. Of cumulant attention it stays finite however many heads there are, see `dimensions`."""
    matrix = features(name, prompts(700, keys, width, seed), 150, seed)
    roots = torch.linalg.svdvals(matrix)
    return int((roots > 1e-10 * roots[0]).sum())


def dimensions(name: str, width: int) -> int:
    """The rank by counting: 1 and the mean (d), the query with 1 times the covariance, and for the third order
    quadratics of the query times the third cumulant, all of it or the d^2 entries with two equal indices.

    Quadratics of (x_0, 1) on the unit sphere: (d + 1)(d + 2) / 2 - 1, since |x_0|^2 is the constant. The constant
    channel of the values adds only 1 itself: centred weights sum to 0.
    """
    linear, pairs = width + 1, width * (width + 1) // 2
    quadratic = linear * (linear + 1) // 2 - 1
    triples = width * (width + 1) * (width + 2) // 6 if "full" in name else width**2
    return 1 + width + linear * pairs + (quadratic * triples if name.startswith("cumulant3") else 0)


def statements(settings: Settings) -> list[Statement]:
    last, middle = settings.samples[-1], settings.samples[1]

    def less(first: str, second: str, key: str, by: float = 0.0, source: str = "known") -> Statement:
        return above(second, first, key, f"error of {second} less that of {first}, {key}", by=by, source=source)

    steps = list(itertools.pairwise(settings.sweep))
    found = [less("RFA", "RFMLP", f"{name} n={last}") for name in ("f1 p=2", "f1 p=3", "f2 p=1", "f2 p=3", "f3")]
    key, wide = f"f1 p=2 n={last}", f"wide f1 p=1 n={settings.wide_samples[-2]}"
    found += [
        Statement(f"RFMLP over RFA, {key}", ratio("RFMLP", "RFA", key), least=20, source="known"),
        Statement(f"RFMLP over RFA, {wide}", ratio("RFMLP", "RFA", wide), least=5, source="known"),
        *(less("BRFA", "RFA", f"f2 p={p} n={last}", 0.2) for p in (2, 4)),
        less("RFA", "BRFA", wide),
        less("RFA", "BRFA", f"f2 p=1 n={last}"),
        *(less(CENTRED, "BRFA", f"f2 p={p} n={last}", source="new") for p in (1, 2, 3, 4)),
        Statement("permuting the keys changes RFA's features by", number("RFA", "permuted"), most=1e-12, exact=True),
        Statement("permuting the keys changes RFMLP's features by", number("RFMLP", "permuted"), least=0.1, exact=True),
        Statement(
            f"least fall of the error from one number of heads to the next, {settings.sweep}",
            lambda of: min(of["RFA"][f"heads={a}"] - of["RFA"][f"heads={b}"] for a, b in steps),
            least=0,
            source="known",
        ),
    ]
    for name in ("cumulant2", "cumulant3", "cumulant3+full"):
        count, text = dimensions(name, 3), f"all heads of {name} together express so many functions at d=3"
        found.append(Statement(text, number(name, "rank"), count - 0.5, count + 0.5, "derived", exact=True))
    found += [
        Statement(f"cumulant2 cannot express {key}", number("cumulant2", key), least=0.9, source="derived")
        for key in (f"f2 p={p} n={last}" for p in (1, 2, 3, 4))
    ]
    own = f"f4 n={last}"
    found += [
        Statement(f"cumulant2 expresses {own}", number("cumulant2", own), most=0.01, source="derived"),
        less("cumulant3+full", "cumulant2", f"f3 n={last}", source="new"),
        less("cumulant2", "softmax", f"f4 n={middle}", source="new"),
        less("softmax", "cumulant2", f"f2 p=1 n={last}", source="new"),
    ]
    return found


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    names, centred = plan(settings), (*BASES, CENTRED)
    keys = [f"{name} n={count}" for name in TARGETS for count in settings.samples]
    wide = {key: f"wide {key}" for key in
            (f"{name} n={count}" for name in ("f1 p=1", "f2 p=1") for count in settings.wide_samples)}  # fmt: skip
    heads = [f"heads={count}" for count in settings.sweep]

    def mean(key: str, name: str, digits: int = 3) -> str:
        return mean_of(seeds, name, key, digits)

    def enough(target: str, name: str) -> str:
        """The first number of samples with a mean error below 1/2."""
        for count in settings.samples:
            values = [one[name][f"{target} n={count}"] for one in seeds if name in one]
            if values and statistics.mean(values) < 0.5:
                return f"{count:,}"
        return f"more than {settings.samples[-1]:,}"

    size = f"d = {settings.width}, {settings.keys} keys, {settings.heads} heads"
    larger = f"d = {settings.wide}, {settings.wide} keys, {settings.wide_heads} heads"
    rank = "Independent functions of all heads together, d = 3"
    return [
        Table.grid(f"Normalised test error, {size}", "target", keys, names, mean),
        Table.grid(f"The same, {larger}", "target", wide, centred, mean),
        Table.grid("Samples after which the error is below 1/2", "target", TARGETS, names, enough),
        Table.grid("RFA on f1 p=2 against the number of heads", "", heads, {"error": "RFA"}, mean),
        Table.grid(rank, "", ["rank"], names, partial(mean, digits=0)),
    ]


def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """Error by target for every operator at the largest number of samples, a row each."""
    names, last = [name for name in plan(settings) if name in seeds[0]], settings.samples[-1]
    grid = [[statistics.mean(one[name][f"{key} n={last}"] for one in seeds) for key in TARGETS] for name in names]
    figure, axes = new_figure(1, 1, (7.5, 0.42 * len(names) + 1.2))
    axis = axes[0, 0]
    axis.imshow([[min(cell, 1.0) for cell in row] for row in grid], cmap="cividis_r", vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(grid):
        for j, cell in enumerate(row):
            axis.text(j, i, f"{cell:.2f}", ha="center", va="center", color="white" if cell > 0.5 else "black")
    axis.set_xticks(range(len(TARGETS)), TARGETS)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("f1: powers of β·x   f2: powers of <x0, x>   f3: <x0, x>² β·x   f4: x0 with the covariance of x")
    return {f"Test error at n = {last} (1: the mean predicts as well)": figure}


STUDY = Study.of(
    __name__,
    name="random-features",
    claim="One attention layer with frozen random scores learns permutation-invariant targets from far fewer samples "
    "than a random-feature MLP; a non-zero mean of the scores helps for even powers of the correlation.",
    paper="Fu et al., What can a Single Attention Layer Learn?, NeurIPS 2023",
    settings={"small": Settings(), "paper": Settings(seeds=10)},
    needs=("cross",),
    seconds={"two cores": 226, "an H200": 173},
)
