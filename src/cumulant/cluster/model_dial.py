"""The dial for a model: clusters and near field of each layer, and the heads that may have them, in words of `convert`.

Shape legend: B batch, H heads, L tokens, D, E widths, R sampled queries, N candidates.

A layer takes one of the registered mechanisms in some of its heads, the others stay softmax. For each candidate those
heads are taken whose errors are smallest, as many as the target allows; the candidate that makes the layer cheapest
wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .attention import cluster_attention
from .cost import multiply_adds, softmax_multiply_adds

NAMES = ("cluster4", "cluster16", "cluster64", "cluster16+near=2", "cluster64+near=2", "cluster64+near=8")


@dataclass(frozen=True)
class LayerDial:
    """Of one layer: the mechanism, the heads that take it (none: all stay softmax) of how many, its error and cost.

    The error is that of all heads together, the cost a share of softmax's multiply-adds.
    """

    attention: str
    heads: tuple[int, ...]
    of: int
    error: float
    cost: float


@dataclass(frozen=True)
class ModelDial:
    """What `choose_layers` found, by layer in the order in which they run."""

    layers: dict[str, LayerDial]

    @property
    def plan(self) -> dict[str, dict[str, Any]]:
        """For `convert(model, layers=dial.plan)`: the layers in which something changes."""
        heads = {name: None if len(x.heads) == x.of else list(x.heads) for name, x in self.layers.items()}
        return {name: {"attention": x.attention, "heads": heads[name]} for name, x in self.layers.items() if x.heads}

    def __str__(self) -> str:
        width = max([5, *map(len, self.layers)])
        rows = [f"{'layer':{width}}  {'error':>6}  {'cost':>5}  mechanism and heads"]
        for name, x in self.layers.items():
            some = "" if len(x.heads) == x.of else f" in heads {list(x.heads)}"
            what = f"{x.attention}{some}" if x.heads else "softmax"
            rows.append(f"{name:{width}}  {x.error:6.3f}  {x.cost:5.0%}  {what}")
        return "\n".join(rows)


@torch.no_grad()
def choose_layers(
    model: nn.Module,
    data: Any = None,
    *,
    target: float = 0.15,
    candidates: Sequence[str] = NAMES,
    batches: int = 2,
    samples: int = 64,
) -> ModelDial:
    """For every softmax layer of a model that `convert` knows, the cheapest candidate with an error within `target`.

    Errors are ||out - softmax|| / ||softmax - <v>|| of the layer's own heads on `samples` queries of each of the first
    `batches` of data (noise where there are none), with masks and grids as the model has them. Costs are those at the
    length of the data, and over few tokens nothing is cheaper than softmax. Causal layers are not looked at: their
    blocks are of the past. The model is left as it is. Cost: a forward pass, and every candidate once in every layer.
    """
    from ..convert import sites  # conversion knows the mechanisms, and these know this room
    from ..convert.choice import KEPT, Call, Choice, observing
    from ..convert.conversion import _is_softmax, _kept_plan, find_sites
    from ..convert.inputs import call, evaluating, example_for, some

    if isinstance(target, bool) or not isinstance(target, int | float) or not target > 0:
        raise ValueError(f"target must be a positive relative error, got {target!r}")
    for what, number in (("samples", samples), ("batches", batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} must be a whole number, 1 or more, got {number!r}")
    if isinstance(candidates, str) or not candidates:
        raise ValueError(f"candidates must be names of cluster mechanisms, at least one, got {candidates!r}")
    asked = {name: Choice.named(name) for name in candidates}
    for name, choice in asked.items():
        if not choice.attention.startswith("cluster"):
            raise ValueError(f"candidates must be cluster mechanisms, with options as in {NAMES[-1]!r}, got {name!r}")
    used = some(example_for(model) if data is None else data, batches, model)
    with evaluating(model):
        found = find_sites(model, used[0])
        able = [site for site in found if site.obstacle is None and _is_softmax(site.module)]
        sums: dict[str, _Sums] = {}
        grids = {site.name: _grid(site.module) for site in able}
        with sites.applied(model, {**_kept_plan(model, found), **{site.name: KEPT for site in able}}):
            names = {id(model.get_submodule(site.name)): site.name for site in able}

            def record(module: nn.Module, made: Call) -> None:
                name = names.get(id(module))
                if name is not None and not made.is_causal:
                    sums.setdefault(name, _Sums()).add(made, asked, grids[name], samples)

            with observing(record):
                for batch in used:
                    call(model, batch)
    if not sums:
        raise ValueError(f"{type(model).__name__} has no softmax layer that is not causal: nothing to set a dial for")
    return ModelDial({site.name: sums[site.name].cheapest(target) for site in able if site.name in sums})


def _grid(module: nn.Module) -> tuple[tuple[int, ...], int] | None:
    grid = getattr(module, "grid_size", None)
    return None if grid is None else (tuple(grid), getattr(module, "prefix", 0))


class _Sums:
    """Squared errors (H,) of each candidate over the calls of a layer, their shares of cost, and the size (H,)."""

    def __init__(self) -> None:
        self.error: dict[str, Tensor] = {}
        self.cost: dict[str, float] = {}
        self.size: Tensor | float = 0.0

    def add(self, made: Any, asked: dict[str, Any], grid: tuple[tuple[int, ...], int] | None, samples: int) -> None:
        from .. import zoo

        query, key, value = made.query, made.key, made.value
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        shared: dict[str, Any] = {"key_mask": made.key_mask, "scale": made.scale}
        step = max(1, query.shape[-2] // samples)
        at = slice(step // 2, None, step)
        exact = cluster_attention(query, key, value, clusters=1, near=1, **shared)[..., at, :].double()  # softmax
        there = torch.ones(exact.shape[0], 1, exact.shape[-2], 1, dtype=torch.bool, device=exact.device)
        if made.key_mask is not None and query.shape[-2] == key.shape[-2]:  # padding asks nothing
            there = (made.key_mask != 0).expand(exact.shape[0], -1)[:, None, at, None]
        weights = torch.ones_like(key[..., 0]) if made.key_mask is None else made.key_mask.to(key)[:, None]
        mean = (weights.unsqueeze(-1) * value).sum(-2, keepdim=True) / weights.sum(-1)[..., None, None].clamp(min=1e-9)
        self.size = self.size + torch.where(there, exact - mean.double(), 0).square().sum((0, 2, 3))
        told: dict[str, Any] = {}
        if grid is not None and prod(grid[0]) + grid[1] == key.shape[-2]:
            told = {"grid": grid[0], "prefix": grid[1]}
        for name, choice in asked.items():
            out = zoo.get(choice.attention)(query, key, value, **shared, **told, **choice.options)[..., at, :]
            new = torch.where(there, out.double() - exact, 0).square().sum((0, 2, 3))
            self.error[name] = self.error.get(name, 0.0) + new
            self.cost[name] = _share(choice, key.shape[-2], key.shape[-1], value.shape[-1])

    def cheapest(self, target: float) -> LayerDial:
        assert isinstance(self.size, Tensor)
        total, heads = float(self.size.sum()), len(self.size)
        best = LayerDial("softmax", (), heads, 0.0, 1.0)
        for name, error in self.error.items():
            sums = error.sort().values.cumsum(0)
            count = int((sums <= target**2 * total).sum())
            cost = 1 - count / heads * (1 - self.cost[name])
            if cost < best.cost:
                taken = tuple(sorted(error.argsort()[:count].tolist()))
                best = LayerDial(name, taken, heads, (float(sums[count - 1]) / max(total, 1e-300)) ** 0.5, cost)
        return best


def _share(choice: Any, L: int, D: int, E: int) -> float:
    """Multiply-adds of a candidate over those of softmax, with blocks of equal size."""
    K = min(int(choice.attention.removeprefix("cluster")), -(-L // 2))
    near = choice.options.get("near", 0)
    tokens = min(L, (3 if near == "neighbours" else near) * L / K)
    form = {name: choice.options[name] for name in ("response", "variance") if name in choice.options}
    return multiply_adds(L, D, E, K, near_tokens=tokens, **form) / softmax_multiply_adds(L, D, E)
