"""In-context linear regression: what heads learn, which attention needs how many of them, and how close theory comes.

A prompt is L examples z = (x, y) with y = beta.x + noise, and a query (x_q, 0); one attention layer without residual
answers yhat = sum_h O_h V_h Z a(K_h Z, Q_h z_q). Its heads are read as KQ_h = K_h^T Q_h / sqrt(d + 1), OV_h = O_h V_h.

Shape legend: B prompts, H heads, L examples, d width of x, D = d + 1.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cumulant.studies.measuring import Study, Table, mean_of
from cumulant.studies.prompts import (
    RAW,
    Settings,
    attend,
    best_eta,
    best_ideal,
    debiased_risk,
    gradient_step,
    ideal_heads,
    prompts,
    ridge,
    risks,
    step_risk,
)
from cumulant.studies.statements import Measured, Quantity, Statement, difference, number
from cumulant.style import SOFT, colour, mark, new_figure
from cumulant.train.optimise import descend as descend_along


class Heads(torch.nn.Module):
    """The layer: full-width heads without biases, initialised as `nn.Linear` is."""

    K: Tensor
    Q: Tensor
    V: Tensor
    out: Tensor

    def __init__(self, name: str, heads: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.name = name
        shapes = {"K": (heads, size, size), "Q": (heads, size, size), "V": (heads, size, size), "out": (heads, 1, size)}
        for part, shape in shapes.items():
            start = torch.rand(shape, generator=generator, device=generator.device)
            self.register_parameter(part, torch.nn.Parameter((2 * start - 1) * size**-0.5))

    def forward(self, examples: Tensor, query: Tensor) -> Tensor:
        return self.each(examples, query).sum(1)

    def each(self, examples: Tensor, query: Tensor) -> Tensor:
        """What every head says, (B, H)."""
        rows = examples[:, None]
        query, key, value = query[:, None, None] @ self.Q.mT, rows @ self.K.mT, rows @ (self.out @ self.V).mT
        return attend(self.name, query, key, value, self.scale).flatten(1)

    def part(self, number: int, heads: int) -> Heads:
        """The heads of one group alone."""
        made = Heads(self.name, heads, self.Q.shape[-1], torch.Generator(self.Q.device))
        for own, other in zip(made.parameters(), self.parameters(), strict=True):
            own.data.copy_(other.data[number * heads : (number + 1) * heads])
        return made

    @property
    def scale(self) -> float:
        return self.Q.shape[-1] ** -0.5

    def read(self) -> tuple[Tensor, Tensor]:
        """KQ (H, D, D), rows of the key, and OV (H, D)."""
        with torch.no_grad():
            return self.K.mT @ self.Q * self.scale, (self.out @ self.V).squeeze(1)


def train(settings: Settings, name: str, heads: int, seed: int, device: str) -> tuple[Heads, dict[str, Any]]:
    """Adam on fresh prompts at every step; and what became of the starts of several heads.

    Two heads that take the same sign at first stay at the risk of one head for long. So several are begun, and the one
    with the least error after the trial goes on.
    """
    generator = torch.Generator(device).manual_seed(seed)
    many = settings.starts if heads > 1 else 1
    model, found = Heads(name, many * heads, settings.width + 1, generator), {}
    if many > 1:
        error = descend(settings, model, heads, settings.trial, settings.lr, generator)
        w = model.read()[0][:, :-1, :-1].diagonal(dim1=-2, dim2=-1).mean(-1).unflatten(0, (many, heads))
        both = (w.amax(1) > 0) & (w.amin(1) < 0)
        found = {"starts of both signs": both.float().mean().item()}
        model = model.part(int(error.argmin()), heads)
    descend(settings, model, heads, settings.steps, settings.last_lr, generator)
    return model, found


def descend(
    settings: Settings, model: Heads, heads: int, steps: int, last_lr: float, generator: torch.Generator
) -> Tensor:
    """Train so many steps, groups of `heads` each by itself; their mean error over the last fifth."""
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, last_lr)
    total: list[Tensor] = []

    def error() -> Tensor:
        examples, query, label = prompts(settings, settings.batch, settings.examples, generator)
        errors = (model.each(examples, query).unflatten(1, (-1, heads)).sum(-1) - label[:, None]).square().mean(0)
        total.append(errors.detach())
        return errors.sum()

    descend_along(optimiser, (error() for _ in range(steps)), schedule=schedule)
    return sum(total[math.ceil(0.8 * steps) :], torch.zeros((), device=generator.device))


def head_counts(name: str) -> tuple[int, ...]:
    """How many heads are tried: what takes longest alone is not tried in pairs."""
    if name == "softmax":
        return 1, 2, 4
    return (1,) if "+" in name or name.startswith("cluster") else (1, 2)


def plan(settings: Settings) -> list[str]:
    names = [f"{name}, {count} heads" for name in settings.attention for count in head_counts(name)]
    return ["references", *names, f"{RAW}, 1 heads", *(f"{name}, ideal" for name in settings.attention)]


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    if configuration == "references":
        return references(settings, device, seed)
    name, what = configuration.rsplit(", ", 1)
    if what == "ideal":
        return ideals(settings, name, device, seed)
    model, found = train(settings, name, int(what.split()[0]), seed, device)
    found |= risks(settings, model, device, seed)
    found |= structure(*model.read())
    if name == RAW:
        fixed = risks(settings, lambda z, q: model(z, q) * z.shape[1] / settings.examples, device, seed)
        found |= {f"fixed {key}": value for key, value in fixed.items()}
    found |= likeness(settings, name, found["w"], found["m"], device, seed)
    return found


def references(settings: Settings, device: str, seed: int) -> dict[str, Any]:
    found = {"ridge": risks(settings, ridge(settings), device, seed)}
    for debiased in (False, True):
        eta = best_eta(settings, debiased)
        found["debiased step" if debiased else "step"] = risks(settings, gradient_step(eta, debiased), device, seed)
    return {f"{name} {key}": value for name, each in found.items() for key, value in each.items()}


def ideals(settings: Settings, name: str, device: str, seed: int) -> dict[str, Any]:
    """The best single head and the best pair, and how far the pair is from a debiased gradient step at its own step."""
    found: dict[str, Any] = {}
    for kind, pair in (("one", False), ("pair", True)):
        risk, w, m = best_ideal(settings, name, pair, device, seed)
        found |= {f"{kind} risk": risk, f"{kind} w": w, f"{kind} m": m}
    generator = torch.Generator(device).manual_seed(seed)
    examples, query, _ = (x.double() for x in prompts(settings, 500, settings.examples, generator))
    w, m = 0.5, 0.7
    difference = ideal_heads(name, (w, -w), (m, -m))(examples, query) - gradient_step(2 * w * m, True)(examples, query)
    return {**found, "pair from debiased step": float(difference.abs().max())}


def structure(kq: Tensor, ov: Tensor) -> dict[str, Any]:
    """Whether heads read as the theory says: KQ diagonal on x and nothing on y, OV on y alone, signs in pairs."""
    inner = kq[:, :-1, :-1]
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    w, m = diagonal.mean(-1), ov[:, -1]
    off = (inner - torch.diag_embed(diagonal)).abs().amax((-2, -1))
    label = kq[:, -1, :-1].abs().amax(-1)  # the column of the query's label, which is always 0, has no gradient
    return {
        "w": w.tolist(), "m": m.tolist(), "product": float((w * m).sum()),
        "off-diagonal": float((off / w.abs()).max()), "label of KQ": float(label.max()),
        "x of OV": float((ov[:, :-1].abs().amax(-1) / m.abs()).max()),
        "sum of OV": float(m.sum().abs() / m.abs().max()),
    }  # fmt: skip


def likeness(
    settings: Settings, name: str, w: Sequence[float], m: Sequence[float], device: str, seed: int
) -> dict[str, float]:
    """Correlation of ideal heads at the learned weights with a debiased and a plain gradient step, on fresh prompts."""
    examples, query, _ = prompts(settings, 5000, settings.examples, torch.Generator(device).manual_seed(55 + seed))
    if name == RAW:
        return {}
    own = ideal_heads(name, w, m)(examples, query)
    found = {}
    for debiased in (True, False):
        other = gradient_step(1.0, debiased)(examples, query)
        found["like debiased" if debiased else "like plain"] = float(torch.corrcoef(torch.stack([own, other]))[0, 1])
    return found


def statements(settings: Settings) -> list[Statement]:
    at = f"L={settings.examples}"
    lengths = [f"L={length}" for length in settings.lengths]

    def ratio(first: str, second: str, key: str = at, other: str = "") -> Quantity:
        return lambda of: of[first][key] / of[second][other or key]

    def known(text: str, quantity: Quantity, least: float = -math.inf, most: float = math.inf) -> Statement:
        return Statement(text, quantity, least, most, "known")

    def falls(name: str) -> Quantity:
        return lambda of: max(of[name][b] / of[name][a] for a, b in itertools.pairwise(lengths))

    def worst(name: str, theory: dict[str, float]) -> Quantity:
        return lambda of: max(abs(of[name][key] / risk - 1) for key, risk in theory.items())

    one, two, four = (f"softmax, {count} heads" for count in (1, 2, 4))
    raw, far = f"{RAW}, 1 heads", f"L={2 * settings.examples}"
    best, like = step_risk(settings, settings.examples, best_eta(settings, False)), number(two, "like debiased")
    found = [
        known(f"risk of 2 softmax heads at {at}", number(two, at), 0.243 * 0.95, 0.243 * 1.05),
        known(f"risk of 1 softmax head over that of 2 at {at}", ratio(one, two), least=1.5),
        known(f"risk of 4 softmax heads over that of 2 at {at}", ratio(four, two), 0.97, 1.03),
        known("off-diagonal of KQ over its diagonal, 1 head", number(one, "off-diagonal"), most=0.05),
        known("off-diagonal of KQ over its diagonal, 2 heads", number(two, "off-diagonal"), most=0.05),
        known("label row of KQ, 2 heads", number(two, "label of KQ"), most=0.02),
        known("OV on x over OV on y, 2 heads", number(two, "x of OV"), most=0.02),
        known("sum of OV over its largest, 2 heads: a +/- pair", number(two, "sum of OV"), most=0.05),
        known("product w m, summed over 2 heads", number(two, "product"), 0.84, 0.94),
        known("2 softmax heads: largest risk over that of the length before", falls(two), most=1.0),
        known(f"unnormalised, over the training length always: risk at {far}", number(raw, f"fixed {far}"), least=0.8),
        known("2 softmax heads are a debiased step: correlation", like, least=0.999),
        known("the same, less that with a plain step", difference(like, number(two, "like plain")), least=0.0),
        known("best plain step over its closed form", lambda of: of["references"][f"step {at}"] / best, 0.97, 1.03),
    ]
    eta = best_eta(settings, True)
    theory = {f"L={length}": debiased_risk(settings, length, eta) for length in settings.lengths}
    c1, c2, full = "cumulant2, 1 heads", "cumulant2, 2 heads", "cumulant3+full, 1 heads"
    exact = number("cumulant2, ideal", "pair from debiased step")
    found += [
        Statement("a +/- pair of cumulant2 is a debiased step: difference", exact, -1, 1e-10, "derived", exact=True),
        Statement("2 cumulant2 heads from the closed form, worst length", worst(c2, theory), -1, 0.05, "derived"),
        Statement(f"1 cumulant2 head over 2 at {at}: one is enough", ratio(c1, c2), 0.95, 1.1, "derived"),
        Statement(f"1 softmax head over 1 cumulant2 head at {at}", ratio(one, c1), least=1.2, source="new"),
        Statement(f"1 head of full third order over 1 of second at {at}", ratio(full, c1), least=1.0, source="new"),
        Statement(f"1 softmax head over 1 of full third order at {at}", ratio(one, full), least=1.0, source="new"),
    ]
    for name in settings.attention:
        for count, kind in ((1, "one risk"), (2, "pair risk")):
            if count not in head_counts(name):
                continue
            text = f"{name}, {count} heads, trained, over the best ideal {'head' if count == 1 else 'pair'} at {at}"
            found.append(
                Statement(text, ratio(f"{name}, {count} heads", f"{name}, ideal", at, kind), 0.95, 1.05, "new")
            )
    return found


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    lengths = [f"L={length}" for length in settings.lengths]
    trained = {name: name for name in plan(settings) if name.endswith("heads")}
    fixed, rows = f"{RAW}, 1 heads", {name: (name, "{}") for name in trained}
    rows[f"{fixed}, over {settings.examples} always"] = (fixed, "fixed {}")
    rows |= {name: ("references", name + " {}") for name in ("step", "debiased step", "ridge")}
    risk = Table.grid(f"Risk by length of the prompt, trained at {settings.examples}", "", rows, lengths,
                      lambda row, key: mean_of(seeds, row[0], row[1].format(key)))  # fmt: skip
    for debiased, name in ((False, "step, closed form"), (True, "debiased step, closed form")):
        of, eta = debiased_risk if debiased else step_risk, best_eta(settings, debiased)
        risk.rows.append([name, *(f"{of(settings, length, eta):.3f}" for length in settings.lengths)])
    keys = ("starts of both signs", "product", "off-diagonal", "label of KQ", "x of OV", "sum of OV", "like debiased",
            "like plain")  # fmt: skip
    ideal = {name: f"{name}, ideal" for name in settings.attention}
    title, best = "Ideal heads (KQ = w I, OV on the label), best over w", ("one risk", "one w", "pair risk", "pair w")
    mean = partial(mean_of, seeds)
    return [risk, Table.grid("What the heads read", "", trained, keys, mean), Table.grid(title, "", ideal, best, mean)]


def figures(settings: Settings, seeds: Sequence[Measured]) -> dict[str, Any]:
    """Risk against length: one head, two heads, beside theory."""
    figure, axes = new_figure(1, 2, (8.5, 3.4), sharey=True)
    eta = best_eta(settings, True)
    for count, axis in zip((1, 2), axes[0], strict=True):
        for i, name in enumerate(settings.attention):
            own = [one[f"{name}, {count} heads"] for one in seeds if f"{name}, {count} heads" in one]
            if own:
                risk = [statistics.mean(one[f"L={length}"] for one in own) for length in settings.lengths]
                axis.plot(settings.lengths, risk, color=colour(name, i), marker=mark(name), ms=4, label=name)
        theory = [debiased_risk(settings, length, eta) for length in settings.lengths]
        axis.plot(settings.lengths, theory, color=SOFT, ls=":", label="debiased step, closed form")
        bayes = [
            statistics.mean(one["references"][f"ridge L={length}"] for one in seeds) for length in settings.lengths
        ]
        axis.plot(settings.lengths, bayes, color=SOFT, ls="--", label="ridge (Bayes)")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="examples in the prompt",
            title=f"{count} {'head' if count == 1 else 'heads'}",
        )
        axis.set_xticks(settings.lengths, [str(length) for length in settings.lengths])
        axis.minorticks_off()
    axes[0, 0].set_yticks([0.1, 0.2, 0.5, 1.0], ["0.1", "0.2", "0.5", "1"])
    axes[0, 0].set_ylabel("mean squared error")
    axes[0, 1].legend(fontsize=7)
    return {"Risk against the length of the prompt": figure}


STUDY = Study.of(
    __name__,
    name="in-context-linear-regression",
    claim="One softmax layer trained on regression prompts ends in +/- pairs of heads that compute a debiased gradient "
    "step; one head is clearly worse, and longer prompts help.",
    paper="He et al., In-Context Linear Regression Demystified, ICML 2025",
    settings={"small": Settings(), "paper": Settings(steps=15000, lr=1e-3, test=40000, seeds=5)},
    needs=("cross",),
    seconds={"two cores": 290, "an H200": 41},
)
