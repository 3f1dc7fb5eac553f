"""Which heads matter: prune one at a time and watch the output; prune more and more of them and watch the accuracy.

Shape legend: B images, N all images, K classes. Definitions are ours, in the spirit of the study (docs/explain.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inspect.batches import evaluating
from ..inspect.sites import find_sites
from ..inspect.tokens import expected_layout
from ..kinds import kinds_checked
from .capture import capture
from .flow import logits_of
from .heads import block_off, head_off
from .metrics import patch_distances

Head = tuple[int, int]
IMPORTANCE = ("probability", "js", "loss", "accuracy", "feature")


@dataclass(frozen=True)
class Answers:
    """What a model says about N images: logits (N, K) and the features (N, C) that its classifier sees."""

    logits: Tensor
    features: Tensor | None


@torch.no_grad()
def answers(model: nn.Module, images: Tensor, batch_size: int = 256) -> Answers:
    """Logits and features of all images, batch by batch, in evaluation mode."""
    candidates = (getattr(model, name, None) for name in ("head", "classifier", "fc"))
    head = next((module for module in candidates if isinstance(module, nn.Linear)), None)  # its input: the features
    kept: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if head is not None:
            stack.callback(head.register_forward_pre_hook(lambda _, args: kept.append(args[0])).remove)
        logits = torch.cat([logits_of(model(part)).float() for part in images.split(batch_size)])
    if getattr(model, "num_classes", None) == 0:  # without a classifier the answer is the features
        kept = [logits]
    return Answers(logits, torch.cat(kept).float() if kept else None)


@kinds_checked
def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions (..., K) in nats: symmetric, from 0 to log 2, 0 only for p = q."""
    p, q = p.double(), q.double()
    middle = (p + q) / 2

    def against_middle(x: Tensor) -> Tensor:
        return torch.where(x > 0, x * (x / middle.clamp(min=1e-300)).log(), 0.0).sum(-1)

    return ((against_middle(p) + against_middle(q)) / 2).clamp(0, math.log(2))


def feature_change(a: Tensor, b: Tensor) -> Tensor:
    """1 - cosine of features (..., C), as half the squared distance of their directions: exactly 0 for equal ones."""
    return (F.normalize(a.double(), dim=-1) - F.normalize(b.double(), dim=-1)).square().sum(-1) / 2


def changes(before: Answers, after: Answers, labels: Tensor) -> dict[str, Tensor]:
    """How much worse each image (N,) is answered: the five measures of importance.

    probability p_y - p'_y; js; loss' - loss; accuracy right - right'; feature 1 - cosine (nan if unknown).
    """
    p, q = before.logits.double().softmax(-1), after.logits.double().softmax(-1)
    true = labels[:, None]
    if before.features is None or after.features is None:
        feature = torch.full_like(p[:, 0], math.nan)
    else:
        feature = feature_change(before.features, after.features)
    loss = [F.cross_entropy(x.logits.double(), labels, reduction="none") for x in (before, after)]
    right = [(x.logits.argmax(-1) == labels).double() for x in (before, after)]
    return {
        "probability": (p.gather(-1, true) - q.gather(-1, true))[:, 0],
        "js": jensen_shannon(p, q),
        "loss": loss[1] - loss[0],
        "accuracy": right[0] - right[1],
        "feature": feature,
    }


@kinds_checked
def head_importance(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    keep_one: bool = False,
    means: dict[Head, Tensor] | None = None,
    per_image: bool = False,
    batch_size: int = 256,
) -> dict[str, Tensor]:
    """Importance of every head under each measure of `changes`: (layers, heads), or (layers, heads, N) per image.

    labels: None takes the classes that the full model predicts. keep_one: prune all others of the layer instead, so
    that a *low* number says that the head does the layer's work alone. means: prune to these means
    (`head_means`) instead of to 0. Layers with fewer heads than others are filled with nan. Cost: a pass for each head.
    """
    sites = find_sites(model)
    before = answers(model, images, batch_size)
    labels = before.logits.argmax(-1) if labels is None else labels
    _check_labels(labels, before.logits)
    shape = (len(sites), max(site.heads for site in sites), len(images))
    found = {name: torch.full(shape, math.nan, dtype=torch.float64, device=labels.device) for name in IMPORTANCE}
    for site in sites:
        for head in range(site.heads):
            off = [h for h in range(site.heads) if (h != head) == keep_one]
            with head_off(model, [(site.number, h) for h in off], means):
                after = answers(model, images, batch_size)
            for name, value in changes(before, after, labels).items():
                found[name][site.number, head] = value
    return found if per_image else {name: value.mean(-1) for name, value in found.items()}


