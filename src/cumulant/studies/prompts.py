"""Prompts of in-context linear regression, and what theory says of them: closed forms, Bayes, heads made by hand.

A prompt is L examples z = (x, y) with y = beta.x + noise, and a query (x_q, 0).

Shape legend: B prompts, H heads, L examples, d width of x, D = d + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant import zoo

RAW = "unnormalised"  # sum_l (k_l.q) v_l over the length: linear attention of the theory
GRID = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 4.0, 8.0)  # w of ideal heads


@dataclass(frozen=True)
class Settings:
    """The recipe of the study."""

    width: int = 5
    examples: int = 40
    noise: float = 0.1  # variance
    steps: int = 1500
    batch: int = 256
    lr: float = 0.004
    last_lr: float = 0.0001  # a cosine leads there
    starts: int = 4  # of several heads: so many are begun, and the best goes on
    trial: int = 200  # steps after which it is chosen
    lengths: tuple[int, ...] = (10, 20, 40, 80, 160)
    test: int = 20000
    attention: tuple[str, ...] = ("softmax", "linear", "cumulant2", "cumulant3", "cumulant3+full", "cluster4")
    seeds: int = 3


def prompts(settings: Settings, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Examples (B, L, D), queries (B, D) and their labels (B,): beta ~ N(0, I / d), x ~ N(0, I)."""
    d = settings.width
    device = generator.device
    beta = torch.randn(count, d, 1, generator=generator, device=device) * d**-0.5
    x = torch.randn(count, length + 1, d, generator=generator, device=device)
    noise = torch.randn(count, length + 1, 1, generator=generator, device=device)
    y = x @ beta + math.sqrt(settings.noise) * noise
    query = torch.cat([x[:, -1], torch.zeros_like(y[:, -1])], -1)
    return torch.cat([x, y], -1)[:, :-1], query, y[:, -1, 0]


def attend(name: str, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query (B, H, 1, D), key (B, H, L, D), value (B, H, L, 1) -> (B, H, 1, 1)."""
    if name == RAW:
        return (query * scale) @ (key.mT @ value) / key.shape[-2]
    return zoo.get(name)(query, key, value, scale=scale)


Predictor = Callable[[Tensor, Tensor], Tensor]


def risks(settings: Settings, predict: Predictor, device: str, seed: int = 0) -> dict[str, float]:
    """Mean squared error by length, on the same prompts for every predictor."""
    found = {}
    for length in settings.lengths:
        generator = torch.Generator(device).manual_seed(10**6 + length + 1000 * seed)
        errors, left = [], settings.test
        while left > 0:
            examples, query, label = prompts(settings, min(left, 5000), length, generator)
            with torch.no_grad():
                errors.append((predict(examples, query) - label).square().sum().item())
            left -= len(label)
        found[f"L={length}"] = sum(errors) / settings.test
    return found


def step_risk(settings: Settings, length: int, eta: float) -> float:
    """Of yhat = (eta / L) sum_l y_l x_l.x_q at L examples: 1 + s2 - 2 eta + eta^2 (1 + (d + 1 + s2 d) / L)."""
    d, s2 = settings.width, settings.noise
    return 1 + s2 - 2 * eta + eta**2 * (1 + (d + 1 + s2 * d) / length)


def debiased_risk(settings: Settings, length: int, eta: float) -> float:
    """Of yhat = (eta / L) sum_l (y_l - ybar) (x_l - xbar).x_q, exactly.

    With S the covariance of the examples' x, L S is a Wishart matrix of n = L - 1 degrees of freedom, so
    E tr S = d n / L and E tr S^2 = d n (n + d + 1) / L^2; the noise adds s2 d n / L^2.
    """
    d, s2, n = settings.width, settings.noise, length - 1
    return 1 + s2 - 2 * eta * n / length + eta**2 * n * (n + d + 1 + s2 * d) / length**2


def best_eta(settings: Settings, debiased: bool) -> float:
    """The step that is best at the training length."""
    length, more = settings.examples, settings.width + 1 + settings.noise * settings.width
    return length / ((length - 1 if debiased else length) + more)


def gradient_step(eta: float, debiased: bool) -> Predictor:
    def predict(examples: Tensor, query: Tensor) -> Tensor:
        x, y = examples[..., :-1], examples[..., -1:]
        if debiased:
            x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        return eta / x.shape[1] * (x.mT @ y).squeeze(-1).mul(query[:, :-1]).sum(-1)

    return predict


def ridge(settings: Settings) -> Predictor:
    """The Bayes predictor: ridge regression with parameter d s2."""

    def predict(examples: Tensor, query: Tensor) -> Tensor:
        x, y = examples[..., :-1], examples[..., -1:]
        ground = settings.width * settings.noise * torch.eye(x.shape[-1], device=x.device)
        return torch.linalg.solve(x.mT @ x + ground, x.mT @ y).squeeze(-1).mul(query[:, :-1]).sum(-1)

    return predict


def ideal_heads(name: str, w: Sequence[float], m: Sequence[float]) -> Predictor:
    """Heads that the theory reads out: KQ = w I on x, OV = m on y."""

    def predict(examples: Tensor, query: Tensor) -> Tensor:
        strength = torch.tensor(w, device=query.device, dtype=query.dtype)[:, None, None]
        weight = torch.tensor(m, device=query.device, dtype=query.dtype)
        x, y = examples[:, None, :, :-1], examples[:, None, :, -1:]
        several = (-1, len(w), -1, -1)
        out = attend(name, query[:, None, None, :-1] * strength, x.expand(several), y.expand(several), 1.0)
        return out.flatten(1) @ weight

    return predict


def best_ideal(settings: Settings, name: str, pair: bool, device: str, seed: int) -> tuple[float, float, float]:
    """The least risk at the training length of one ideal head, or a +/- pair: (risk, w, m); m is the best for each w
    of `GRID`."""
    generator = torch.Generator(device).manual_seed(77 + seed)
    examples, query, label = prompts(settings, min(settings.test, 20000), settings.examples, generator)
    best = (math.inf, 0.0, 0.0)
    for w in GRID:
        out = ideal_heads(name, (w, -w) if pair else (w,), (1.0, -1.0) if pair else (1.0,))(examples, query)
        m = float(out @ label / out.square().sum())
        risk = float((m * out - label).square().mean())
        best = min(best, (risk, w, m))
    return best