@kinds_checked
def partial_importance(
    model: nn.Module, head: Head, images: Tensor, labels: Tensor, *, batch_size: int = 256
) -> dict[str, dict[str, float]]:
    """Which part of a head's map carries its importance: measures of `changes` for each block left out, and `lost`,
    the mean weight that went missing from the rows concerned. "whole head" is the head itself for comparison."""
    if expected_layout(model) is None:
        raise ValueError(f"{type(model).__name__} does not tell the grid of its patches")
    with evaluating(model), capture(model, images[:1], layers=[head[0]], queries=[0]) as captured:
        layout = captured.tokens  # that of these images, which may be of another size than the model was made for
    blocks: list[tuple[str, int | None]] = [("patches to patches", None)]
    if layout.prefix:
        blocks = [("class to patches", None), ("patches to class", None), *blocks]
    hops = int(patch_distances(layout.grid).max())
    blocks += [("patches at distance", k) for k in range(hops + 1)]
    before = answers(model, images, batch_size)
    _check_labels(labels, before.logits)
    found: dict[str, dict[str, float]] = {}

    def measure(name: str, pruned: AbstractContextManager, lost: list[Tensor]) -> None:
        with pruned:
            after = answers(model, images, batch_size)
        found[name] = {key: float(value.mean()) for key, value in changes(before, after, labels).items()}
        if lost:
            missing = torch.cat(lost)
            rows = missing[:, :1] if name == "class to patches" else missing[:, layout.prefix :]
            found[name]["lost"] = float(rows.mean())

    measure("whole head", head_off(model, [head]), [])
    for block, k in blocks:
        lost: list[Tensor] = []
        name = block if k is None else f"{block} {k}"
        measure(name, block_off(model, *head, block, k, lost), lost)
    return found


@dataclass(frozen=True)
class PruningCurve:
    """Accuracy after removing 0, 1, 2, ... heads in some order; `area` is its mean, between 0 and 1."""

    order: tuple[Head, ...]
    removed: tuple[int, ...]
    accuracy: tuple[float, ...]

    @property
    def area(self) -> float:
        pairs = zip(self.removed[1:], self.removed, self.accuracy[1:], self.accuracy, strict=False)
        return sum((b - a) * (x + y) / 2 for b, a, x, y in pairs) / (self.removed[-1] - self.removed[0])


@kinds_checked
def pruning_curve(
    model: nn.Module, images: Tensor, labels: Tensor, order: Sequence[Head], *, steps: int | None = None
) -> PruningCurve:
    """Accuracy as the heads of `order` are removed one after the other, at `steps` + 1 counts (None: at each)."""
    total = len(order)
    counts = range(total + 1) if steps is None else sorted({round(i * total / steps) for i in range(steps + 1)})
    accuracy = []
    for count in counts:
        with head_off(model, order[:count]) if count else nullcontext():
            logits = answers(model, images).logits
            _check_labels(labels, logits)
            right = logits.argmax(-1) == labels
        accuracy.append(float(right.double().mean()))
    return PruningCurve(tuple(order), tuple(counts), tuple(accuracy))


@kinds_checked
def pruning_curves(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    importance: Tensor,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int | None = None,
) -> dict[str, list[PruningCurve]]:
    """Curves by falling importance (layers, heads), by rising importance, and in one random order for each seed."""
    first = ranked(importance)
    mixed = [torch.randperm(len(first), generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds]
    orders = {
        "important first": [first],
        "random": [[first[i] for i in places] for places in mixed],
        "least important first": [first[::-1]],
    }
    return {
        name: [pruning_curve(model, images, labels, order, steps=steps) for order in several]
        for name, several in orders.items()
    }


@kinds_checked
def ranked(importance: Tensor) -> list[Head]:
    """Heads (layer, head) by falling importance (layers, heads); nan is no head."""
    order = importance.flatten().nan_to_num(-math.inf).argsort(descending=True, stable=True).tolist()
    places = [divmod(i, importance.shape[1]) for i in order]
    return [place for place in places if not bool(importance[place].isnan())]


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two sets of numbers, ties at their mean rank; nan where one of them is constant."""
    kept = ~(a.isnan() | b.isnan())
    x, y = (_ranks(z[kept].double()) for z in (a, b))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt())


def rank_correlations(metrics: dict[str, Tensor]) -> tuple[list[str], Tensor]:
    """Names and the matrix of Spearman correlations between metrics (layers, heads) of the same heads."""
    names = list(metrics)
    values = [[spearman(metrics[a].flatten(), metrics[b].flatten()) for b in names] for a in names]
    return names, torch.tensor(values)


def _ranks(x: Tensor) -> Tensor:
    smaller = (x[None, :] < x[:, None]).sum(-1)
    same = (x[None, :] == x[:, None]).sum(-1)
    return smaller + (same - 1) / 2


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    """Refuse labels that are not one class for each row of logits (N, K)."""
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"labels must be ({logits.shape[0]},), one for each image, got {tuple(labels.shape)}")
